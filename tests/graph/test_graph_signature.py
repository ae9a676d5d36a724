"""A step is used again where it fits, and only there: what a call may change without being read is part of its key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.graphs import DIM, Rating, Train, batches, compiled_steps, embedding, graph_of, id_batches, mlp
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


def test_closure_tensors_are_read_and_written_live() -> None:
    scale, count = torch.tensor(2.0), torch.zeros(2)

    def build(graph: Any, x: Tensor) -> Tensor:
        count[1:].add_(1)
        return x * scale + count.sum()

    graph, x = graph_of(build), torch.ones(3)
    assert graph(x).tolist() == [3, 3, 3]
    scale.fill_(5.0)
    assert graph(x).tolist() == [7, 7, 7]
    assert count.tolist() == [0, 2]


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


def test_too_many_signatures_warn_where_the_call_is_and_keep_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierbed.graph.graph.MAX_CACHED_STEPS", 4)
    graph, x = graph_of(lambda graph, x, number: x + number), torch.zeros(1)
    for number in range(4):
        graph(x, number)
    with pytest.warns(UserWarning, match="4 signatures") as caught:
        assert graph(x, 4) == 4
    assert caught[0].filename == __file__
    assert compiled_steps(graph) == 4


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
