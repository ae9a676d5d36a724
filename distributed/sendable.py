"""Check the tensors that ranks send to each other, and convert the tensors to bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..engine.errors import InputError

_SUMMABLE = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_SENDABLE = (
    *_SUMMABLE,
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)


def check_sendable(name: str, x: Any, needs_sum: bool = False) -> Tensor:
    """Return `x`, or raise InputError if `x` cannot be sent as bytes. needs_sum: True if ranks also sum `x`."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name}: got {type(x).__name__}; give a dense torch.Tensor")
    if x.is_quantized:
        raise InputError(f"{name}: got a quantized tensor of {x.dtype}; give {name}.dequantize()")
    if x.layout != torch.strided or x.is_nested or x.is_meta or is_traceable_wrapper_subclass(x):
        kind = "a nested tensor" if x.is_nested else "a meta tensor" if x.is_meta else f"{type(x).__name__}, {x.layout}"
        raise InputError(f"{name}: got {kind}; give a dense torch.Tensor")
    if needs_sum and x.dtype == torch.bool:
        raise InputError(
            f"{name}: got torch.bool, and a sum of bools does not count the True ones; give {name}.to(torch.int64)"
        )
    if x.dtype not in (allowed := _SUMMABLE if needs_sum else _SENDABLE):
        raise InputError(f"{name}: got {x.dtype}; give one of {', '.join(map(str, allowed))}")
    return x


def to_bytes(x: Tensor) -> Tensor:
    """Return a checked tensor's values as a flat uint8 tensor on the CPU, in row-major order."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
