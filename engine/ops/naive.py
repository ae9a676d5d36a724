"""What the native loops compute, in plain NumPy and Python numbers: the specification, and the oracle of the tests.

Every function is a fixed sequence of IEEE operations without fma, so the native core gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
LN2 = 0.6931471805599453
CONSTANT, UNIFORM, NORMAL = 0, 1, 2


# ---- identity of a row


def hash_row(table: int, key: int) -> int:
    """64 bits that a row's place depends on: the splitmix64 finaliser over the key, displaced by its table."""
    x = (key ^ ((table + 1) * 0x9E3779B97F4A7C15)) & MASK64
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & MASK64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def bucket(table: int, key: int) -> int:
    """0 .. 63, the top 6 bits of the hash."""
    return hash_row(table, key) >> 58


@dataclass(frozen=True)
class Unique:
    """The unique rows of `size` positions: by bucket, then by first occurrence."""

    keys: U64  # [unique]
    tables: U32  # [unique]
    inverse: NDArray[np.int32]  # [size], -1 where a position is padding
    occurrences: U32  # positions grouped by unique row, ascending within one
    offsets: U32  # [unique + 1], where each row's occurrences start


def unique(keys: U64, tables: U32, padding: int | None = None) -> Unique:
    """keys [n], tables [n]; keys equal to `padding` as unsigned 64 bits are no rows."""
    positions: dict[tuple[int, int], list[int]] = {}
    for position, row in enumerate(zip(tables.tolist(), keys.tolist(), strict=True)):
        if padding is None or row[1] != padding & MASK64:
            positions.setdefault(row, []).append(position)
    rows = sorted(positions, key=lambda row: (bucket(*row), positions[row][0]))
    inverse = np.full(len(keys), -1, np.int32)
    for index, row in enumerate(rows):
        inverse[positions[row]] = index
    return Unique(
        keys=np.array([key for _, key in rows], np.uint64),
        tables=np.array([table for table, _ in rows], np.uint32),
        inverse=inverse,
        occurrences=np.array([position for row in rows for position in positions[row]], np.uint32),
        offsets=np.cumsum([0] + [len(positions[row]) for row in rows], dtype=np.uint32),
    )


