"""FBGEMM's table-batched embedding on tiered tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...embedding.handle_contract import Ranks
from ...engine.errors import GraphError, InputError, OptionError
from ...engine.numeric import real
from ...engine.options.table_spec import DTYPES, check_seed, check_state_dtype
from .bounds import Bounds
from .calls import Call, checked_call
from .enums import BoundsCheckMode, CacheAlgorithm, OptimType, PoolingMode, WeightDecayMode, taken, taken_dtype
from .lookups import Plan
from .refused import CONSTRUCTOR, refuse, refuse_call
from .settings import DEFAULTS, Settings, ShiftedOptimizer, checked_state_dtype, checked_step
from .specs import LOAD_FACTOR, Caching, checked_features, checked_tables, device_of, parts_of, stores_for
from .tables import TablesInEmbeddings
from .update import Trainer

POOLING = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean", PoolingMode.NONE: None}


class TableBatchedEmbeddingBags(TablesInEmbeddings):
    """Bags of rows of many tables, looked up at once and updated in backward, by FBGEMM's words and formulas.

    embedding_specs: (rows, dim, EmbeddingLocation, ComputeDevice) for each table, of any dims. Tables of one dim and
    location are one embedding, `<name>-d<dim>-<location>`: DEVICE is a store of device memory, MANAGED and HOST of host
    memory, and MANAGED_CACHING caches `cache_load_factor` of the rows on the device, by `cache_algorithm`.
    ComputeDevice.CUDA without a GPU looks up on the CPU, with a warning. Rows begin as zeros.
    feature_table_map: for each feature its table; None is a feature for each. table_names: None is table-0, table-1...
    store_options: from a `make_*_store_options`, in the place of all locations. Then tables of one dim are one
    embedding, `<name>-d<dim>`, and the store is divided between them; or a mapping of stores by their names.
    optimizer: EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB, PARTIAL_ROWWISE_LAMB
    or LARS_SGD. The numbers after it are FBGEMM's; one that the optimizer has not is refused. max_norm: after an
    update, a row of a larger L2 norm is scaled to it; 0 is none. max_gradient: with `gradient_clipping`, the
    magnitude to which each element of the output's gradient is clamped before it is summed.
    weights_precision: of stored rows, output_dtype: of results: torch.float32, float16 or bfloat16, or a SparseType of
    FBGEMM. Training rounds rows of 16 bits by chance. optimizer_state_dtypes: {"momentum1": dtype, ...} of the states
    that `split_optimizer_states` gives, float32 or bfloat16; those of every element have one dtype, others are float32.
    bounds_check_mode: of indices that a table has no row for. FATAL raises InputError; WARNING drops them, and logs the
    first; IGNORE drops them; dropped ones are like none, and `metrics()` counts them. NONE checks nothing: any 64-bit
    index is a row. Offsets are always checked.
    name: names the embeddings. seed: of how rows begin. unsupported: FBGEMM's other arguments, which are refused.
    world: a `World` of tierbed.distributed, over whose ranks the rows are spread: every rank calls forward, and
    backward, of the same modules in the same order.

    Enums of FBGEMM are taken by value. All lookups of a table in one forward are one update of its rows, in training
    mode; in evaluation, and under no_grad, nothing changes. Raises OptionError, OptimizerError.
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
        world: Ranks | None = None,
        **unsupported: Any,
    ) -> None:
        refuse(unsupported, CONSTRUCTOR, type(self).__init__.__kwdefaults__ or ())
        tables = checked_tables(embedding_specs, table_names)
        features = checked_features(feature_table_map, len(tables))
        weights = taken_dtype(weights_precision, "weights_precision")
        parts = parts_of(name, tables, features, store_options is None, weights)
        mode = taken(PoolingMode, pooling_mode, "pooling_mode")
        dims = list(dict.fromkeys(table.dim for table in tables))
        if mode is PoolingMode.NONE and len(dims) > 1:
            raise OptionError(
                f"pooling_mode=PoolingMode.NONE returns a row for each index, and embedding_specs have dims {dims}; "
                "give all tables one dim, or make a module for each"
            )
        settings = Settings(
            taken(OptimType, optimizer, "optimizer"),
            learning_rate,
            {
                "eps": eps,
                "beta1": beta1,
                "beta2": beta2,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "eta": eta,
            },
            taken(WeightDecayMode, weight_decay_mode, "weight_decay_mode"),
            max_norm,
        )
        clip = _checked_clip(gradient_clipping, max_gradient)
        caching = Caching(taken(CacheAlgorithm, cache_algorithm, "cache_algorithm"), cache_load_factor)
        bounds = Bounds(taken(BoundsCheckMode, bounds_check_mode, "bounds_check_mode"), name)
        dtype, place = taken_dtype(output_dtype), device_of(tables[0].compute, device)
        anchor = nn.Parameter(torch.zeros(0))
        made = settings.made([anchor])
        rows = ShiftedOptimizer(made, made.param_groups[0])
        state_dtype = checked_state_dtype(optimizer_state_dtypes, rows)
        of_state = check_state_dtype(state_dtype)
        words = {dim: rows.row_state(dim, of_state).form(dim, DTYPES[weights]).width for dim in dims}
        stores = stores_for(name, parts, tables, store_options, caching, words, weights)
        super().__init__(
            name, tables, parts, stores, bounds, rows, dtype, weights, state_dtype, check_seed(seed), world
        )
        self.features = features
        self.pooling_mode = mode
        # autograd reaches lookups by it; optimizers of the dense part find no gradient in it
        self.anchor = anchor
        self._settings, self._numbers = settings, made.param_groups[0]
        self._trainers = [Trainer(embedding, rows, clip) for _, embedding in self.each()]
        self._plan = Plan(name, parts, [embedding.spec for _, embedding in self.each()], POOLING[mode])
        self.to(place)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """Pooled bags [batch, total dim], features side by side; of PoolingMode.NONE rows [n, dim].

        indices: int64 or int32 [n]. offsets: int64 or int32 [features * batch + 1], feature by feature.
        per_sample_weights: floats [n], for pooling: a bag is sum(w * row), for a mean divided by the indices in it.
        batch_size_per_feature_per_rank: how many bags each feature has for each rank; offsets are [all bags + 1]. The
        result is 1-D then, rank by rank, in each feature by feature. unsupported: FBGEMM's other arguments.

        Raises InputError, StoreError; GraphError where a graph traces it.
        """
        anchor = self.anchor if self.training else self.anchor.detach()
        with self._told():
            call = self._call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank, unsupported)
            asked = self._plan.asked(call)
        found = [
            trainer.look_up(anchor, one.lookup, one.weights) for trainer, one in zip(self._trainers, asked, strict=True)
        ]
        self._bounds.warn([embedding for _, embedding in self.each()])
        return self._plan.joined(call, asked, found)

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        **unsupported: Any,
    ) -> None:
        """Announce the training step of a coming forward, so that its rows are made ready while others run.

        Announce steps in their order; they may be any number ahead. Rows never depend on it. In evaluation nothing
        happens. Raises InputError, StoreError.
        """
        with self._told():
            call = self._call(indices, offsets, None, batch_size_per_feature_per_rank, unsupported)
            asked = self._plan.asked(call)
        if self.training:
            for trainer, one in zip(self._trainers, asked, strict=True):
                trainer.embedding.announce([one.lookup])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the coming updates. OptionError."""
        self.update_hyper_parameters({"lr": lr})

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._numbers["lr"])

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Set numbers of the optimizer by FBGEMM's names, and `lr`. OptionError, and none is set."""
        self._settings.change(self._numbers, params_dict)

    def set_optimizer_step(self, step: int) -> None:
        """Let the next update be that after `step` updates, in ADAM's bias correction. OptionError.

        A store keeps its own count of updates: set the step again after a restart.
        """
        self._rows.shift = checked_step(step) - max(embedding.opened().own_table.step for _, embedding in self.each())

    def extra_repr(self) -> str:
        optimizer = self._settings.optimizer.name
        return f"{self.name!r}, tables={len(self.tables)}, features={len(self.features)}, optimizer={optimizer}"

    def _told(self) -> AbstractContextManager[None]:
        """A block of a call of all ranks: what it raises on one of them is raised on all."""
        _, embedding = next(self.each())
        return embedding.told()

    def _call(self, indices: Any, offsets: Any, weights: Any, sizes: Any, unsupported: Mapping[str, Any]) -> Call:
        if detect_fake_mode() is not None:
            raise GraphError(
                f"TableBatchedEmbeddingBags {self.name!r} updates its rows in backward, and a graph after it; use an "
                "EmbeddingBagCollection in a graph"
            )
        refuse_call(unsupported, ("indices", "offsets", "per_sample_weights", "batch_size_per_feature_per_rank"))
        if weights is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError("per_sample_weights: PoolingMode.NONE sums no rows that they could weigh; leave them out")
        if sizes is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError(
                "batch_size_per_feature_per_rank: PoolingMode.NONE returns a row for each index, whatever the bags; "
                "leave it out"
            )
        return checked_call(self.name, len(self.features), indices, offsets, weights, sizes, self.anchor.device)


def _checked_clip(gradient_clipping: Any, max_gradient: Any) -> float | None:
    most = real(max_gradient)
    if not isinstance(gradient_clipping, bool):
        raise OptionError(f"gradient_clipping={gradient_clipping!r}: give True or False")
    if most is None or not most > 0:
        raise OptionError(f"max_gradient={max_gradient!r}: give a number > 0")
    if not gradient_clipping and most != 1.0:
        raise OptionError(f"max_gradient={max_gradient!r}: gradients are clamped with gradient_clipping=True; give it")
    return most if gradient_clipping else None
