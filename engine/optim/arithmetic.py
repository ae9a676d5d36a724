"""The arithmetic that the references share: fixed sequences of IEEE operations (kernels/gradients.h, math.h)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

LN2 = 0.6931471805599453


def row_sum(x: F32) -> F32:
    """x [n, dim] -> [n, 1]: column c goes to partial sum c % 32, ascending; the 32 are then added by halves."""
    partial = np.zeros((len(x), 32), np.float32)
    for begin in range(0, x.shape[1], 32):
        block = x[:, begin : begin + 32]
        partial[:, : block.shape[1]] += block
    for half in (16, 8, 4, 2, 1):
        partial = partial[:, :half] + partial[:, half : 2 * half]
    return partial


def log_unit(x: float) -> float:
    """The natural logarithm of x > 0: exponent times ln 2, plus 2 artanh((m - 1) / (m + 1)) as a series."""
    m, e = math.frexp(x)
    if m < float.fromhex("0x1.6a09e667f3bcdp-1"):
        m *= 2.0
        e -= 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 / 19.0
    for odd in (17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * z + 1.0 / odd
    return e * LN2 + (2.0 * s) * series


def power_by_squaring(base: float, n: int) -> float:
    """base^n in double."""
    result = 1.0
    while n:
        if n % 2:
            result *= base
        base *= base
        n //= 2
    return result


@np.vectorize(otypes=[np.float32])
def power(x: float, exponent: float) -> float:
    """x^exponent for x >= 0, else NaN, rounded once from double: 2^k e^r, with ln(x^exponent) = k ln 2 + r."""
    if not x >= 0:
        return math.nan
    if exponent == 0 or x == 1:
        return 1.0
    if exponent == 0.5:
        return float(np.sqrt(np.float32(x)))
    if x in (0, math.inf):
        return 0.0 if (x == 0) == (exponent > 0) else math.inf
    logarithm = float(exponent) * log_unit(float(x))
    if not -104.0 <= logarithm <= 89.0:
        return 0.0 if logarithm < 0 else math.inf
    k = int(logarithm / LN2 + (-0.5 if logarithm < 0 else 0.5))
    r, series = logarithm - k * LN2, 1.0
    for i in range(13, 0, -1):
        series = 1.0 + r / i * series
    return float(series * 2.0**k)
