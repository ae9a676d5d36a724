"""FBGEMM's enums, with its names and values. Members of FBGEMM's own enums are taken by value."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, TypeVar

import torch

from ...engine.errors import OptionError
from ...engine.options.lookup import OUTPUT_DTYPES


class EmbeddingLocation(IntEnum):
    """Where a table lives; `TableBatchedEmbeddingBags` has the store of each location."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(IntEnum):
    """The kind of device that looks tables up."""

    CPU = 0
    CUDA = 1
    MTIA = 2


class PoolingMode(IntEnum):
    """How the rows of a bag are pooled."""

    SUM = 0
    MEAN = 1
    NONE = 2


class BoundsCheckMode(IntEnum):
    """What a lookup does with an index out of its table's bounds. V2_* are the same as those without V2."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


class WeightDecayMode(IntEnum):
    """How weight decay is applied."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


class CacheAlgorithm(Enum):
    """Which row a cache evicts."""

    LRU = 0
    LFU = 1


class OptimType(Enum):
    """How rows are updated."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"


E = TypeVar("E", bound=Enum)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # by the value of a SparseType
_RENAMED = {"EmbOptimType": "OptimType"}  # FBGEMM's class: ours


def parse_enum(kind: type[E], given: Any, argument: str) -> E:
    """A member of `kind`: given as one, as FBGEMM's of the same class, or as its value. OptionError."""
    if isinstance(given, kind):
        return given
    theirs = type(given).__name__
    value = given.value if isinstance(given, Enum) and _RENAMED.get(theirs, theirs) == kind.__name__ else given
    try:
        if isinstance(value, (Enum, bool)):
            raise ValueError
        return kind(value)
    except ValueError:
        names = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise OptionError(f"{argument}={given!r}: give one of {names}") from None


def parse_dtype(given: Any, argument: str = "output_dtype") -> torch.dtype:
    """A dtype: given as torch's, or as a member or value of FBGEMM's SparseType. OptionError."""
    value = given.value if isinstance(given, Enum) else given
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in OUTPUT_DTYPES:
        raise OptionError(
            f"{argument}={given!r}: give torch.float32, torch.float16 or torch.bfloat16, or FBGEMM's SparseType of "
            "one of them"
        )
    return dtype
