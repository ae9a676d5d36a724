"""A graph over ranks trains with the bits of one process that accumulates the same parts and takes their mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from support.ranked import Ranked, assert_equal, batch, state
from support.ranks import assert_alike, on_ranks, outcome, run_kept
from tierbed import Graph, MultiTableEmbedding, World, make_host_mem_store_options

STEPS = 4


def _scaled(graph: Ranked) -> None:
    graph.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    graph.set_grad_scaler(graph.scaler)


SETTINGS: dict[str, Callable[[Ranked], Any]] = {
    "plain": lambda graph: None,
    "norm": lambda graph: [graph.clip_grad_norm(0.05), _scaled(graph)],
    "everything": lambda graph: [graph.clip_grad_norm(0.05), graph.clip_grad_value(0.001), _scaled(graph)],
}


class Scaled(Ranked):
    """Multiplies its loss where it has a scaler."""

    scaler: Any = None

    def loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)


def reached(graph: Scaled) -> dict[str, Tensor]:
    scale = 1.0 if graph.scaler is None else graph.scaler.get_scale()
    return state(graph) | {"scale": torch.tensor(scale), "lr": torch.tensor(graph.optimizer.param_groups[0]["lr"])}


def over_ranks(world: World, setting: str, by_run: bool) -> tuple[list[float], dict[str, Tensor]]:
    graph = Scaled(world)
    SETTINGS[setting](graph)
    mine = [batch(world.rank, step, size=5 + 3 * world.rank) for step in range(STEPS)]
    losses = list(graph.run(mine, ahead=2)) if by_run else [graph(*one) for one in mine]
    return [loss.item() for loss in losses], reached(graph)


def in_one_process(ranks: int, setting: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each rank's parts, and the state."""
    graph = Scaled(None)
    SETTINGS[setting](graph)
    graph.accumulate_grads(ranks, mean=True)
    parts = [[graph(*batch(rank, step, size=5 + 3 * rank)).item() for rank in range(ranks)] for step in range(STEPS)]
    return [list(losses) for losses in zip(*parts, strict=True)], reached(graph)


@pytest.mark.parametrize(
    ("ranks", "by_run", "setting"),
    [
        pytest.param(3, True, "plain", marks=pytest.mark.slow),
        pytest.param(2, False, "norm", marks=pytest.mark.slow),
        (2, True, "everything"),
    ],
)
def test_ranks_train_as_one_process_that_accumulates_their_parts(ranks: int, by_run: bool, setting: str) -> None:
    losses, expected = in_one_process(ranks, setting)
    for mine, (found, there) in zip(losses, run_kept(ranks, over_ranks, setting, by_run), strict=True):
        assert found == mine
        assert_equal(there, expected)


@on_ranks(2, run_kept)
def test_what_travels_is_shown_as_a_stage_of_its_own(world: World, tmp_path: Path) -> None:
    graph, drawn = Ranked(world), tmp_path / f"{world.rank}.mmd"
    assert "exchange" in graph.profile([batch(world.rank, step) for step in range(3)]).stages
    lines = [line.strip() for line in repr(graph).splitlines()]
    assert lines.index("# pin") < lines.index("# gather") < lines.index("# exchange") < lines.index("# update")
    assert next(line for line in lines if line.startswith("send")).endswith("# items in host_mem")
    graph.draw(str(drawn))
    assert '["exchange"]' in drawn.read_text()


class _Sparse(nn.Linear):
    """Uses its weight as an embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(torch.zeros(len(x), dtype=torch.int64), self.weight, sparse=True)


REFUSED: list[tuple[Callable[[Ranked], Any], str]] = [
    (lambda graph: setattr(graph.items, "world", World()), "GraphError: .* embedding 'items' is over a world of 2"),
    (lambda graph: setattr(graph.items, "world", None), "GraphError: .*, but embedding .* is in this process alone"),
    (lambda graph: graph.cuda_graph(), "OptionError: .*cuda_graph: ranks exchange rows through host memory"),
    (lambda graph: setattr(graph, "after", DistributedDataParallel(graph.after)), "GraphError: .*without it"),
    (lambda graph: setattr(graph.before, "__class__", _Sparse), "GraphError: .*'before_weight' is sparse"),
]


@on_ranks(2)
def test_what_a_graph_over_ranks_cannot_hold_is_refused_on_all(world: World) -> None:
    for spoil, pattern in REFUSED:
        graph = Ranked(world)
        spoil(graph)
        said = outcome(partial(graph, *batch(world.rank, 0)))
        assert re.match(pattern, said), said


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


@on_ranks(2, run_kept)
def test_an_evaluation_begins_with_rank_0s_values_and_a_further_graph_leaves_buffers(world: World) -> None:
    graph = Normed(world)
    scores = graph.eval()(IDS)
    if world.rank == 0:
        nn.init.ones_(graph.top.weight)  # as a checkpoint that rank 0 alone loads
    graph.train()(IDS[world.rank :] + world.rank)
    assert_alike(world, {"scores": scores, "weight": graph.top.weight.detach()})
    mean = graph.norm.running_mean.clone()
    assert not torch.equal(*world.gather(mean).chunk(2))  # of the ids of each rank
    Normed(world, graph).eval()(IDS)
    assert torch.equal(graph.norm.running_mean, mean)
