"""The references themselves, held to facts from outside the project."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.arithmetic import log_unit, normal_quantile
from tierbed.engine.options.initializers import NORMAL, UNIFORM

pytestmark = pytest.mark.op


def test_philox_gives_the_published_vectors() -> None:
    ones = naive.MASK32
    assert naive.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert naive.philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    digits_of_pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert naive.philox(*digits_of_pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_hash_is_splitmix64_and_tables_displace_it() -> None:
    # the first three outputs of splitmix64 from state 0
    assert [naive.hash_row(table, 0) for table in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(st.floats(1e-18, 1.0, exclude_min=True))
def test_logarithm_is_accurate_to_the_last_bits(x: float) -> None:
    assert log_unit(x) == pytest.approx(math.log(x), rel=1e-15, abs=0)


@given(st.floats(1e-18, 1.0, exclude_max=True) | st.integers(1, 2**53 - 1).map(lambda n: n * 2.0**-53))
def test_quantile_is_accurate_in_the_middle_and_both_tails(p: float) -> None:
    assert normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=3e-15, abs=0)


def test_draws_have_the_moments_of_their_distributions_and_columns_do_not_correlate() -> None:
    keys, zeros = np.arange(2000, dtype=np.uint64), np.zeros(2000, np.uint32)
    draws = [UNIFORM, NORMAL], np.array([[-1, 3], [5, 2]], np.float32), np.array([[0.0, 1.0]] * 2)
    rows = naive.initial_rows(zeros, keys, 3, [2, 2], *draws)
    assert rows.mean(0) == pytest.approx([1, 1, 5, 5], abs=0.15)
    assert rows.std(0) == pytest.approx([4 / 12**0.5] * 2 + [2] * 2, rel=0.05)
    correlations = np.corrcoef(rows.T) - np.eye(4)
    assert np.abs(correlations).max() < 0.08
    assert len(np.unique(rows)) > 0.999 * rows.size


def test_a_sum_begins_with_its_first_gradient_so_that_negative_zero_stays() -> None:
    grads = np.array([[-0.0], [1.0], [-0.0]], np.float32)
    sums = naive.reduce(grads, np.array([0, 2, 1], np.uint32), np.array([0, 2, 3], np.uint32))
    assert np.signbit(sums[:, 0]).tolist() == [True, False]


@pytest.mark.parametrize("count", [256, 257, 700])
def test_many_gradients_are_summed_in_blocks_of_256(count: int) -> None:
    grads = np.random.default_rng(count).standard_normal((count, 3), np.float32)
    blocks = [np.add.accumulate(grads[begin : begin + 256])[-1] for begin in range(0, count, 256)]
    sums = naive.reduce(grads, np.arange(count, dtype=np.uint32), np.array([0, count], np.uint32))
    assert sums.tobytes() == np.add.accumulate(np.array(blocks))[-1].tobytes()
