"""The NumPy reference of how trained numbers are rounded: readable, slow, equal to the kernels to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..row_format import narrowed, widened

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_GOLDEN = np.uint32(0x9E3779B9)
_LAST_PLACE = {"float16": (11, -24), "bfloat16": (8, -133)}  # digits of a number, exponent of the smallest one


def noise(seed: int, hashes: U64, step: int | U32, columns: int) -> U32:
    """[n, columns] of 32 bits each, for rows by their hashes [n]. A column is a number's place in a float32 line.

    step: of all rows, or of each.
    """
    low, high = hashes.astype(np.uint32), (hashes >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        base = _mixed(np.uint32(seed & 0xFFFFFFFF) ^ low)
        base = _mixed(base + np.uint32(seed >> 32 & 0xFFFFFFFF))
        base = _mixed(_mixed(base ^ high) + np.asarray(step, np.uint32) * _GOLDEN)
        return _mixed(base[:, None] + np.arange(columns, dtype=np.uint32) * _GOLDEN)


def by_chance(values: F32, type: str, noise: U32) -> NDArray[Any]:
    """Numbers as they are stored in `type`, float16 or bfloat16: each one of its two neighbours. noise: of its shape.

    A number is cut off after its last place, once the highest bits of noise were added to what is below: as many as
    float32 has more places. A subnormal float16 is first rounded to nearest after as many.
    """
    digits, smallest = _LAST_PLACE[type]
    exact = np.abs(values.astype(np.float64))
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(exact)[1] - digits, smallest)
        units = np.ldexp(exact, -exponent)  # of the last place
        bits = 24 - digits
        if type == "float16":
            units = np.where(exact < 2.0**-14, np.ldexp(np.rint(np.ldexp(units, bits)), -bits), units)
        whole = np.floor(units)
        below = np.ldexp(units - whole, bits).astype(np.uint64)
        up = (below + (noise >> np.uint32(32 - bits))) >> np.uint64(bits)
        magnitude = np.ldexp(whole + up, exponent)
        largest = float(np.finfo(np.float16).max) if type == "float16" else float(np.float32(2.0**127) * (2 - 2.0**-7))
        rounded = np.copysign(np.minimum(magnitude, largest), values).astype(np.float32)
    return narrowed(np.where(np.isfinite(values), rounded, values), type)


def trained(values: F32, type: str, noise: U32) -> F32:
    """`by_chance` as float32."""
    return values if type == "float32" else widened(by_chance(values, type, noise), type)


def _mixed(x: Any) -> Any:
    x = np.asarray(x, np.uint32)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)
