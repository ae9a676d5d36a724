"""FBGEMM's enums, with its names and values. Arguments accept a member of either tierbed's or FBGEMM's enum."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, TypeVar

import torch

from ...engine.errors import OptionError
from ...engine.options.lookup import OUTPUT_DTYPES

EmbeddingLocation = IntEnum("EmbeddingLocation", "DEVICE MANAGED MANAGED_CACHING HOST MTIA", start=0)
ComputeDevice = IntEnum("ComputeDevice", "CPU CUDA MTIA", start=0)
PoolingMode = IntEnum("PoolingMode", "SUM MEAN NONE", start=0)
WeightDecayMode = IntEnum("WeightDecayMode", "NONE L2 DECOUPLE COUNTER COWCLIP DECOUPLE_GLOBAL", start=0)
CacheAlgorithm = Enum("CacheAlgorithm", "LRU LFU", start=0)  # which row a cache evicts
# how a lookup handles an index outside its table; V2_X is the same as X
BoundsCheckMode = IntEnum("BoundsCheckMode", "FATAL WARNING IGNORE NONE V2_IGNORE V2_WARNING V2_FATAL", start=0)


class OptimType(Enum):
    """FBGEMM's optimizers. docs/torchrec.md lists the supported ones."""

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
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # keys are values of SparseType
_CLASS_NAMES = {"EmbOptimType": "OptimType"}  # FBGEMM's class: ours


def parse_enum(enum_class: type[E], member: Any, argument: str) -> E:
    """Return a member of `enum_class`. `member` may also be its value, or FBGEMM's member. Raises OptionError."""
    if isinstance(member, enum_class):
        return member
    class_name = type(member).__name__
    is_matching_enum = isinstance(member, Enum) and _CLASS_NAMES.get(class_name, class_name) == enum_class.__name__
    value = member.value if is_matching_enum else member
    try:
        if isinstance(value, (Enum, bool)):
            raise ValueError
        return enum_class(value)
    except ValueError:
        names = ", ".join(f"{enum_class.__name__}.{member.name}" for member in enum_class)
        raise OptionError(f"{argument}={member!r}: give one of {names}") from None


def parse_dtype(value: Any, argument: str = "output_dtype") -> torch.dtype:
    """Return a torch dtype. `value` is a torch dtype, a SparseType of FBGEMM, or its value. Raises OptionError."""
    raw_value = value.value if isinstance(value, Enum) else value
    dtype = _DTYPES.get(raw_value) if isinstance(raw_value, str) else raw_value
    if not isinstance(dtype, torch.dtype) or dtype not in OUTPUT_DTYPES:
        expected = "torch.float32, torch.float16 or torch.bfloat16, or FBGEMM's SparseType of one of them"
        raise OptionError(f"{argument}={value!r}: give {expected}")
    return dtype
