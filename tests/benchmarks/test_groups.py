"""Groups of benchmarks: sides that differ have no figure, and what is measured is what is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
from groups import snapshots
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
    with pytest.raises(Mismatch, match="the loaded rows differ from the saved rows"):
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
