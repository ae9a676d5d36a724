"""Numbers of 16 bits: how they are rounded, bit for bit and on average; outputs and gradients are held to torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.processors import instruction_set
from support.rows import Table, same_bits
from tierbed.engine import _core
from tierbed.engine.row_format import to_float32, to_stored

pytestmark = [pytest.mark.op, pytest.mark.optimizer]

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}  # the one that every other becomes
LARGEST = {"bfloat16": float(torch.finfo(torch.bfloat16).max), "float16": 65504.0}
PATTERNS = np.arange(2**16, dtype=np.uint16)
MANY = 1 << 16
SGD = "sgd", [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # with a learning rate of -1: a row of 0 becomes its gradient

narrow = pytest.mark.parametrize("type", NARROW)
on_every_set = pytest.mark.parametrize("on_set", _core.list_instruction_sets(), indirect=True)


@pytest.fixture
def on_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with instruction_set(request.param):
        yield


def one_row(values: NDArray[np.float32]) -> tuple[Table, _core.Batch]:
    table = Table([len(values)], tables=1)
    batch = table.batch([5], [0])
    _core.initialise_missing(batch, table.layout)
    _core.assign(batch, table.layout, values[None], 1)
    return table, batch


def rounded(values: NDArray[np.float32], type: str) -> NDArray[np.uint16]:
    """The bits that `gather` writes for a row of these values."""
    table, batch = one_row(values)
    out = np.full((1, len(values)), 0xA5A5, np.uint16)
    _core.gather(batch, table.layout, 0, out, dtype=type)
    return out[0]


def by_torch(type: str) -> NDArray[np.float32]:
    """The value of every pattern."""
    return torch.from_numpy(PATTERNS.copy()).view(NARROW[type]).to(torch.float32).numpy()


@on_every_set
@narrow
@pytest.mark.usefixtures("on_set")
def test_every_pattern_is_read_as_torch_reads_it(type: str) -> None:
    table, batch = one_row(np.full(2**16, -0.0, np.float32))
    _core.update(batch, table.layout, [PATTERNS[None]], [False], [None], "sgd", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 2, type)
    gradient = by_torch(type)
    nan = np.isnan(gradient)
    values = table.values(batch.lines)[0]
    same_bits(values[~nan], -gradient[~nan])  # -0 - g, signed zeros included
    np.testing.assert_array_equal(np.isnan(values), nan)


@on_every_set
@narrow
@pytest.mark.usefixtures("on_set")
def test_every_value_every_tie_and_their_neighbours_are_rounded_as_torch_does(type: str) -> None:
    patterns = by_torch(type)
    finite = np.unique(patterns[np.isfinite(patterns)])
    ties = (finite[:-1].astype(np.float64) + finite[1:]) / 2  # exact
    assert np.array_equal(ties, ties.astype(np.float32))
    largest = float(finite[-1])
    overflow = largest + (largest - float(finite[-2])) / 2  # rounds to infinity, what is below to the largest
    edges = np.concatenate([finite, ties.astype(np.float32), np.array([overflow, -overflow], np.float32)])
    magnitudes = [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000]  # to the smallest normal number
    magnitudes += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]  # the largest, inf, NaNs
    bits = np.array(magnitudes + [magnitude | 0x80000000 for magnitude in magnitudes], np.uint32)
    beside = [np.nextafter(edges, np.float32(side)) for side in (np.inf, -np.inf)]
    values = np.concatenate([patterns, edges, *beside, bits.view(np.float32)])
    actual, nan = rounded(values, type), np.isnan(values)
    wanted = torch.from_numpy(values).to(NARROW[type]).view(torch.uint16).numpy()
    np.testing.assert_array_equal(actual[~nan], wanted[~nan])
    assert (actual[nan] == NAN[type]).all()


def trained_to(type: str, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """values [n, dim], written by a step to rows of 0 with those keys [n]."""
    dim = values.shape[1]
    layout = _core.Layout(dim, [], [], 7, [dim], [0], np.zeros((1, 2), np.float32), np.zeros((1, 2)), type)
    batch = _core.Batch([(keys, None, None)], 1, None)
    store = _core.FullTable(layout)
    store.look_up_rows(batch)
    store.insert_missing(batch, layout)
    _core.update(batch, layout, [values], [False], [None], *SGD, 1)
    out = np.empty_like(values)
    _core.gather(batch, layout, 0, out)
    return out


def neighbours(x: np.ndarray, type: str) -> tuple[np.ndarray, np.ndarray]:
    """The largest numbers of a type that are at most |x|, the smallest that are at least |x|, with the sign of x."""
    exact = torch.from_numpy(np.abs(x)).to(NARROW[type])
    near = exact.float().numpy()
    bits = exact.view(torch.int16)
    other = torch.where(torch.from_numpy(near > np.abs(x)), bits - 1, bits + 1).view(exact.dtype).float().numpy()
    low, high = np.minimum(near, other), np.maximum(near, other)
    same = near == np.abs(x)
    return np.copysign(np.where(same, near, low), x), np.copysign(np.where(same, near, high), x)


@narrow
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
    same = to_float32(to_stored(values[0], type), type) == values[0]
    np.testing.assert_array_equal(out[same], values[0][same])


@narrow
def test_a_row_holds_one_nan_since_processors_differ_in_the_sign_of_those_that_they_make(type: str) -> None:
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    out = trained_to(type, nan[None], np.zeros(1, np.uint64))
    assert out.view(np.uint32).tolist() == [[0x7FC00000] * 4]
    assert to_stored(nan, type).view(np.uint16).tolist() == [NAN[type]] * 4


@narrow
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


def hashes(count: int) -> np.ndarray:
    return np.array([naive.hash_row(0, key) for key in range(count)], np.uint64)


def noise(seed: int = 7, step: int = 3, columns: int = 1, first: int = 0) -> np.ndarray:
    return naive.noise(seed, hashes(MANY + first)[first:], step, columns)[:, -1]


NEIGHBOURS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "columns": lambda: (noise(), noise(columns=2)),
    "keys": lambda: (noise(), noise(first=1)),
    "steps": lambda: (noise(), noise(step=4)),
    "seeds": lambda: (noise(), noise(seed=8)),
    "steps of one row": lambda: tuple(
        naive.noise(7, np.repeat(hashes(1), MANY), np.arange(first, first + MANY, dtype=np.uint32), 1)[:, 0]
        for first in (0, 1)
    ),
}


@pytest.mark.parametrize("pairs", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_noise_is_even_and_neighbours_are_uncorrelated(pairs: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
    left, right = pairs()
    bound = 4.5 / np.sqrt(MANY)
    for shift in (0, 8, 16, 24, 31):  # every byte of it, and the highest bit
        a, b = ((noise >> shift & 0xFF).astype(np.float64) for noise in (left, right))
        assert abs(np.corrcoef(a, b)[0, 1]) < bound
        assert abs(a.mean() / a.max() - 0.5) < bound
    bits = np.unpackbits((left ^ right).view(np.uint8)).mean()
    assert abs(bits - 0.5) < bound
