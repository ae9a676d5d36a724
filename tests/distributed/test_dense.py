"""Dense gradients over ranks have the bits of a plain sum in the order of the ranks, and are clipped by one norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from support.ranks import assert_alike, on_ranks, run_kept
from tierbed import CapacityError, Graph, MultiTableEmbedding, World, make_host_mem_store_options
from tierbed.distributed.dense_gradients import all_reduce_in_order
from tierbed.engine.ops.exact_sum import sum_squares

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


@on_ranks(3, run_kept)
def test_sums_are_those_in_the_order_of_ranks_of_those_that_have_a_batch(world: World) -> None:
    for absent in range(-1, world.size):  # the rank that has no batch, -1 for none
        vote = all_reduce_in_order(world, "grads", grads(world.rank), contributes=world.rank != absent)
        present = [rank for rank in range(world.size) if rank != absent]
        assert (vote.num_contributors, vote.is_finite) == (len(present), True)
        for found, expected in zip(vote.sums, plain(present), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_ranks(2, run_kept)
def test_an_error_of_one_rank_is_raised_on_all_before_anything_is_sent_and_the_next_vote_works(world: World) -> None:
    error = CapacityError("no room") if world.rank == 1 else None
    with pytest.raises(CapacityError, match=r"^rank 1: no room$"):
        all_reduce_in_order(world, "grads", grads(world.rank), error)
    vote = all_reduce_in_order(world, "grads", [], is_finite=world.rank != 0)
    assert (vote.is_finite, vote.sums) == (False, [])


# numbers whose norm torch rounds otherwise with two threads than with one
GRADIENT = ((torch.arange(460_051) * 7919 + 51) % 100_003 * 0.37e-3 - 11).half()


class Half(Graph):
    """A parameter of 16 bits, whose gradient is what `build` is given, beside rows."""

    def __init__(self, world: World) -> None:
        super().__init__()
        store = make_host_mem_store_options()
        self.rows = MultiTableEmbedding("rows", 1, torch.float32, torch.int64, None, store, world=world)
        self.weight = nn.Parameter(torch.zeros_like(GRADIENT))
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=1.0))
        self.clip_grad_norm(1000.0)

    def build(self, ids: Tensor, gradient: Tensor) -> Tensor:
        loss = (self.weight * gradient).sum() + self.rows(ids).sum()
        loss.backward()
        return loss


@on_ranks(2)
def test_ranks_with_other_numbers_of_threads_clip_alike(world: World) -> None:
    torch.set_num_threads(1 + world.rank)
    graph = Half(world)
    graph(torch.arange(3), GRADIENT if world.rank == 0 else torch.zeros_like(GRADIENT))
    assert graph.weight.any()
    assert_alike(world, {"weight": graph.weight.detach()})


def test_squares_are_added_in_one_order() -> None:
    sizes = [0, 1, 7, 140_001]
    tensors = [torch.arange(size).double() / 7 for size in sizes] + [torch.ones(3, dtype=torch.complex64) * (3 + 4j)]
    expected = math.fsum(x * x for tensor in tensors[:-1] for x in tensor.tolist()) + 75
    assert math.isclose(sum_squares(tensors), expected, rel_tol=1e-14)
    assert sum_squares([tensors[-2].view(1, -1).t()]) == sum_squares(tensors[3:4])
    assert sum_squares([]) == 0
    assert math.isnan(sum_squares([torch.tensor([1.0, math.nan])]))
    assert sum_squares([torch.tensor([-math.inf])]) == math.inf
