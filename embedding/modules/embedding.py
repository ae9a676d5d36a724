"""The embedding modules, which users make, look up and save."""

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
from ...engine.checks import as_int, checked_arguments
from ...engine.errors import ClosedError, GraphError, InputError, OptimizerError, OptionError, StoreError
from ...engine.ops.batch import check_offsets, segment
from ...engine.ops.rows_contract import TRACED
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.initializers import make_normal_initializer
from ...engine.options.lookup import Lookup, check_lookup, check_output_dtype, check_weights
from ...engine.options.store_options import store_options_from_dict
from ...engine.options.table_spec import check_name, table_spec
from ...engine.table.table import OpenTable, RowsReplaced
from ..autograd import lookup_op as ops
from ..autograd.gradients import ShadowGrad, accumulate, holders, set_grad
from ..autograd.shadow import adopt, converter
from ..optim.ddp_guard import check_world, refuse_lookup, warn_alone
from ..optim.eager import IN_BACKWARD, follow_in_backward
from ..saving.rows_reference import UNKNOWN
from ..saving.sharded_handle import ShardedTableHandle
from ..saving.table_handle import TableHandle
from ..state_dict.saved_rows import EXTRA, ROWS
from ..tables.names import provisional_name
from .dense_rows import dense_tensors, put_in_state
from .keyed_rows import KeyedRows, on_present_rows

Handle = TableHandle | ShardedTableHandle

log = logging.getLogger("tierbed")


