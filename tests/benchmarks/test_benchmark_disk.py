"""The picture of benchmarks/disk: what its lines are, and what is said where it cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
from disk import plot


def test_what_reads_explain_is_in_samples_too() -> None:
    figures = [{"at": 1.0, "unit": "/s", "value": 1000.0}, {"at": 0.5, "unit": "/s", "value": 400.0}]
    figures += [{"at": 0.5, "unit": "x", "value": 1.25}, {"at": None, "unit": "x", "value": 3.0}]
    assert plot.curves({"figures": figures}) == ({1.0: 1000.0, 0.5: 400.0}, {0.5: 500.0})


def test_what_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="has no curve"):
        plot.draw({"figures": []}, tmp_path / "curve.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"tierbed\[plot\]"):
        plot.draw({"figures": []}, tmp_path / "curve.svg")
