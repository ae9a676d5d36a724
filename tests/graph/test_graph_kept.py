"""Nothing of a trace stays behind: a tensor that build keeps somewhere is found, taken away and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import embedding, graph_of
from tierbed import Graph, GraphError


class Cache(nn.Module):
    """A layer that keeps a tensor in one of the ways of lazy caches and logs."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.keep = keep
        self.losses: list[Tensor] = []
        self.acts = {"seen": [torch.zeros(1)]}
        self.register_buffer("empty", None)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return x * 2


KEEPS: dict[str, Callable[[Any, Tensor], Any]] = {
    "last": lambda m, x: setattr(m, "last", x),
    "state": lambda m, x: setattr(m, "state", (x, [x])),
    "losses": lambda m, x: m.losses.append(x.detach()),
    "acts.y": lambda m, x: m.acts.update(y=x),
    "acts.seen": lambda m, x: m.acts["seen"].append(x),
    "empty": lambda m, x: setattr(m, "empty", x),
    "lazy": lambda m, x: m.register_buffer("lazy", torch.arange(3)),
    "weight": lambda m, x: setattr(m, "weight", nn.Parameter(torch.ones(3))),
}


def graph_with(keep: Callable[[Any, Tensor], Any]) -> tuple[Graph, Cache]:
    cache = Cache(keep)
    return graph_of(lambda graph, x: graph.cache(x), cache=cache), cache


@pytest.mark.parametrize("place", KEEPS)
def test_a_tensor_kept_on_a_module_is_refused_and_taken_away(place: str) -> None:
    graph, cache = graph_with(KEEPS[place])
    before = {name: list(value) if isinstance(value, list | dict) else value for name, value in vars(cache).items()}
    for _ in range(2):
        with pytest.raises(GraphError, match=rf"attribute Cache\.{place}, but only the first call"):
            graph(torch.ones(2))
        for name, value in vars(cache).items():
            assert before[name] == (list(value) if isinstance(value, list | dict) else value)
        assert [len(value) for value in cache.acts.values()] == [1]
    cache.keep = lambda m, x: None
    assert graph(torch.ones(2)).tolist() == [2, 2]


def test_a_tensor_kept_by_a_build_that_raises_is_taken_away() -> None:
    def keep(module: Any, x: Tensor) -> None:
        module.losses.append(x)
        raise KeyError("mine")

    graph, cache = graph_with(keep)
    with pytest.raises(KeyError, match="mine"):
        graph(torch.ones(2))
    assert cache.losses == []


def test_a_submodule_made_in_build_is_refused() -> None:
    graph, cache = graph_with(lambda m, x: setattr(m, "head", nn.Linear(2, 1)))
    with pytest.raises(GraphError, match=r"attribute Linear\.(weight|bias)"):
        graph(torch.ones(2))
    assert not hasattr(cache, "head")


@pytest.mark.parametrize("value", [lambda x: x + 1, lambda x: None])
def test_a_buffer_that_build_replaces_is_refused_and_restored(value: Callable[[Tensor], Any]) -> None:
    graph, cache = graph_with(lambda m, x: setattr(m, "count", value(m.count)))
    with pytest.raises(GraphError, match=r"replaces cache\.count"):
        graph(torch.ones(2))
    assert type(cache.count) is Tensor
    assert cache.count == 0


def test_old_weight_norm_is_refused_with_the_new_one_as_remedy() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(2, 1))
    with pytest.raises(GraphError, match=r"torch\.nn\.utils\.parametrizations"):
        graph_of(lambda graph, x: graph.layer(x), layer=layer)(torch.ones(2))


def test_a_parameter_or_argument_that_build_returns_is_detached() -> None:
    layer = nn.Linear(2, 1)
    views = (lambda t: t, lambda t: t.detach(), lambda t: t[0], lambda t: t.view(-1))
    graph = graph_of(lambda graph, x: [view(t) for view in views for t in (graph.layer.weight, x)], layer=layer)
    for result in graph(torch.ones(2, 2, requires_grad=True)):
        assert type(result) is Tensor
        assert not result.requires_grad


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
    assert message.startswith("Built is in training mode, but nothing is trained")
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
