"""The results of the native loops in NumPy and Python numbers: the specification, and the oracle of the tests.

Every function is a fixed sequence of IEEE operations without fma, so the native core gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.arithmetic import normal_quantile, row_sum
from support.rule_references import CATCH_UPS, REFERENCES, PastRates
from tierbed.engine.optim.kernel import LIMITS
from tierbed.engine.optim.rule import Rule, load_rules
from tierbed.engine.options.initializers import CONSTANT, UNIFORM
from tierbed.engine.row_format import to_float32, to_stored

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint32(0x9E3779B9)
_PRECISION = {"float16": (11, -24), "bfloat16": (8, -133)}  # bits of a number, exponent of the smallest one


def noise(seed: int, hashes: U64, step: int | U32, columns: int) -> U32:
    """[n, columns] of 32 bits each, for rows by their hashes [n]. A column is a number's index in a float32 line.

    step: of all rows, or of each.
    """
    low, high = hashes.astype(np.uint32), (hashes >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        base = _mixed(np.uint32(seed & 0xFFFFFFFF) ^ low)
        base = _mixed(base + np.uint32(seed >> 32 & 0xFFFFFFFF))
        base = _mixed(_mixed(base ^ high) + np.asarray(step, np.uint32) * _GOLDEN)
        return _mixed(base[:, None] + np.arange(columns, dtype=np.uint32) * _GOLDEN)


def by_chance(values: F32, type: str, noise: U32) -> NDArray[Any]:
    """Numbers as stored in `type`, float16 or bfloat16: each is one of its two neighbours. noise: of its shape.

    The highest bits of noise, as many as the bits that float32 has more, are added below the last bit of `type`; then
    the number is truncated to `type`. A subnormal float16 is first rounded to nearest at that number of bits.
    """
    digits, smallest = _PRECISION[type]
    exact = np.abs(values.astype(np.float64))
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(exact)[1] - digits, smallest)
        units = np.ldexp(exact, -exponent)  # of the last bit
        bits = 24 - digits
        if type == "float16":
            units = np.where(exact < 2.0**-14, np.ldexp(np.rint(np.ldexp(units, bits)), -bits), units)
        whole = np.floor(units)
        below = np.ldexp(units - whole, bits).astype(np.uint64)
        up = (below + (noise >> np.uint32(32 - bits))) >> np.uint64(bits)
        magnitude = np.ldexp(whole + up, exponent)
        largest = float(np.finfo(np.float16).max) if type == "float16" else float(np.float32(2.0**127) * (2 - 2.0**-7))
        rounded = np.copysign(np.minimum(magnitude, largest), values).astype(np.float32)
    return to_stored(np.where(np.isfinite(values), rounded, values), type)


def trained(values: F32, type: str, noise: U32) -> F32:
    return values if type == "float32" else to_float32(by_chance(values, type, noise), type)


def _mixed(x: Any) -> Any:
    x = np.asarray(x, np.uint32)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


# ---- identity of a row


def hash_row(table: int, key: int) -> int:
    """The hash of a row, 64 bits: the splitmix64 finaliser of the key, displaced by its table."""
    x = (key ^ ((table + 1) * 0x9E3779B97F4A7C15)) & MASK64
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & MASK64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def slot_hash(table: int, key: int, numbers: Sequence[int]) -> int:
    """The hash of a row in memory, 64 bits, by the random `numbers` of the process."""
    addend, of_table, first, second, *_ = numbers
    x = hash_row(table, key)
    x ^= x >> 31 ^ x >> 62  # without the last step of that hash
    x = ((x << 8 | x >> 56) * first + table * of_table + addend) & MASK64
    x ^= x >> 40 << 8
    return int.from_bytes(((x * second) & MASK64).to_bytes(8, "little"), "big")


def bucket(table: int, key: int) -> int:
    """The top 6 bits of the hash."""
    return hash_row(table, key) >> 58


def owner(table: int, key: int, ranks: int) -> int:
    """0 .. ranks - 1, the rank that owns a row: an interval of bits 34 to 49 of the hash."""
    return (hash_row(table, key) >> 34 & 0xFFFF) * ranks >> 16


@dataclass(frozen=True)
class Unique:
    """The unique rows of `size` positions: by bucket, then by first occurrence; or by number, table after table."""

    keys: U64  # [unique]
    tables: U32  # [unique]
    inverse: NDArray[np.int32]  # [size], -1 where a position is padding
    occurrences: U32  # positions grouped by unique row, ascending within one
    occurrence_offsets: U32  # [unique + 1], where each row's occurrences start


def unique(keys: U64, tables: U32, padding: int | None = None, numbered: bool = False) -> Unique:
    """The unique rows of keys [n], tables [n]; keys equal to `padding` as unsigned 64 bits have no rows.

    numbered: whether ids have numbers, and rows their order.
    """
    positions: dict[tuple[int, int], list[int]] = {}
    for position, row in enumerate(zip(tables.tolist(), keys.tolist(), strict=True)):
        if padding is None or row[1] != padding & MASK64:
            positions.setdefault(row, []).append(position)
    rows = sorted(positions) if numbered else sorted(positions, key=lambda row: (bucket(*row), positions[row][0]))
    inverse = np.full(len(keys), -1, np.int32)
    for index, row in enumerate(rows):
        inverse[positions[row]] = index
    return Unique(
        keys=np.array([key for _, key in rows], np.uint64),
        tables=np.array([table for table, _ in rows], np.uint32),
        inverse=inverse,
        occurrences=np.array([position for row in rows for position in positions[row]], np.uint32),
        occurrence_offsets=np.cumsum([0] + [len(positions[row]) for row in rows], dtype=np.uint32),
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
    """The 32 random bits of a row's column; columns count floats from the start of the row, over all column groups."""
    counter = (column // 4, table, key & MASK32, (key >> 32) & MASK32)
    return philox(counter, (seed & MASK32, (seed >> 32) & MASK32))[column % 4]


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
    tables: U32, keys: U64, seed: int, columns: Sequence[int], kinds: Sequence[int], parameters: F32, quantiles: F64,
    states: Sequence[float] = (), state_widths: Sequence[int] = (),
) -> F32:  # fmt: skip
    """[n, dim + sum(state_widths)]: embeddings, then each state's constant.

    `columns` are widths of column groups. Entry table * len(columns) + group of `kinds`, `parameters` [n, 2] and
    `quantiles` [n, 2] describes a group.
    """
    groups = [group for group, width in enumerate(columns) for _ in range(width)]
    dim = len(groups)
    rows = np.empty((len(keys), dim + sum(state_widths)), np.float32)
    rows[:, dim:] = np.repeat(np.asarray(states, np.float32), state_widths)
    for row, table, key in zip(rows, tables.tolist(), keys.tolist(), strict=True):
        for column, group in enumerate(groups):
            entry = table * len(columns) + group
            bits = random_bits(seed, table, key, column)
            row[column] = initial_value(bits, kinds[entry], parameters[entry], quantiles[entry])
    return rows


