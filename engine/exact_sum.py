"""Sums of float32 numbers that depend neither on their order nor on how they are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LIMBS, _BITS = 10, 32  # of a partial sum, the least first: room for 2^40 numbers
_UNIT = 1 << 149  # in how many parts 1 is counted: float32 has none that is smaller
_CHUNK = 1 << 28  # so many integers of 24 bits have a sum that is exact in float64


def partial(numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """The exact sum of numbers [n] >= 0 as [12] integers, which `total` adds to those of other ranks.

    The last two are how many numbers are infinite, and how many are no numbers.
    """
    bits = numbers.view(np.uint32) & 0x7FFFFFFF  # a number that is none may have a sign
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
    """The sum of what `partial` was given, of all partial sums together, rounded once."""
    *limbs, infinite, nan = (sum(place) for place in zip(*(part.tolist() for part in partials), strict=True))
    if infinite or nan:
        return float("nan" if nan else "inf")
    return sum(count << _BITS * limb for limb, count in enumerate(limbs)) / _UNIT  # of integers, so rounded once
