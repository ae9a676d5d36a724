"""FBGEMM's table-batched embedding, with rows in tiered tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...distributed.world import World
from ...embedding.modules.dense_rows import CHUNK_ROWS
from ...embedding.state_dict.read_only import ReadOnlyCopy
from ...embedding.tables.names import make_next_seed
from ...engine.checks import as_number, check_flags, check_int, validate_arguments
from ...engine.errors import GraphError, InputError, OptionError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.initializers import make_uniform_initializer
from ...engine.options.store_options import make_cached_ssd_store_options
from ...engine.options.table_spec import DTYPES, check_initializer_range, check_name, check_seed, check_state_dtype
from ...engine.row_format import MAX_STEP
from ..collections.configs import EmbeddingConfig
from ..collections.tables import TableModule, group_tables
from ..tensors.validation import is_tracing
from . import call_arguments
from .call_arguments import TBECall, check_arguments, parse_call, pop_ignored_arguments
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
from .fused_lookup import CallSplitter, FusedUpdater
from .settings import DEFAULT_ARGS, DEFAULT_LOAD_FACTOR, DEFAULT_LR, make_optimizer_settings, parse_state_dtype
from .specs import BoundsCheck, choose_device, choose_stores, compute_cache_mb, parse_features, parse_specs

log = logging.getLogger("tierbed")


class TableBatchedEmbeddingBags(TableModule):
    """Looks up many tables in one call and updates their rows in backward, with FBGEMM's arguments and formulas.

    In training mode, a call's backward updates each row once, however often the call looked the row up. In evaluation
    mode and under no_grad, rows do not change. Arguments accept FBGEMM's enum members too.

    Args:
        embedding_specs: (rows, dim, EmbeddingLocation, ComputeDevice) per table. Tables with equal dim and location
            share an embedding, `<name>-d<dim>-<location>`. DEVICE stores rows in device memory, MANAGED and HOST in
            host memory. MANAGED_CACHING is host memory with a cache in device memory. ComputeDevice.CUDA
            without a GPU looks up on the CPU, with a warning. New rows are zeros.
        feature_table_map: Table number of each feature. None means one feature per table.
        optimizer: EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB,
            PARTIAL_ROWWISE_LAMB, LARS_SGD, or NONE if an EagerOptimizer or a Graph trains the rows.
        learning_rate, eps, beta1, beta2, weight_decay, weight_decay_mode, momentum, eta: The optimizer's settings.
        max_norm: After an update, a row with a larger L2 norm is scaled down to it. 0 means no limit.
        gradient_clipping: If True, clamps each element of the output's gradient before gradients are summed per row.
        max_gradient: The largest magnitude of a clamped element.
        pooling_mode: PoolingMode.SUM, MEAN, or NONE to return one row per index.
        weights_precision: Storage dtype: torch.float32, float16 or bfloat16, or FBGEMM's SparseType. 16-bit rows are
            rounded stochastically in training.
        output_dtype: The dtype of results, from the same choices as weights_precision.
        bounds_check_mode: What happens to an index outside its table. FATAL raises InputError. WARNING and IGNORE leave
            the index out of its bag and count it in `metrics()`; WARNING also logs once. With NONE, any 64-bit index is
            valid and gets a row. Offsets are always checked.
        cache_algorithm, cache_load_factor: MANAGED_CACHING's eviction policy, and the fraction of rows it can cache.
        table_names: Table names. None means table-0, table-1, ...
        optimizer_state_dtypes: Optimizer states' dtypes, as {"momentum1": dtype, ...}. Per-element states share one
            dtype, float32 or bfloat16. States with one number per row are float32.
        device: Lookup device, of the same type as the ComputeDevice.
        store_options: Options from a `make_*_store_options`, or a mapping from embedding name to options. They
            replace the locations in `embedding_specs`, so all tables with equal dim share an embedding `<name>-d<dim>`.
            A single store's options are divided between the embeddings.
        name: Prefix for embedding names. None means "tbe".
        seed: A number that determines initial rows, together with table names. If `seed` is None, and `name` or
            `table_names` is given, the seed is 0. If none of the three is given, each module gets a different seed.
        world: A `tierbed.distributed.World` whose ranks divide the rows. All ranks must call forward and backward of
            the same modules in the same order.
        unsupported: FBGEMM's other arguments. Values that tierbed does not support raise OptionError.

    Raises:
        OptionError, OptimizerError: If an argument is invalid or not supported.
    """

    _default_name = "tbe"

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, Any]],
        feature_table_map: Sequence[int] | None = None,
        *,
        optimizer: Any = OptimType.EXACT_SGD,
        learning_rate: float = DEFAULT_LR,
        eps: float = DEFAULT_ARGS["eps"],
        beta1: float = DEFAULT_ARGS["beta1"],
        beta2: float = DEFAULT_ARGS["beta2"],
        weight_decay: float = DEFAULT_ARGS["weight_decay"],
        weight_decay_mode: Any = WeightDecayMode.NONE,
        momentum: float = DEFAULT_ARGS["momentum"],
        eta: float = DEFAULT_ARGS["eta"],
        max_norm: float = 0.0,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        pooling_mode: Any = PoolingMode.SUM,
        weights_precision: Any = torch.float32,
        output_dtype: Any = torch.float32,
        bounds_check_mode: Any = BoundsCheckMode.WARNING,
        cache_algorithm: Any = CacheAlgorithm.LRU,
        cache_load_factor: float = DEFAULT_LOAD_FACTOR,
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
        unused = pop_ignored_arguments(unsupported, dtype)
        supported = *call_arguments.IGNORED_ARGS, *(TableBatchedEmbeddingBags.__init__.__kwdefaults__ or ())
        check_arguments(unsupported, call_arguments.REFUSED_ARGS, supported)
        prefix = check_name(self._default_name if name is None else name)
        bounds_check = BoundsCheck(parse_enum(BoundsCheckMode, bounds_check_mode, "bounds_check_mode"), prefix)
        tables = parse_specs(embedding_specs, table_names, dtype, bounds_check, store_options is None)
        super().__init__(name, [table.name for table in tables])
        self.tables, self._bounds_check, self._has_warned = tables, bounds_check, False
        self.features = self.feature_table_map = parse_features(feature_table_map, len(tables))
        self.embedding_specs: list[tuple[Any, ...]] = list(embedding_specs)
        self.pooling_mode = parse_enum(PoolingMode, pooling_mode, "pooling_mode")
        dims = list(dict.fromkeys(table.embedding_dim for table in tables))
        if self.pooling_mode is PoolingMode.NONE and len(dims) > 1:
            problem = f"PoolingMode.NONE needs tables of equal dim, but embedding_specs have dims {dims}"
            raise OptionError(f"pooling_mode: {problem}; make a module for each dim")
        # None with OptimType.NONE: an EagerOptimizer or a Graph trains the rows
        self._settings = make_optimizer_settings(
            {"optimizer": optimizer, "learning_rate": learning_rate, "max_norm": max_norm}
            | {"eps": eps, "beta1": beta1, "beta2": beta2, "momentum": momentum, "eta": eta}
            | {"weight_decay": weight_decay, "weight_decay_mode": weight_decay_mode}
        )
        max_grad = _parse_max_gradient(gradient_clipping, max_gradient)
        algorithm = parse_enum(CacheAlgorithm, cache_algorithm, "cache_algorithm")
        result_dtype, lookup_device = parse_dtype(output_dtype), choose_device(tables[0].compute_device, device)
        self._row_optimizer: RowOptimizer | None = None
        state_dtype, widths = torch.float32, {dim: dim for dim in dims}
        if self._settings is not None:
            # an empty parameter: autograd reaches lookups through it, and dense optimizers find nothing to change
            self.anchor = nn.Parameter(torch.zeros(0))
            torch_optimizer = self._settings.make_optimizer([self.anchor])
            self._param_group = torch_optimizer.param_groups[0]
            self._row_optimizer = RowOptimizer(torch_optimizer, self._param_group)
            state_dtype = parse_state_dtype(optimizer_state_dtypes, self._row_optimizer)
            state_name = check_state_dtype(state_dtype)
            row_states = {dim: self._row_optimizer.make_row_state(dim, state_name) for dim in dims}
            widths = {dim: state.make_row_format(dim, DTYPES[dtype]).width for dim, state in row_states.items()}
            unused += self._settings.find_unused()
        if seed is None:  # modules without names get different seeds, as their tables are different
            seed = make_next_seed(world is not None) if name is None and table_names is None else 0
        table_groups = group_tables(prefix, tables)
        stores = choose_stores(table_groups, store_options, algorithm, cache_load_factor, widths, unused)
        self._make_embeddings(
            table_groups, stores, check_seed(seed), output_dtype=result_dtype, world=world, state_dtype=state_dtype
        )
        self._updaters = []
        if self._row_optimizer is not None:
            for embedding in self.each():
                embedding.shadow.requires_grad_(False)  # so that no EagerOptimizer or graph also trains the rows
                embedding.use_optimizer(self._row_optimizer)
                self._updaters.append(FusedUpdater(embedding, self._row_optimizer, max_grad))
        embedding_indices = {group: index for index, group in enumerate(table_groups)}
        locations = [(embedding_indices[name], table_id) for name, table_id in map(self.table_location, self.features)]
        pooling = None if self.pooling_mode is PoolingMode.NONE else self.pooling_mode.name.lower()
        self._splitter = CallSplitter([embedding.spec for embedding in self.each()], locations, pooling)
        self.to(lookup_device)
        if unused:
            log.warning("TableBatchedEmbeddingBags %r: arguments that change nothing: %s", prefix, "; ".join(unused))

    def _make_seed_text(self, embedding_name: str, tables: Sequence[EmbeddingConfig]) -> str:
        return tables[0].name  # the group's name contains the location, but initial rows must not depend on a location

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """Look up all features.

        Args:
            indices: int64 or int32 [n].
            offsets: int64 or int32 [features * batch + 1], feature by feature.
            per_sample_weights: Floats [n]. A bag's result is sum(weight * row); MEAN divides it by the bag's number of
                indices. Not allowed with PoolingMode.NONE.
            feature_requires_grad: Integers [features]; 0 means that the feature's weights get no gradient. By default,
                all weights get gradients.
            batch_size_per_feature_per_rank: Number of bags per feature and rank. Offsets are then [all bags + 1].
            unsupported: FBGEMM's other arguments raise InputError. hash_zch_* are ignored, with one warning.

        Returns:
            Pooled bags [batch, total dim], features side by side. With PoolingMode.NONE, rows [n, dim]. With
            batch_size_per_feature_per_rank, all bags in a 1-D tensor, ordered by rank, then by feature.

        Raises:
            InputError, StoreError: As for an embedding's lookup.
            GraphError: In a graph, unless the optimizer is OptimType.NONE.
        """
        with self.raise_on_all_ranks():
            call = self._parse_call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank, unsupported)
            if feature_requires_grad is not None:
                call = call.detach_frozen_weights(feature_requires_grad)
            lookups = self._splitter.split(call)
        if self._row_optimizer is None:
            results = [embedding.look_up(*lookup) for embedding, lookup in zip(self.each(), lookups, strict=True)]
        else:
            anchor = self.anchor if self.training else self.anchor.detach()
            updates = zip(self._updaters, lookups, strict=True)
            results = [updater.look_up(anchor, *lookup) for updater, lookup in updates]
        if not is_tracing():
            self._bounds_check.warn_about_dropped(self.each())
        return self._splitter.join(call, results)

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> None:
        """Announce a future forward's lookups, so that their rows are fetched while other steps run.

        Announce steps in the order in which they will run. You may announce any number of steps. Prefetching never
        changes rows. Does nothing in evaluation mode. Arguments are as in `forward`. Raises InputError, StoreError.
        """
        with self.raise_on_all_ranks():
            call = self._parse_call(indices, offsets, None, batch_size_per_feature_per_rank, unsupported)
            lookups = self._splitter.split(call)
        if self.training:
            for embedding, (lookup, _) in zip(self.each(), lookups, strict=True):
                embedding.announce([lookup])

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Draw rows uniformly from [min_val, max_val].

        A call before the module's first use sets how new rows are initialized. Rows already in a store folder do not
        change. A call after the first use overwrites all rows with numbers from torch's random number generator, and
        keeps optimizer state. Raises OptionError, for example if a value exceeds the range of `weights_precision`.
        """
        initializer = make_uniform_initializer(min_val, max_val)
        specs = {table.name: table for table in self.tables}
        tables_by_embedding = {}
        for embedding in self.each():
            tables = tuple(specs[str(name)].table_options(initializer) for name in embedding.spec.table_names)
            check_initializer_range(tables, embedding.spec.dtype)
            tables_by_embedding[embedding] = tables
        for embedding, tables in tables_by_embedding.items():
            if not embedding.is_open:
                embedding.set_spec(tables=tables)
                continue
            for name in map(str, embedding.spec.table_names):
                for keys in torch.arange(specs[name].num_embeddings).split(CHUNK_ROWS):
                    embedding.put(keys, torch.empty(len(keys), embedding.dim).uniform_(min_val, max_val), name)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return a copy of each table's rows [rows, dim] in the stored dtype.

        In-place writes into the copy raise InputError. Use `embedding_of(table).put(keys, rows, table)` to write rows,
        or `clone()` for a writable tensor.
        """
        return [self.embeddings.tables[table.name].weight for table in self.tables]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Return a copy of each table's optimizer states. In-place writes into the copies raise InputError.

        A state is [rows, dim], or [rows] for EXACT_ROWWISE_ADAGRAD. For EXACT_SGD the list is empty.
        Raises StoreError if ranks share the rows.
        """
        return [list(states.values()) for states in self.get_optimizer_state()]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Return {state name: copy} for each table, like `split_optimizer_states`. Raises StoreError."""
        copies: list[dict[str, Tensor]] = []
        for table, states in self._dense_states().items():
            remedy = (
                f"split_optimizer_states of {self.name!r} returns copies, so a write into the state of table {table!r} "
                "changes no row; call load_dense, or clone() it for a tensor of your own"
            )
            copies.append({name: ReadOnlyCopy(state, remedy) for name, state in states.items()})
        return copies if self._row_optimizer is not None and self._row_optimizer.states else []

    @validate_arguments("weights", "states")
    def load_dense(
        self,
        weights: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor] | Sequence[Tensor]] | None = None,
        step: int | None = None,
    ) -> None:
        """Replace all tables' rows.

        Args:
            weights: Tensors as returned by `split_embedding_weights`.
            states: Optimizer states as returned by `split_optimizer_states` or `get_optimizer_state`. None resets them.
            step: The number of updates so far, as returned by `iter`. If None, the number does not change.

        Raises:
            InputError, StoreError: As an embedding's `load_dense`.
        """
        with self.raise_on_all_ranks():
            if len(weights) != len(self.tables) or (states and len(states) != len(self.tables)):
                counts = f"weights of {len(weights)} tables and states of {len(states or ())}"
                expected = f"them for each of {len(self.tables)} tables"
                raise InputError(f"load_dense of {self.name!r}: got {counts}; give {expected}")
            names = [*self._require_optimizer("load_dense").states, "another"] if states else []
            states_by_table = [dict(s if isinstance(s, Mapping) else zip(names, s, strict=False)) for s in states or ()]
        tables = [table.name for table in self.tables]
        self._load_rows(dict(zip(tables, weights, strict=True)), dict(zip(tables, states_by_table, strict=False)), step)
        if self._row_optimizer is not None and (step is not None or any("step" in state for state in states_by_table)):
            self._row_optimizer.set_step_shift(0)

    @property
    def iter(self) -> Tensor:
        """A copy of the number of updates so far, int64 [1]. FBGEMM's Adam corrects its bias by this number."""
        steps = [embedding.table_handle().open_table.step for embedding in self.each()]
        return torch.tensor([max(steps) + (0 if self._row_optimizer is None else self._row_optimizer.step_shift)])

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return {embedding name: its metrics}; docs/metrics.md explains them."""
        return {embedding.name: embedding.metrics() for embedding in self.each()}

    def flush(self) -> None:
        """Write changed rows from caches to the tiers below. Raises StoreError."""
        for embedding in self.each():
            embedding.table_handle().open_table.flush()

    def reset_cache_states(self) -> None:
        """Do nothing. Caches are always consistent, because `load_dense` and `put` write through them."""

    def reset_embedding_weight_momentum(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Set pruned rows to zeros, and reset their optimizer state.

        Pruned rows are listed by table. List i is for table buffer_ids[i] and begins at pruned_indices_offsets[i].
        """
        for index, (begin, end) in zip(buffer_ids.tolist(), pairwise(pruned_indices_offsets.tolist()), strict=True):
            ids, name = pruned_indices[begin:end], self.tables[index].name
            embedding = self.embedding_of(name)
            embedding.delete(ids, name)
            embedding.put(ids, torch.zeros(len(ids), embedding.dim), name)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate for the next updates. Raises OptionError."""
        self.update_hyper_parameters({"lr": lr})

    def get_learning_rate(self) -> float:
        """Return the learning rate for the next update."""
        self._require_optimizer("get_learning_rate")
        return float(self._param_group["lr"])

    @validate_arguments("params_dict")
    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Change optimizer settings: {FBGEMM's name or "lr": value}. Raises OptionError before any change."""
        self._require_optimizer("update_hyper_parameters")
        assert self._settings is not None
        self._settings.update_param_group(self._param_group, params_dict)

    def set_optimizer_step(self, step: int) -> None:
        """Set the count of earlier updates for Adam's bias correction. Raises OptionError.

        The setting is not stored: set it again after a restart.
        """
        optimizer = self._require_optimizer("set_optimizer_step")
        num_updates = check_int("step", step, f"a whole number from 0 to {MAX_STEP - 1}", 0, MAX_STEP - 1)
        steps = [embedding.table_handle().open_table.step for embedding in self.each()]
        optimizer.set_step_shift(num_updates - max(steps))

    def freeze(self) -> None:
        """Drop the optimizer, because another kind of embedding has replaced the trained ones."""
        self._row_optimizer, self._updaters, self._has_warned = None, [], True
        self._bounds_check.should_warn = False
        self._splitter.make_table_ids(torch.device("cpu"))
        self._parameters.pop("anchor", None)

    def extra_repr(self) -> str:
        optimizer = "NONE" if self._settings is None else self._settings.optim_type.name
        return f"{self.name!r}, tables={len(self.tables)}, features={len(self.features)}, optimizer={optimizer}"

    def _parse_call(self, indices: Any, offsets: Any, weights: Any, counts: Any, options: Mapping[str, Any]) -> TBECall:
        if self._row_optimizer is not None and detect_fake_mode() is not None:
            raise GraphError(
                f"TableBatchedEmbeddingBags {self.name!r} updates rows in backward, but a graph does not support that; "
                "make the module with OptimType.NONE, and pass an optimizer for its parameters() to add_optimizer"
            )
        # FBGEMM allocates gradients by total_unique_indices; tierbed ignores this argument
        names = call_arguments.IGNORED_CALL_ARGS
        ignored = ("total_unique_indices", *names) if self._row_optimizer is None else names
        if not self._has_warned and any(options.get(name) is not None for name in names):
            self._has_warned = True
            log.warning("%r: rows are never streamed; ignored arguments: %s", self.name, ", ".join(names))
        options = {name: value for name, value in options.items() if name not in ignored}
        supported = "indices", "offsets", "per_sample_weights", "batch_size_per_feature_per_rank"
        check_arguments(options, call_arguments.REFUSED_CALL_ARGS, supported, InputError)
        if weights is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError("per_sample_weights: PoolingMode.NONE does not sum rows; call without weights")
        if counts is not None and self.pooling_mode is PoolingMode.NONE:
            reason = "PoolingMode.NONE returns a row for each index and has no bags"
            raise InputError(f"batch_size_per_feature_per_rank: {reason}; leave it out")
        device = next(self.each()).device
        return parse_call(self.name, len(self.features), indices, offsets, weights, counts, device)

    def _require_optimizer(self, call: str) -> RowOptimizer:
        if self._row_optimizer is None:
            raise OptionError(
                f"{call} of {self.name!r}: with OptimType.NONE, the module has no optimizer; change settings in the "
                "optimizer that trains the rows. To load optimizer states, use embedding_of(table).load_dense"
            )
        return self._row_optimizer


