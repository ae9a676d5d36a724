"""Ranks clip by one norm, on processors that add in orders of their own as well."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from support.ranks import run_ranks
from tierbed import Graph, MultiTableEmbedding, World, make_host_mem_store_options
from tierbed.engine.ops.exact_sum import sum_of_squares

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


def clipped(world: World) -> Tensor:
    torch.set_num_threads(1 + world.rank)
    graph = Half(world)
    graph(torch.arange(3), GRADIENT if world.rank == 0 else torch.zeros_like(GRADIENT))
    return graph.weight.detach()


def test_ranks_with_other_numbers_of_threads_clip_alike() -> None:
    first, second = run_ranks(2, clipped)
    assert first.any()
    assert torch.equal(first, second)


def test_squares_are_added_in_one_order() -> None:
    sizes = [0, 1, 7, 300_001]
    tensors = [torch.arange(size).double() / 7 for size in sizes] + [torch.ones(3, dtype=torch.complex64) * (3 + 4j)]
    expected = math.fsum(x * x for tensor in tensors[:-1] for x in tensor.tolist()) + 75
    assert math.isclose(sum_of_squares(tensors), expected, rel_tol=1e-14)
    assert sum_of_squares([tensors[-2].view(1, -1).t()]) == sum_of_squares(tensors[3:4])
    assert sum_of_squares([]) == 0
    assert math.isnan(sum_of_squares([torch.tensor([1.0, math.nan])]))
    assert sum_of_squares([torch.tensor([-math.inf])]) == math.inf
