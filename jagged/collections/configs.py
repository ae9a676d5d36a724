"""TorchRec's table configs: each describes a table and the features that look it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import nn

from ...engine.checks import check_int, is_folder_name
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
    """How a bag's rows are pooled."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"  # rows are not pooled, as in an EmbeddingCollection


# {function of torch.nn.init: (function that makes tierbed's initializer, default arguments)}
_INIT_FUNCTIONS: dict[Any, tuple[Callable[..., Mapping[str, Any]], dict[str, float]]] = {
    nn.init.uniform_: (make_uniform_initializer, {"low": 0.0, "high": 1.0}),
    nn.init.normal_: (make_normal_initializer, {"mean": 0.0, "std": 1.0}),
    nn.init.constant_: (make_constant_initializer, {}),
    nn.init.zeros_: (make_constant_initializer, {"value": 0.0}),
    nn.init.ones_: (make_constant_initializer, {"value": 1.0}),
}
_ARGUMENT_NAMES = {"a": "low", "b": "high", "val": "value"}  # {torch's argument name: tierbed's}

# {name: dtype}. A name is a value of TorchRec's DataType, such as "FP32", or torch's name, such as "torch.float32".
_DATA_TYPES = {
    name: dtype
    for value, dtype in (("FP32", torch.float32), ("BF16", torch.bfloat16), ("FP16", torch.float16))
    for name in (value, str(dtype))
}


def _refused_field(default: Any, reason: str) -> Any:
    """Declare a TorchRec field that accepts only its default value. For other values, the error states `reason`."""
    return field(default=default, kw_only=True, metadata={"reason": reason})


