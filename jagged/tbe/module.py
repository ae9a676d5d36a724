"""FBGEMM's table-batched embedding on tiered tables: the embeddings that hold them, and their rows as whole tensors.

Such a tensor is a copy that refuses to be written: a write into FBGEMM's is one into the table, and here it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from ...distributed.world import World
from ...embedding.embedding import MultiTableEmbedding
from ...embedding.model_snapshots import ModelSnapshots
from ...embedding.training_group import train_together
from ...engine.checks import as_number
from ...engine.errors import GraphError, InputError, OptionError, StoreError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.initializers import (
    AnyTableOptions,
    make_constant_initializer,
    make_table_options,
    make_uniform_initializer,
)
from ...engine.options.store_options import StoreOptions
from ...engine.options.table_names import choices, table_number
from ...engine.options.table_spec import DTYPES, check_reach, check_seed, check_state_dtype
from ...engine.table.table_report import settled
from ..collections.store_split import stores_text
from .call_arguments import CONSTRUCTOR, TBECall, checked_call, refuse, refuse_call
from .dispatch import CallSplitter, Trainer
from .enums import BoundsCheckMode, CacheAlgorithm, OptimType, PoolingMode, WeightDecayMode, taken, taken_dtype
from .settings import DEFAULTS, Settings, ShiftedOptimizer, checked_state_dtype, checked_step
from .specs import (
    LOAD_FACTOR,
    Bounds,
    Caching,
    EmbeddingGroup,
    EmbeddingSpec,
    checked_features,
    checked_tables,
    device_of,
    parts_of,
    stores_for,
)

CHUNK = 1 << 16  # rows
WRITES = (  # beside those whose name ends in _
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
)
T = TypeVar("T")
POOLING = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean", PoolingMode.NONE: None}


def copied_weights(embedding: MultiTableEmbedding, number: int, rows: int) -> Tensor:
    """The rows [rows, dim] of one table, those that were never written as they begin."""
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
    """For each table each state of its rows, [rows, dim], or [rows] where a row has one number.

    rows: of each table.
    """
    state = optimizer.row_state(embedding.dim)
    of_rows = [width == 1 for width in optimizer.row_state(2).widths]  # a dim of 1 does not tell
    with torch.inference_mode(False):  # a read-only copy tells a write by the tensor's version
        states = [
            [
                torch.full((count, width), value, dtype=torch.float32)
                for width, value in zip(state.widths, state.initial, strict=True)
            ]
            for count in rows
        ]
    if state.names:
        table = embedding.opened().own_table
        for _, chunk in settled(table):
            values = [torch.from_numpy(table.form.numbers(chunk, name).copy()) for name in state.names]
            for number, count in enumerate(rows):
                chosen = (chunk["table"] == number) & (chunk["key"] < count)
                keys, here = torch.from_numpy(chunk["key"][chosen].astype("i8")), torch.from_numpy(chosen)
                for copied, value in zip(states[number], values, strict=True):
                    copied[keys] = value[here]
    device = embedding.device
    with torch.inference_mode(False):
        return [
            [
                (copied.flatten() if of_row else copied).to(device)
                for copied, of_row in zip(of_table, of_rows, strict=True)
            ]
            for of_table in states
        ]


class ReadOnlyCopy(Tensor):
    """A tensor whose in-place operations raise InputError, and those of its views. Tensors computed of it are plain.

    So are views that code of torch.compile makes within: a write into such a view changes the copy without an error.
    """

    remedy: str

    @classmethod
    def of(cls, tensor: Tensor, remedy: str) -> ReadOnlyCopy:
        """The same memory. remedy: the message of the error."""
        with torch._C.DisableTorchFunctionSubclass():
            made = tensor.as_subclass(cls)
        made.remedy = remedy
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this method, and knows neither versions nor memory
            if func.__name__ in WRITES or (func.__name__[-1] == "_" and func.__name__[-2] != "_"):
                raise InputError("not in compiled code: Dynamo runs the write as it is, and there it is refused")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            own = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
            if own and func is Tensor.__format__:
                return Tensor.__format__(own[0].as_subclass(Tensor), *args[1:])  # of a subclass it refuses formats
            versions = [one._version for one in own]
            found = func(*args, **(kwargs or {}))
            for one, version in zip(own, versions, strict=True):
                if one._version != version:
                    raise InputError(one.remedy)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        if type(found) in (list, tuple):
            return type(found)(_same_memory(one, own) for one in found)
        return _same_memory(found, own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def _same_memory(found: Any, own: Sequence[ReadOnlyCopy]) -> Any:
    """What an operation returned: read-only as well, if it is a view of one of these."""
    if type(found) is not Tensor or found.layout != torch.strided:
        return found
    with torch._C.DisableTorchFunctionSubclass():
        memory = found.untyped_storage()._cdata
        copy = next((one for one in own if one.untyped_storage()._cdata == memory), None)
    return found if copy is None else ReadOnlyCopy.of(found, copy.remedy)


class TablesInEmbeddings(ModelSnapshots, nn.Module):
    """Tables, and the embeddings that hold them.

    parts, stores: what each embedding has, and by its name where it lives. rows: the optimizer of all of them. dtype:
    of outputs. world: the ranks that share the rows.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[EmbeddingSpec],
        parts: Sequence[EmbeddingGroup],
        stores: Mapping[str, StoreOptions],
        bounds: Bounds,
        rows: ShiftedOptimizer,
        dtype: torch.dtype,
        weights_dtype: torch.dtype,
        state_dtype: torch.dtype,
        seed: int,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.tables = tables
        self._parts, self._bounds, self._rows = parts, bounds, rows
        self.embeddings = nn.ModuleDict()
        for part in parts:
            embedding = MultiTableEmbedding(
                part.name,
                tables[part.tables[0]].dim,
                weights_dtype,
                torch.int64,
                self._options(part, make_constant_initializer(0.0)),
                stores[part.name],
                # rows of one seed, table and key begin alike in all embeddings; where they live does not matter
                seed=(seed + crc32(tables[part.tables[0]].name.encode())) % 2**63,
                output_dtype=dtype,
                world=world,
                state_dtype=state_dtype,
            )
            embedding.shadow.requires_grad_(False)  # no EagerOptimizer and no graph trains it
            embedding.use_optimizer(rows)
            self.embeddings[part.name] = embedding
        train_together(self.embeddings.values())

    def _options(self, part: EmbeddingGroup, initializer: Mapping[str, Any]) -> list[AnyTableOptions]:
        tables = [self.tables[number] for number in part.tables]
        return [make_table_options(initializer, table.name, **self._bounds.options(table.rows)) for table in tables]

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Let all rows be uniform over [min_val, max_val].

        Before the first use nothing is written: rows begin so, and rows that a store folder has stay. Later all rows
        are written, drawn from torch's generator; optimizer state stays. Raises OptionError, also for values beyond the
        largest number of `weights_precision`.
        """
        uniform = make_uniform_initializer(min_val, max_val)
        for part, embedding in self.each():
            check_reach(self._options(part, uniform), embedding.spec.dtype)
        for part, embedding in self.each():
            if embedding.is_open:
                for number, table in enumerate(part.tables):
                    fill_uniform(embedding, number, self.tables[table].rows, min_val, max_val)
            else:
                embedding.spec = replace(embedding.spec, tables=tuple(self._options(part, uniform)))

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table [rows, dim], copied: an in-place write into them raises InputError.

        `embedding_of(table).put(keys, rows, table)` writes, and `clone()` gives a tensor of your own.
        """
        copies = self._by_table(lambda embedding, rows: [copied_weights(embedding, i, n) for i, n in enumerate(rows)])
        return [
            ReadOnlyCopy.of(
                weights,
                f"split_embedding_weights of {self.name!r} copies rows, so writing into those of table {table.name!r} "
                f"changes none that is stored; call embedding_of({table.name!r}).put(torch.arange({table.rows}), rows, "
                f"{table.name!r}), or clone() them for a tensor of your own",
            )
            for weights, table in zip(copies, self.tables, strict=True)
        ]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The optimizer's states of each table, copied: an in-place write into them raises InputError.

        [rows, dim] each, of EXACT_ROWWISE_ADAGRAD [rows]. EXACT_SGD has none, and gives an empty list. Raises
        StoreError where ranks share the rows.
        """
        if not self._rows.states:
            return []
        for _, embedding in self.each():
            if embedding.world is not None:
                raise StoreError(
                    f"split_optimizer_states of {self.name!r}: ranks share the rows, and no call gathers their states; "
                    "save a snapshot, whose files have them"
                )
        copies = self._by_table(lambda embedding, rows: copied_states(embedding, rows, self._rows))
        return [
            [
                ReadOnlyCopy.of(
                    state,
                    f"split_optimizer_states of {self.name!r} copies them, so writing into that of table "
                    f"{table.name!r} changes no row; load a snapshot or state_dict() that has the state, or clone() it "
                    "for a tensor of your own",
                )
                for state in states
            ]
            for states, table in zip(copies, self.tables, strict=True)
        ]

    def embedding_of(self, table: int | str) -> MultiTableEmbedding:
        """The embedding that has a table, where the table goes by its name: for put, get, snapshots. InputError."""
        names = [one.name for one in self.tables]
        number = table_number(table, names)
        if number is None:
            raise InputError(f"table of {self.name!r}: got {table!r}; give one of {choices(names)}")
        return next(embedding for part, embedding in self.each() if number in part.tables)

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By the name of each embedding, its metrics: docs/metrics.md explains them."""
        return {part.name: embedding.metrics() for part, embedding in self.each()}

    def stores(self) -> None:
        """Print how the memory of stores is divided between the embeddings."""
        print(stores_text({part.name: embedding.store_options for part, embedding in self.each()}))

    def close(self) -> None:
        """Bring all rows down and close the stores. May be called again; a use raises ClosedError."""
        with ExitStack() as stack:  # an error in one leaves none open
            for _, embedding in self.each():
                stack.callback(embedding.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def each(self) -> Iterator[tuple[EmbeddingGroup, MultiTableEmbedding]]:
        """The embeddings, with what each has."""
        return zip(self._parts, cast(Iterable[MultiTableEmbedding], self.embeddings.values()), strict=True)

    def _by_table(self, copy: Callable[[MultiTableEmbedding, list[int]], list[T]]) -> list[T]:
        """What `copy` gives for the tables of each embedding, in the order of embedding_specs."""
        found: dict[int, T] = {}
        for part, embedding in self.each():
            rows = [self.tables[number].rows for number in part.tables]
            found.update(zip(part.tables, copy(embedding, rows), strict=True))
        return [found[number] for number in range(len(self.tables))]


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
        world: World | None = None,
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
        self._plan = CallSplitter(name, parts, [embedding.spec for _, embedding in self.each()], POOLING[mode])
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
        return embedding.raise_on_all_ranks()

    def _call(self, indices: Any, offsets: Any, weights: Any, sizes: Any, unsupported: Mapping[str, Any]) -> TBECall:
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
    most = as_number(max_gradient)
    if not isinstance(gradient_clipping, bool):
        raise OptionError(f"gradient_clipping={gradient_clipping!r}: give True or False")
    if most is None or not most > 0:
        raise OptionError(f"max_gradient={max_gradient!r}: give a number > 0")
    if not gradient_clipping and most != 1.0:
        raise OptionError(f"max_gradient={max_gradient!r}: gradients are clamped with gradient_clipping=True; give it")
    return most if gradient_clipping else None
