"""What a graph over ranks refuses, on all ranks alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from support.ranked import Ranked, batch
from support.ranks import outcome, run_ranks
from tierbed import World


class _Sparse(nn.Linear):
    """Uses its weight as an embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(torch.zeros(len(x), dtype=torch.int64), self.weight, sparse=True)


REFUSED: list[tuple[Callable[[Ranked], Any], str]] = [
    (
        lambda graph: setattr(graph.items, "world", World()),
        "GraphError: .*embeddings 'users' and 'items': one is over a world of 2 ranks, and",
    ),
    (
        lambda graph: setattr(graph.items, "world", None),
        "GraphError: .*one is over a world of 2 ranks, and one is in this process alone",
    ),
    (lambda graph: graph.cuda_graph(), "OptionError: .*cuda_graph: ranks exchange rows through host memory"),
    (
        lambda graph: setattr(graph, "after", DistributedDataParallel(graph.after)),
        "GraphError: .*after is a DistributedDataParallel: .*give the graph the module without it",
    ),
    (
        lambda graph: setattr(graph.before, "__class__", _Sparse),
        "GraphError: .*the gradient of parameter 'before_weight' is sparse",
    ),
]


def refusals(world: World) -> list[str]:
    said = []
    for spoil, _ in REFUSED:
        graph = Ranked(world)
        spoil(graph)
        said.append(outcome(lambda graph=graph: graph(*batch(world.rank, 0))))  # type: ignore[misc]
    return said


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_a_graph_over_ranks_cannot_hold_is_refused_on_all() -> None:
    for said in run_ranks(2, refusals):
        for text, (_, pattern) in zip(said, REFUSED, strict=True):
            assert re.match(pattern, text), text
