"""The benchmark of snapshots runs, in small, and checks what it measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.places import BENCHMARKS
from support.scripts import run_script

sys.path.insert(0, str(BENCHMARKS))
import snapshot_steps
from snapshot_disk import peak_bytes
from tier_stores import Mismatch


@pytest.mark.slow
def test_every_section_has_figures(tmp_path: Path) -> None:
    place = tmp_path / "figures.json"
    done = run_script(BENCHMARKS / "snapshots.py", "--quick", "--folder", tmp_path, "--json", place)
    assert done.returncode == 0, done.stderr
    figures = json.loads(place.read_text())["figures"]
    assert {figure["section"] for figure in figures} == {"full", "incremental", "checkpoint", "background", "verify"}
    assert all(figure["value"] > 0 for figure in figures)


def test_memory_counts_that_the_allocator_kept_of_what_ran_before() -> None:
    def blocks() -> list[bytes]:
        return [b"x" * (64 << 10) for _ in range(257)]  # each too small for the allocator to map it by itself

    last = blocks()[-1]  # nothing below it goes back to the system
    assert peak_bytes(blocks) > 8 << 20
    del last


def test_no_figure_of_a_load_that_gave_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter([1, 2])
    monkeypatch.setattr(snapshot_steps, "digest", lambda embedding: next(digests))
    with pytest.raises(Mismatch, match="rows that were loaded are not those that were saved"):
        snapshot_steps.full(tmp_path, snapshot_steps.QUICK)
