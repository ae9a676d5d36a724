"""Groups of benchmarks: sides that differ have no figure, and what is measured is what is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support.places import BENCHMARKS
from support.scripts import run_script

sys.path.insert(0, str(BENCHMARKS))
from disk import plot
from groups import disk, snapshots
from ranks import on_ranks
from workload import Mismatch


def test_memory_counts_that_the_allocator_kept_of_what_ran_before() -> None:
    def blocks() -> list[bytes]:
        return [b"x" * (64 << 10) for _ in range(257)]  # each too small for the allocator to map it by itself

    last = blocks()[-1]  # nothing below it goes back to the system
    assert snapshots.peak_bytes(blocks) > 8 << 20
    del last


def test_no_figure_of_a_load_that_gave_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter([1, 2])
    monkeypatch.setattr(snapshots, "digest", lambda embedding: next(digests))
    with pytest.raises(Mismatch, match="rows that were loaded are not those that were saved"):
        list(snapshots.full(tmp_path, rows=1000, repeats=1))


def fails_on_rank_1() -> int:
    import torch.distributed as dist

    if dist.get_rank():
        raise Mismatch("on rank 1")
    return dist.get_rank()


@pytest.mark.slow
def test_what_a_rank_raises_is_raised_by_all() -> None:
    with pytest.raises(Mismatch, match="on rank 1"):
        on_ranks(2, fails_on_rank_1)


def points(svg: str, line: str) -> int:
    """How many points a line of a picture has."""
    found = re.search(rf'<g id="{line}">\s*<path d="([^"]*)"', svg)
    assert found is not None, f"no line {line}"
    return len(re.findall("[ML]", found[1]))


@pytest.mark.slow
def test_memory_mapped_torch_agrees_and_the_curve_of_limits_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = {"rows": 2000, "limit": None, "batch": 64, "warm_up": 4, "repeats": 12, "curve": (1.0, 0.5, 0.25)}
    figures = [each.as_dict() for each in disk.beyond_memory(tmp_path, **sizes, floor_seconds=0.05, apart=False)]
    (tmp_path / "figures.json").write_text(json.dumps({"figures": figures}))
    pictures = []
    for name in ("once.svg", "again.svg"):
        done = run_script(BENCHMARKS / "disk" / "plot.py", tmp_path / "figures.json", tmp_path / name)
        assert done.returncode == 0, done.stderr
        pictures.append((tmp_path / name).read_text())
    assert (points(pictures[0], "measured"), points(pictures[0], "explained")) == (3, 2)
    assert pictures[0] == pictures[1]


def test_what_reads_explain_is_in_samples_too() -> None:
    figures = [{"at": 1.0, "unit": "/s", "value": 1000.0}, {"at": 0.5, "unit": "/s", "value": 400.0}]
    figures += [{"at": 0.5, "unit": "x", "value": 1.25}, {"at": None, "unit": "x", "value": 3.0}]
    assert plot.curves({"figures": figures}) == ({1.0: 1000.0, 0.5: 400.0}, {0.5: 500.0})


def test_an_error_says_why_a_curve_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="has no curve"):
        plot.draw({"figures": []}, tmp_path / "curve.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"tierbed\[plot\]"):
        plot.draw({"figures": []}, tmp_path / "curve.svg")
