"""An EagerOptimizer is an optimizer of torch: what is made over it works as over the one that it wraps."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from support.graphs import Rating, embedding, mlp, train
from tierbed import EagerOptimizer
from tierbed.engine.errors import OptimizerError

IDS = torch.arange(6).view(6, 1)
SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_over_an_eager_optimizer_moves_rates_as_over_the_wrapped_one(name) -> None:
    found = []
    for over in (lambda o: o, lambda o: o.optimizer):
        model = Model()
        optimizer = wrapped(model)
        scheduler, rates = SCHEDULES[name](over(optimizer)), []
        for _ in range(6):
            train(model.rows, model.mlp, IDS)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        assert len(set(rates)) > 1
        found.append((rates, model.rows.get(IDS).tolist()))
    assert found[0] == found[1]


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


def test_a_schedule_that_gives_rows_a_momentum_names_its_option() -> None:
    for schedule in (partial(lr_scheduler.OneCycleLR, total_steps=8), partial(lr_scheduler.CyclicLR, max_lr=0.5)):
        model = Model()
        optimizer = wrapped(model)
        schedule(optimizer, 0.1)
        train(model.rows, model.mlp, IDS)
        before = model.rows.get(IDS)
        with pytest.raises(
            OptimizerError, match=r"OneCycleLR and CyclicLR set momentum: give them cycle_momentum=False"
        ):
            optimizer.step()
        assert torch.equal(model.rows.get(IDS), before)


def test_a_copy_of_an_eager_optimizer_is_refused_and_a_graph_takes_what_it_wraps() -> None:
    model = Model()
    optimizer = wrapped(model)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(OptimizerError, match="cannot be copied or pickled"):
            make(optimizer)
    with pytest.raises(OptimizerError, match="pass the attribute `optimizer`"):
        Rating(model.rows, model.mlp, optimizer)
    before: Tensor = model.rows.get(IDS)
    Rating(model.rows, model.mlp, optimizer.optimizer)(IDS)
    assert not torch.equal(model.rows.get(IDS), before)
