"""What a compiled step must not freeze silently: `.data`, values, attributes, hooks, names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from support.graphs import graph_of
from tierbed import (
    Graph,
    GraphError,
    MultiTableEmbedding,
    make_constant_initializer,
    make_device_mem_store_options,
    make_table_options,
)


class Reads(Graph):
    """A graph whose build is the given function of the graph and x."""

    def __init__(self, function: Callable[[Reads, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.net = nn.Linear(2, 2)
        self.mask: Tensor | None = None

    def build(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def items(name: str = "items") -> MultiTableEmbedding:
    table = make_table_options(make_constant_initializer(1.0))
    return MultiTableEmbedding(name, 2, torch.float32, torch.int64, [table], make_device_mem_store_options())


X = torch.ones(1, 2)


def test_an_assignment_to_data_is_refused_not_lost() -> None:
    def clamp(graph: Reads, x: Tensor) -> Tensor:
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
    class Train(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict() if name in dir(nn.Module) else None
            self.embeddings = nn.Module()
            setattr(self if not hasattr(self, name) else self.embeddings, name, embedding)
            self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))

        def build(self, ids: Tensor) -> Tensor:
            rows = embedding(ids)
            rows.sum().backward()
            return rows

    embedding = items()
    graph = Train()
    graph(torch.tensor([1]))
    assert embedding.get([1]).tolist() == [[0.0, 0.0]]


def test_a_vocabulary_on_a_module_is_whole_after_a_trace() -> None:
    graph = Reads(lambda graph, x: graph.net(x))
    graph.vocabulary = {str(i): i for i in range(300_000)}
    seen: list[int] = []
    graph.net.register_forward_hook(lambda *_: seen.append(len(graph.vocabulary)))
    graph(X)
    assert seen == [300_000]
    assert len(graph.vocabulary) == 300_000


def test_an_evaluation_graph_compiles_while_another_thread_trains() -> None:
    embedding, net = items(), nn.Linear(2, 1)

    class Train(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.net = embedding, net
            self.add_optimizer(torch.optim.SGD([*embedding.parameters(), *net.parameters()], lr=1e-3))

        def build(self, ids: Tensor) -> Tensor:
            loss = self.net(self.embedding(ids)).sum()
            loss.backward()
            return loss

    class Score(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding

        def build(self, ids: Tensor) -> Tensor:
            return self.embedding(ids).sum()

    train, score = Train(), Score()
    train(torch.arange(8))
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(300):
                train(torch.arange(8))
        except Exception as error:
            failures.append(error)

    trainer = threading.Thread(target=work)
    trainer.start()
    for size in range(1, 30):
        assert torch.isfinite(score(torch.arange(size)))
    trainer.join()
    assert not failures


class Key(str):
    """A key that makes one call at its next comparison, as another thread may at any time."""

    meanwhile: ClassVar[list[Callable[[], object]]] = []

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if self.meanwhile:
            self.meanwhile.pop()()
        return str.__eq__(self, other)


def test_a_call_meanwhile_of_other_containers_leaves_the_arguments_in_their_places() -> None:
    class Difference(Graph):
        def build(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["a"] - batch["b"]

    graph, five, three = Difference(), torch.tensor([5.0]), torch.tensor([3.0])
    assert graph({Key("a"): five, "b": three}) == 2
    Key.meanwhile.append(lambda: graph({"b": three, "a": five}))
    assert graph({Key("a"): five, "b": three}) == 2
    assert not Key.meanwhile


SCHEDULES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 100).step,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10).step,
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
