"""Adds float32 numbers, or squares of gradients. The result's bits do not depend on threads, ranks or processor.

`compute_partial_sum` adds exactly, in integer multiples of the smallest float32. `add_partial_sums` rounds only once.
So ranks may add in any order. `sum_squares` adds in a fixed order instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_LIMBS, _LIMB_BITS = 10, 32  # a partial sum: ten 32-bit limbs, lowest first, enough for 2^40 numbers
_UNIT = 1 << 149  # 1.0 as a multiple of the smallest float32
_CHUNK_NUMBERS = 1 << 28  # a float64 sum of up to this many 24-bit mantissas is exact
_NUM_LANES = 1 << 16  # parallel sums
PartialSum = NDArray[np.int64]  # [12]: the sum's 10 limbs, then counts of infinities and NaNs


def compute_partial_sum(numbers: NDArray[np.float32]) -> PartialSum:
    """Sum non-negative numbers [n] exactly."""
    bits = numbers.view(np.uint32) & 0x7FFFFFFF  # a NaN's sign bit may be set
    exponents = (bits >> 23).astype(np.int64)
    mantissas = (bits & 0x7FFFFF) + ((exponents > 0).astype(np.uint32) << 23)
    exact = 0
    for begin in range(0, len(numbers), _CHUNK_NUMBERS):
        part = slice(begin, begin + _CHUNK_NUMBERS)
        by_exponent = np.bincount(exponents[part], mantissas[part], 256)[:255].tolist()
        exact += sum(int(count) << max(exponent - 1, 0) for exponent, count in enumerate(by_exponent))
    limbs = [exact >> _LIMB_BITS * limb & (1 << _LIMB_BITS) - 1 for limb in range(_NUM_LIMBS)]
    num_nan = int(np.isnan(numbers).sum())
    return np.array([*limbs, int((exponents == 255).sum()) - num_nan, num_nan], np.int64)


def add_partial_sums(partials: Sequence[PartialSum]) -> float:
    """Add all ranks' partial sums, rounding once."""
    *limbs, num_infinite, num_nan = (sum(column) for column in zip(*(part.tolist() for part in partials), strict=True))
    if num_infinite or num_nan:
        return float("nan" if num_nan else "inf")
    return sum(count << _LIMB_BITS * limb for limb, count in enumerate(limbs)) / _UNIT  # integer division rounds once


@torch.no_grad()
def sum_squares(tensors: Sequence[Tensor]) -> float:
    """Sum all elements' squares in float64 by elementwise ops, since `torch.norm` depends on threads and processor."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        by_device.setdefault(tensor.device, []).append(flat)
    return sum((_sum_squares_on_device(flats) for flats in by_device.values()), 0.0)


def _sum_squares_on_device(flats: list[Tensor]) -> float:
    """Sum the squares in 1-D tensors on one device. Waits for the device once."""
    small = [flat for flat in flats if len(flat) < _NUM_LANES]  # small tensors are joined, since launches are slow
    flats = [torch.cat(small), *(flat for flat in flats if len(flat) >= _NUM_LANES)] if small else flats
    lanes = flats[0].new_zeros(min(max(map(len, flats)), _NUM_LANES), dtype=torch.float64)
    memory = torch.empty_like(lanes)
    for flat in flats:
        for piece in flat.split(_NUM_LANES):
            squares = memory[: len(piece)].copy_(piece)
            lanes[: len(piece)] += squares.mul_(squares)
    while len(lanes) > 1:
        half = len(lanes) // 2
        rest, lanes = lanes[2 * half :], lanes[:half] + lanes[half : 2 * half]
        lanes[: len(rest)] += rest
    return float(lanes.sum())  # at most one element is left
