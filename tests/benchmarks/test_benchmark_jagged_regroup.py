"""benchmarks/jagged_regroup.py at tiny sizes: what differs from FBGEMM has no figure."""

from __future__ import annotations

import sys

import pytest

from support.places import BENCHMARKS
from tierbed.jagged import KeyedTensor

sys.path.insert(0, str(BENCHMARKS))
import jagged_regroup
from tier_stores import Mismatch


def test_an_output_four_millionths_off_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = jagged_regroup.regroup_figures(quick=True)
    assert [figure.bar for figure in figures] == [0.25, 0.2]
    regroup = KeyedTensor.regroup
    monkeypatch.setattr(KeyedTensor, "regroup", lambda *given: [part * (1 + 4e-6) for part in regroup(*given)])
    with pytest.raises(Mismatch, match=r"tensor 0 is .* of its largest magnitude apart"):
        jagged_regroup.regroup_figures(quick=True)
