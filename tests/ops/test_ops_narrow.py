"""Numbers of 16 bits: how they are rounded, put, read and caught up, bit for bit and on average."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.row_rules import optimizer_of, pinned, table_of
from support.rows import Table, same_bits
from tierbed.engine import _core
from tierbed.engine.row_format import narrowed, widened

pytestmark = pytest.mark.optimizer

NARROW = ["bfloat16", "float16"]
MANY = 1 << 16
LARGEST = {"bfloat16": float(torch.finfo(torch.bfloat16).max), "float16": 65504.0}
SGD = "sgd", [-1.0, 0.0, 0.0, 0.0, 0.0]  # with a learning rate of -1: a row of 0 becomes its gradient


def trained_to(type: str, values: np.ndarray, keys: np.ndarray, step: int = 1, seed: int = 7) -> np.ndarray:
    """values [n, dim], written by a step to rows of 0 with those keys [n]."""
    dim = values.shape[1]
    constant = [0], np.zeros((1, 2), np.float32), np.zeros((1, 2))
    layout = _core.Layout(dim, [], [], seed, [dim], *constant, type)
    batch = _core.Batch([(keys, None, None)], 1, None)
    store = _core.FullTable(layout)
    if store.find(batch):
        store.insert_missing(batch, layout)
    _core.update(batch, layout, [values], [False], [None], *SGD, step)
    out = np.empty_like(values)
    _core.gather(batch, layout, 0, out)
    return out


def neighbours(x: np.ndarray, type: str) -> tuple[np.ndarray, np.ndarray]:
    """The largest numbers of a type that are at most |x|, the smallest that are at least |x|, with the sign of x."""
    exact = torch.from_numpy(np.abs(x)).to(getattr(torch, type))
    near = exact.float().numpy()
    bits = exact.view(torch.int16)
    other = torch.where(torch.from_numpy(near > np.abs(x)), bits - 1, bits + 1).view(exact.dtype).float().numpy()
    low, high = np.minimum(near, other), np.maximum(near, other)
    same = near == np.abs(x)
    return np.copysign(np.where(same, near, low), x), np.copysign(np.where(same, near, high), x)


@pytest.mark.parametrize("type", NARROW)
@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=40), key=st.integers(0, 2**64 - 1))
def test_a_trained_number_is_one_of_its_neighbours(type: str, numbers: list[float], key: int) -> None:
    values = np.array([numbers], np.float32) + np.float32(0.0)  # as the row's 0 plus the step has it
    [out] = trained_to(type, values, np.array([key], np.uint64))
    hashes = np.array([naive.hash_row(0, key)], np.uint64)
    same_bits(out[None], naive.trained(values, type, naive.noise(7, hashes, 1, len(numbers))))
    with np.errstate(over="ignore"):
        low, high = neighbours(values[0], type)
    finite = np.isfinite(values[0])
    within = finite & (np.abs(values[0]) <= LARGEST[type])
    assert ((out == low) | (out == high))[within].all()
    assert (np.abs(out) == LARGEST[type])[finite & ~within].all()
    np.testing.assert_array_equal(out[~finite], values[0][~finite])
    exact = narrowed(values[0], type)
    same = widened(exact, type) == values[0]
    np.testing.assert_array_equal(out[same], values[0][same])


@pytest.mark.parametrize("type", NARROW)
def test_a_row_holds_one_nan_since_processors_differ_in_the_sign_of_those_that_they_make(type: str) -> None:
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    out = trained_to(type, nan[None], np.zeros(1, np.uint64))
    assert out.view(np.uint32).tolist() == [[0x7FC00000] * 4]
    assert narrowed(nan, type).view(np.uint16).tolist() == [0x7FC0 if type == "bfloat16" else 0x7E00] * 4


@pytest.mark.parametrize("type", NARROW)
@pytest.mark.parametrize("x", [0.3, -1.00001, 3e-5, -4.1e-7, 100.1, 2.0**-24 / 3])
@pytest.mark.parametrize("over", ["keys", "steps"])
def test_the_mean_of_trained_numbers_is_the_number(type: str, x: float, over: str) -> None:
    value = np.float32(x)
    if over == "keys":
        out = trained_to(type, np.full((MANY, 1), value), np.arange(MANY, dtype=np.uint64))
    else:
        noise = naive.noise(7, np.full(MANY, 12345, np.uint64), np.arange(MANY, dtype=np.uint32), 1)
        out = naive.trained(np.full((MANY, 1), value), type, noise)
    low, high = (float(side[0]) for side in neighbours(np.array([value]), type))
    chance = (float(value) - low) / (high - low)
    error = abs(high - low) * np.sqrt(chance * (1 - chance) / MANY)
    assert abs(float(out.mean(dtype=np.float64)) - float(value)) <= 4 * error


def of_columns() -> tuple[np.ndarray, np.ndarray]:
    noise = naive.noise(7, _hashes(MANY), 3, 2)
    return noise[:, 0], noise[:, 1]


def of_keys() -> tuple[np.ndarray, np.ndarray]:
    noise = naive.noise(7, _hashes(MANY + 1), 3, 1)[:, 0]
    return noise[:-1], noise[1:]


def of_steps() -> tuple[np.ndarray, np.ndarray]:
    hashes = _hashes(MANY)
    return naive.noise(7, hashes, 3, 1)[:, 0], naive.noise(7, hashes, 4, 1)[:, 0]


def of_steps_of_one_row() -> tuple[np.ndarray, np.ndarray]:
    noise = naive.noise(7, np.repeat(_hashes(1), MANY + 1), np.arange(MANY + 1, dtype=np.uint32), 1)[:, 0]
    return noise[:-1], noise[1:]


def of_seeds() -> tuple[np.ndarray, np.ndarray]:
    hashes = _hashes(MANY)
    return naive.noise(7, hashes, 3, 1)[:, 0], naive.noise(8, hashes, 3, 1)[:, 0]


def _hashes(count: int) -> np.ndarray:
    return np.array([naive.hash_row(0, key) for key in range(count)], np.uint64)


@pytest.mark.parametrize("pairs", [of_columns, of_keys, of_steps, of_steps_of_one_row, of_seeds])
def test_noise_is_even_and_neighbours_are_uncorrelated(pairs: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
    left, right = pairs()
    bound = 4.5 / np.sqrt(MANY)
    for shift in (0, 8, 16, 24, 31):  # every byte of it, and the highest bit
        a, b = ((noise >> shift & 0xFF).astype(np.float64) for noise in (left, right))
        assert abs(np.corrcoef(a, b)[0, 1]) < bound
        assert abs(a.mean() / a.max() - 0.5) < bound
    bits = np.unpackbits((left ^ right).view(np.uint8)).mean()
    assert abs(bits - 0.5) < bound


@pytest.mark.parametrize("type", NARROW)
def test_small_steps_are_taken_on_the_average_where_rounding_to_nearest_stands_still(type: str) -> None:
    last_place = 2.0**-7 if type == "bfloat16" else 2.0**-10
    step_of, steps, rows = np.float32(last_place / 100), 10_000, 64
    constant = [0], np.array([[1.0, 0.0]], np.float32), np.zeros((1, 2))
    layout = _core.Layout(16, [], [], 7, [16], *constant, type)
    batch = _core.Batch([(np.arange(rows, dtype=np.uint64), None, None)], 1, None)
    store = _core.FullTable(layout)
    assert store.find(batch)
    store.insert_missing(batch, layout)
    grads = np.full((rows, 16), step_of)
    out = np.empty_like(grads)
    for step in range(1, steps + 1):
        _core.update(batch, layout, [grads], [False], [None], *SGD, step)
    _core.gather(batch, layout, 0, out)
    moved, nearest = out.mean() - 1.0, np.float32(1.0)
    for _ in range(100):
        [nearest] = widened(narrowed(np.array([nearest + step_of], np.float32), type), type)
    assert nearest == 1.0
    assert moved == pytest.approx(float(step_of) * steps, rel=0.05)


@pytest.mark.parametrize("dim", [1, 5, 32])
@pytest.mark.parametrize("type", NARROW)
def test_rows_that_are_put_are_rounded_to_nearest_even_and_state_stays(type: str, dim: int) -> None:
    table = Table([dim], [0.25, 0.5], state_widths=[dim, 1], types=(type, "bfloat16"), narrow_states=1)
    store = _core.FullTable(table.layout)
    keys, tables = np.arange(30, dtype=np.uint64), np.zeros(30, np.uint32)
    batch = pinned(table, store, keys, tables)
    values = np.random.default_rng(dim).standard_normal((30, dim), np.float32)
    _core.assign(batch, table.layout, values, 3)
    state = np.tile(np.repeat(np.array([0.25, 0.5], np.float32), [dim, 1]), (30, 1))
    position = {int(key): at for at, key in enumerate(keys)}
    order = [position[int(key)] for key in batch.keys]
    same_bits(table.values(batch.lines), table.nearest(np.concatenate([values[order], state], 1)))
    np.testing.assert_array_equal(table.records(batch.lines), [(1, 3)] * 30)


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("type", NARROW)
@pytest.mark.parametrize("dim", [1, 7, 64, 200])
@pytest.mark.rotated("output")
def test_lookups_read_the_numbers_that_are_stored(type: str, dim: int, output: str) -> None:
    table = Table([dim], types=(type, "float32"))
    keys = np.random.default_rng(dim).integers(0, 40, 60).astype(np.uint64)
    offsets = np.array([0, 0, 20, 21, 60])
    segments = [(keys, np.zeros(4, np.uint32), offsets), (keys, np.zeros(60, np.uint32), None)]
    bags = _core.Batch(segments, table.tables, 3)
    _core.initialise_missing(bags, table.layout)
    rows, weights = table.initial(bags.tables, bags.keys), np.linspace(-1, 1, 60, dtype=np.float32)

    def gathered(lookup: int, count: int, **how: object) -> np.ndarray:
        out = np.empty((count, dim), np.float32 if output == "float32" else np.uint16)
        _core.gather(bags, table.layout, lookup, out, dtype=output, **how)
        return out

    def stored(values: np.ndarray) -> np.ndarray:
        return values if output == "float32" else narrowed(values, output).view(np.uint16)

    inverse = bags.inverse
    for mean in (False, True):
        for scales in (None, weights):
            wanted = naive.pool(rows, inverse[:60], offsets, mean, scales)
            np.testing.assert_array_equal(gathered(0, 4, mean=mean, weights=scales), stored(wanted))
    np.testing.assert_array_equal(gathered(1, 60), stored(naive.gather(rows, inverse[60:])))
    grads = np.random.default_rng(1).standard_normal((4, dim), np.float32)
    out = np.empty(60, np.float32)
    _core.weights_grad(bags, table.layout, 0, grads, out, True)
    same_bits(out, naive.weights_grad(rows, inverse[:60], offsets, grads, True))


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")])
def test_a_lookup_catches_up_a_view_to_nearest_and_leaves_the_row(types: tuple[str, str]) -> None:
    optimizer = optimizer_of("catch-up adam")
    table = table_of(optimizer, 9, types)
    store = _core.FullTable(table.layout)
    keys, tables = np.arange(20, dtype=np.uint64), np.zeros(20, np.uint32)
    batch = pinned(table, store, keys, tables)
    grads = np.random.default_rng(0).standard_normal((20, 9), np.float32)
    table.update(batch, grads, optimizer.rule, optimizer.hyper(1), 1)
    before = table.values(batch.lines)
    _core.preview_catch_up(batch, table.layout, optimizer.rule, optimizer.hyper(30), 30)
    caught_up = before.copy()
    naive.catch_up(
        caught_up, np.ones(20, np.uint32), np.ones(20, np.uint32), 9, optimizer.rule, optimizer.hyper(30), 30
    )
    same_bits(table.values(batch.views), table.nearest(caught_up))
    same_bits(table.values(batch.lines), before)