# ---- a step


def gather(rows: F32, inverse: NDArray[np.int32]) -> F32:
    """rows [unique, dim], inverse [n] -> [n, dim], zeros for padding."""
    zeros = np.zeros((1, rows.shape[1]), np.float32)
    return np.concatenate([rows, zeros])[inverse]  # -1 picks the last row, the zeros


def pool(rows: F32, inverse: NDArray[np.int32], offsets: I64, mean: bool = False, weights: F32 | None = None) -> F32:
    """rows [unique, dim], inverse [n], offsets [bags + 1], weights [n] -> [bags, dim], summed by ascending position.

    A mean is divided by the number of ids that are not padding. A bag without any is zeros.
    """
    out = np.zeros((len(offsets) - 1, rows.shape[1]), np.float32)
    for bag, positions in _bags(inverse, offsets):
        for position in positions:
            row = rows[inverse[position]]
            out[bag] += row if weights is None else weights[position] * row
        if mean:
            out[bag] /= np.float32(len(positions))
    return out


def pool_grad(
    grads: F32, inverse: NDArray[np.int32], offsets: I64, mean: bool = False, weights: F32 | None = None
) -> F32:
    """grads [bags, dim] -> [n, dim], the gradient of the row of each position, zeros for padding.

    It is the gradient of the position's bag, times w, 1 / count or w * (1 / count).
    """
    out = np.zeros((len(inverse), grads.shape[1]), np.float32)
    one = np.float32(1)
    for bag, positions in _bags(inverse, offsets):
        share = one / np.float32(len(positions)) if mean else one
        for position in positions:
            out[position] = (share if weights is None else weights[position] * share) * grads[bag]
    return out


def weights_grad(rows: F32, inverse: NDArray[np.int32], offsets: I64, grads: F32, mean: bool = False) -> F32:
    """rows [unique, dim], grads [bags, dim] -> [n], the gradient of each weight; zeros for padding."""
    out = np.zeros(len(inverse), np.float32)
    for bag, positions in _bags(inverse, offsets):
        totals = row_sum(grads[bag] * rows[inverse[positions]])[:, 0]
        out[positions] = totals / np.float32(len(positions)) if mean else totals
    return out


def _bags(inverse: NDArray[np.int32], offsets: I64) -> Iterator[tuple[int, list[int]]]:
    """Each bag that has ids, and the positions of those that are not padding."""
    for bag, (begin, end) in enumerate(pairwise(offsets.tolist())):
        positions = [position for position in range(begin, end) if inverse[position] >= 0]
        if positions:
            yield bag, positions


def reduce(grads: F32, occurrences: U32, offsets: U32) -> F32:
    """grads [size, dim] -> [unique, dim]: sums over each row's occurrences, ascending.

    Each block of 256 occurrences is summed from its first one; the sums of the blocks are added in order to the first.
    """
    sums = np.empty((len(offsets) - 1, grads.shape[1]), np.float32)
    for index, (begin, end) in enumerate(pairwise(offsets.tolist())):
        blocks = [_sum(grads[occurrences[first : min(first + 256, end)]]) for first in range(begin, end, 256)]
        sums[index] = _sum(np.array(blocks, np.float32))
    return sums