@dataclass
class EmbeddingConfig:
    """Config for one table.

    TorchRec's other fields must have their default values; any other value raises OptionError.

    Args:
        num_embeddings: Valid ids are 0 to num_embeddings - 1. None accepts any 64-bit id.
        embedding_dim: Elements per row, at least 1.
        name: Table name.
        data_type: Storage dtype: FP32, BF16 or FP16, as text, torch's dtype or TorchRec's DataType.
        feature_names: Features that look the table up. By default, one feature with the same name as the table.
        weight_init_min, weight_init_max: New rows are drawn uniformly from this range. Default: -x to x, where x is
            sqrt(1 / num_embeddings). If num_embeddings=None, the default is a normal distribution (mean 0, std 0.05).
        initializer: Initializer for new rows, from a `make_*_initializer`. Replaces the range.
        init_fn: TorchRec's form of the initializer: `uniform_`, `normal_`, `constant_`, `zeros_` or `ones_` of
            torch.nn.init, or a functools.partial of one. The id of a row determines its initial values.
        group: Tables with equal dim, data_type and group share an embedding, and so an optimizer.
        bad_ids: "raise" raises InputError for an invalid id. "drop" treats an invalid id as padding and counts it.
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
    num_embeddings_post_pruning: int | None = _refused_field(None, "only rows that were trained are stored")
    need_pos: bool = _refused_field(False, "use PositionWeightedModuleCollection to weight features by position")
    input_dim: int | None = _refused_field(None, "ids are hashed; give num_embeddings=None to accept any 64-bit id")
    total_num_buckets: int | None = _refused_field(None, "the store has its own hash partitions")
    use_virtual_table: bool = _refused_field(False, "give num_embeddings=None for a table that accepts any 64-bit id")
    virtual_table_eviction_policy: Any = _refused_field(None, "set eviction, admission or ttl_steps in store_options")  # noqa: RUF009
    enable_embedding_update: bool = _refused_field(False, "put and load_snapshot write rows of any table")
    stash_weights: bool = _refused_field(False, "the store keeps the rows that do not fit in memory")
    pruning_indices_remapping: Any = _refused_field(None, "only trained rows are stored, so there is nothing to prune")  # noqa: RUF009

    def __post_init__(self) -> None:
        subject = f"table {self.name!r}"
        if not is_table_name(self.name):
            raise OptionError(f"{subject}: name={self.name!r}; give printable characters that are not all digits")
        if (count := self.num_embeddings) is not None:
            check_int(f"{subject}: num_embeddings", count, "the number of ids, or None for any id", 1, 2**64)
        check_int(f"{subject}: embedding_dim", self.embedding_dim, "a whole number from 1 on", 1)
        self._check_unsupported(subject)
        if isinstance(self.feature_names, str) or not all(isinstance(name, str) for name in self.feature_names):
            raise OptionError(f"{subject}: feature_names={self.feature_names!r}; give a list of names")
        self.feature_names = list(self.feature_names) or [self.name]
        if len(set(self.feature_names)) < len(self.feature_names):
            raise OptionError(f"{subject}: feature_names={self.feature_names} repeats a name; name each once")
        if self.group and (not is_folder_name(self.group) or "." in self.group):
            raise OptionError(f"{subject}: group={self.group!r}; give printable characters without slashes and dots")
        self.table_options()  # raises OptionError if the initializer, range or bad_ids is wrong

    def num_features(self) -> int:
        """Return the number of features that look the table up."""
        return len(self.feature_names)

    def get_weight_init_min(self) -> float:
        """Return the smallest value of new rows, or the default if new rows are not drawn uniformly."""
        return float(self._make_initializer().get("low", -sqrt(1 / (self.num_embeddings or 1))))

    def get_weight_init_max(self) -> float:
        """Return the largest value of new rows, or the default if new rows are not drawn uniformly."""
        return float(self._make_initializer().get("high", sqrt(1 / (self.num_embeddings or 1))))

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype."""
        return _DATA_TYPES[str(getattr(self.data_type, "value", self.data_type))]

    def table_options(self) -> AnyTableOptions:
        """Return the table options for `MultiTableEmbedding`."""
        num_ids = None if self.num_embeddings is None else int(self.num_embeddings)
        return make_table_options(self._make_initializer(), name=self.name, ids=num_ids, bad_ids=self.bad_ids)

    def _make_initializer(self) -> Mapping[str, Any]:
        low, high, subject = self.weight_init_min, self.weight_init_max, f"table {self.name!r}"
        bounds = [bound for bound in (low, high) if bound is not None]
        if (self.initializer is not None) + (self.init_fn is not None) + bool(bounds) > 1:
            raise OptionError(f"{subject}: give initializer, or init_fn, or weight_init_min and weight_init_max")
        if self.initializer is not None:
            return self.initializer
        if self.init_fn is not None:
            return _convert_init_fn(self.init_fn, subject)
        if self.num_embeddings is None and not bounds:
            return make_normal_initializer(0.0, 0.05)
        if self.num_embeddings is None and len(bounds) < 2:
            raise OptionError(f"{subject}: give both weight_init_min and weight_init_max")
        default_bound = sqrt(1 / (self.num_embeddings or 1))
        return make_uniform_initializer(-default_bound if low is None else low, default_bound if high is None else high)

    def _check_unsupported(self, subject: str) -> None:
        if str(getattr(self.data_type, "value", self.data_type)) not in _DATA_TYPES:
            raise OptionError(
                f"{subject}: data_type={self.data_type!r}; rows are stored in FP32, BF16 or FP16: give one of them, or "
                "torch.float32, torch.bfloat16 or torch.float16"
            )
        for item in fields(self):
            value, reason = getattr(self, item.name), item.metadata.get("reason")
            if reason and value != item.default:
                raise OptionError(f"{subject}: {item.name}={value!r} is not supported: {reason}; leave it out")


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """Config for one table with pooled rows.

    Args:
        pooling: PoolingType.SUM or PoolingType.MEAN over each bag's rows.

    The other arguments are the same as for EmbeddingConfig.
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = str(getattr(self.pooling, "value", self.pooling))
        if pooling not in ("SUM", "MEAN"):
            raise OptionError(
                f"table {self.name!r}: pooling={self.pooling!r}; give PoolingType.SUM or PoolingType.MEAN, or use an "
                "EmbeddingCollection for rows that are not pooled"
            )
        self.pooling = PoolingType(pooling)


def _convert_init_fn(init_fn: Any, subject: str) -> Mapping[str, Any]:
    """Convert a function of torch.nn.init to an initializer. Raises OptionError for any other function."""
    function, arguments = (init_fn.func, init_fn.keywords) if isinstance(init_fn, partial) else (init_fn, {})
    if function not in _INIT_FUNCTIONS or (isinstance(init_fn, partial) and init_fn.args) or arguments.get("generator"):
        raise OptionError(
            f"{subject}: init_fn={init_fn!r} cannot compute a new row from the row's id alone. Give uniform_, "
            "normal_, constant_, zeros_ or ones_ of torch.nn.init, for example functools.partial(normal_, std=0.01). "
            "Or give an initializer, for example initializer=make_normal_initializer(...)"
        )
    factory, defaults = _INIT_FUNCTIONS[function]
    try:
        return factory(**defaults | {_ARGUMENT_NAMES.get(name, name): value for name, value in arguments.items()})
    except TypeError as error:
        raise OptionError(f"{subject}: init_fn={init_fn!r}: {error}") from None


def as_config(config: Any, config_class: type[EmbeddingConfig]) -> EmbeddingConfig:
    """Return a config of class `config_class`, made from TorchRec's config if needed. Raises OptionError."""
    is_pooled = issubclass(config_class, EmbeddingBagConfig)
    is_table = hasattr(config, "num_embeddings") and hasattr(config, "embedding_dim")
    if not is_table or hasattr(config, "pooling") != is_pooled:
        raise OptionError(
            f"tables: got a {type(config).__name__}; give a list of {config_class.__name__}"
            + ("; for rows that are not pooled, use an EmbeddingCollection" if is_pooled else ", which pools nothing")
        )
    if isinstance(config, config_class):
        return config
    if not config.feature_names:
        config.feature_names = [config.name]  # TorchRec's collections also change the caller's config
    values = {item.name: getattr(config, item.name) for item in fields(config_class) if hasattr(config, item.name)}
    if not isinstance(config, EmbeddingConfig):
        # if the user gives no init_fn, TorchRec makes one from weight_init_min and weight_init_max
        init = values.get("init_fn")
        if isinstance(init, partial) and init.func is nn.init.uniform_ and set(init.keywords) == {"a", "b"}:
            values |= {"init_fn": None, "weight_init_min": init.keywords["a"], "weight_init_max": init.keywords["b"]}
    return config_class(**values)
