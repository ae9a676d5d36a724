"""benchmarks/distributed.py at tiny sizes: it runs, and a step whose output differs has no figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.figures import check_quick_run
from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import rank_steps
from rank_group import on_ranks
from tier_stores import Mismatch

import distributed


@pytest.mark.slow
def test_it_has_figures_where_both_sides_agree(tmp_path: Path) -> None:
    check_quick_run(distributed, tmp_path)


def test_another_output_has_no_figure() -> None:
    same = torch.arange(4.0)
    rank_steps.same("rows", same, same, 0)
    with pytest.raises(Mismatch, match=r"rows are 0\.25 of the largest magnitude apart"):
        rank_steps.same("rows", same, same + 1, 1e-3)


def fails_on_rank_1() -> int:
    import torch.distributed as dist

    if dist.get_rank():
        raise Mismatch("on rank 1")
    return dist.get_rank()


@pytest.mark.slow
def test_what_a_rank_raises_is_raised_by_all() -> None:
    with pytest.raises(Mismatch, match="on rank 1"):
        on_ranks(2, fails_on_rank_1)