class MultiTableMultiColumnEmbedding(KeyedRows):
    """Hashed tables that share a row layout: several columns of their own widths, laid side by side in each row.

    name: names the folder under `persistent_path`. With None the embedding takes its path in the model as its name when
    an EagerOptimizer, a Graph, a DistributedModelParallel or a checkpoint first gets the model.
    embedding_dim: the width of a row, or a list of widths, one for each column.
    dtype: of the numbers of stored rows: torch.float32, bfloat16 or float16. All arithmetic is float32; what training
    writes is rounded by chance, everything else to nearest even.
    key_type: torch.int32, int64 or uint64, the dtype of ids; every value is a legal id.
    tables: one `make_table_options(...)` for each table, known by its name or its place; None is one table with
    `default_initializer` (normal(0, 0.05)).
    store_options: from a `make_*_store_options`, or the dict that it prints.
    padding_idx: an id that is no row: zeros, no gradient.
    seed: initial rows are a pure function of (seed, table, key, column). None is the CRC-32 of the name, or the seed of
    stored rows; without a name it is another for each embedding of the process, in the order of their first uses (over
    ranks, of those with a `world`). Two embeddings with one seed begin with equal rows.
    output_dtype: of a lookup's result and of its gradient: torch.float32, float16 or bfloat16, whatever rows are.
    world: a `World` of tierbed.distributed, over whose ranks the rows are spread; None keeps all rows in this process.
    state_dtype: of the numbers of the optimizer's state that every element has: torch.float32 or bfloat16.

    A row's identity is (table, key): the same id in two tables is two rows. The store opens at the first use, on the
    device of the module, and moves with the module. Raises OptionError.
    """

    _has_columns = True  # False if embedding_dim is one width

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
        if not self._has_columns and as_int(embedding_dim) is None:
            raise OptionError(
                f"embedding_dim={embedding_dim!r}: give a whole number, or use MultiTableMultiColumnEmbedding"
            )
        if tables is None:
            tables = [default_initializer if default_initializer is not None else make_normal_initializer(0.0, 0.05)]
        elif default_initializer is not None:
            raise OptionError("default_initializer is for tables=None alone; leave it out, or give each table its own")
        if not isinstance(tables, (list, tuple)) or not tables:
            raise OptionError(f"tables={tables!r}: give a list with make_table_options(...) for each table, or None")
        self.naming, self._has_seed = "given" if name is not None else "path", name is not None or seed is not None
        name = provisional_name(world is not None) if name is None else name
        self.spec = table_spec(name, embedding_dim, key_type, tables, padding_idx, seed, dtype, state_dtype)
        self.spec.layout(RowState())  # reports a table whose columns do not fit at once, not at the first use
        self.output_dtype = check_output_dtype(output_dtype)
        self.store_options = store_options_from_dict(store_options)
        self.world = check_world(world, name)
        self.row_optimizer: RowOptimizer | None = None
        # held by an optimizer and followed by autograd; the rows themselves are no parameter
        self.register_parameter("shadow", nn.Parameter(torch.zeros(1, 1, dtype=torch.float32)))
        self.handle = ops.register(self)
        self._opening, self._accumulating = Lock(), Lock()
        self._refused: OptimizerError | None = None  # why the stored rows cannot be trained
        self.misses_rows = False

    @property
    def name(self) -> str:
        return self.spec.name

    def take_name(self, name: str) -> None:
        """Be called `name` from here on. Rows that are in memory stay."""
        self.fix_seed()
        self.set_spec(name=check_name(name))
        self.naming = "given"
        if self._handle is not None:
            self._handle.rename(name)

    def set_spec(self, **facts: Any) -> None:
        """Change facts of an embedding that is not open, or its name."""
        self.spec = replace(self.spec, **facts)

    @property
    def dim(self) -> int:
        """Floats of a row that a lookup returns, all columns together."""
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
        """Rows of ids, ids.shape + (dim,), or bags of them pooled, shape of the bags + (dim,), of `output_dtype`.

        ids: `key_type` or an integer dtype that fits into it, any shape. Unknown ids have their initial rows; only
        training inserts them.
        pooling: "sum" or "mean" of the rows of a bag, those of padding_idx left out; a bag of none is zeros. The bags
        are the last dimension of ids [..., L]; or with offsets, int64 or int32 [bags + 1] from 0 to n and ascending,
        bag b is ids[offsets[b]:offsets[b + 1]] of ids [n].
        weights: float32 of the shape of ids, for pooling: sum(w * row), for a mean divided by the ids but padding.
        table_ids: integers or, but for tensors, names of tables that broadcast to ids.shape, or to the shape of the
        bags; without them and with several tables, the last dimension of that shape is the tables, in order.
        features: numbers of the features to look up, each once. Offsets are then [num_features * batch + 1], feature by
        feature, and table_ids one for each listed feature; the result is (batch, len(features), dim) in their order.
        num_features: how many features offsets are of; as many as are listed, if left out.

        Outside a `Graph` a lookup reads, and an `EagerOptimizer` trains what it read. Raises InputError, StoreError.
        """
        ops.refuse_export(self.name)
        with self.raise_on_all_ranks():
            lookup = check_lookup(self.spec, ids, table_ids, offsets, pooling, features, num_features)
            check_weights(self.spec, lookup, weights)
            if (device := self.device) != ids.device:
                raise InputError(
                    f"ids of embedding {self.name!r} are on {ids.device} and the embedding on {device}; give "
                    f"ids.to({str(device)!r}), or move the module that holds it by .to({str(ids.device)!r})"
                )
        return self.look_up(lookup, weights)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Take the parameter that stands for the rows. InputError for any other."""
        self._parameters[self.parameter_name] = adopt(self, name, param)
        self.device = self.shadow.device

    @property
    def shadow(self) -> nn.Parameter:  # type: ignore[override]
        parameter = self._parameters[self.parameter_name]
        assert parameter is not None
        return parameter

    def look_up(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """The result of a lookup with checked arguments, through which autograd reaches the rows."""
        shadow: Tensor = self.shadow
        traced = getattr(shadow, TRACED, None)
        if traced is not None and traced[0] != get_ident():  # the fake tensor of another thread's trace: two threads in
            shadow = traced[1]  # autograd of it would wait for each other, one with its lock, the other with Python's
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
        """Announce the lookup of a later training step, so that a thread prefetches its rows while others run.

        Announce steps in their order, each before it runs, any number of them ahead. The arguments are those of the
        lookup. Rows never depend on an announcement: a step that was not announced, or looks up other ids, runs without
        prefetch. A cache over a slower tier keeps the rows that the announced steps need soonest. On CUDA the thread
        uses a second stream. Raises InputError, OptimizerError, StoreError.
        """
        with self.raise_on_all_ranks():
            lookup = check_lookup(self.spec, ids, table_ids, offsets, pooling, features, num_features)
        self.announce([lookup])

    @checked_arguments("states")
    def load_dense(
        self,
        weights: Mapping[Any, Tensor],
        states: Mapping[Any, Mapping[str, Tensor]] | None = None,
        step: int | None = None,
    ) -> None:
        """Replace the rows of tables by dense ones, whose row i is that of id i, as a checkpoint of `nn.Embedding` has.

        weights: by the table's number or name, floats [rows, dim]. states: by table, the optimizer's states by name:
        [rows, dim], or [rows] of one number a row. Without them the optimizer begins with new state.
        step: how many steps the rows were trained, which Adam's correction counts; None is the largest `step` or `iter`
        of the states, as torch and FBGEMM have them; 0 without states, if the rows of all tables are given. Else the
        embedding's own counts on, with a warning if the optimizer counts steps, and an InputError if it is 0. Other
        tables keep their rows; the step must be theirs.

        If this raises, nothing has changed: InputError, OptimizerError, StoreError, SnapshotError.
        """
        with self.raise_on_all_ranks():
            tensors = dense_tensors(self, weights, states or {}, step)
        self.load_tensors(tensors)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shadow, weight = state_dict.pop(prefix + "shadow", None), state_dict.pop(prefix + "weight", None)
        errors = rest[-1]
        is_shadow = prefix + EXTRA in state_dict or f"{prefix}{ROWS}key" in state_dict
        if shadow is None and is_shadow and getattr(weight, "shape", None) == (1, 1):
            shadow, weight = weight, None  # that of an Embedding
        if shadow is not None:
            state_dict[prefix + self.parameter_name] = shadow
        elif weight is not None:  # of nn.Embedding or nn.EmbeddingBag
            if self.spec.num_tables == 1:
                is_double = isinstance(weight, Tensor) and weight.dtype == torch.float64  # which torch rounds as well
                put_in_state(self, {0: weight.float() if is_double else weight}, state_dict, prefix, errors)
            else:
                errors.append(
                    f"{prefix}weight is of one table, and embedding {self.name!r} has {', '.join(self.spec.labels)}; "
                    "leave it out of the state, and load it by load_dense({table: weight, ...})"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all rows by those of `dense_tensors`. SnapshotError, StoreError."""
        self.table_handle(for_load=True).load_state(tensors)
        self.keep_rows()

    def close(self) -> None:
        """Bring every row down and close the store; the next run resumes from it.

        May be called again. Using the embedding raises ClosedError.
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
            f"embedding {self.name!r} cannot be copied or pickled: its rows live in a store; create another under its "
            "own name, and carry rows over by save_snapshot or put. To keep a model, use its state_dict(), which has "
            "the rows of an embedding without a folder, and with state_dict_snapshots=True in the store options names "
            "a snapshot of others; graph.save or save_checkpoint. For averages (AveragedModel), average what "
            "tierbed.to_dense_state_dict(model) returns"
        )

    def extra_repr(self) -> str:
        spec = self.spec
        columns = list(spec.columns)
        tables = list(spec.labels) if any(spec.table_names) else spec.num_tables
        return f"{spec.name!r}, columns={columns}, tables={tables}, store={self.store_options.store}"

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As torch's, of all tables of the embedding."""
        if not requires_grad and self.spec.num_tables > 1:
            log.warning(
                "embedding %r: requires_grad_(False) freezes all of its tables, %s; to freeze one of them, give that "
                "table an embedding of its own, in a collection by a group",
                self.name,
                ", ".join(self.spec.labels),
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the embedding, as a module that holds it moves. OptionError for another dtype than `output_dtype`."""
        convert, grad = converter(self, fn), self.shadow.grad
        if isinstance(grad, ShadowGrad):
            set_grad(self, None)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return super()._apply(convert, recurse)
        finally:
            self.register_parameter("shadow", self.shadow)  # it may be a new one, on another device
            if isinstance(grad, ShadowGrad):
                set_grad(self, ShadowGrad(grad.rows))  # on the device of the parameter

    def use_optimizer(self, rows_optimizer: RowOptimizer) -> None:
        if self._handle is not None:
            self._handle.use_optimizer(rows_optimizer)
        self.row_optimizer = rows_optimizer

    def keep_rows(self) -> None:
        super().keep_rows()
        if self._refused is None or self._handle is None or self.is_closed or self.row_optimizer is None:
            return
        try:
            self._handle.use_optimizer(self.row_optimizer)  # rows that were loaded since may fit it
            self._refused = None
        except OptimizerError as error:
            self._refused = error

    def read(self, lookup: Lookup, weights: Tensor | None = None, trains: bool = False) -> Tensor:
        try:
            return self.table_handle().table.read(lookup, weights, self.output_dtype, trains)
        except RowsReplaced:  # by a load in another thread
            return self.read(lookup, weights, trains)

    @on_present_rows
    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        return self.table_handle().table.read_weights_grad(lookup, grad)

    def check_trained_lookup(self) -> None:
        """OptimizerError where an EagerOptimizer trains the embedding and ranks share the training, as of `attach`."""
        if hasattr(self.shadow, IN_BACKWARD):
            follow_in_backward(self)
            if self.group is not None:
                self.group.check_passed()
        if self.handle in holders:
            refuse_lookup(self.name)

    def accumulate(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
        with self._accumulating:
            accumulate(self, lookup, grad, weights, order)

    def pin(self, lookups: list[Lookup], dedup_from: Any = None, dtype: torch.dtype | None = None) -> Any:
        return self._trained().pin(lookups, dtype or self.output_dtype, dedup_from)

    def announce(self, lookups: list[Lookup]) -> None:
        table = self._trained()
        with self.raise_on_all_ranks():
            for lookup in lookups:
                if lookup.ids.device.type == "cpu":
                    segment(self.spec, lookup)
                    check_offsets(self.spec, lookup)
        table.announce(lookups)

    @on_present_rows
    def hit_counts(self) -> tuple[int, int]:
        table = self.table_handle().local_table
        with table.lock:
            hits, misses = table.ready().hit_counts().sum(axis=0).tolist()
        return hits, misses

    def forget_announced(self) -> None:
        if self._handle is not None:
            self._handle.forget_announced()

    def release(self) -> None:
        if self._handle is not None:
            self._handle.release()

    def _trained(self) -> OpenTable | ShardedTable:
        table = self.table_handle().table
        if table.optimizer is None and self._refused is not None:
            raise self._refused
        return table

    def table_handle(self, for_load: bool = False) -> Handle:
        """The handle of the table, which is opened at the first use. for_load: its rows are about to be replaced."""
        if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
            raise GraphError(
                f"embedding {self.name!r}: build calls a method that needs the table itself, and it is traced without "
                "values; look rows up by calling the embedding, and use get, put, size and metrics outside the graph"
            )
        device = self.device
        with self._opening:
            if self._handle is None:
                if self.is_closed:
                    with self.raise_on_all_ranks():  # others may be about to open it, which takes all ranks
                        raise ClosedError(f"embedding {self.name!r} was closed; create it again")
                self._check_has_name()
                self.fix_seed()
                try:
                    self._handle = self._hold(self.row_optimizer, device, for_load)
                except OptimizerError as error:
                    self._refused = error  # the rows can still be read
                    self._handle = self._hold(None, device, for_load)
                weakref.finalize(self, self._handle.finish)
                if self._handle.own.unsettled:
                    self._awaited[:] = self._awaited or [UNKNOWN]
            elif self._handle.device != device:
                self._handle.own.move(device)
            handle = self._handle
        if self._awaited and not for_load:
            self._await_rows()
        if self._calls_when_open and not for_load:
            calls, self._calls_when_open = self._calls_when_open, []
            for call in calls:
                call()
        return handle

    def _check_has_name(self) -> None:
        path = self.store_options.persistent_path
        if self.naming == "path" and path is not None:
            with self.raise_on_all_ranks():
                raise StoreError(
                    f"an embedding without a name was used before it took one, so its folder under {path!r} is not "
                    "known; give it name=, or first make the Graph of the model that has it, or its EagerOptimizer "
                    "with module=, or load a checkpoint into the model"
                )

    def _hold(self, optimizer: RowOptimizer | None, device: torch.device, for_load: bool) -> Handle:
        arguments = self.spec, self.store_options, optimizer, device, self.group, for_load, self._awaited
        if self.world is not None:
            return ShardedTableHandle(self.world, *arguments)
        warn_alone(self.name)
        return TableHandle(*arguments)


class MultiTableEmbedding(MultiTableMultiColumnEmbedding):
    """Hashed tables of rows of one width. `embedding_dim` is an int; all else as `MultiTableMultiColumnEmbedding`."""

    _has_columns = False