def _sum(rows: F32) -> F32:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def rule_named(kernel: str) -> Rule:
    return {rule.kernel.name: rule for rule in load_rules()}[kernel]


def update(
    rows: F32, updates: U32, grads: F32, rule: str, hyperparams: Sequence[float], step: int = 1, last: U32 | None = None
) -> None:
    """One step in place: rows [n, width] with state, updates [n], which counts earlier writes, grads [n, dim] reduced.

    hyperparams: from `RowOptimizer.compute_hyperparams`, with limits. last [n]: each row's latest step, for a rule that
    catches up. Each operation is rounded to float32.
    """
    found, dim = rule_named(rule), grads.shape[1]
    if last is not None:
        catch_up(rows, updates, last, dim, rule, hyperparams, step)
        last[:] = step
    with np.errstate(all="ignore"):
        given = map(np.float32, hyperparams[len(found.kernel.all_hyperparams) :])
        value, norm, row_norm = islice(chain(given, repeat(np.float32(0))), len(LIMITS))
        g = clip(grads, value, norm)
        of_step = {"g": g, "first": (updates == 0)[:, None], "step": step, "dim": np.float32(dim)}
        REFERENCES[rule](SimpleNamespace(**_arguments(found, rows, dim, hyperparams), **of_step))
        if row_norm > 0:
            rows[:, :dim] *= norm_scales(rows[:, :dim], row_norm)
    updates += np.uint32(1)


def catch_up(rows: F32, updates: U32, last: U32, dim: int, rule: str, hyperparams: Sequence[float], step: int) -> None:
    """Apply missed steps to rows [n, width] in place, if the rule catches up; updates, last: [n]."""
    found = rule_named(rule)
    if rule not in CATCH_UPS:
        return
    assert found.kernel.catch_up is not None
    rates = PastRates(found.kernel, hyperparams)
    misses = (updates != 0) | bool(found.kernel.catch_up.unwritten_rows)
    for index in np.flatnonzero(misses & (last.astype(np.int64) + 1 < step)):
        named = _arguments(found, rows[index : index + 1], dim, hyperparams)
        of_row = {"first": updates[index] == 0, "last": int(last[index]), "missed": step - 1 - int(last[index])}
        with np.errstate(all="ignore"):
            CATCH_UPS[rule](SimpleNamespace(**named, **of_row, rates=rates))


def clip(grads: F32, value: np.float32, norm: np.float32) -> F32:
    """grads [n, dim], each element clamped to [-value, value], then each row scaled to an L2 norm of at most `norm`.

    A limit of 0 is no limit.
    """
    if value > 0:
        grads = np.where(grads > value, value, np.where(grads < -value, -value, grads))
    if norm > 0:
        grads = grads * norm_scales(grads, norm)
    return grads


def norm_scales(rows: F32, limit: np.float32) -> F32:
    """What to multiply each of rows [n, dim] by, [n, 1], so that its L2 norm is at most `limit`."""
    norms = np.sqrt(row_sum(rows * rows))
    scales: F32 = np.where(norms > limit, limit / norms, np.float32(1))
    return scales


def _arguments(rule: Rule, rows: F32, dim: int, hyperparams: Sequence[float]) -> dict[str, Any]:
    """Weights, states and hyper-parameters by the names of the rule's kernel."""
    kernel = rule.kernel
    ends = np.cumsum([dim, *rule.kernel.state_widths(dim)]).tolist()
    names = dict(zip(rule.kernel.states, (rows[:, begin:end] for begin, end in pairwise(ends)), strict=True))
    values = dict(zip(kernel.all_hyperparams, hyperparams, strict=False))
    rounded = {name: np.float32(x) if name in kernel.hyperparams.split() else x for name, x in values.items()}
    return {"w": rows[:, :dim], **names, **rounded}


def move_columns(sources: Sequence[NDArray[Any]], moves: Sequence[Sequence[int]], widths: Sequence[int]) -> list[Any]:
    """Matrices of `widths` columns. A move: source, target, their first columns, number of columns."""
    targets = [np.zeros((len(sources[0]), width), sources[0].dtype) for width in widths]
    for source, target, first, to, count in moves:
        targets[target][:, to : to + count] = sources[source][:, first : first + count]
    return targets


def add_columns(
    grads: Sequence[NDArray[Any]], moves: Sequence[Sequence[int]], widths: Sequence[int], dtype: str
) -> list[Any]:
    """The gradients of the sources, from zeros in the order of the moves. Numbers of bfloat16 are given by their bits.

    Each sum of 16-bit numbers is that of float32, rounded.
    """
    sums = [np.zeros((len(grads[0]), width), grads[0].dtype) for width in widths]
    for source, target, first, to, count in moves:
        part, grad = sums[source][:, first : first + count], grads[target][:, to : to + count]
        if dtype in _PRECISION:
            part[:] = to_stored(to_float32(part, dtype) + to_float32(grad, dtype), dtype)
        else:
            part += grad
    return sums
