"""The benchmark of open sizes runs, and has no figure where the two graphs differ."""

from __future__ import annotations

import sys

import pytest
import torch

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import jagged_sizes
from tier_stores import Mismatch


def test_one_step_serves_all_totals_with_the_bits_of_a_step_for_each() -> None:
    steps, ratio = jagged_sizes.measure(jagged_sizes.QUICK)
    assert steps.value == 1
    assert ratio.value > 0


@pytest.mark.slow
def test_other_rows_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    check = jagged_sizes._check_rows

    def changed(sizes: jagged_sizes.Sizes, one: jagged_sizes.Model, other: jagged_sizes.Model) -> None:
        other.rows.put(torch.zeros(1, dtype=torch.int64), torch.ones(1, sizes.dim), 0)
        check(sizes, one, other)

    monkeypatch.setattr(jagged_sizes, "_check_rows", changed)
    with pytest.raises(Mismatch, match="rows of table 0"):
        jagged_sizes.measure(jagged_sizes.QUICK)
