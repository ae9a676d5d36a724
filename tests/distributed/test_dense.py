"""Dense gradients over ranks have the bits of a plain sum in the order of the ranks, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.ranks import run_ranks
from tierbed import CapacityError, World
from tierbed.distributed.dense import Vote, all_reduce_in_order

KINDS = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float16]
SHAPES = [(3, 5), (4,), (), (0, 2), (1,), (7, 3)]


def grads(rank: int) -> list[Tensor]:
    """Gradients of several dtypes and sizes, some that lie in memory otherwise than in order."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    found[0] = found[0].t().contiguous().t()
    return [(10**rank * grad).to(kind) for grad, kind in zip(found, KINDS, strict=True)]


def plain(ranks: list[int]) -> list[Tensor]:
    totals = grads(ranks[0])
    for rank in ranks[1:]:
        totals = [total + grad for total, grad in zip(totals, grads(rank), strict=True)]
    return totals


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def summed(world: World, absent: int) -> Vote:
    return all_reduce_in_order(world, "grads", grads(world.rank), present=world.rank != absent)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_in_the_order_of_ranks(ranks: int) -> None:
    for vote in run_ranks(ranks, summed, -1):
        assert (vote.present, vote.finite) == (ranks, True)
        same(vote.sums, plain([*range(ranks)]))


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_without_a_batch_adds_nothing_and_gets_the_sum(absent: int) -> None:
    for vote in run_ranks(3, summed, absent):
        assert vote.present == 2
        same(vote.sums, plain([rank for rank in range(3) if rank != absent]))


def failing(world: World) -> tuple[str, bool, int]:
    error = CapacityError("no room") if world.rank == 1 else None
    try:
        all_reduce_in_order(world, "grads", grads(world.rank), error)
        text = "nothing raised"
    except CapacityError as reports:
        text = str(reports)
    vote = all_reduce_in_order(world, "grads", [], finite=world.rank != 0)
    return text, vote.finite, len(vote.sums)


def test_an_error_of_one_rank_is_raised_on_all_before_anything_is_sent_and_the_next_vote_works() -> None:
    assert run_ranks(3, failing) == [("rank 1: no room", False, 0)] * 3
