"""What a compiled step must not freeze silently: `.data`, values, attributes, hooks, names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from support.graphs import embedding, graph_of
from tierbed import (
    Graph,
    GraphError,
)


class Reads(Graph):
    """A graph whose build is the given function of the graph and x."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.net, self.mask = function, nn.Linear(2, 2), None

    def build(self, x: Tensor) -> Tensor:
        return self.function(self, x)


X = torch.ones(1, 2)


def test_an_assignment_to_data_is_refused_not_lost() -> None:
    def clamp(graph: Any, x: Tensor) -> Tensor:
        graph.net.weight.data = graph.net.weight.data.clamp(-0.1, 0.1)
        return graph.net(x)

    with pytest.raises(GraphError, match=r"\.data .*copy_"):
        Reads(clamp)(X)


@pytest.mark.parametrize("value", [lambda t: t.item(), float, int])
def test_the_value_of_an_attribute_is_refused_not_frozen(value: Callable[[Tensor], float]) -> None:
    graph = Reads(lambda graph, x: x * value(graph.mask))
    graph.mask = torch.tensor(2.0)
    with pytest.raises(GraphError, match="reads the value of the tensor"):
        graph(X)
    assert Reads(lambda graph, x: x * torch.tensor(3.0).item())(X).sum() == 6


def test_an_attribute_that_was_none_or_has_another_shape_is_traced_anew() -> None:
    graph = Reads(lambda graph, x: x if graph.mask is None else x * graph.mask.shape[0])
    assert graph(X).sum() == 2
    for size in (5, 3, 4, 5, 1):
        del graph.mask  # its id may come again
        graph.mask = torch.ones(size)
        assert graph(X).sum() == 2 * size


def test_a_hook_in_the_place_of_another_is_seen() -> None:
    graph = Reads(lambda graph, x: graph.net(x))
    plain = graph(X)
    for factor in (2.0, 3.0):
        hook = graph.net.register_forward_hook(lambda module, args, output, factor=factor: output * factor)
        torch.testing.assert_close(graph(X), plain * factor)
        hook.remove()
    torch.testing.assert_close(graph(X), plain)


@pytest.mark.parametrize("name", ["code", "graph", "recompile", "_code", "forward", "sgd"])
def test_an_embedding_may_have_any_name_in_the_graph(name: str) -> None:
    rows, holder, ids = embedding(), nn.Module(), torch.tensor([1])
    graph = graph_of(
        lambda graph, ids: rows(ids).sum().backward(), torch.optim.SGD(rows.parameters(), lr=1.0), holder=holder
    )
    setattr(holder if hasattr(graph, name) else graph, name, rows)
    before = rows.get(ids)
    graph(ids)
    torch.testing.assert_close(rows.get(ids), before - 1)


def test_a_vocabulary_on_a_module_is_whole_after_a_trace() -> None:
    graph = Reads(lambda graph, x: graph.net(x))
    graph.vocabulary = dict.fromkeys(range(300_000))
    seen: list[int] = []
    graph.net.register_forward_hook(lambda *_: seen.append(len(graph.vocabulary)))
    graph(X)
    assert seen == [len(graph.vocabulary)] == [300_000]


def test_an_evaluation_graph_compiles_while_another_thread_trains() -> None:
    rows = embedding()
    train = graph_of(
        lambda graph, ids: graph.rows(ids).sum().backward(), torch.optim.SGD(rows.parameters(), lr=1e-3), rows=rows
    )
    score = graph_of(lambda graph, ids: graph.rows(ids).sum(), rows=rows)
    train(torch.arange(8))
    stop = threading.Event()

    def work() -> int:
        steps = 0
        while not stop.is_set():
            train(torch.arange(8))
            steps += 1
        return steps

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(work)
        try:
            assert all(torch.isfinite(score(torch.arange(size))) for size in range(1, 15))
        finally:
            stop.set()
        assert trained.result() > 0


class Key(str):
    """A key that makes one call at its next comparison, as another thread may at any time."""

    meanwhile: ClassVar[list[Callable[[], object]]] = []

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if self.meanwhile:
            self.meanwhile.pop()()
        return str.__eq__(self, other)


def test_a_call_meanwhile_of_other_containers_leaves_the_arguments_in_their_places() -> None:
    graph = graph_of(lambda graph, batch: batch["a"] - batch["b"])
    five, three = torch.tensor([5.0]), torch.tensor([3.0])
    assert graph({Key("a"): five, "b": three}) == 2
    Key.meanwhile.append(lambda: graph({"b": three, "a": five}))
    assert graph({Key("a"): five, "b": three}) == 2
    assert not Key.meanwhile


SCHEDULES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 100).step,
    "chain": lambda optimizer: (
        lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
        ).step
    ),
    "item": lambda optimizer: lambda: optimizer.param_groups[0].__setitem__("lr", 0.1),
    "update": lambda optimizer: lambda: optimizer.param_groups[0].update(lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.rotated("as_tensor")
def test_a_schedule_that_build_steps_is_refused_not_frozen(schedule: str, as_tensor: bool) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1) if as_tensor else 0.1)

    def build(graph: Any, x: Tensor) -> Tensor:
        assert float(graph.optimizer.param_groups[0]["betas"][0]) == 0.9  # settings may be read
        loss = graph.net(x).sum()
        loss.backward()
        if graph.step is not None:
            graph.step()
        return loss

    graph = graph_of(build, optimizer, net=net)
    graph.optimizer, graph.step = optimizer, SCHEDULES[schedule](optimizer)
    groups = optimizer.param_groups[0]
    with pytest.raises(GraphError, match=r"build sets 'lr' of a param group of Adam.*lr_sch=scheduler"):
        graph(torch.ones(2, 3))
    graph.step = None
    before = net.weight.clone()
    graph(torch.ones(2, 3))
    assert not torch.equal(net.weight, before)
    assert optimizer.param_groups[0] is groups
    assert groups["params"][0] is net.weight
