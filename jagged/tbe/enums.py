"""FBGEMM's enums, with its names and values. Members of FBGEMM's own enums are taken by value."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, TypeVar

import torch

from ...engine.errors import OptionError
from ...engine.options.lookup import OUTPUT_DTYPES

EmbeddingLocation = IntEnum("EmbeddingLocation", "DEVICE MANAGED MANAGED_CACHING HOST MTIA", start=0)
ComputeDevice = IntEnum("ComputeDevice", "CPU CUDA MTIA", start=0)  # that looks tables up
PoolingMode = IntEnum("PoolingMode", "SUM MEAN NONE", start=0)
WeightDecayMode = IntEnum("WeightDecayMode", "NONE L2 DECOUPLE COUNTER COWCLIP DECOUPLE_GLOBAL", start=0)
CacheAlgorithm = Enum("CacheAlgorithm", "LRU LFU", start=0)  # which row a cache evicts
# what a lookup does with an index out of its table's bounds; V2_* are the same as those without V2
BoundsCheckMode = IntEnum("BoundsCheckMode", "FATAL WARNING IGNORE NONE V2_IGNORE V2_WARNING V2_FATAL", start=0)


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
