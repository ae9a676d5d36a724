"""Sums of float32 are exact, rounded once, and the same however the numbers are ordered and spread."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierbed.engine.ops.exact_sum import add_partial_sums, compute_partial_sum

LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149
numbers = st.floats(0, width=32, allow_infinity=False) | st.sampled_from([0.0, SMALLEST, 2.0**-126, 1.0, LARGEST])


def sum_of(*parts: list[float]) -> float:
    return add_partial_sums([compute_partial_sum(np.array(part, np.float32)) for part in parts])


@given(st.lists(st.lists(numbers, max_size=9), min_size=1, max_size=5), st.randoms())
def test_the_sum_is_that_of_fractions_for_any_order_and_ranks(parts: list[list[float]], random: object) -> None:
    every = [number for part in parts for number in part]
    expected = float(sum(map(Fraction, every)))
    assert sum_of(*parts) == expected
    random.shuffle(every)
    assert sum_of(every) == expected


def test_many_numbers_of_all_sizes() -> None:
    rng = np.random.default_rng(0)
    given = np.abs(rng.standard_normal(100_000, np.float32)) * np.float32(2) ** rng.integers(-140, 60, 100_000)
    given = given.astype(np.float32)
    expected = math.fsum(given.tolist())
    parts = [compute_partial_sum(part) for part in np.array_split(given[::-1], 7)]
    assert add_partial_sums([compute_partial_sum(given)]) == add_partial_sums(parts) == expected
    largest = np.full(1 << 20, LARGEST, np.float32)
    assert add_partial_sums([compute_partial_sum(largest)] * 1024) == LARGEST * 2.0**30


@pytest.mark.parametrize(
    ("parts", "expected"), [([[1.0, math.inf], [2.0]], math.inf), ([[math.inf], [math.nan]], math.nan), ([[]], 0.0)]
)
def test_what_is_not_finite_is_told(parts: list[list[float]], expected: float) -> None:
    np.testing.assert_equal(sum_of(*parts), expected)


def test_a_nan_with_a_sign_is_one() -> None:
    assert math.isnan(add_partial_sums([compute_partial_sum(np.array([0xFFC00000], np.uint32).view(np.float32))]))
