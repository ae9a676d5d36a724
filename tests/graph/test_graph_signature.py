"""A step is used again where it fits, and only there: what a call may change without being read is part of its key."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.graphs import DIM, Rating, Train, batches, compiled_steps, embedding, graph_of, id_batches, mlp
from tierbed import Graph, GraphError


def test_the_training_flag_of_one_submodule_is_seen() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = batches(1)[0]
    assert graph(x, y) != graph(x, y)
    model[1].eval()
    assert graph(x, y) == graph(x, y)


def test_loaded_and_replaced_parameters_are_read_live() -> None:
    model, other = mlp(), mlp()
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = batches(1)[0]
    graph(x, y)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(graph(x, y), F.mse_loss(other(x), y).detach())

    class Evaluate(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.model(x), y)

    evaluate = Evaluate()
    evaluate(x, y)
    third = mlp()
    model.load_state_dict(third.state_dict(), assign=True)
    torch.testing.assert_close(evaluate(x, y), F.mse_loss(third(x), y).detach())
    model[0] = nn.Linear(6, 8)
    torch.testing.assert_close(evaluate(x, y), F.mse_loss(model(x), y).detach())


def test_closure_tensors_are_read_and_written_live() -> None:
    scale, count = torch.tensor(2.0), torch.zeros(2)

    class Scaled(Graph):
        def build(self, x: Tensor) -> Tensor:
            count[1:].add_(1)
            return x * scale + count.sum()

    graph, x = Scaled(), torch.ones(3)
    assert graph(x).tolist() == [3, 3, 3]
    scale.fill_(5.0)
    assert graph(x).tolist() == [7, 7, 7]
    assert count.tolist() == [0, 2]


def test_numbers_keywords_and_nested_arguments_are_part_of_the_signature() -> None:
    class Scaled(Graph):
        def build(self, batch: dict[str, Tensor], *, power: float = 1, flag: bool = True) -> Tensor:
            return batch["x"] ** power if flag else batch["y"]

    graph = Scaled()
    batch = {"x": torch.full((2,), 3.0), "y": torch.zeros(2)}
    assert graph(batch).tolist() == [3, 3]
    assert graph(batch, power=2).tolist() == [9, 9]
    assert graph(batch, power=2, flag=False).tolist() == [0, 0]
    assert graph(batch, power=2).tolist() == [9, 9]
    assert compiled_steps(graph) == 3


def test_a_tensor_given_twice_is_not_taken_for_one_argument() -> None:
    class Subtract(Graph):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            return x - y

    graph, x = Subtract(), torch.ones(2)
    assert graph(x, x).tolist() == [0, 0]
    assert graph(x, torch.zeros(2)).tolist() == [1, 1]
    assert graph(torch.zeros(2), x).tolist() == [-1, -1]


def test_one_true_and_one_point_zero_are_different_arguments() -> None:
    class Name(Graph):
        def build(self, x: Tensor, value: object) -> str:
            return type(value).__name__

    graph, x = Name(), torch.zeros(1)
    assert [graph(x, v) for v in (1, True, 1.0)] == ["int", "bool", "float"]


def test_gradient_mode_is_part_of_the_signature() -> None:
    model = mlp()
    x, y = batches(1)[0]

    class Either(Train):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(self.model(x), y)
            if torch.is_grad_enabled():
                loss.backward()
            return loss

    graph = Either(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = graph(x, y)
    with torch.no_grad():
        second = graph(x, y)
        assert second < first
        assert graph(x, y) == second
    with torch.inference_mode():
        assert graph(x, y) == second


def test_frozen_parameters_are_seen_after_the_first_call() -> None:
    model = mlp()
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    graph(x, y)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    graph(x, y)
    assert torch.equal(model[0].weight, before)


def test_an_optimizer_or_a_parameter_group_added_after_the_first_call_trains() -> None:
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


def test_autocast_around_a_call_is_seen() -> None:
    model = mlp()
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = batches(1)[0]
    full = graph(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        half = graph(x, y)
    assert full != half
    assert graph(x, y) == full


def test_too_many_signatures_warn_where_the_call_is_and_keep_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierbed.graph.graph.MAX_CACHED_STEPS", 4)
    graph, x = graph_of(lambda graph, x, number: x + number), torch.zeros(1)
    for number in range(4):
        graph(x, number)
    with pytest.warns(UserWarning, match="4 signatures") as caught:
        assert graph(x, 4) == 4
    assert caught[0].filename == __file__
    assert compiled_steps(graph) == 4


def test_negative_zero_and_nan_are_values_of_their_own() -> None:
    graph = graph_of(lambda graph, x, value: x / value)
    x = torch.ones(1)
    assert [graph(x, 0.0).item(), graph(x, -0.0).item()] == [float("inf"), float("-inf")]
    for _ in range(3):
        graph(x, float("nan"))
    assert compiled_steps(graph) == 3


def test_a_function_a_type_and_a_dtype_are_arguments() -> None:
    graph = graph_of(lambda graph, x, function, dtype, kind: function(x).to(dtype))
    assert graph(torch.ones(1), torch.relu, torch.float64, int).dtype is torch.float64
    assert graph(torch.ones(1), lambda x: -x, torch.int64, int).tolist() == [-1]


def test_a_tensor_attribute_that_is_rebound_is_seen() -> None:
    graph = graph_of(lambda graph, x: x * graph.scale)
    graph.scale = torch.tensor(2.0)
    assert graph(torch.ones(1)) == 2
    graph.scale = torch.tensor(3.0)
    assert graph(torch.ones(1)) == 3
    graph.scale.fill_(4.0)
    assert graph(torch.ones(1)) == 4


def test_a_gradient_hook_added_after_the_first_call_is_refused() -> None:
    model = mlp()
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    graph(x, y)
    model[0].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(GraphError, match=r"model\.0\.weight has a gradient hook"):
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
