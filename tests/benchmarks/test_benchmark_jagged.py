"""benchmarks/jagged.py at tiny sizes: it runs, and a step whose output differs has no figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.figures import check_quick_run
from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import jagged_steps
from tier_stores import Mismatch

import jagged


@pytest.mark.slow
def test_it_has_figures_where_both_sides_agree(tmp_path: Path) -> None:
    check_quick_run(jagged, tmp_path)


def test_rows_that_begin_elsewhere_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [figure.bar for figure in jagged_steps.against_fbgemm(quick=True)] == [1.0, 1.2, 1.5]
    assert [figure.bar for figure in jagged_steps.against_plain(quick=True)] == [1.3, 1.05]
    step = jagged_steps.Fbgemm.step

    def changed(self: jagged_steps.Fbgemm, batch: jagged_steps.Batch) -> torch.Tensor:
        return step(self, batch) * (1 + 4e-6)

    monkeypatch.setattr(jagged_steps.Fbgemm, "step", changed)
    with pytest.raises(Mismatch, match=r"outputs are .* of the largest magnitude apart"):
        jagged_steps.against_fbgemm(quick=True)