class SplitTableBatchedEmbeddingBagsCodegen(TableBatchedEmbeddingBags):
    """A TableBatchedEmbeddingBags that also accepts positional arguments, in FBGEMM's order."""

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, Any]],
        feature_table_map: Sequence[int] | None = None,
        *positional: Any,
        **named: Any,
    ) -> None:
        names = call_arguments.POSITIONAL_ARGS
        if (n := len(positional)) > len(names):
            raise OptionError(f"got {n + 2} positional arguments; give all after {names[-1]} by name")
        by_name = dict(zip(names, positional, strict=False))
        if repeated := [name for name in by_name if name in named]:
            raise OptionError(f"{repeated[0]}={named[repeated[0]]!r}: it is also given by position; give it once")
        super().__init__(embedding_specs, feature_table_map, **by_name, **named)


class SSDTableBatchedEmbeddingBags(TableBatchedEmbeddingBags):
    """FBGEMM's table-batched embedding with rows on SSD below a cache.

    Args:
        embedding_specs: (rows, dim) per table.
        feature_table_map: Table number of each feature. None means one feature per table.
        cache_sets: Size of the cache in FBGEMM's sets of 32 rows. All tables with the same dim share a part of the
            cache. Each part holds at least 64 rows.
        ssd_storage_directory: Store folder.
        ssd_uniform_init_lower, ssd_uniform_init_upper: New rows are drawn uniformly from this range.
        options: Arguments for TableBatchedEmbeddingBags. FBGEMM's RocksDB arguments are refused.
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
        location = EmbeddingLocation.MANAGED, ComputeDevice.CUDA if torch.cuda.is_available() else ComputeDevice.CPU
        optimizer = parse_enum(OptimType, options.get("optimizer", OptimType.EXACT_ROWWISE_ADAGRAD), "optimizer")
        cache_mb = compute_cache_mb(embedding_specs, cache_sets, optimizer)
        store = make_cached_ssd_store_options(cache_mb, ssd_storage_directory)
        options = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "store_options": store, **options}
        super().__init__([(*spec, *location) for spec in embedding_specs], feature_table_map, **options)
        self.embedding_specs = list(embedding_specs)
        self.init_embedding_weights_uniform(ssd_uniform_init_lower, ssd_uniform_init_upper)


def _parse_max_gradient(gradient_clipping: Any, max_gradient: Any) -> float | None:
    maximum = as_number(max_gradient)
    check_flags(OptionError, gradient_clipping=gradient_clipping)
    if maximum is None or not maximum > 0:
        raise OptionError(f"max_gradient={max_gradient!r}: give a number > 0")
    if not gradient_clipping and maximum != 1.0:
        raise OptionError(f"max_gradient={max_gradient!r}: nothing is clamped; give gradient_clipping=True as well")
    return maximum if gradient_clipping else None
