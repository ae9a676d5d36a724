"""Why a step was compiled, in the user's words: one reason a step, with all that differs from the nearest one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierbed import Graph


class Model(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 1), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: Tensor, options: Any = None) -> Tensor:
        loss = self.model(x.float()).sum()
        loss.backward()
        return loss


def autocast(graph: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph(torch.ones(2, 3))


X = torch.ones(2, 3)
CHANGES: dict[str, Callable[[Any], Any]] = {
    "argument x: shape (5, 3), was (2, 3)": lambda g: g(torch.ones(5, 3)),
    "argument x: dtype torch.float64, was torch.float32": lambda g: g(X.double()),
    "argument x: strides (1, 2), was (3, 1)": lambda g: g(torch.ones(3, 2).t()),
    "argument options: 'a', was missing": lambda g: g(X, "a"),
    "argument options['b']: int64 [3], was missing": lambda g: g(X, {"b": torch.arange(3)}),
    "arguments: another structure of lists, tuples, dicts and keywords": lambda g: g(X, []),
    "training flag of the graph: False, was True": lambda g: g.eval(),
    "training flag of model: False, was True": lambda g: g.model.eval(),
    "training flag of model.1.1: False, was True": lambda g: g.model[1][1].eval(),
    "parameter model.0.bias: requires_grad False, was True": lambda g: g.model[0].bias.requires_grad_(False),
    "autocast on cpu: torch.bfloat16, was off": autocast,
    "gradients: clipped or unscaled, was as they are": lambda g: g.clip_grad_norm(1.0),
    "gradients: accumulated, was as they are": lambda g: g.accumulate_grads(2),
    "module model.1.0: another ReLU": lambda g: g.model[1].__setitem__(0, nn.ReLU()),
    "module model.1.0: Tanh, was ReLU": lambda g: g.model[1].__setitem__(0, nn.Tanh()),
    "hooks of model.0: 1, was 0": lambda g: g.model[0].register_forward_hook(lambda *_: None),
    "attribute model.mask: float32 [3], was missing": lambda g: setattr(g.model, "mask", torch.ones(3)),
    "buffer scale: float32 [2], was missing": lambda g: g.register_buffer("scale", torch.ones(2)),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_each_change_has_its_reason_and_no_other(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    graph = Model()
    with caplog.at_level(logging.INFO, "tierbed"):
        graph(X)
        graph(X)
        assert graph.why_recompiled() == []
        assert caplog.messages == []
        CHANGES[reason](graph)
        if not graph.why_recompiled():
            graph(X)
    assert graph.why_recompiled() == [f"step 1: {reason}"]
    assert caplog.messages == [f"Model compiled step 1: {reason}"]


def test_the_nearest_step_is_the_one_that_is_told_with_all_differences() -> None:
    graph = Model()
    for size in (2, 5, 7):
        graph(torch.ones(size, 3))
    graph.eval()
    graph(torch.ones(5, 3))
    graph(torch.ones(9, 3))
    graph.extra = nn.Linear(1, 1)
    graph.add_optimizer(torch.optim.Adam(graph.extra.parameters()))
    graph(torch.ones(9, 3))
    graph.model[0].bias.requires_grad_(False)
    graph.train()
    graph(torch.ones(9, 3))
    assert graph.why_recompiled() == [
        "step 1: argument x: shape (5, 3), was (2, 3)",
        "step 2: argument x: shape (7, 3), was (5, 3)",
        "step 3: training flag of the graph: False, was True",
        "step 4: argument x: shape (9, 3), was (5, 3)",
        "step 5: optimizer 1: Adam of 2 parameters, was missing; module extra: Linear, was missing",
        "step 6: training flag of the graph: True, was False; parameter model.0.bias: requires_grad False, was True",
    ]


def test_a_step_that_was_dropped_is_told_and_reasons_and_differences_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierbed.graph.graph.MAX_CACHED_STEPS", 3)
    graph = Model()
    for value in (1, 1.0, list(range(9))):
        graph(X, value)
    assert graph.why_recompiled()[0] == "step 1: argument options: 1.0, was 1"
    assert graph.why_recompiled()[1].endswith("; and 4 more")
    with pytest.warns(UserWarning, match="3 signatures") as caught:
        graph(X, 5)
    assert caught[0].filename == __file__  # where the call is
    with pytest.warns(UserWarning, match="3 signatures"):
        graph(X, 1)  # it was dropped
    reasons = graph.why_recompiled()
    assert len(reasons) == 3
    assert reasons[-1].startswith("step 4: argument options: 1, was ")
