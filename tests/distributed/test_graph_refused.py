"""What a graph over ranks refuses, on all ranks alike."""

from __future__ import annotations

import re
from collections.abc import Callable

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


REFUSED: list[tuple[Callable[[Ranked], None], str]] = [
    (other_world, "GraphError: .*embeddings 'users' and 'items': one is over a world of 2 ranks, and"),
    (no_world, "GraphError: .*one is over a world of 2 ranks, and one is in this process alone"),
    (
        recorded,
        "OptionError: .*cuda_graph: ranks exchange rows through host memory",
    ),
    (wrapped, "GraphError: .*after is a DistributedDataParallel: .*give the graph the module without it"),
    (sparse, "GraphError: .*the gradient of parameter 'before_weight' is sparse"),
]


def refusals(world: World) -> list[str]:
    said = []
    for spoil, _ in REFUSED:
        graph = Ranked(world)
        spoil(graph)
        with pytest.raises(TierbedError) as error:
            graph(*batch(world.rank, 0))
        said.append(f"{error.type.__name__}: {error.value}")
    return said


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_a_graph_over_ranks_cannot_hold_is_refused_on_all() -> None:
    for said in run_ranks(2, refusals):
        for text, (_, pattern) in zip(said, REFUSED, strict=True):
            assert re.match(pattern, text), text
