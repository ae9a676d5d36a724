"""Parameters and buffers begin as those of rank 0, whatever a graph does first; then buffers are each rank's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.ranks import run_ranks
from tierbed import Graph, MultiTableEmbedding, World, make_host_mem_store_options

IDS = torch.arange(12)


class Normed(Graph):
    """An embedding, a BatchNorm and a linear layer, which each rank draws for itself, or the modules of another."""

    def __init__(self, world: World, of: Normed | None = None) -> None:
        super().__init__()
        if of is not None:
            self.rows, self.norm, self.top = of.rows, of.norm, of.top
            return
        torch.manual_seed(world.rank)
        store = make_host_mem_store_options()
        self.rows = MultiTableEmbedding("rows", 4, torch.float32, torch.int64, None, store, world=world)
        self.norm, self.top = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.norm.running_mean = torch.rand(4)
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Any:
        scores = self.top(self.norm(self.rows(ids)))
        if self.training:
            scores.square().mean().backward()
        return scores


def of_graphs(world: World) -> dict[str, Tensor]:
    """Scores, buffers and weights at points of a run."""
    graph = Normed(world)
    found = {"scores first": graph.eval()(IDS)}
    if world.rank == 0:
        nn.init.ones_(graph.top.weight)  # as a checkpoint that rank 0 alone loads
    graph.train()(IDS[world.rank :] + world.rank)
    found |= {"weight": graph.top.weight.detach().clone(), "trained mean": graph.norm.running_mean.clone()}
    Normed(world, graph).eval()(IDS)
    return found | {"mean after scores": graph.norm.running_mean.clone()}


def test_an_evaluation_begins_with_rank_0s_values_and_a_further_graph_leaves_buffers() -> None:
    one, two = run_ranks(2, of_graphs)
    for name in ("scores first", "weight"):
        assert torch.equal(one[name], two[name]), name
    assert not torch.equal(one["trained mean"], two["trained mean"])  # of the ids of each rank
    for found in (one, two):
        assert torch.equal(found["trained mean"], found["mean after scores"])
