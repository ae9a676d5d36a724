"""FBGEMM's table-batched embedding on tiered tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...distributed.world import World
from ...embedding.modules.dense_rows import CHUNK
from ...embedding.state_dict.read_only import ReadOnlyCopy
from ...embedding.tables.names import next_seed
from ...engine.checks import as_number, check_flags, checked_arguments, int_option
from ...engine.errors import GraphError, InputError, OptionError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.initializers import make_uniform_initializer
from ...engine.options.store_options import make_cached_ssd_store_options
from ...engine.options.table_spec import DTYPES, check_name, check_reach, check_seed, check_state_dtype
from ...engine.row_format import LAST_STEP
from ..collections.configs import EmbeddingConfig
from ..collections.tables import TableModule, group_tables
from ..tensors.validation import is_traced
from .call_arguments import CALL, CONSTRUCTOR, IDLE, IDLE_CALL, POSITIONS, TBECall, checked_call, idle, refuse
from .dispatch import CallSplitter, FusedUpdater
from .enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    WeightDecayMode,
    parse_dtype,
    parse_enum,
)
from .settings import DEFAULTS, LEARNING_RATE, checked_state_dtype, settings_of
from .specs import LOAD_FACTOR, Bounds, checked_features, checked_specs, device_of, set_budget_mb, stores_for

log = logging.getLogger("tierbed")
POOLING = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean", PoolingMode.NONE: None}


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
    or LARS_SGD; or NONE, with which an EagerOptimizer or a Graph trains the rows. The numbers after it are FBGEMM's.
    max_norm: after an update, a row of a larger L2 norm is scaled to it; 0 is none. max_gradient: with
    `gradient_clipping`, the magnitude to which each element of the output's gradient is clamped before it is summed.
    weights_precision: of stored rows, output_dtype: of results: torch.float32, float16 or bfloat16, or a SparseType of
    FBGEMM. Training rounds rows of 16 bits stochastically. optimizer_state_dtypes: {"momentum1": dtype, ...} of the
    states that `split_optimizer_states` returns, float32 or bfloat16. All states of elements have one dtype; states of
    one number a row are float32.
    bounds_check_mode: of indices that are out of a table's bounds. FATAL raises InputError; WARNING drops them, and
    logs the first; IGNORE drops them. A dropped index is left out of its bag, and `metrics()` counts it. NONE checks
    nothing: any 64-bit index is a row. Offsets are always checked.
    name: begins the names of the embeddings. seed: of initial rows, with the names of tables. None is 0, and another
    number for each module of a process that has neither name nor table_names.
    unsupported: FBGEMM's other arguments, refused unless they ask for nothing. world: a `World` of tierbed.distributed,
    over whose ranks the rows are spread: every rank calls forward, and backward, of the same modules in the same order.

    Enums of FBGEMM are taken by value. In training mode, all lookups of a table in one forward are one update of its
    rows; in evaluation, and under no_grad, nothing changes. Raises OptionError, OptimizerError.
    """

    _default_name = "tbe"

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, Any]],
        feature_table_map: Sequence[int] | None = None,
        *,
        optimizer: Any = OptimType.EXACT_SGD,
        learning_rate: float = LEARNING_RATE,
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
        name: str | None = None,
        seed: int | None = None,
        world: World | None = None,
        **unsupported: Any,
    ) -> None:
        dtype = parse_dtype(weights_precision, "weights_precision")
        unused = idle(unsupported, dtype)
        refuse(unsupported, CONSTRUCTOR, [*IDLE, *(TableBatchedEmbeddingBags.__init__.__kwdefaults__ or ())])
        called = check_name(self._default_name if name is None else name)
        bounds = Bounds(parse_enum(BoundsCheckMode, bounds_check_mode, "bounds_check_mode"), called)
        tables = checked_specs(embedding_specs, table_names, dtype, bounds, store_options is None)
        super().__init__(name, [table.name for table in tables])
        self.tables, self._bounds = tables, bounds
        self.features = self.feature_table_map = checked_features(feature_table_map, len(tables))
        self.embedding_specs: list[tuple[Any, ...]] = list(embedding_specs)
        self._said_idle = False
        self.pooling_mode = parse_enum(PoolingMode, pooling_mode, "pooling_mode")
        dims = list(dict.fromkeys(table.embedding_dim for table in tables))
        if self.pooling_mode is PoolingMode.NONE and len(dims) > 1:
            raise OptionError(
                f"pooling_mode=PoolingMode.NONE returns a row for each index, and embedding_specs have dims {dims}; "
                "give all tables one dim, or make a module for each"
            )
        # without an optimizer of its own the module's rows are trained by an EagerOptimizer or a Graph
        self._settings = settings_of(
            {"optimizer": optimizer, "learning_rate": learning_rate, "max_norm": max_norm}
            | {"eps": eps, "beta1": beta1, "beta2": beta2, "momentum": momentum, "eta": eta}
            | {"weight_decay": weight_decay, "weight_decay_mode": weight_decay_mode}
        )
        clip = _checked_clip(gradient_clipping, max_gradient)
        algorithm = parse_enum(CacheAlgorithm, cache_algorithm, "cache_algorithm")
        output, run_on = parse_dtype(output_dtype), device_of(tables[0].compute, device)
        self._rows: RowOptimizer | None = None
        state_dtype, widths = torch.float32, {dim: dim for dim in dims}
        if self._settings is not None:
            # autograd reaches lookups through it; it has no elements, so optimizers of the dense part leave it alone
            self.anchor = nn.Parameter(torch.zeros(0))
            dense = self._settings.make_optimizer([self.anchor])
            self._group = dense.param_groups[0]
            self._rows = RowOptimizer(dense, self._group)
            state_dtype = checked_state_dtype(optimizer_state_dtypes, self._rows)
            of_state = check_state_dtype(state_dtype)
            widths = {dim: self._rows.row_state(dim, of_state).form(dim, DTYPES[dtype]).width for dim in dims}
            unused += self._settings.idle()
        if seed is None:  # modules without any names are of different tables
            seed = next_seed(world is not None) if name is None and table_names is None else 0
        groups = group_tables(called, tables)
        stores = stores_for(groups, store_options, algorithm, cache_load_factor, widths, unused)
        self._make_embeddings(
            groups, stores, check_seed(seed), output_dtype=output, world=world, state_dtype=state_dtype
        )
        self._updaters = []
        if self._rows is not None:
            for embedding in self.each():
                embedding.shadow.requires_grad_(False)  # no EagerOptimizer and no graph trains it
                embedding.use_optimizer(self._rows)
                self._updaters.append(FusedUpdater(embedding, self._rows, clip))
        places = {group: number for number, group in enumerate(groups)}
        self._splitter = CallSplitter(
            [embedding.spec for embedding in self.each()],
            [(places[group], table) for group, table in map(self.table_location, self.features)],
            POOLING[self.pooling_mode],
        )
        self.to(run_on)
        if unused:
            log.warning("TableBatchedEmbeddingBags %r: arguments that change nothing: %s", called, "; ".join(unused))

    def _seed_name(self, group: str, tables: Sequence[EmbeddingConfig]) -> str:
        return tables[0].name  # initial rows do not depend on where they live

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
        unsupported: FBGEMM's other arguments, which are refused; hash_zch_* change nothing, and the log says so once.

        Raises InputError, StoreError; GraphError while a graph is traced.
        """
        with self.raise_on_all_ranks():
            call = self._call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank, unsupported)
            if feature_requires_grad is not None:
                call = call.with_gradients(feature_requires_grad)
            lookups = self._splitter.split(call)
        if self._rows is None:
            results = [embedding.look_up(*one) for embedding, one in zip(self.each(), lookups, strict=True)]
        else:
            anchor = self.anchor if self.training else self.anchor.detach()
            results = [updater.look_up(anchor, *one) for updater, one in zip(self._updaters, lookups, strict=True)]
        if not is_traced():
            self._bounds.warn(self.each())
        return self._splitter.join(call, results)

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
            lookups = self._splitter.split(call)
        if self.training:
            for embedding, (lookup, _) in zip(self.each(), lookups, strict=True):
                embedding.announce([lookup])

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Make all rows uniform over [min_val, max_val].

        Before the first use nothing is written: this is how new rows begin, and rows that a store folder has are
        unchanged. Later all rows are written, drawn from torch's generator; optimizer state is unchanged. Raises
        OptionError, also for values beyond the largest number of `weights_precision`.
        """
        uniform = make_uniform_initializer(min_val, max_val)
        specs = {table.name: table for table in self.tables}
        options = {
            embedding: tuple(specs[str(name)].table_options(uniform) for name in embedding.spec.table_names)
            for embedding in self.each()
        }
        for embedding, tables in options.items():
            check_reach(tables, embedding.spec.dtype)
        for embedding, tables in options.items():
            if not embedding.is_open:
                embedding.set_spec(tables=tables)
                continue
            for name in map(str, embedding.spec.table_names):
                for keys in torch.arange(specs[name].num_embeddings).split(CHUNK):
                    embedding.put(keys, torch.empty(len(keys), embedding.dim).uniform_(min_val, max_val), name)

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table [rows, dim] as stored, copied: an in-place write into them raises InputError.

        `embedding_of(table).put(keys, rows, table)` writes, and `clone()` gives a tensor of your own.
        """
        return [self.embeddings.tables[table.name].weight for table in self.tables]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The optimizer's states of each table, copied: an in-place write into them raises InputError.

        [rows, dim] each, of EXACT_ROWWISE_ADAGRAD [rows]. EXACT_SGD has none, and returns an empty list. Raises
        StoreError if ranks share the rows.
        """
        return [list(states.values()) for states in self.get_optimizer_state()]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """The states of each table by their names, copies as of `split_optimizer_states`. StoreError."""
        copies: list[dict[str, Tensor]] = []
        for table, states in self._dense_states().items():
            remedy = (
                f"split_optimizer_states of {self.name!r} copies them, so a write into that of table {table!r} "
                "changes no row; call load_dense, or clone() it for a tensor of your own"
            )
            copies.append({name: ReadOnlyCopy(state, remedy) for name, state in states.items()})
        return copies if self._rows is not None and self._rows.states else []

    @checked_arguments("weights", "states")
    def load_dense(
        self,
        weights: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor] | Sequence[Tensor]] | None = None,
        step: int | None = None,
    ) -> None:
        """Replace the rows of all tables, by tensors as `split_embedding_weights` has them.

        states: as `split_optimizer_states` or `get_optimizer_state` has them; without them the optimizer begins with
        new state. step: how many updates there were, as `iter` has it; None keeps the number. Raises as an embedding's.
        """
        with self.raise_on_all_ranks():
            if len(weights) != len(self.tables) or (states and len(states) != len(self.tables)):
                raise InputError(
                    f"load_dense of {self.name!r}: got weights of {len(weights)} tables and states of "
                    f"{len(states or ())}; give them for each of {len(self.tables)} tables"
                )
            names = [*self._own_optimizer("load_dense").states, "another"] if states else []
            by_name = [dict(one if isinstance(one, Mapping) else zip(names, one, strict=False)) for one in states or ()]
        tables = [table.name for table in self.tables]
        self._load_rows(dict(zip(tables, weights, strict=True)), dict(zip(tables, by_name, strict=False)), step)
        if self._rows is not None and (step is not None or any("step" in one for one in by_name)):
            self._rows.count_from(0)

    @property
    def iter(self) -> Tensor:
        """How many updates there were, int64 [1], as FBGEMM counts them for ADAM's correction; a copy."""
        steps = [embedding.table_handle().local_table.step for embedding in self.each()]
        return torch.tensor([max(steps) + (0 if self._rows is None else self._rows.shift)])

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The metrics of each embedding by its name; docs/metrics.md explains them."""
        return {embedding.name: embedding.metrics() for embedding in self.each()}

    def flush(self) -> None:
        """Write the rows that caches changed to the tiers below. StoreError."""
        for embedding in self.each():
            embedding.table_handle().local_table.flush()

    def reset_cache_states(self) -> None:
        """Nothing, since a cache always has the rows of its table: `load_dense` and `put` go through it."""

    def reset_embedding_weight_momentum(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Make pruned rows zeros, with new optimizer state.

        Those of table buffer_ids[i] are pruned_indices[pruned_indices_offsets[i]:pruned_indices_offsets[i + 1]].
        """
        for number, (begin, end) in zip(buffer_ids.tolist(), pairwise(pruned_indices_offsets.tolist()), strict=True):
            rows, name = pruned_indices[begin:end], self.tables[number].name
            embedding = self.embedding_of(name)
            embedding.delete(rows, name)
            embedding.put(rows, torch.zeros(len(rows), embedding.dim), name)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next updates. OptionError."""
        self.update_hyper_parameters({"lr": lr})

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        self._own_optimizer("get_learning_rate")
        return float(self._group["lr"])

    @checked_arguments("params_dict")
    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Set numbers of the optimizer by FBGEMM's names, and `lr`. If it raises OptionError, none is set."""
        self._own_optimizer("update_hyper_parameters")
        assert self._settings is not None
        self._settings.change(self._group, params_dict)

    def set_optimizer_step(self, step: int) -> None:
        """Set how many updates ADAM's bias correction counts before the next one. OptionError.

        A store keeps its own count of updates: set the step again after a restart.
        """
        rows = self._own_optimizer("set_optimizer_step")
        past = int_option("step", step, f"a whole number from 0 to {LAST_STEP - 1}", 0, LAST_STEP - 1)
        rows.count_from(past - max(embedding.table_handle().local_table.step for embedding in self.each()))

    def extra_repr(self) -> str:
        optimizer = "NONE" if self._settings is None else self._settings.optimizer.name
        return f"{self.name!r}, tables={len(self.tables)}, features={len(self.features)}, optimizer={optimizer}"

    def _call(self, indices: Any, offsets: Any, weights: Any, sizes: Any, unsupported: Mapping[str, Any]) -> TBECall:
        if self._rows is not None and detect_fake_mode() is not None:
            raise GraphError(
                f"TableBatchedEmbeddingBags {self.name!r} updates its rows in backward, and a graph updates them after "
                "it; make it with OptimType.NONE, and give its parameters() to an optimizer that add_optimizer takes"
            )
        # FBGEMM needs the number to make the memory of gradients
        ignored = ("total_unique_indices", *IDLE_CALL) if self._rows is None else IDLE_CALL
        if not self._said_idle and any(unsupported.get(name) is not None for name in IDLE_CALL):
            self._said_idle = True
            log.warning("%r: no rows are streamed, so these change nothing: %s", self.name, ", ".join(IDLE_CALL))
        unsupported = {name: given for name, given in unsupported.items() if name not in ignored}
        supported = "indices", "offsets", "per_sample_weights", "batch_size_per_feature_per_rank"
        refuse(unsupported, CALL, supported, InputError)
        if weights is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError("per_sample_weights: PoolingMode.NONE does not sum rows; leave them out")
        if sizes is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError(
                "batch_size_per_feature_per_rank: PoolingMode.NONE returns a row for each index and has no bags; leave "
                "it out"
            )
        device = next(self.each()).device
        return checked_call(self.name, len(self.features), indices, offsets, weights, sizes, device)

    def _own_optimizer(self, call: str) -> RowOptimizer:
        if self._rows is None:
            raise OptionError(
                f"{call} of {self.name!r}: OptimType.NONE has no optimizer here; change that of the EagerOptimizer or "
                "the Graph, and load states by load_dense of embedding_of(table)"
            )
        return self._rows


