"""TorchRec's configs: a table, and the features that look it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import nn

from ...engine.checks import int_option, is_folder_name
from ...engine.errors import OptionError
from ...engine.options.initializers import (
    AnyTableOptions,
    make_constant_initializer,
    make_normal_initializer,
    make_table_options,
    make_uniform_initializer,
)
from ...engine.options.table_names import is_table_name


@unique
class PoolingType(Enum):
    """How the rows of a bag are pooled."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"  # of configs of an EmbeddingCollection, which pools nothing


# by the function of torch.nn.init: the initializer, and its arguments by default
_INIT_FNS: dict[Any, tuple[Callable[..., Mapping[str, Any]], dict[str, float]]] = {
    nn.init.uniform_: (make_uniform_initializer, {"low": 0.0, "high": 1.0}),
    nn.init.normal_: (make_normal_initializer, {"mean": 0.0, "std": 1.0}),
    nn.init.constant_: (make_constant_initializer, {}),
    nn.init.zeros_: (make_constant_initializer, {"value": 0.0}),
    nn.init.ones_: (make_constant_initializer, {"value": 1.0}),
}
_NAMES = {"a": "low", "b": "high", "val": "value"}  # torch's names of these arguments

# by the value of TorchRec's DataType, and by torch's name
_DATA_TYPES = {
    name: dtype
    for value, dtype in (("FP32", torch.float32), ("BF16", torch.bfloat16), ("FP16", torch.float16))
    for name in (value, str(dtype))
}


def _unused(default: Any, reason: str) -> Any:
    """A field of TorchRec's configs that is refused unless it has its default. reason: why no other value is taken."""
    return field(default=default, kw_only=True, metadata={"reason": reason})


