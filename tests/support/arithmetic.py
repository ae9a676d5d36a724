"""The arithmetic that the references share: fixed sequences of IEEE operations (kernels/gradients.h, math.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

LN2 = 0.6931471805599453

# numerators and denominators of AS 241 (PPND16), highest power first: the middle, the tails, the far tails
_A = (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
      13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080)  # fmt: skip
_B = (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
      5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0)  # fmt: skip
_C = (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
      3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734)  # fmt: skip
_D = (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
      6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0)  # fmt: skip
_E = (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
      2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720)  # fmt: skip
_F = (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
      1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0)  # fmt: skip


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


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    return reduce(lambda value, coefficient: value * x + coefficient, coefficients)


def normal_quantile(p: float) -> float:
    """The inverse of the standard normal distribution function, 0 < p < 1: Wichura 1988, algorithm AS 241, PPND16."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return _polynomial(_A, r) * q / _polynomial(_B, r)
    r = math.sqrt(-log_unit(p if q <= 0.0 else 1.0 - p))
    if r <= 5.0:
        x = _polynomial(_C, r - 1.6) / _polynomial(_D, r - 1.6)
    else:
        x = _polynomial(_E, r - 5.0) / _polynomial(_F, r - 5.0)
    return -x if q < 0.0 else x
