"""A graph without embeddings is the same training loop as eager torch, step for step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.graphs import Train, assert_same_state, batches, compiled_steps, eager_step, graph_of, mlp

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_with_a_changing_rate_equal_eager(kind: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), mlp())
    other = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](other.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in (ours, theirs)]
    graph = Train(model, ours)
    assert "not compiled yet" in str(graph)
    for number, (x, y) in enumerate(batches(20)):
        torch.manual_seed(number)
        found = graph(x, y)
        torch.manual_seed(number)
        torch.testing.assert_close(found, eager_step(other, theirs, x, y), rtol=1e-6, atol=1e-7)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_state(model, other)
    assert compiled_steps(graph) == 1
    assert "def forward(self, x, y, model_0_weight" in str(graph)
    graph.eval()
    torch.testing.assert_close(graph(x, y), F.mse_loss(other.eval()(x), y).detach())
    assert_same_state(model, other)


def test_batch_norm_whose_output_nobody_reads_still_counts() -> None:
    norm = nn.BatchNorm1d(6)
    graph_of(lambda graph, x: (graph.norm(x), x.sum())[1], norm=norm)(torch.ones(4, 6))
    torch.testing.assert_close(norm.running_mean, torch.full((6,), 0.1))


def test_two_losses_add_their_gradients_and_build_returns_what_it_likes() -> None:
    def build(graph: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
        out = graph.model(x)
        first, second = F.mse_loss(out, y), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        return {"losses": [first, second], "rows": x.shape[0], "name": "two"}

    model = mlp()
    eager = SimpleNamespace(model=copy.deepcopy(model))
    graph = graph_of(build, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    theirs = torch.optim.SGD(eager.model.parameters(), lr=0.1)
    for x, y in batches(3):
        F.mse_loss(model(x), y).backward()  # of before: it is in no update
        result = graph(x, y)
        theirs.zero_grad()
        build(eager, x, y)
        theirs.step()
        assert (result["rows"], result["name"]) == (16, "two")
        assert not any(loss.requires_grad for loss in result["losses"])
        assert [(type(p), p.grad) for p in model.parameters()] == [(nn.Parameter, None)] * 4
    assert_same_state(model, eager.model)


def test_a_parameter_without_gradient_is_left_alone_by_weight_decay() -> None:
    used, unused = nn.Linear(6, 1), nn.Linear(6, 1)
    before = unused.weight.clone()
    sgd = torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1, weight_decay=0.5)
    graph_of(lambda graph, x, _: graph.used(x).sum().backward(), sgd, used=used, unused=unused)(*batches(1)[0])
    assert torch.equal(unused.weight, before)
