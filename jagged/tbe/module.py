"""FBGEMM's table-batched embedding on tiered tables, and read-only copies of its rows and states.

In FBGEMM a write into a tensor of rows is a write into the table. Here it would change a copy, so it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from ...distributed.world import World
from ...embedding.embedding import MultiTableEmbedding
from ...engine.checks import as_number
from ...engine.errors import GraphError, InputError, OptionError, StoreError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.initializers import make_uniform_initializer
from ...engine.options.table_spec import DTYPES, check_name, check_reach, check_seed, check_state_dtype
from ...engine.table.table_report import scan_caught_up
from ..collections.tables import Table, TableModule, group_tables
from .call_arguments import CONSTRUCTOR, IDLE, TBECall, checked_call, idle, refuse, refuse_call
from .dispatch import CallSplitter, FusedUpdater
from .enums import BoundsCheckMode, CacheAlgorithm, OptimType, PoolingMode, WeightDecayMode, parse_dtype, parse_enum
from .settings import DEFAULTS, Settings, ShiftedOptimizer, checked_state_dtype, checked_step
from .specs import LOAD_FACTOR, Bounds, Caching, checked_features, checked_specs, device_of, stores_for

log = logging.getLogger("tierbed")
CHUNK = 1 << 16  # rows
WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")  # besides names that end in _
POOLING = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean", PoolingMode.NONE: None}


def copied_weights(embedding: MultiTableEmbedding, number: int, rows: int) -> Tensor:
    """The rows [rows, dim] of one table; a row that was never written has its initial value."""
    with torch.inference_mode(False):
        weights = torch.empty(rows, embedding.dim, device=embedding.device)
    for first in range(0, rows, CHUNK):
        keys = torch.arange(first, min(first + CHUNK, rows))
        weights[first : first + CHUNK] = embedding.get(keys, number)
    return weights


def fill_uniform(embedding: MultiTableEmbedding, number: int, rows: int, low: float, high: float) -> None:
    """Write all rows of one table, uniform over [low, high], drawn in the order of the rows."""
    for first in range(0, rows, CHUNK):
        keys = torch.arange(first, min(first + CHUNK, rows))
        embedding.put(keys, torch.empty(len(keys), embedding.dim).uniform_(low, high), number)


def copied_states(embedding: MultiTableEmbedding, rows: Sequence[int], optimizer: RowOptimizer) -> list[list[Tensor]]:
    """The states of each table: [rows, dim] of a state of elements, [rows] of one number a row.

    rows: of each table.
    """
    state, table = optimizer.row_state(embedding.dim), embedding.table_handle().local_table
    # without inference mode, since a read-only copy detects writes by the tensor's version
    with torch.inference_mode(False):
        initial = list(zip(state.widths, state.initial, strict=True))
        states = [
            [torch.full((count, width), float(value), dtype=torch.float32) for width, value in initial]
            for count in rows
        ]
        for _, chunk in scan_caught_up(table):
            values = [table.form.numbers(chunk, name) for name in state.names]
            for of_table, (number, count) in zip(states, enumerate(rows), strict=True):
                chosen = (chunk["table"] == number) & (chunk["key"] < count)
                keys = torch.from_numpy(chunk["key"][chosen].astype("i8"))
                for copied, value in zip(of_table, values, strict=True):
                    copied[keys] = torch.from_numpy(value[chosen])
        is_of_row = [width == 1 for width in optimizer.row_state(2).widths]  # with a dim of 1 all widths are 1
        return [
            [
                (copied.flatten() if of_row else copied).to(embedding.device)
                for copied, of_row in zip(of_table, is_of_row, strict=True)
            ]
            for of_table in states
        ]


class ReadOnlyCopy(Tensor):
    """A tensor whose in-place operations, and those of its views, raise InputError. Tensors computed from it are plain.

    A view that is made inside of torch.compile is plain too: a write into it changes the copy and raises nothing.
    """

    remedy: str

    @classmethod
    def of(cls, tensor: Tensor, remedy: str) -> ReadOnlyCopy:
        """A read-only view of `tensor`. remedy: the message of the error."""
        with torch._C.DisableTorchFunctionSubclass():
            copy = tensor.as_subclass(cls)
        copy.remedy = remedy
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this method, and knows neither versions nor memory
            if func.__name__ in WRITES or (func.__name__[-1] == "_" and func.__name__[-2] != "_"):
                raise InputError("not in compiled code: Dynamo runs the write as it is, and it raises the remedy")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            copies = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
            if copies and func is Tensor.__format__:
                return Tensor.__format__(copies[0].as_subclass(Tensor), *args[1:])  # a subclass takes no format
            versions = [copy._version for copy in copies]
            result = func(*args, **(kwargs or {}))
            for copy, version in zip(copies, versions, strict=True):
                if copy._version != version:
                    raise InputError(copy.remedy)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        if type(result) in (list, tuple):
            return type(result)(_read_only_view(one, copies) for one in result)
        return _read_only_view(result, copies)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def _read_only_view(result: Any, copies: Sequence[ReadOnlyCopy]) -> Any:
    """The result of an operation, read-only if it is a view of one of the copies."""
    if type(result) is not Tensor or result.layout != torch.strided:
        return result
    with torch._C.DisableTorchFunctionSubclass():
        memory = result.untyped_storage()._cdata
        copy = next((one for one in copies if one.untyped_storage()._cdata == memory), None)
    return result if copy is None else ReadOnlyCopy.of(result, copy.remedy)


class TableBatchedEmbeddingBags(TableModule):
    """Bags of rows of many tables, looked up at once and updated in backward, with FBGEMM's names and formulas.

    embedding_specs: (rows, dim, EmbeddingLocation, ComputeDevice) for each table, of any dims. Tables of one dim and
    location share an embedding, `<name>-d<dim>-<location>`: DEVICE is a store of device memory, MANAGED and HOST are of
    host memory, and MANAGED_CACHING caches `cache_load_factor` of the rows on the device, by `cache_algorithm`.
    ComputeDevice.CUDA without a GPU looks up on the CPU, with a warning. Rows begin as zeros.
    feature_table_map: the table of each feature; None is one feature a table. table_names: None is table-0, table-1...
    store_options: from a `make_*_store_options`, instead of the locations. Then tables of one dim share an embedding,
    `<name>-d<dim>`, and the store is divided between the embeddings; or a mapping of stores by their names.
    optimizer: EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB, PARTIAL_ROWWISE_LAMB
    or LARS_SGD. The numbers after it are FBGEMM's; a number that the optimizer lacks is refused. max_norm: after an
    update, a row of a larger L2 norm is scaled to it; 0 is none. max_gradient: with `gradient_clipping`, the
    magnitude to which each element of the output's gradient is clamped before it is summed.
    weights_precision: of stored rows, output_dtype: of results: torch.float32, float16 or bfloat16, or a SparseType of
    FBGEMM. Training rounds rows of 16 bits stochastically. optimizer_state_dtypes: {"momentum1": dtype, ...} of the
    states that `split_optimizer_states` returns, float32 or bfloat16. All states of elements have one dtype; states of
    one number a row are float32.
    bounds_check_mode: of indices that are out of a table's bounds. FATAL raises InputError; WARNING drops them, and
    logs the first; IGNORE drops them. A dropped index is left out of its bag, and `metrics()` counts it. NONE checks
    nothing: any 64-bit index is a row. Offsets are always checked.
    name: begins the names of the embeddings. seed: of initial rows. unsupported: FBGEMM's other arguments, which are
    refused. world: a `World` of tierbed.distributed, over whose ranks the rows are spread: every rank calls forward,
    and backward, of the same modules in the same order.

    Enums of FBGEMM are taken by value. In training mode, all lookups of a table in one forward are one update of its
    rows; in evaluation, and under no_grad, nothing changes. Raises OptionError, OptimizerError.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, Any]],
        feature_table_map: Sequence[int] | None = None,
        *,
        optimizer: Any = OptimType.EXACT_SGD,
        learning_rate: float = 0.01,
        eps: float = DEFAULTS["eps"],
        beta1: float = DEFAULTS["beta1"],
        beta2: float = DEFAULTS["beta2"],
        weight_decay: float = DEFAULTS["weight_decay"],
        weight_decay_mode: Any = WeightDecayMode.NONE,
        momentum: float = DEFAULTS["momentum"],
        eta: float = DEFAULTS["eta"],
        max_norm: float = 0.0,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        pooling_mode: Any = PoolingMode.SUM,
        weights_precision: Any = torch.float32,
        output_dtype: Any = torch.float32,
        bounds_check_mode: Any = BoundsCheckMode.WARNING,
        cache_algorithm: Any = CacheAlgorithm.LRU,
        cache_load_factor: float = LOAD_FACTOR,
        table_names: Sequence[str] | None = None,
        optimizer_state_dtypes: Mapping[str, Any] | None = None,
        device: Any = None,
        store_options: Mapping[str, Any] | None = None,
        name: str = "tbe",
        seed: int = 0,
        world: World | None = None,
        **unsupported: Any,
    ) -> None:
        dtype = parse_dtype(weights_precision, "weights_precision")
        unused = idle(unsupported, dtype)
        refuse(unsupported, CONSTRUCTOR, [*IDLE, *(type(self).__init__.__kwdefaults__ or ())])
        bounds = Bounds(parse_enum(BoundsCheckMode, bounds_check_mode, "bounds_check_mode"), name)
        tables = checked_specs(embedding_specs, table_names, dtype, bounds, store_options is None)
        super().__init__(check_name(name), [table.name for table in tables])
        self.tables, self._bounds = tables, bounds
        self.features = checked_features(feature_table_map, len(tables))
        self.pooling_mode = parse_enum(PoolingMode, pooling_mode, "pooling_mode")
        dims = list(dict.fromkeys(table.embedding_dim for table in tables))
        if self.pooling_mode is PoolingMode.NONE and len(dims) > 1:
            raise OptionError(
                f"pooling_mode=PoolingMode.NONE returns a row for each index, and embedding_specs have dims {dims}; "
                "give all tables one dim, or make a module for each"
            )
        self._settings = Settings(
            parse_enum(OptimType, optimizer, "optimizer"),
            learning_rate,
            {
                "eps": eps,
                "beta1": beta1,
                "beta2": beta2,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "eta": eta,
            },
            parse_enum(WeightDecayMode, weight_decay_mode, "weight_decay_mode"),
            max_norm,
        )
        clip = _checked_clip(gradient_clipping, max_gradient)
        caching = Caching(parse_enum(CacheAlgorithm, cache_algorithm, "cache_algorithm"), cache_load_factor)
        output, run_on = parse_dtype(output_dtype), device_of(tables[0].compute, device)
        # autograd reaches lookups through it; it has no elements, so optimizers of the dense part leave it alone
        self.anchor = nn.Parameter(torch.zeros(0))
        dense = self._settings.make_optimizer([self.anchor])
        self._numbers = dense.param_groups[0]
        self._rows = ShiftedOptimizer(dense, self._numbers)
        state_dtype = checked_state_dtype(optimizer_state_dtypes, self._rows)
        of_state = check_state_dtype(state_dtype)
        widths = {dim: self._rows.row_state(dim, of_state).form(dim, DTYPES[dtype]).width for dim in dims}
        groups = group_tables(name, tables)
        stores = stores_for(groups, store_options, caching, widths, unused)
        self._make_embeddings(groups, stores, torch.int64, None, check_seed(seed), output, world, state_dtype)
        for embedding in self.each():
            embedding.shadow.requires_grad_(False)  # no EagerOptimizer and no graph trains it
            embedding.use_optimizer(self._rows)
        self._updaters = [FusedUpdater(embedding, self._rows, clip) for embedding in self.each()]
        numbers = {group: number for number, group in enumerate(groups)}
        self._splitter = CallSplitter(
            name,
            [embedding.spec for embedding in self.each()],
            [(numbers[group], table) for group, table in map(self.table_location, self.features)],
            POOLING[self.pooling_mode],
        )
        self.to(run_on)
        if unused := self._settings.idle() + unused:
            log.warning("TableBatchedEmbeddingBags %r: arguments that change nothing: %s", name, "; ".join(unused))

    def _seed_name(self, group: str, first: Table) -> str:
        return first.name  # initial rows do not depend on where they live

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """Pooled bags [batch, total dim], features side by side; with PoolingMode.NONE rows [n, dim].

        indices: int64 or int32 [n]. offsets: int64 or int32 [features * batch + 1], feature by feature.
        per_sample_weights: floats [n], for pooling: a bag is sum(w * row), and a mean divides by its number of indices.
        feature_requires_grad: integers [features]: whether weights of each feature get a gradient; None: all do.
        batch_size_per_feature_per_rank: how many bags each feature has for each rank. Offsets are then
        [all bags + 1], and the result is 1-D: rank by rank, and feature by feature within a rank.
        unsupported: FBGEMM's other arguments, which are refused.

        Raises InputError, StoreError; GraphError while a graph is traced.
        """
        anchor = self.anchor if self.training else self.anchor.detach()
        with self.raise_on_all_ranks():
            call = self._call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank, unsupported)
            if feature_requires_grad is not None:
                call = call.with_gradients(feature_requires_grad, len(self.features))
            calls = self._splitter.split(call)
        results = [
            updater.look_up(anchor, one.lookup, one.weights) for updater, one in zip(self._updaters, calls, strict=True)
        ]
        self._bounds.warn(self.each())
        return self._splitter.join(call, calls, results)

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> None:
        """Announce the lookups of a future forward, so that their rows are fetched while other steps run.

        Announce steps in their order, any number ahead. Rows never depend on it. Does nothing in evaluation. Raises
        InputError, StoreError.
        """
        with self.raise_on_all_ranks():
            call = self._call(indices, offsets, None, batch_size_per_feature_per_rank, unsupported)
            calls = self._splitter.split(call)
        if self.training:
            for embedding, one in zip(self.each(), calls, strict=True):
                embedding.announce([one.lookup])

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Make all rows uniform over [min_val, max_val].

        Before the first use nothing is written: this is how new rows begin, and rows that a store folder has are
        unchanged. Later all rows are written, drawn from torch's generator; optimizer state is unchanged. Raises
        OptionError, also for values beyond the largest number of `weights_precision`.
        """
        uniform = make_uniform_initializer(min_val, max_val)
        specs = {table.name: table for table in self.tables}
        for embedding in self.each():
            options = tuple(specs[str(name)].table_options(uniform) for name in embedding.spec.table_names)
            check_reach(options, embedding.spec.dtype)
        for embedding in self.each():
            names = [str(name) for name in embedding.spec.table_names]
            if embedding.is_open:
                for number, name in enumerate(names):
                    fill_uniform(embedding, number, specs[name].num_embeddings, min_val, max_val)
            else:
                options = tuple(specs[name].table_options(uniform) for name in names)
                embedding.spec = replace(embedding.spec, tables=options)

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table [rows, dim], copied: an in-place write into them raises InputError.

        `embedding_of(table).put(keys, rows, table)` writes, and `clone()` gives a tensor of your own.
        """
        copies: list[Tensor] = []
        for table in self.tables:
            group, number = self.table_location(table.name)
            remedy = (
                f"split_embedding_weights of {self.name!r} copies rows, so a write into those of table {table.name!r} "
                f"changes no stored row; call embedding_of({table.name!r}).put(torch.arange({table.num_embeddings}), "
                f"rows, {table.name!r}), or clone() them for a tensor of your own"
            )
            weights = copied_weights(self.embedding(group), number, table.num_embeddings)
            copies.append(ReadOnlyCopy.of(weights, remedy))
        return copies

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The optimizer's states of each table, copied: an in-place write into them raises InputError.

        [rows, dim] each, of EXACT_ROWWISE_ADAGRAD [rows]. EXACT_SGD has none, and returns an empty list. Raises
        StoreError if ranks share the rows.
        """
        if not self._rows.states:
            return []
        if any(embedding.world is not None for embedding in self.each()):
            raise StoreError(
                f"split_optimizer_states of {self.name!r}: ranks share the rows, and no call gathers their states; "
                "save a snapshot, whose files have them"
            )
        rows = {table.name: table.num_embeddings for table in self.tables}
        states: dict[str, list[Tensor]] = {}
        for embedding in self.each():
            names = [str(name) for name in embedding.spec.table_names]
            copies = copied_states(embedding, [rows[name] for name in names], self._rows)
            for name, of_table in zip(names, copies, strict=True):
                remedy = (
                    f"split_optimizer_states of {self.name!r} copies them, so a write into that of table {name!r} "
                    "changes no row; load a snapshot or state_dict() that has the state, or clone() it for a tensor of "
                    "your own"
                )
                states[name] = [ReadOnlyCopy.of(state, remedy) for state in of_table]
        return [states[name] for name in rows]

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The metrics of each embedding by its name; docs/metrics.md explains them."""
        return {embedding.name: embedding.metrics() for embedding in self.each()}

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next updates. OptionError."""
        self.update_hyper_parameters({"lr": lr})

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._numbers["lr"])

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Set numbers of the optimizer by FBGEMM's names, and `lr`. If it raises OptionError, none is set."""
        self._settings.change(self._numbers, params_dict)

    def set_optimizer_step(self, step: int) -> None:
        """Set how many updates ADAM's bias correction counts before the next one. OptionError.

        A store keeps its own count of updates: set the step again after a restart.
        """
        self._rows.shift = checked_step(step) - max(
            embedding.table_handle().local_table.step for embedding in self.each()
        )

    def extra_repr(self) -> str:
        optimizer = self._settings.optimizer.name
        return f"{self.name!r}, tables={len(self.tables)}, features={len(self.features)}, optimizer={optimizer}"

    def _call(self, indices: Any, offsets: Any, weights: Any, sizes: Any, unsupported: Mapping[str, Any]) -> TBECall:
        if detect_fake_mode() is not None:
            raise GraphError(
                f"TableBatchedEmbeddingBags {self.name!r} updates its rows in backward, and a graph updates them after "
                "it; use an EmbeddingBagCollection in a graph"
            )
        refuse_call(unsupported, ("indices", "offsets", "per_sample_weights", "batch_size_per_feature_per_rank"))
        if weights is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError("per_sample_weights: PoolingMode.NONE does not sum rows; leave them out")
        if sizes is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError(
                "batch_size_per_feature_per_rank: PoolingMode.NONE returns a row for each index and has no bags; leave "
                "it out"
            )
        return checked_call(self.name, len(self.features), indices, offsets, weights, sizes, self.anchor.device)


def _checked_clip(gradient_clipping: Any, max_gradient: Any) -> float | None:
    clip = as_number(max_gradient)
    if not isinstance(gradient_clipping, bool):
        raise OptionError(f"gradient_clipping={gradient_clipping!r}: give True or False")
    if clip is None or not clip > 0:
        raise OptionError(f"max_gradient={max_gradient!r}: give a number > 0")
    if not gradient_clipping and clip != 1.0:
        raise OptionError(f"max_gradient={max_gradient!r}: nothing is clamped; give gradient_clipping=True as well")
    return clip if gradient_clipping else None
