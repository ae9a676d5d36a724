"""float16 and bfloat16 as outputs and gradients: every pattern and every rounding edge, held to torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.rows import Table, same_bits
from tierbed.engine import _core

pytestmark = pytest.mark.op

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}  # the one that every other becomes
PATTERNS = np.arange(2**16, dtype=np.uint16)


@pytest.fixture(params=_core.instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    _core.use_instruction_set(request.param)
    yield
    _core.use_instruction_set(_core.instruction_sets()[0])


def one_row(values: NDArray[np.float32]) -> tuple[Table, _core.Batch]:
    """A batch of one row with these values."""
    table = Table([len(values)], tables=1)
    batch = table.batch([5], [0])
    _core.initialise_missing(batch, table.layout)
    _core.assign(batch, table.layout, values[None], 1)
    return table, batch


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint16]:
    """The bits that `gather` writes for a row of these values."""
    table, batch = one_row(values)
    out = np.full((1, len(values)), 0xA5A5, np.uint16)
    _core.gather(batch, table.layout, 0, out, dtype=dtype)
    return out[0]


def check_rounding(values: NDArray[np.float32], dtype: str) -> None:
    """As torch rounds; a NaN becomes one NaN, whatever its sign."""
    actual = rounded(values, dtype)
    wanted = torch.from_numpy(values).to(HALVES[dtype]).view(torch.uint16).numpy()
    nan = np.isnan(values)
    np.testing.assert_array_equal(actual[~nan], wanted[~nan])
    assert (actual[nan] == NAN[dtype]).all()


def widened(dtype: str) -> NDArray[np.float32]:
    """The value of every pattern, by torch."""
    return torch.from_numpy(PATTERNS.copy()).view(HALVES[dtype]).to(torch.float32).numpy()


@pytest.mark.parametrize("dtype", HALVES)
def test_every_pattern_is_read_as_torch_reads_it(dtype: str) -> None:
    table, batch = one_row(np.full(2**16, -0.0, np.float32))
    _core.update(batch, table.layout, [PATTERNS[None]], [False], [None], "sgd", [1.0, 0.0, 0.0, 0.0, 0.0], 2, dtype)
    gradient = widened(dtype)
    nan = np.isnan(gradient)
    values = table.values(batch.lines)[0]
    same_bits(values[~nan], -gradient[~nan])  # -0 - g, signed zeros included
    np.testing.assert_array_equal(np.isnan(values), nan)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_pattern_comes_back_from_float32(dtype: str) -> None:
    values = widened(dtype)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(rounded(values, dtype)[number], PATTERNS[number])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_and_every_tie_and_their_neighbours_are_rounded_as_torch_does(dtype: str) -> None:
    values = widened(dtype)
    finite = np.unique(values[np.isfinite(values)])
    ties = (finite[:-1].astype(np.float64) + finite[1:]) / 2  # exact
    assert np.array_equal(ties, ties.astype(np.float32))
    largest = float(finite[-1])
    overflow = largest + (largest - float(finite[-2])) / 2  # rounds to infinity, what is below to the largest
    edges = np.concatenate([finite, ties.astype(np.float32), np.array([overflow, -overflow], np.float32)])
    infinity = np.float32(np.inf)
    check_rounding(np.concatenate([edges, np.nextafter(edges, infinity), np.nextafter(edges, -infinity)]), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_subnormals_infinities_and_nans_of_float32_are_rounded_as_torch_does(dtype: str) -> None:
    magnitudes = [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000]  # to the smallest normal number
    magnitudes += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]  # the largest, inf, NaNs
    bits = np.array(magnitudes + [magnitude | 0x80000000 for magnitude in magnitudes], np.uint32)
    check_rounding(bits.view(np.float32), dtype)