class SplitTableBatchedEmbeddingBagsCodegen(TableBatchedEmbeddingBags):
    """A TableBatchedEmbeddingBags by FBGEMM's name, whose arguments may be given by position, in FBGEMM's order."""

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, Any]],
        feature_table_map: Sequence[int] | None = None,
        *positional: Any,
        **named: Any,
    ) -> None:
        if len(positional) > len(POSITIONS):
            raise OptionError(f"{len(positional) + 2} arguments by position; give those after {POSITIONS[-1]} by name")
        by_name = dict(zip(POSITIONS, positional, strict=False))
        if twice := [name for name in by_name if name in named]:
            raise OptionError(f"{twice[0]}={named[twice[0]]!r}: it is given by position as well; give it once")
        super().__init__(embedding_specs, feature_table_map, **by_name, **named)


class SSDTableBatchedEmbeddingBags(TableBatchedEmbeddingBags):
    """FBGEMM's table-batched embedding of rows in the folder `ssd_storage_directory`, below a cache of 32 rows a set.

    embedding_specs: (rows, dim) each. cache_sets: sets of the cache, which is divided between the dims; each dim gets
    one set of tierbed's 64 rows at least. Rows begin uniform between ssd_uniform_init_lower and ssd_uniform_init_upper.
    options: those of a TableBatchedEmbeddingBags; RocksDB's are refused.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int]],
        feature_table_map: Sequence[int] | None,
        cache_sets: int,
        ssd_storage_directory: str,
        *,
        ssd_uniform_init_lower: float = -0.01,
        ssd_uniform_init_upper: float = 0.01,
        **options: Any,
    ) -> None:
        place = EmbeddingLocation.MANAGED, ComputeDevice.CUDA if torch.cuda.is_available() else ComputeDevice.CPU
        optimizer = parse_enum(OptimType, options.get("optimizer", OptimType.EXACT_ROWWISE_ADAGRAD), "optimizer")
        budget = set_budget_mb(embedding_specs, cache_sets, optimizer)
        store = make_cached_ssd_store_options(budget, ssd_storage_directory)
        options = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "store_options": store, **options}
        super().__init__([(*spec, *place) for spec in embedding_specs], feature_table_map, **options)
        self.embedding_specs = list(embedding_specs)
        self.init_embedding_weights_uniform(ssd_uniform_init_lower, ssd_uniform_init_upper)


def _checked_clip(gradient_clipping: Any, max_gradient: Any) -> float | None:
    clip = as_number(max_gradient)
    check_flags(OptionError, gradient_clipping=gradient_clipping)
    if clip is None or not clip > 0:
        raise OptionError(f"max_gradient={max_gradient!r}: give a number > 0")
    if not gradient_clipping and clip != 1.0:
        raise OptionError(f"max_gradient={max_gradient!r}: nothing is clamped; give gradient_clipping=True as well")
    return clip if gradient_clipping else None
