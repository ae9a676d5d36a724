"""A step is used again where it fits, and only there: what a call may change without being read is part of its key."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from support.graphs import DIM, Rating, Train, batches, compiled_steps, embedding, graph_of, id_batches, mlp, training
from tierbed import Graph, GraphError


def test_loaded_and_replaced_parameters_are_read_live() -> None:
    model = mlp()
    x, y = batches(1)[0]
    train = Train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    evaluate = graph_of(lambda graph, x, y: F.mse_loss(graph.model(x), y), model=model)
    for graph, assign in ((train, False), (evaluate, False), (evaluate, True)):
        graph(x, y)
        other = mlp()
        model.load_state_dict(other.state_dict(), assign=assign)
        torch.testing.assert_close(graph(x, y), F.mse_loss(other(x), y).detach())
    model[0] = nn.Linear(6, 8)
    torch.testing.assert_close(graph(x, y), F.mse_loss(model(x), y).detach())


def test_numbers_keywords_and_nested_arguments_are_part_of_the_signature() -> None:
    class Scaled(Graph):
        def build(self, batch: dict[str, Tensor], *, power: float = 1, flag: bool = True) -> Tensor:
            return batch["x"] ** power if flag else batch["x"] - batch["y"]

    graph, x = Scaled(), torch.full((2,), 3.0)
    batch = {"x": x, "y": x}
    assert graph(batch).tolist() == [3, 3]
    assert graph(batch, power=2).tolist() == [9, 9]
    assert graph(batch, flag=False).tolist() == [0, 0]
    assert graph({"x": x, "y": torch.zeros(2)}, flag=False).tolist() == [3, 3]  # a tensor given twice is two arguments
    assert graph(batch, power=2).tolist() == [9, 9]
    assert compiled_steps(graph) == 3


def test_arguments_that_are_equal_but_not_the_same_have_steps_of_their_own() -> None:
    graph = graph_of(lambda graph, x, value: (type(value).__name__, x / value))
    x = torch.ones(1)
    assert [graph(x, value)[0] for value in (1, True, 1.0)] == ["int", "bool", "float"]
    assert [graph(x, value)[1] for value in (0.0, -0.0)] == [float("inf"), float("-inf")]
    for _ in range(3):
        graph(x, float("nan"))
    assert compiled_steps(graph) == 6
    graph = graph_of(lambda graph, x, function, dtype, kind: function(x).to(dtype))
    assert graph(x, torch.relu, torch.float64, int).dtype is torch.float64
    assert graph(x, lambda x: -x, torch.int64, int).tolist() == [-1]


def test_gradient_mode_is_part_of_the_signature() -> None:
    def build(graph: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(graph.model(x), y)
        if torch.is_grad_enabled():
            loss.backward()
        return loss

    model = mlp()
    graph = graph_of(build, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    x, y = batches(1)[0]
    first = graph(x, y)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            second = graph(x, y)
            assert second < first
            assert graph(x, y) == second


def test_what_trains_may_change_after_the_first_call() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    model[0].bias.requires_grad_(False)
    graph = Train(model, optimizer)
    x, y = batches(1)[0]
    graph(x, y)
    before = copy.deepcopy(model)
    model.requires_grad_(True)
    graph.add_optimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))
    optimizer.add_param_group({"params": [model[0].bias]})
    graph(x, y)
    assert not any(torch.equal(old, new) for old, new in zip(before.parameters(), model.parameters(), strict=True))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    graph(x, y)
    assert torch.equal(model[0].weight, before[0].weight)
    model[2].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(GraphError, match=r"model\.2\.weight has a gradient hook"):
        graph(x, y)


def test_attributes_of_the_user_do_not_meet_those_of_the_graph() -> None:
    graph = graph_of(lambda graph, x: x + graph._steps)
    graph._steps, graph._last, graph._optimizers, graph._structure = 1, 2, 3, 4
    assert graph(torch.zeros(1)) == 1


def test_states_and_loads_of_rows_cost_no_step() -> None:
    rows, net = embedding(), mlp(5 * DIM)
    graph = Rating(rows, net, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.5))
    ids = id_batches(8, 3)[0]
    graph(ids, ids[:, :1], ids[:, :1])
    for call in (
        lambda: graph.load_state_dict(graph.state_dict()),
        rows.keep_rows,
        rows.metrics,
        lambda: rows.delete([7]),
        lambda: rows.put([7], torch.zeros(1, DIM)),
        lambda: rows.prefetch(ids),
    ):
        call()
        graph(ids, ids[:, :1], ids[:, :1])
        assert graph.why_recompiled() == []


def test_an_attribute_that_was_none_or_has_another_shape_is_traced_anew() -> None:
    graph, x = graph_of(lambda graph, x: x if graph.mask is None else x * graph.mask.shape[0]), torch.ones(2)
    graph.mask = None
    assert graph(x).sum() == 2
    for size in (5, 3, 4, 5, 1):
        del graph.mask  # its id may come again
        graph.mask = torch.ones(size)
        assert graph(x).sum() == 2 * size


def test_a_hook_in_the_place_of_another_is_seen() -> None:
    graph, x = graph_of(lambda graph, x: graph.net(x), net=nn.Linear(2, 2)), torch.ones(1, 2)
    plain = graph(x)
    for factor in (2.0, 3.0):
        hook = graph.net.register_forward_hook(lambda module, args, output, factor=factor: output * factor)
        torch.testing.assert_close(graph(x), plain * factor)
        hook.remove()
    torch.testing.assert_close(graph(x), plain)


@pytest.mark.parametrize("name", ["code", "graph", "recompile", "_code", "forward", "sgd"])
def test_an_embedding_may_have_any_name_in_the_graph(name: str) -> None:
    rows, holder, ids = embedding(), nn.Module(), torch.tensor([1])
    graph = training(lambda graph, ids: rows(ids).sum(), lr=1.0, holder=holder, rows=rows)
    del graph.rows
    setattr(holder if hasattr(graph, name) else graph, name, rows)
    before = rows.get(ids)
    graph(ids)
    torch.testing.assert_close(rows.get(ids), before - 1)


def test_a_vocabulary_on_a_module_is_whole_after_a_trace() -> None:
    graph = graph_of(lambda graph, x: graph.net(x), net=nn.Linear(2, 2))
    graph.vocabulary = dict.fromkeys(range(300_000))
    seen: list[int] = []
    graph.net.register_forward_hook(lambda *_: seen.append(len(graph.vocabulary)))
    graph(torch.ones(1, 2))
    assert seen == [len(graph.vocabulary)] == [300_000]


def test_an_evaluation_graph_compiles_while_another_thread_trains() -> None:
    rows = embedding()
    train = training(lambda graph, ids: graph.rows(ids).sum(), rows=rows)
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
