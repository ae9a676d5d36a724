"""Sums of float32 numbers, and of squares of gradients, bit-identical in any order and on every processor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LIMBS, _BITS = 10, 32  # of a partial sum, the least first: room for 2^40 numbers
_UNIT = 1 << 149  # 1 as a multiple of the smallest float32
_CHUNK = 1 << 28  # integers of 24 bits, whose sum is exact in float64
_LANES = 1 << 16  # sums that are computed in parallel


def partial(numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """The exact sum of numbers [n] >= 0 as [12] integers, which `total` adds to those of other ranks.

    The last two are the counts of infinite numbers and of NaNs.
    """
    bits = numbers.view(np.uint32) & 0x7FFFFFFF  # a NaN may have a sign
    exponents = (bits >> 23).astype(np.int64)
    mantissas = (bits & 0x7FFFFF) + ((exponents > 0).astype(np.uint32) << 23)
    exact = 0
    for begin in range(0, len(numbers), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        by_exponent = np.bincount(exponents[part], mantissas[part], 256)[:255].tolist()
        exact += sum(int(count) << max(exponent - 1, 0) for exponent, count in enumerate(by_exponent))
    limbs = [exact >> _BITS * limb & (1 << _BITS) - 1 for limb in range(_LIMBS)]
    nan = int(np.isnan(numbers).sum())
    return np.array([*limbs, int((exponents == 255).sum()) - nan, nan], np.int64)


def total(partials: Sequence[NDArray[np.int64]]) -> float:
    """The sum of the numbers of all partial sums, rounded once."""
    *limbs, infinite, nan = (sum(column) for column in zip(*(part.tolist() for part in partials), strict=True))
    if infinite or nan:
        return float("nan" if nan else "inf")
    return sum(count << _BITS * limb for limb, count in enumerate(limbs)) / _UNIT  # of integers, so rounded once


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements, in float64. Torch's norm depends on threads and processors.

    Each element is squared and added by elementwise ops, which have one result by IEEE.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        by_device.setdefault(tensor.device, []).append(flat)
    return sum((_of_device(flats) for flats in by_device.values()), 0.0)


def _of_device(flats: list[Tensor]) -> float:
    """The sum over tensors [n] of one device; waits for the device once."""
    small = [flat for flat in flats if len(flat) < _LANES]  # as one: each op costs more than its elements
    flats = [torch.cat(small), *(flat for flat in flats if len(flat) >= _LANES)] if small else flats
    lanes = flats[0].new_zeros(min(max(map(len, flats)), _LANES), dtype=torch.float64)
    memory = torch.empty_like(lanes)
    for flat in flats:
        for piece in flat.split(_LANES):
            wide = memory[: len(piece)].copy_(piece)
            lanes[: len(piece)] += wide.mul_(wide)
    while len(lanes) > 1:
        half = len(lanes) // 2
        rest, lanes = lanes[2 * half :], lanes[:half] + lanes[half : 2 * half]
        lanes[: len(rest)] += rest
    return float(lanes.sum())  # of one element or none
