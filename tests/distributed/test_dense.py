"""Dense gradients over ranks have the bits of a plain sum in the order of the ranks, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.ranks import alike, fails, run_ranks
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


def summed(world: World) -> dict[int, Vote]:
    """By the rank that has no batch, -1 for none."""
    return {
        absent: all_reduce_in_order(world, "grads", grads(world.rank), present=world.rank != absent)
        for absent in range(-1, world.size)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_those_in_the_order_of_ranks_of_those_that_have_a_batch(ranks: int) -> None:
    for votes in run_ranks(ranks, summed):
        for absent, vote in votes.items():
            present = [rank for rank in range(ranks) if rank != absent]
            assert (vote.present, vote.finite) == (len(present), True)
            for found, expected in zip(vote.sums, plain(present), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


def failing(world: World) -> tuple[str, bool, int]:
    error = CapacityError("no room") if world.rank == 1 else None
    text = fails(lambda: all_reduce_in_order(world, "grads", grads(world.rank), error), CapacityError)
    vote = all_reduce_in_order(world, "grads", [], finite=world.rank != 0)
    return text, vote.finite, len(vote.sums)


def test_an_error_of_one_rank_is_raised_on_all_before_anything_is_sent_and_the_next_vote_works() -> None:
    assert alike(3, failing) == ("rank 1: no room", False, 0)
