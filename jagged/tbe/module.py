"""FBGEMM's table-batched embedding on tiered tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...engine.errors import GraphError, InputError, OptionError
from ...engine.modules.multi_table import MultiTableEmbedding
from ...engine.numeric import real
from ...engine.spec.initializers import (
    AnyTableOptions,
    make_constant_initializer,
    make_table_options,
    make_uniform_initializer,
)
from ...engine.spec.table_spec import check_name, check_seed
from ...engine.spec.tables import choices, table_number
from ..modules.division import stores_text
from .calls import Call, checked_call
from .copies import copied_states, copied_weights, fill_uniform
from .enums import BoundsCheckMode, CacheAlgorithm, OptimType, PoolingMode, WeightDecayMode, taken, taken_dtype
from .lookups import Plan
from .refused import CONSTRUCTOR, refuse, refuse_call
from .settings import DEFAULTS, Settings, ShiftedOptimizer, checked_step
from .specs import LOAD_FACTOR, Caching, Part, checked_features, checked_tables, device_of, parts_of, stores_for
from .update import Trainer

T = TypeVar("T")

POOLING = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean", PoolingMode.NONE: None}
BAD_IDS = {"FATAL": "raise", "WARNING": "drop", "IGNORE": "drop"}


class TableBatchedEmbeddingBags(nn.Module):
    """Bags of rows of many tables, looked up at once and updated in backward, by FBGEMM's words and formulas.

    embedding_specs: (rows, dim, EmbeddingLocation, ComputeDevice) for each table, of any dims. Tables of one dim and
    location are one embedding, `<name>-d<dim>-<location>`: DEVICE is a store of device memory, MANAGED and HOST of host
    memory, and MANAGED_CACHING caches `cache_load_factor` of the rows on the device, by `cache_algorithm`.
    ComputeDevice.CUDA without a GPU looks up on the CPU, with a warning. Rows begin as zeros.
    feature_table_map: for each feature its table; None is a feature for each. table_names: None is table-0, table-1...
    store_options: from a `make_*_store_options`, in the place of all locations. Then tables of one dim are one
    embedding, `<name>-d<dim>`, and the store is divided between them; or a mapping of stores by their names.
    optimizer: EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD or ADAM, which decays weights decoupled. The numbers
    after it are FBGEMM's; one that the optimizer has not is refused. max_gradient: with `gradient_clipping`, the
    magnitude to which each element of the output's gradient is clamped before it is summed.
    output_dtype: torch.float32, float16 or bfloat16, or a SparseType of FBGEMM.
    bounds_check_mode: of indices that a table has no row for. FATAL raises InputError; WARNING drops them, and logs the
    first; IGNORE drops them; dropped ones are like none, and `metrics()` counts them. NONE checks nothing: any 64-bit
    index is a row. Offsets are always checked.
    name: names the embeddings. seed: of how rows begin. unsupported: FBGEMM's other arguments, which are refused.

    Enums of FBGEMM are taken by value. All lookups of a table in one forward are one update of its rows, in training
    mode; in evaluation, and under no_grad, nothing changes. Raises OptionError.
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
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        pooling_mode: Any = PoolingMode.SUM,
        output_dtype: Any = torch.float32,
        bounds_check_mode: Any = BoundsCheckMode.WARNING,
        cache_algorithm: Any = CacheAlgorithm.LRU,
        cache_load_factor: float = LOAD_FACTOR,
        table_names: Sequence[str] | None = None,
        device: Any = None,
        store_options: Mapping[str, Any] | None = None,
        name: str = "tbe",
        seed: int = 0,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        refuse(unsupported, CONSTRUCTOR, self.__init__.__kwdefaults__)  # type: ignore[misc]
        self.name = check_name(name)
        self.tables = checked_tables(embedding_specs, table_names)
        self.features = checked_features(feature_table_map, len(self.tables))
        self.pooling_mode = taken(PoolingMode, pooling_mode, "pooling_mode")
        self.bounds_check_mode = taken(BoundsCheckMode, bounds_check_mode, "bounds_check_mode")
        self._settings = Settings(
            taken(OptimType, optimizer, "optimizer"),
            learning_rate,
            {"eps": eps, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay},
            taken(WeightDecayMode, weight_decay_mode, "weight_decay_mode"),
        )
        dims = list(dict.fromkeys(table.dim for table in self.tables))
        if self.pooling_mode is PoolingMode.NONE and len(dims) > 1:
            raise OptionError(
                f"pooling_mode=PoolingMode.NONE returns a row for each index, and embedding_specs have dims {dims}; "
                "give all tables one dim, or make a module for each"
            )
        clip = _checked_clip(gradient_clipping, max_gradient)
        # autograd reaches lookups by it; optimizers of the dense part find no gradient in it
        self.anchor = nn.Parameter(torch.zeros(0))
        self._optimizer = self._settings.made([self.anchor])
        self._rows = ShiftedOptimizer(self._optimizer, self._optimizer.param_groups[0])
        caching = Caching(taken(CacheAlgorithm, cache_algorithm, "cache_algorithm"), cache_load_factor)
        self._parts = parts_of(self.name, self.tables, self.features, store_options is None)
        state_floats = {dim: self._rows.row_state(dim).width for dim in dims}
        self._stores = stores_for(self._parts, self.tables, store_options, caching, state_floats)
        dtype = taken_dtype(output_dtype)
        seeds = range(check_seed(seed), check_seed(seed) + len(self._parts))
        self.embeddings = nn.ModuleList(map(partial(self._made, dtype), self._parts, seeds))
        self._trainers = [Trainer(embedding, self._rows, clip) for _, embedding in self._each()]
        specs = [embedding.spec for _, embedding in self._each()]
        self._plan = Plan(self.name, self._parts, specs, POOLING[self.pooling_mode])
        self.to(device_of(self.tables[0].compute, device))

    def _made(self, dtype: torch.dtype, part: Part, seed: int) -> MultiTableEmbedding:
        embedding = MultiTableEmbedding(
            part.name,
            self.tables[part.tables[0]].dim,
            torch.float32,
            torch.int64,
            self._options(part, make_constant_initializer(0.0)),
            self._stores[part.name],
            seed=seed,
            output_dtype=dtype,
        )
        embedding.requires_grad_(False)  # no EagerOptimizer and no graph trains it
        embedding.use_optimizer(self._rows)
        return embedding

    def _options(self, part: Part, initializer: Mapping[str, Any]) -> list[AnyTableOptions]:
        tables = [self.tables[number] for number in part.tables]
        return [make_table_options(initializer, table.name) for table in tables]

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
        call = self._call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank, unsupported)
        anchor = self.anchor if self.training else self.anchor.detach()
        asked = self._plan.asked(call)
        found = [
            trainer.look_up(anchor, one.lookup, one.weights) for trainer, one in zip(self._trainers, asked, strict=True)
        ]
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
        call = self._call(indices, offsets, None, batch_size_per_feature_per_rank, unsupported)
        if self.training:
            for trainer, one in zip(self._trainers, self._plan.asked(call), strict=True):
                trainer.embedding.announce([one.lookup])

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Let all rows be uniform over [min_val, max_val].

        Before the first use nothing is written: rows begin so, and rows that a store folder has stay. Later all rows
        are written, drawn from torch's generator; optimizer state stays. Raises OptionError.
        """
        uniform = make_uniform_initializer(min_val, max_val)
        for part, embedding in self._each():
            if embedding.is_open:
                for number, table in enumerate(part.tables):
                    fill_uniform(embedding, number, self.tables[table].rows, min_val, max_val)
            else:
                embedding.spec = replace(embedding.spec, tables=tuple(self._options(part, uniform)))

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table [rows, dim], copied: writing to them changes no table, and `embedding.put` does."""
        return self._by_table(lambda embedding, rows: [copied_weights(embedding, i, n) for i, n in enumerate(rows)])

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The optimizer's states of each table, copied: writing to them changes no table.

        [rows, dim] each, of EXACT_ROWWISE_ADAGRAD [rows]. EXACT_SGD has none, and gives an empty list.
        """
        if not self._rows.states:
            return []
        return self._by_table(
            lambda embedding, rows: copied_states(embedding, rows, self._rows.row_state(embedding.dim))
        )

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the coming updates. OptionError."""
        self.update_hyper_parameters({"lr": lr})

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Set numbers of the optimizer by name: lr, eps, beta1, beta2, weight_decay. OptionError, and none is set."""
        self._settings.change(self._optimizer.param_groups[0], params_dict)

    def set_optimizer_step(self, step: int) -> None:
        """Let the next update be that after `step` updates, in ADAM's bias correction. OptionError.

        A store keeps its own count of updates: set the step again after a restart.
        """
        self._rows.shift = checked_step(step) - max(embedding.opened().table.step for _, embedding in self._each())

    def embedding_of(self, table: int | str) -> MultiTableEmbedding:
        """The embedding that has a table, where the table goes by its name: for put, get, snapshots. InputError."""
        names = [one.name for one in self.tables]
        number = table_number(table, names)
        if number is None:
            raise InputError(f"table of {self.name!r}: got {table!r}; give one of {choices(names)}")
        return next(embedding for part, embedding in self._each() if number in part.tables)

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By the name of each embedding, its metrics: docs/metrics.md explains them."""
        return {part.name: embedding.metrics() for part, embedding in self._each()}

    def stores(self) -> str:
        """Print, and return, which memory each embedding's store has."""
        text = stores_text({part.name: embedding.store_options for part, embedding in self._each()})
        print(text)
        return text

    def close(self) -> None:
        """Bring all rows down and close the stores. May be called again; a use raises ClosedError."""
        for _, embedding in self._each():
            embedding.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def extra_repr(self) -> str:
        optimizer = self._settings.optimizer.name
        return f"{self.name!r}, tables={len(self.tables)}, features={len(self.features)}, optimizer={optimizer}"

    def _call(self, indices: Any, offsets: Any, weights: Any, sizes: Any, unsupported: Mapping[str, Any]) -> Call:
        if detect_fake_mode() is not None:
            raise GraphError(
                f"TableBatchedEmbeddingBags {self.name!r} updates its rows in backward, and a graph after it; use an "
                "EmbeddingBagCollection in a graph"
            )
        refuse_call(unsupported, ("indices", "offsets", "per_sample_weights", "batch_size_per_feature_per_rank"))
        if weights is not None and self.pooling_mode is PoolingMode.NONE:
            raise InputError("per_sample_weights: PoolingMode.NONE sums no rows that they could weigh; leave them out")
        return checked_call(self.name, len(self.features), indices, offsets, weights, sizes, self.anchor.device)

    def _each(self) -> Iterator[tuple[Part, MultiTableEmbedding]]:
        return zip(self._parts, cast(Iterable[MultiTableEmbedding], self.embeddings), strict=True)

    def _by_table(self, copy: Callable[[MultiTableEmbedding, list[int]], list[T]]) -> list[T]:
        """What `copy` gives for the tables of each embedding, in the order of embedding_specs."""
        found: dict[int, T] = {}
        for part, embedding in self._each():
            rows = [self.tables[number].rows for number in part.tables]
            found.update(zip(part.tables, copy(embedding, rows), strict=True))
        return [found[number] for number in range(len(self.tables))]


def _checked_clip(gradient_clipping: Any, max_gradient: Any) -> float | None:
    most = real(max_gradient)
    if not isinstance(gradient_clipping, bool):
        raise OptionError(f"gradient_clipping={gradient_clipping!r}: give True or False")
    if most is None or not most > 0:
        raise OptionError(f"max_gradient={max_gradient!r}: give a number > 0")
    if not gradient_clipping and most != 1.0:
        raise OptionError(f"max_gradient={max_gradient!r}: gradients are clamped with gradient_clipping=True; give it")
    return most if gradient_clipping else None
