"""The embedding modules: `MultiTableMultiColumnEmbedding` and `MultiTableEmbedding`.

The rows are in a store, outside torch. At its first use, the module opens the store and keeps it in a handle. The
module's only parameter, the shadow, stands for the rows in optimizers and autograd. `EmbeddingBase` documents methods.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock, get_ident
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...distributed.sharded_table import ShardedTable
from ...distributed.world import World
from ...engine.checks import as_int, validate_arguments
from ...engine.errors import ClosedError, GraphError, InputError, OptimizerError, OptionError, StoreError
from ...engine.ops.batch import check_offsets, make_lookup_arguments
from ...engine.ops.embedding_base import TRACED_ATTRIBUTE
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.initializers import make_normal_initializer
from ...engine.options.lookup import Lookup, check_lookup, check_output_dtype, check_weights
from ...engine.options.store_options import store_options_from_dict
from ...engine.options.table_spec import check_name, make_table_spec
from ...engine.table.table import OpenTable, RowsReplacedError
from ..autograd import lookup_op as ops
from ..autograd.gradients import ShadowGrad, accumulate, set_grad, trainers
from ..autograd.shadow import make_converter, make_shadow
from ..optim.ddp_guard import check_lookup_outside_ddp, normalize_world, warn_without_world
from ..optim.eager import IN_BACKWARD, follow_in_backward
from ..saving.rows_reference import UNLOADABLE_ROWS
from ..saving.sharded_handle import ShardedTableHandle
from ..saving.table_handle import TableHandle
from ..state_dict.saved_rows import EXTRA_STATE_KEY, ROWS_PREFIX
from ..tables.local_table import close_collected
from ..tables.names import make_provisional_name
from .dense_rows import add_rows_to_state, convert_dense
from .keyed_rows import KeyedRows, retry_if_replaced

Handle = TableHandle | ShardedTableHandle

log = logging.getLogger("tierbed")


class MultiTableMultiColumnEmbedding(KeyedRows):
    """Hashed embedding tables whose rows consist of several concatenated columns with different widths.

    The arguments are the same as for `MultiTableEmbedding`, but `embedding_dim` may be a list of the columns' widths.
    """

    _allows_columns = True  # True if embedding_dim may be a list of column widths

    def __init__(
        self,
        name: str | None,
        embedding_dim: int | Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[Mapping[str, Any]] | None,
        store_options: Mapping[str, Any],
        default_initializer: Mapping[str, Any] | None = None,
        padding_idx: int | None = None,
        seed: int | None = None,
        output_dtype: torch.dtype = torch.float32,
        world: World | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not self._allows_columns and as_int(embedding_dim) is None:
            raise OptionError(
                f"embedding_dim={embedding_dim!r}: give a whole number, or use MultiTableMultiColumnEmbedding"
            )
        if tables is None:
            tables = [default_initializer if default_initializer is not None else make_normal_initializer(0.0, 0.05)]
        elif default_initializer is not None:
            raise OptionError("default_initializer is for tables=None alone; leave it out, or set it in each table")
        if not isinstance(tables, (list, tuple)) or not tables:
            raise OptionError(f"tables={tables!r}: give a list with make_table_options(...) for each table, or None")
        self.name_source, self._has_seed = "given" if name is not None else "path", name is not None or seed is not None
        name = make_provisional_name(world is not None) if name is None else name
        self.spec = make_table_spec(name, embedding_dim, key_type, tables, padding_idx, seed, dtype, state_dtype)
        self.spec.make_layout(RowState())  # raise now if a table has too many or too few column options
        self.output_dtype = check_output_dtype(output_dtype)
        self.store_options = store_options_from_dict(store_options)
        self.world = normalize_world(world, name)
        self.row_optimizer: RowOptimizer | None = None
        # the shadow stands for the rows in optimizers and autograd; no parameter contains the rows themselves
        self.register_parameter("shadow", nn.Parameter(torch.zeros(1, 1, dtype=torch.float32)))
        self.embedding_id = ops.register(self)
        self._open_lock, self._accumulate_lock = Lock(), Lock()
        self._optimizer_error: OptimizerError | None = None  # raised in training if rows do not match the optimizer
        self.look_ahead = 0

    @property
    def name(self) -> str:
        return self.spec.name

    def set_name(self, name: str) -> None:
        """Rename the embedding. Its rows in memory do not change."""
        self.fix_seed()
        self.set_spec(name=check_name(name))
        self.name_source = "given"
        if self._handle is not None:
            self._handle.rename(name)

    def set_spec(self, **fields: Any) -> None:
        """Change fields of the spec. The store must not be open, except to change the name."""
        self.spec = replace(self.spec, **fields)

    @property
    def dim(self) -> int:
        """Number of elements in a row, all columns together."""
        return self.spec.dim

    def forward(
        self,
        ids: Tensor,
        table_ids: Tensor | int | str | Sequence[Any] | None = None,
        offsets: Tensor | None = None,
        pooling: str | None = None,
        weights: Tensor | None = None,
        features: Sequence[int] | None = None,
        num_features: int | None = None,
    ) -> Tensor:
        """Look up rows by id, or pool the rows of bags.

        An unknown id gets its initial row; only training inserts it. Outside a `Graph`, train with an `EagerOptimizer`.

        Args:
            ids: Integers of any shape, of `key_type` or a dtype that fits into it.
            table_ids: The table of each id, as integers or a list of names. The shape must broadcast to
                `ids.shape` without pooling, and to the bags' shape with pooling. Default: the only table. If there are
                several tables, the default is table t for position t of the last dimension.
            offsets: Int64 or int32 [bags + 1], ascending from 0 to len(ids). Bag b is ids[offsets[b]:offsets[b + 1]].
                When pooling without offsets, each ids[..., :] is one bag.
            pooling: "sum" or "mean" of each bag's rows, without padding_idx. None returns all rows.
            weights: Float32 with the shape of ids, to multiply rows before pooling. A weighted mean divides by the
                number of ids that are not padding.
            features: Indices of the features to look up, without repeats. `offsets` [num_features * batch + 1] then
                lists the bags of feature 0, then of feature 1, and so on. `table_ids` has one entry per listed feature.
            num_features: The number of features that `offsets` covers. Default: len(features).

        Returns:
            A tensor of dtype `output_dtype`; an empty bag gets zeros. Without pooling, its shape is ids.shape + (dim,).
            With pooling, its shape is the bags' shape + (dim,). With `features`, it is (batch, len(features), dim).

        Raises:
            InputError: If an argument is invalid, or an id is out of range.
            StoreError: If the store cannot be opened or read.
        """
        with self.raise_on_all_ranks():
            lookup = check_lookup(self.spec, ids, table_ids, offsets, pooling, features, num_features)
            check_weights(self.spec, lookup, weights)
            if (device := self.device) != ids.device:
                raise InputError(
                    f"ids of embedding {self.name!r} are on {ids.device}, but the embedding is on {device}; give "
                    f"ids.to({str(device)!r}), or move the module that holds it by .to({str(ids.device)!r})"
                )
        return self.look_up(lookup, weights)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set the parameter that stands for the rows. Raises InputError for any other parameter."""
        self._parameters[self.parameter_name] = make_shadow(self, name, param)
        self.device = self.shadow.device

    @property
    def shadow(self) -> nn.Parameter:  # type: ignore[override]
        parameter = self._parameters[self.parameter_name]
        assert parameter is not None
        return parameter

    def look_up(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Look up rows for arguments that are already checked. Autograd records the lookup."""
        ops.check_not_exported(self.name)
        shadow: Tensor = self.shadow
        traced = getattr(shadow, TRACED_ATTRIBUTE, None)
        # Another thread traces the shadow. Autograd on the shadow's fake tensor could deadlock: one thread would hold
        # Python's lock and wait for a lock of autograd, and the other thread would do the reverse.
        if traced is not None and traced[0] != get_ident():
            shadow = traced[1]
        return ops.look_up(self, shadow, lookup, weights)

    def prefetch(
        self,
        ids: Tensor,
        table_ids: Tensor | int | str | Sequence[Any] | None = None,
        offsets: Tensor | None = None,
        pooling: str | None = None,
        features: Sequence[int] | None = None,
        num_features: int | None = None,
    ) -> None:
        """Announce a later step. A thread fetches the step's rows into the store's cache while earlier steps run.

        Announce steps in the order in which they will run, any number of steps ahead. Results never change. A step that
        was not announced, or looks up other ids, runs without prefetch. If the store has a cache, the cache keeps the
        rows that the announced steps need soonest. On a GPU, the thread copies rows on a separate CUDA stream.

        Args:
            ids, table_ids, offsets, pooling, features, num_features: As in the lookup.

        Raises:
            InputError: If an argument is invalid.
            OptimizerError: If the stored rows do not match the optimizer.
            StoreError: If the store cannot be opened or read.
        """
        with self.raise_on_all_ranks():
            lookup = check_lookup(self.spec, ids, table_ids, offsets, pooling, features, num_features)
        self.announce([lookup])

    @validate_arguments("states")
    def load_dense(
        self,
        weights: Mapping[Any, Tensor],
        states: Mapping[Any, Mapping[str, Tensor]] | None = None,
        step: int | None = None,
    ) -> None:
        """Replace tables' rows by dense tensors whose row i belongs to id i, as in nn.Embedding's checkpoints.

        Other tables keep their rows. If this raises, nothing has changed.

        Args:
            weights: Floats [rows, dim], by table index or name.
            states: Optimizer states by table and name: [rows, dim], or [rows] for one number per row. None: new state.
            step: The number of steps that trained the rows; Adam's bias correction needs it. Default: the largest
                `step` (torch) or `iter` (FBGEMM) in `states`. Without either: 0 if `states` is empty and every table is
                replaced, otherwise the current step, with a warning if the optimizer counts steps. If some tables keep
                their rows, `step` must equal the current step.

        Raises:
            InputError: If a table, shape or dtype is wrong, or the optimizer counts steps and no step is known.
            OptimizerError: If `states` is given, but the embedding's optimizer is stateless.
            StoreError, SnapshotError: If the rows cannot be stored.
        """
        with self.raise_on_all_ranks():
            tensors = convert_dense(self, weights, states or {}, step)
        self.load_tensors(tensors)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shadow, weight = state_dict.pop(prefix + "shadow", None), state_dict.pop(prefix + "weight", None)
        errors = rest[-1]
        is_shadow = prefix + EXTRA_STATE_KEY in state_dict or f"{prefix}{ROWS_PREFIX}key" in state_dict
        if shadow is None and is_shadow and getattr(weight, "shape", None) == (1, 1):
            shadow, weight = weight, None  # an Embedding's shadow is named "weight"
        if shadow is not None:
            state_dict[prefix + self.parameter_name] = shadow
        elif weight is not None:  # a weight from nn.Embedding or nn.EmbeddingBag
            if self.spec.num_tables == 1:
                is_double = isinstance(weight, Tensor) and weight.dtype == torch.float64  # rounded to float32
                add_rows_to_state(self, {0: weight.float() if is_double else weight}, state_dict, prefix, errors)
            else:
                errors.append(
                    f"{prefix}weight holds one table, and embedding {self.name!r} has {', '.join(self.spec.labels)}; "
                    "leave it out of the state, and load it by load_dense({table: weight, ...})"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all rows by the result of `convert_dense`. Raises SnapshotError, StoreError."""
        self.table_handle(for_load=True).load_state(tensors)
        self.keep_rows()

    def close(self) -> None:
        """Flush all rows and close the store. The next run resumes from the flushed rows.

        May be called more than once. All other calls then raise ClosedError.
        """
        self.is_closed = True
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise StoreError(
            f"embedding {self.name!r} cannot be copied or pickled, because its rows are in a store. To copy it, create "
            "an embedding with another name, and load a snapshot or use put. To save a model, call graph.save or "
            "save_checkpoint. To average models, average tierbed.to_dense_state_dict(model)"
        )

    def extra_repr(self) -> str:
        spec = self.spec
        columns = list(spec.columns)
        tables = list(spec.labels) if any(spec.table_names) else spec.num_tables
        return f"{spec.name!r}, columns={columns}, tables={tables}, store={self.store_options.store}"

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze all tables, as torch does for a module."""
        if not requires_grad and self.spec.num_tables > 1:
            log.warning(
                "embedding %r: requires_grad_(False) freezes all of its tables, %s. To freeze a single table, put "
                "the table into a separate embedding, or into a separate group of the collection",
                self.name,
                ", ".join(self.spec.labels),
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the embedding. Raises OptionError if the new dtype is not `output_dtype`."""
        convert, grad = make_converter(self, fn), self.shadow.grad
        if isinstance(grad, ShadowGrad):
            set_grad(self, None)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return super()._apply(convert, recurse)
        finally:
            self.register_parameter("shadow", self.shadow)  # torch may have made a new parameter, on another device
            if isinstance(grad, ShadowGrad):
                set_grad(self, ShadowGrad(grad.row_gradients))  # a new ShadowGrad on the parameter's new device

    def use_optimizer(self, row_optimizer: RowOptimizer) -> None:
        if self._handle is not None:
            self._handle.use_optimizer(row_optimizer)
        self.row_optimizer = row_optimizer

    def keep_rows(self) -> None:
        super().keep_rows()
        if self._optimizer_error is None or self._handle is None or self.is_closed or self.row_optimizer is None:
            return
        try:
            self._handle.use_optimizer(self.row_optimizer)  # may succeed now, because a load replaced the rows
            self._optimizer_error = None
        except OptimizerError as error:
            self._optimizer_error = error

    def read(self, lookup: Lookup, weights: Tensor | None = None, is_training: bool = False) -> Tensor:
        try:
            return self.table_handle().table.read(lookup, weights, self.output_dtype, is_training)
        except RowsReplacedError:  # a load in another thread replaced the rows
            return self.read(lookup, weights, is_training)

    @retry_if_replaced
    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        return self.table_handle().table.read_weights_grad(lookup, grad)

    def check_trained_lookup(self) -> None:
        """Raise OptimizerError if an EagerOptimizer trains the embedding inside a DistributedDataParallel."""
        if hasattr(self.shadow, IN_BACKWARD):
            follow_in_backward(self)
            if self.group is not None:
                self.group.detect_failed_backward()
        if self.embedding_id in trainers:
            check_lookup_outside_ddp(self.name)

    def accumulate(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
        with self._accumulate_lock:
            accumulate(self, lookup, grad, weights, order)

    def pin(self, lookups: list[Lookup], sibling: Any = None, dtype: torch.dtype | None = None) -> Any:
        return self._require_trainable().pin(lookups, dtype or self.output_dtype, sibling)

    def announce(self, lookups: list[Lookup]) -> None:
        table = self._require_trainable()
        with self.raise_on_all_ranks():
            for lookup in lookups:
                if lookup.ids.device.type == "cpu":
                    make_lookup_arguments(self.spec, lookup)
                    check_offsets(self.spec, lookup)
        table.announce(lookups)

    @retry_if_replaced
    def hit_counts(self) -> tuple[int, int]:
        table = self.table_handle().open_table
        with table.lock:
            hits, misses = table.prepare_top_tier().hit_counts().sum(axis=0).tolist()
        return hits, misses

    def forget_announced(self) -> None:
        if self._handle is not None:
            self._handle.forget_announced()

    def unpin_rows(self) -> None:
        if self._handle is not None:
            self._handle.unpin_rows()

    def _require_trainable(self) -> OpenTable | ShardedTable:
        table = self.table_handle().table
        if table.optimizer is None and self._optimizer_error is not None:
            raise self._optimizer_error
        return table

    def table_handle(self, for_load: bool = False) -> Handle:
        """Return the table's handle; the first call opens the table. for_load: a load is about to replace its rows."""
        if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
            raise GraphError(
                f"embedding {self.name!r}: build calls a method that needs the table itself, but build is traced "
                "without values; look up rows by calling the embedding, and use get, put, size and metrics outside "
                "the graph"
            )
        device = self.device
        with self._open_lock:
            if self._handle is None:
                if self.is_closed:
                    with self.raise_on_all_ranks():  # other ranks may be opening the table, and would wait here
                        raise ClosedError(f"embedding {self.name!r} was closed; create it again")
                self._check_has_name()
                self.fix_seed()
                try:
                    self._handle = self._make_handle(self.row_optimizer, device, for_load)
                except OptimizerError as error:
                    self._optimizer_error = error  # without the optimizer, rows can still be read
                    self._handle = self._make_handle(None, device, for_load)
                weakref.finalize(self, close_collected, self._handle.close_and_log)
                if self._handle.local.persistence.unusable_reason:
                    self._pending_references[:] = self._pending_references or [UNLOADABLE_ROWS]
            elif self._handle.device != device:
                self._handle.local.move(device)
            handle = self._handle
        if self._pending_references and not for_load:
            self._load_pending_reference()
        if self._open_callbacks and not for_load:
            calls, self._open_callbacks = self._open_callbacks, []
            for call in calls:
                call()
        return handle

    def _check_has_name(self) -> None:
        path = self.store_options.persistent_path
        if self.name_source == "path" and path is not None:
            with self.raise_on_all_ranks():
                raise StoreError(
                    f"an embedding was used before it had a name, so its folder under {path!r} is not known; before "
                    "the first use, give it name=, pass the model to a Graph or an EagerOptimizer, or load a model "
                    "checkpoint"
                )

    def _make_handle(self, optimizer: RowOptimizer | None, device: torch.device, for_load: bool) -> Handle:
        arguments = self.spec, self.store_options, optimizer, device, self.group, for_load, self._pending_references
        if self.world is not None:
            return ShardedTableHandle(self.world, *arguments)
        warn_without_world(self.name)
        return TableHandle(*arguments)


class MultiTableEmbedding(MultiTableMultiColumnEmbedding):
    """Hashed embedding tables in one store, looked up by (table, id).

    Tables grow: training inserts rows for new ids. The same id in two tables is two rows. The store opens at the first
    use, on the module's device, and moves with the module. `parameters()` contains one small parameter, the shadow
    parameter. Optimizers and autograd use it in place of the rows. docs/glossary.md explains tierbed's terms.

    Args:
        name: Also names the store's folder under `persistent_path`. If None, the embedding is named after its path
            in the model. An EagerOptimizer, Graph, DistributedModelParallel or checkpoint of the model sets this name.
        embedding_dim: A row's width.
        dtype: The stored rows' dtype, torch.float32, bfloat16 or float16. Arithmetic is float32. Training rounds rows
            to 16 bits stochastically; everything else rounds to nearest even.
        key_type: The ids' dtype: torch.int32, int64 or uint64. Every value is a legal id.
        tables: A list with `make_table_options(...)` for each table. Lookups select tables by index, or by name if
            named. None means a single table with `default_initializer`.
        store_options: The result of a `make_*_store_options` function, or the dict that the function prints.
        default_initializer: Initial rows if `tables` is None. Default: normal(0, 0.05).
        padding_idx: An id without a row. Lookups of this id return zeros, and the id gets no gradient.
        seed: Initial rows depend only on (seed, table, id, column), so embeddings with one seed start with equal rows.
            Default: the seed of rows already stored, otherwise the CRC-32 of the name. Unnamed embeddings are seeded by
            the order of their first use; those with a `world` are counted separately, so all ranks get the same seed.
        output_dtype: The dtype of lookup results and their gradients: torch.float32, float16 or bfloat16.
        world: A `World` whose ranks share the rows. Default: all rows are in this process.
        state_dtype: The dtype of optimizer states with one number per element: torch.float32 or bfloat16.

    Raises:
        OptionError: If an argument is invalid.

    Example:

        >>> users = tierbed.make_table_options(tierbed.make_normal_initializer(0.0, 0.05), name="user")
        >>> items = tierbed.make_table_options(tierbed.make_normal_initializer(0.0, 0.05), name="item")
        >>> store = tierbed.make_host_mem_store_options(persistent_path="rows")
        >>> embedding = tierbed.MultiTableEmbedding("ids", 16, torch.float32, torch.int64, [users, items], store)
        >>> embedding(torch.tensor([[7, 42], [8, 42]])).shape  # a user and an item in each row
        torch.Size([2, 2, 16])
    """

    _allows_columns = False