@dataclass
class EmbeddingConfig:
    """One table.

    num_embeddings: ids are 0 to num_embeddings - 1, and another raises InputError; None takes any id of 64 bits.
    embedding_dim: numbers of a row, 1 or more. name: of the table. data_type: of stored numbers, FP32, BF16 or FP16:
    as text, torch's dtype or TorchRec's DataType. feature_names: the features that look the table up; an empty list is
    one feature with the table's name. weight_init_min, weight_init_max: the range of new rows, uniform. The default is
    +-sqrt(1 / num_embeddings), or normal(0, 0.05) if num_embeddings is None. initializer: of new rows instead, from a
    `make_*_initializer`. init_fn: by TorchRec's way, `uniform_`, `normal_`, `constant_`, `zeros_` or `ones_` of
    torch.nn.init, or a partial of one; each new row is drawn from its id. group: tables of one dim, data_type and group
    share an embedding, and so an optimizer. bad_ids: "raise", or "drop" to take ids out of bounds as padding and count
    them.

    The other fields of TorchRec's configs are accepted with their defaults, and raise OptionError otherwise.
    """

    num_embeddings: int | None
    embedding_dim: int
    name: str = ""
    data_type: Any = "FP32"
    feature_names: Sequence[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    initializer: Mapping[str, Any] | None = field(default=None, kw_only=True)
    group: str = field(default="", kw_only=True)
    bad_ids: str = field(default="raise", kw_only=True)
    init_fn: Any = field(default=None, kw_only=True)
    num_embeddings_post_pruning: int | None = _unused(None, "only rows that were trained are stored")
    need_pos: bool = _unused(False, "PositionWeightedModuleCollection weights any feature by position")
    input_dim: int | None = _unused(None, "ids are hashed; num_embeddings=None takes any id of 64 bits")
    total_num_buckets: int | None = _unused(None, "the store has its own hash partitions")
    use_virtual_table: bool = _unused(False, "every table is one; num_embeddings=None takes any id of 64 bits")
    virtual_table_eviction_policy: Any = _unused(None, "store_options have eviction, admission and ttl_steps")  # noqa: RUF009
    enable_embedding_update: bool = _unused(False, "put and load_snapshot write rows of any table")
    stash_weights: bool = _unused(False, "the store keeps the rows that memory has no room for")
    pruning_indices_remapping: Any = _unused(None, "only rows that were trained are stored, so none is pruned")  # noqa: RUF009

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not is_table_name(self.name):
            raise OptionError(f"{where}: name={self.name!r}; give printable characters that are not all digits")
        if self.num_embeddings is not None:
            int_option(
                f"{where}: num_embeddings", self.num_embeddings, "the number of ids, or None for any id", 1, 2**64
            )
        int_option(f"{where}: embedding_dim", self.embedding_dim, "a whole number from 1 on", 1)
        self._check_unused(where)
        if isinstance(self.feature_names, str) or not all(isinstance(name, str) for name in self.feature_names):
            raise OptionError(f"{where}: feature_names={self.feature_names!r}; give a list of names")
        self.feature_names = list(self.feature_names) or [self.name]
        if len(set(self.feature_names)) < len(self.feature_names):
            raise OptionError(f"{where}: feature_names={self.feature_names} has one twice; name each once")
        if self.group and (not is_folder_name(self.group) or "." in self.group):
            raise OptionError(f"{where}: group={self.group!r}; give printable characters without slashes and dots")
        self.table_options()  # raises for a wrong initializer, range or bad_ids

    def num_features(self) -> int:
        """How many features look the table up."""
        return len(self.feature_names)

    def get_weight_init_min(self) -> float:
        """The lower end of the range of new rows, of the default one if they are not uniform."""
        return float(self._initializer().get("low", -sqrt(1 / (self.num_embeddings or 1))))

    def get_weight_init_max(self) -> float:
        """The upper end of the range of new rows, of the default one if they are not uniform."""
        return float(self._initializer().get("high", sqrt(1 / (self.num_embeddings or 1))))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers of a stored row."""
        return _DATA_TYPES[str(getattr(self.data_type, "value", self.data_type))]

    def table_options(self) -> AnyTableOptions:
        """The options of the table in an embedding."""
        ids = None if self.num_embeddings is None else int(self.num_embeddings)
        return make_table_options(self._initializer(), name=self.name, ids=ids, bad_ids=self.bad_ids)

    def _initializer(self) -> Mapping[str, Any]:
        low, high, where = self.weight_init_min, self.weight_init_max, f"table {self.name!r}"
        ends = [end for end in (low, high) if end is not None]
        if (self.initializer is not None) + (self.init_fn is not None) + bool(ends) > 1:
            raise OptionError(f"{where}: give initializer, or init_fn, or weight_init_min and weight_init_max")
        if self.initializer is not None:
            return self.initializer
        if self.init_fn is not None:
            return _initializer_of(self.init_fn, where)
        if self.num_embeddings is None and not ends:
            return make_normal_initializer(0.0, 0.05)
        if self.num_embeddings is None and len(ends) < 2:
            raise OptionError(f"{where}: give both of weight_init_min and weight_init_max")
        bound = sqrt(1 / (self.num_embeddings or 1))
        return make_uniform_initializer(-bound if low is None else low, bound if high is None else high)

    def _check_unused(self, where: str) -> None:
        if str(getattr(self.data_type, "value", self.data_type)) not in _DATA_TYPES:
            raise OptionError(
                f"{where}: data_type={self.data_type!r}; rows are stored in FP32, BF16 or FP16: give one of them, or "
                "torch.float32, torch.bfloat16 or torch.float16"
            )
        for one in fields(self):
            if "reason" in one.metadata and (given := getattr(self, one.name)) != one.default:
                reason = one.metadata["reason"]
                raise OptionError(f"{where}: {one.name}={given!r} is not supported: {reason}; leave it out")


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """One table whose rows are pooled, by sum or mean of a bag. The other fields are those of an EmbeddingConfig."""

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = str(getattr(self.pooling, "value", self.pooling))
        if kind not in ("SUM", "MEAN"):
            raise OptionError(
                f"table {self.name!r}: pooling={self.pooling!r}; give PoolingType.SUM or PoolingType.MEAN, or use an "
                "EmbeddingCollection for rows that are not pooled"
            )
        self.pooling = PoolingType(kind)


def _initializer_of(init_fn: Any, where: str) -> Mapping[str, Any]:
    """The initializer that a function of torch.nn.init means. OptionError for any other function."""
    function, given = (init_fn.func, init_fn.keywords) if isinstance(init_fn, partial) else (init_fn, {})
    if function not in _INIT_FNS or (isinstance(init_fn, partial) and init_fn.args) or given.get("generator"):
        raise OptionError(
            f"{where}: init_fn={init_fn!r}; each new row is initialized alone, from its id: give uniform_, normal_, "
            "constant_, zeros_ or ones_ of torch.nn.init, as functools.partial(normal_, std=0.01), or "
            "initializer=make_normal_initializer(...)"
        )
    make, defaults = _INIT_FNS[function]
    try:
        return make(**defaults | {_NAMES.get(name, name): value for name, value in given.items()})
    except TypeError as error:
        raise OptionError(f"{where}: init_fn={init_fn!r}: {error}") from None


def config_of(given: Any, kind: type[EmbeddingConfig]) -> EmbeddingConfig:
    """A config of `kind`, from a user's config or TorchRec's. OptionError."""
    pools = issubclass(kind, EmbeddingBagConfig)
    if (
        not hasattr(given, "num_embeddings")
        or not hasattr(given, "embedding_dim")
        or hasattr(given, "pooling") != pools
    ):
        raise OptionError(
            f"tables: got a {type(given).__name__}; give a list of {kind.__name__}, "
            + ("for rows that are not pooled use an EmbeddingCollection" if pools else "which pools nothing")
        )
    if isinstance(given, kind):
        return given
    if not given.feature_names:
        given.feature_names = [given.name]  # as TorchRec's collections do
    ours = {f.name: getattr(given, f.name) for f in fields(kind) if hasattr(given, f.name)}
    if not isinstance(given, EmbeddingConfig):
        # if the user gives no init_fn, TorchRec makes one from weight_init_min and weight_init_max
        init = ours.get("init_fn")
        if isinstance(init, partial) and init.func is nn.init.uniform_ and set(init.keywords) == {"a", "b"}:
            ours |= {"init_fn": None, "weight_init_min": init.keywords["a"], "weight_init_max": init.keywords["b"]}
    return kind(**ours)
