"""What a graph over ranks refuses, on all ranks alike."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from support.ranked import Ranked, batch
from support.ranks import run_ranks
from tierbed import TierbedError, World


def other_world(graph: Ranked) -> None:
    graph.items.world = World()


def no_world(graph: Ranked) -> None:
    graph.items.world = None


def recorded(graph: Ranked) -> None:
    graph.cuda_graph()


def wrapped(graph: Ranked) -> None:
    graph.after = DistributedDataParallel(graph.after)


class _Sparse(nn.Linear):
    """Uses its weight as an embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(torch.zeros(len(x), dtype=torch.int64), self.weight, sparse=True)


def sparse(graph: Ranked) -> None:
    graph.before.__class__ = _Sparse


REFUSED: dict[str, tuple[Any, str]] = {
    "other world": (other_world, "GraphError: .*embeddings 'users' and 'items': one is over a world of 2 ranks, and"),
    "no world": (no_world, "GraphError: .*one is over a world of 2 ranks, and one is in this process alone"),
    "cuda_graph": (
        recorded,
        "OptionError: .*cuda_graph: rows of a world are sent between ranks through host memory.*without the host",
    ),
    "DDP": (wrapped, "GraphError: .*after is a DistributedDataParallel: .*give the graph the module without it"),
    "sparse": (sparse, "GraphError: .*the gradient of parameter 'before_weight' is sparse"),
}


def refusal(world: World, kind: str) -> str:
    graph = Ranked(world)
    REFUSED[kind][0](graph)
    try:
        graph(*batch(world.rank, 0))
    except TierbedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_graph_over_ranks_cannot_hold_is_refused_on_all(kind: str) -> None:
    for reports in run_ranks(2, refusal, kind):
        assert re.match(REFUSED[kind][1], reports), reports
