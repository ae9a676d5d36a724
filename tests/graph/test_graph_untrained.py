"""A graph with optimizers that trains nothing says so, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import embedding, graph_of
from tierbed import Graph

X = torch.ones(2, 3)


def build(graph: Any, x: Tensor, train: bool = True, clear: bool = False) -> Tensor:
    loss: Tensor = graph.net(x).sum()
    if train:
        loss.backward()
    if clear:
        graph.net.zero_grad()
    return loss


def graph_with_optimizer() -> Graph:
    net = nn.Linear(3, 1)
    return graph_of(build, torch.optim.SGD(net.parameters(), lr=0.1), net=net)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "tierbed" and "nothing is trained" in r.getMessage()]


@pytest.mark.parametrize("how", [(False, False), (True, True)], ids=["forgets", "clears"])
def test_a_build_without_gradients_does_not_train_in_silence(
    how: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    graph = graph_with_optimizer()
    for rows in (1, 2, 3):
        graph(X[:1].expand(rows, 3), *how)
    (message,) = warnings(caplog)
    assert message.startswith("Built has optimizers and is in training mode")
    assert "loss.backward()" in message


def test_rows_that_nothing_trains_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rows = embedding()
    graph = graph_of(lambda graph, ids: graph.rows(ids), torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    graph(torch.arange(3))
    assert len(warnings(caplog)) == 1


def test_evaluation_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    graph = graph_with_optimizer()
    graph.eval()(X, False)
    with torch.no_grad():
        graph.train()(X, False)
    graph.net.requires_grad_(False)  # type: ignore[union-attr]
    graph(X, False)
    graph_of(build, net=nn.Linear(3, 1))(X, False)
    both = graph_with_optimizer()
    both(X, True)
    both(X, False)
    assert warnings(caplog) == []
