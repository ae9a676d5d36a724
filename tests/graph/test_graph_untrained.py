"""A graph with optimizers that trains nothing says so, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import embedding, graph_of
from tierbed import Graph

X = torch.ones(2, 3)


def forgets(graph: Any, x: Tensor) -> Tensor:
    return graph.net(x).sum()


def drops(graph: Any, x: Tensor) -> Tensor:
    loss: Tensor = graph.net(x).sum()
    loss.backward()
    graph.net.zero_grad()
    return loss


def trains(graph: Any, x: Tensor, train: bool = True) -> Tensor:
    loss: Tensor = graph.net(x).sum()
    if train:
        loss.backward()
    return loss


def graph_with(build: Callable[..., Any]) -> Graph:
    net = nn.Linear(3, 1)
    return graph_of(build, torch.optim.SGD(net.parameters(), lr=0.1), net=net)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "tierbed" and "nothing is trained" in r.getMessage()]


@pytest.mark.parametrize("build", [forgets, drops])
def test_a_build_without_gradients_does_not_train_in_silence(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    graph = graph_with(build)
    for rows in (1, 2, 3):
        graph(X[:1].expand(rows, 3))
    (message,) = warnings(caplog)
    assert message.startswith("Built has optimizers and is in training mode")
    assert "loss.backward()" in message


def test_rows_that_nothing_trains_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rows = embedding()
    graph = graph_of(lambda graph, ids: graph.rows(ids), torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    graph(torch.arange(3))
    assert len(warnings(caplog)) == 1


def test_evaluation_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    graph = graph_with(forgets)
    graph.eval()(X)
    with torch.no_grad():
        graph.train()(X)
    graph.net.requires_grad_(False)  # type: ignore[union-attr]
    graph(X)
    graph_of(forgets, net=nn.Linear(3, 1))(X)
    both = graph_with(trains)
    both(X, True)
    both(X, False)
    assert warnings(caplog) == []
