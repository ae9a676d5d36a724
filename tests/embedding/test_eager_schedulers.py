"""An EagerOptimizer is an optimizer of torch: what is made over it works as over the one that it wraps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from support.graphs import Rating, embedding, mlp, train
from tierbed import EagerOptimizer
from tierbed.engine.errors import OptimizerError

IDS = torch.arange(6).view(6, 1)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "average": lambda o: swa_utils.SWALR(o, 0.05),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.mlp = embedding(), mlp(4)


def wrapped(model: Model) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def trained(schedule: Callable[[Any], Any], over: Callable[[EagerOptimizer], torch.optim.Optimizer]) -> list[Any]:
    model = Model()
    optimizer = wrapped(model)
    scheduler = schedule(over(optimizer))
    rates = []
    for _ in range(6):
        train(model.rows, model.mlp, IDS)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert len(set(rates)) > 1
    return [rates, model.rows.get(IDS), *model.mlp.state_dict().values()]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_over_an_eager_optimizer_moves_rates_as_over_the_wrapped_one(name: str) -> None:
    ours, theirs = (trained(SCHEDULES[name], over) for over in (lambda o: o, lambda o: o.optimizer))
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))


def test_groups_state_and_hooks_are_those_of_the_wrapped_optimizer() -> None:
    model = Model()
    optimizer = wrapped(model)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults is optimizer.optimizer.defaults
    extra.grad = torch.ones(1)
    train(model.rows, model.mlp, IDS)
    optimizer.step()
    assert called == ["before", "after"]
    assert extra.item() == 0.0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert "lr: 0.1" in repr(optimizer)
    with pytest.raises(AttributeError, match="nothing"):
        optimizer.nothing  # noqa: B018


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_eager_optimizer_is_refused_not_made_without_its_rows(make: Callable[[Any], Any]) -> None:
    optimizer = wrapped(Model())
    with pytest.raises(OptimizerError, match="cannot be copied or pickled"):
        make(optimizer)


def test_a_graph_refuses_an_eager_optimizer_and_takes_what_it_wraps() -> None:
    model = Model()
    optimizer = wrapped(model)
    with pytest.raises(OptimizerError, match="pass its attribute optimizer"):
        Rating(model.rows, model.mlp, optimizer)
    before: Tensor = model.rows.get(IDS)
    Rating(model.rows, model.mlp, optimizer.optimizer)(IDS)
    assert not torch.equal(model.rows.get(IDS), before)


@pytest.mark.parametrize("schedule", [lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR])
def test_a_schedule_that_gives_rows_a_momentum_names_its_option(schedule: Any) -> None:
    model = Model()
    optimizer = wrapped(model)
    schedule(optimizer, 0.1, **({"total_steps": 8} if schedule is lr_scheduler.OneCycleLR else {"max_lr": 0.5}))
    train(model.rows, model.mlp, IDS)
    before = model.rows.get(IDS)
    with pytest.raises(OptimizerError, match=r"OneCycleLR and CyclicLR set momentum: give them cycle_momentum=False"):
        optimizer.step()
    assert torch.equal(model.rows.get(IDS), before)
