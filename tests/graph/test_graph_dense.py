"""A graph without embeddings is the same training loop as eager torch, step for step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.graphs import (
    Train,
    assert_same_state,
    batches,
    compiled_steps,
    eager_step,
    mlp,
)
from tierbed import Graph

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fifty_steps_with_a_changing_rate_equal_eager(kind: str) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](other.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in (ours, theirs)]
    graph = Train(model, ours)
    for x, y in batches(50):
        torch.testing.assert_close(graph(x, y), eager_step(other, theirs, x, y), rtol=1e-6, atol=1e-7)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_state(model, other)
    assert compiled_steps(graph) == 1


def test_dropout_draws_anew_and_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    other = copy.deepcopy(model)
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    theirs = torch.optim.SGD(other.parameters(), lr=0.0)
    x, y = batches(1)[0]
    torch.manual_seed(11)
    ours = [graph(x, y) for _ in range(3)]
    torch.manual_seed(11)
    assert ours == [eager_step(other, theirs, x, y) for _ in range(3)]
    assert len({float(loss) for loss in ours}) == 3
    graph.eval()
    assert graph(x, y) == graph(x, y) == F.mse_loss(other.eval()(x), y)


def test_batch_norm_buffers_are_the_live_ones() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other = copy.deepcopy(model)
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches(5):
        torch.testing.assert_close(graph(x, y), eager_step(other, theirs, x, y))
    assert_same_state(model, other)
    assert model[1].num_batches_tracked == 5
    before = copy.deepcopy(model.state_dict())
    graph.eval()
    torch.testing.assert_close(graph(x, y), F.mse_loss(other.eval()(x), y).detach())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batch_norm_whose_output_nobody_reads_still_counts() -> None:
    norm = nn.BatchNorm1d(6)

    class Warm(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def build(self, x: Tensor) -> Tensor:
            self.norm(x)
            return x.sum()

    Warm()(torch.ones(4, 6))
    torch.testing.assert_close(norm.running_mean, torch.full((6,), 0.1))


def test_two_losses_add_their_gradients() -> None:
    class Two(Train):
        def build(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            out = self.model(x)
            first, second = F.mse_loss(out, y), out.abs().mean()
            first.backward(retain_graph=True)
            second.backward()
            return {"losses": [first, second], "rows": x.shape[0], "name": "two"}

    model = mlp()
    other = copy.deepcopy(model)
    graph = Two(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches(3):
        result = graph(x, y)
        theirs.zero_grad()
        out = other(x)
        (F.mse_loss(out, y) + out.abs().mean()).backward()
        theirs.step()
        assert result["rows"] == 16
        assert result["name"] == "two"
        assert not any(loss.requires_grad for loss in result["losses"])
    assert_same_state(model, other)


def test_gradients_are_none_after_a_step_and_parameters_stay_real() -> None:
    model = mlp()
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    F.mse_loss(model(x), y).backward()
    for _ in range(2):
        graph(x, y)
        for parameter in model.parameters():
            assert type(parameter) is nn.Parameter
            assert parameter.grad is None


def test_a_parameter_without_gradient_is_left_alone_by_weight_decay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 1), "unused": nn.Linear(6, 1)})
    before = model["unused"].weight.clone()

    class Part(Train):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(self.model["used"](x), y)
            loss.backward()
            return loss

    graph = Part(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    graph(*batches(1)[0])
    assert torch.equal(model["unused"].weight, before)


def test_parameter_groups_keep_their_own_rates() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    before = copy.deepcopy(model)
    graph = Train(model, optimizer)
    x, y = batches(1)[0]
    graph(x, y)
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)
    optimizer.param_groups[0]["lr"] = 0.1
    graph(x, y)
    assert not torch.equal(model[0].weight, before[0].weight)


def test_print_shows_modules_first_and_the_compiled_step_after_a_call() -> None:
    model = mlp()
    graph = Train(model, torch.optim.Adam(model.parameters()))
    assert "not compiled yet" in str(graph)
    graph(*batches(1)[0])
    code = str(graph)
    assert "def forward(self, x, y, model_0_weight" in code
    assert "dense_step(adam, [model_0_weight," in code
    assert "detach" not in code