# ---- initial values


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al. 2011: four random words for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & MASK32, (left >> 32) ^ c3 ^ k1, left & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def random_bits(seed: int, table: int, key: int, column: int) -> int:
    """The 32 bits of one column of a row; columns count floats from the start of the row, over all column groups."""
    counter = (column // 4, table, key & MASK32, (key >> 32) & MASK32)
    return philox(counter, (seed & MASK32, (seed >> 32) & MASK32))[column % 4]


def log_unit(x: float) -> float:
    """The natural logarithm of 0 < x <= 1: exponent times ln 2, plus 2 artanh((m - 1) / (m + 1)) as a series."""
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


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


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


def initial_value(bits: int, kind: int, parameters: F32, quantiles: F64) -> np.float32:
    """One column of a row. parameters [2]: (value, unused), (low, high) or (mean, std); quantiles [2]: (q0, q1).

    With u uniform in [0, 1): low + u * (high - low), or mean + std * quantile(q0 + u * (q1 - q0)).
    """
    a, b = parameters
    if kind == CONSTANT:
        return np.float32(a)
    if kind == UNIFORM:
        return np.float32(a + np.float32((bits >> 8) * 2.0**-24) * (b - a))
    q0, q1 = quantiles.tolist()
    p = q0 + (bits + 0.5) * 2.0**-32 * (q1 - q0)
    return np.float32(float(a) + float(b) * normal_quantile(p))


def initial_rows(
    tables: U32,
    keys: U64,
    seed: int,
    columns: Sequence[int],
    kinds: Sequence[int],
    parameters: F32,
    quantiles: F64,
    states: Sequence[float] = (),
) -> F32:
    """[n, dim * (1 + len(states))]: embeddings, then each state's constant.

    `columns` are widths of column groups. Entry table * len(columns) + group of `kinds`, `parameters` [n, 2] and
    `quantiles` [n, 2] describes a group.
    """
    groups = [group for group, width in enumerate(columns) for _ in range(width)]
    dim = len(groups)
    rows = np.empty((len(keys), dim * (1 + len(states))), np.float32)
    for row, table, key in zip(rows, tables.tolist(), keys.tolist(), strict=True):
        for column, group in enumerate(groups):
            entry = table * len(columns) + group
            bits = random_bits(seed, table, key, column)
            row[column] = initial_value(bits, kinds[entry], parameters[entry], quantiles[entry])
        for index, initial in enumerate(states, 1):
            row[index * dim : (index + 1) * dim] = initial
    return rows


# ---- a step


def gather(rows: F32, inverse: NDArray[np.int32]) -> F32:
    """rows [unique, dim], inverse [n] -> [n, dim], zeros for padding."""
    zeros = np.zeros((1, rows.shape[1]), np.float32)
    return np.concatenate([rows, zeros])[inverse]  # -1 picks the last


def reduce(grads: F32, occurrences: U32, offsets: U32) -> F32:
    """grads [size, dim] -> [unique, dim]: sums over each row's occurrences in ascending order, begun with the first."""
    sums = grads[occurrences[offsets[:-1]]]
    for index in range(len(sums)):
        for position in occurrences[offsets[index] + 1 : offsets[index + 1]]:
            sums[index] += grads[position]
    return sums


def update(rows: F32, updates: U32, grads: F32, rule: str, hyper: Sequence[float]) -> None:
    """One step in place: rows [n, width] with state, updates [n], which counts earlier writes, grads [n, dim] reduced.

    Each operation is rounded to float32; `engine/optimizers.py` says what `hyper` holds for each rule.
    """
    dim = grads.shape[1]
    w, *states = (rows[:, begin : begin + dim] for begin in range(0, rows.shape[1], dim))
    with np.errstate(all="ignore"):
        RULES[rule](w, states, grads, (updates == 0)[:, None], [np.float32(value) for value in hyper])
    updates += np.uint32(1)


Columns = Sequence[F32]
New = NDArray[np.bool_]
Hyper = list[np.float32]


def _regularised(w: F32, g: F32, weight_decay: np.float32, maximize: np.float32) -> F32:
    g = -g if maximize else g
    return g + weight_decay * w if weight_decay != 0 else g


def _sgd(w: F32, states: Columns, g: F32, new: New, hyper: Hyper) -> None:
    lr, weight_decay, maximize = hyper
    w -= lr * _regularised(w, g, weight_decay, maximize)


def _sgd_momentum(w: F32, states: Columns, g: F32, new: New, hyper: Hyper) -> None:
    (buffer,) = states
    lr, weight_decay, maximize, momentum, undamped, nesterov = hyper
    g = _regularised(w, g, weight_decay, maximize)
    buffer[:] = np.where(new, g, momentum * buffer + undamped * g)
    w -= lr * (g + momentum * buffer if nesterov else buffer)


def _adagrad(w: F32, states: Columns, g: F32, new: New, hyper: Hyper) -> None:
    (total,) = states
    lr, weight_decay, maximize, eps = hyper
    g = _regularised(w, g, weight_decay, maximize)
    total += g * g
    w -= lr * (g / (np.sqrt(total) + eps))


def _adam(w: F32, states: Columns, g: F32, new: New, hyper: Hyper) -> None:
    mean, square = states
    step_size, weight_decay, maximize, one_minus_beta1, beta2, one_minus_beta2, sqrt_correction2, eps, decay = hyper
    w *= decay
    g = _regularised(w, g, weight_decay, maximize)
    mean += (g - mean) * one_minus_beta1
    square[:] = beta2 * square + (one_minus_beta2 * g) * g
    w -= step_size * (mean / (np.sqrt(square) / sqrt_correction2 + eps))


RULES = {"sgd": _sgd, "sgd_momentum": _sgd_momentum, "adagrad": _adagrad, "adam": _adam, "adamw": _adam}
