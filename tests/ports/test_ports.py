"""Models that move from torch.nn to tierbed by two lines train as before: losses, and the parameters after them.

The two lines are the module of `Embedding` and `EmbeddingBag`, and the optimizer: EagerOptimizer around torch's SGD or
Adagrad, or around CatchUpAdam or CatchUpAdamW in place of torch's Adam or AdamW. The rest is one text for both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

import tierbed
from support import ported_models as models

STEPS = 24
THEIRS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
OURS = {**THEIRS, "adam": tierbed.optim.CatchUpAdam, "adamw": tierbed.optim.CatchUpAdamW}
RATES = {"sgd": 0.1, "adagrad": 0.05, "adam": 0.01, "adamw": 0.01}


class Run(NamedTuple):
    """What a port has to carry over."""

    model: type[nn.Module]
    optimizer: str
    decay: float = 0.0  # L2 by the optimizer
    penalty: float = 0.0  # L2 by the model, through `weight`
    clip_norm: float | None = None
    clip_value: float | None = None
    schedule: Callable[[Optimizer], Any] | None = None
    bf16: bool = False
    early_stopping: bool = False
    accumulate: int = 1
    scaler: bool = False


def run(model: type[nn.Module], optimizer: str, **more: Any) -> Any:
    """A parameter of the test, with the name of what is set."""
    return pytest.param(Run(model, optimizer, **more), id="-".join([model.__name__, optimizer, *more]))


cosine = partial(schedules.CosineAnnealingLR, T_max=STEPS)
one_cycle = partial(schedules.OneCycleLR, max_lr=0.05, total_steps=STEPS + 1, cycle_momentum=False)
warm_up = partial(schedules.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 10))
plateaus = partial(schedules.StepLR, step_size=6, gamma=0.5)
RUNS = [
    run(models.MatrixFactorization, "sgd", penalty=1e-3),
    run(models.MatrixFactorization, "adam", decay=1e-3, early_stopping=True),
    run(models.BayesianRanking, "sgd", bf16=True),
    run(models.BayesianRanking, "adamw", decay=0.1, schedule=cosine),
    run(models.WideAndDeep, "adagrad", clip_norm=0.1),
    run(models.WideAndDeep, "adam", schedule=one_cycle),
    run(models.DeepFM, "adam", decay=1e-4),
    run(models.DeepFM, "sgd", accumulate=3),
    run(models.DeepCrossV2, "adamw", decay=0.01, clip_norm=0.5),
    run(models.DeepCrossV2, "adagrad", scaler=True),
    run(models.NeuralFiltering, "sgd", bf16=True, schedule=plateaus),
    run(models.NeuralFiltering, "adam", early_stopping=True),
    run(models.SelfAttentive, "adam", clip_norm=1.0),
    run(models.SelfAttentive, "adagrad", penalty=1e-3),
    run(models.RecurrentSessions, "adagrad", schedule=warm_up),
    run(models.RecurrentSessions, "adamw", decay=0.01, clip_norm=0.2),
    run(models.TwoTower, "adagrad", accumulate=2),
    run(models.TwoTower, "adam", schedule=warm_up, clip_value=0.01),
    run(models.InterestNetwork, "adamw", decay=0.01, early_stopping=True),
    run(models.InterestNetwork, "sgd", clip_value=0.02),
    run(models.DeepRecommendation, "sgd", schedule=plateaus, clip_norm=0.1),
    run(models.DeepRecommendation, "adagrad", bf16=True),
    run(models.TextClassifier, "adam", scaler=True, clip_norm=0.5),
    run(models.TextClassifier, "sgd"),
]


def train(model: Any, optimizer: Any, run: Run) -> list[Tensor]:
    """The losses. One text for both forms of a model."""
    scheduler = run.schedule(optimizer) if run.schedule else None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=8, enabled=run.scaler)
    losses, best, best_state = [], torch.inf, None
    torch.manual_seed(1)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
            loss = model(*model.batch())
            if run.penalty:
                loss = loss + run.penalty * model.items.weight.square().sum()
        losses.append(loss.detach())
        if run.scaler and step == STEPS // 2:
            loss = loss * torch.inf  # as an overflow of float16: the scaler leaves this step out
        scaler.scale(loss / run.accumulate).backward()
        if (step + 1) % run.accumulate:
            continue
        scaler.unscale_(optimizer)
        if run.clip_norm:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm))
        if run.clip_value:
            nn.utils.clip_grad_value_(model.parameters(), run.clip_value)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if run.early_stopping and (step + 1) % 8 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(model(*model.batch()))
            model.train()
            if losses[-1] < best:
                best, best_state = losses[-1], copy.deepcopy(model.state_dict())
    if best_state is not None:
        model.load_state_dict(best_state)
    return losses


@pytest.mark.parametrize("run", RUNS)
def test_a_model_that_was_ported_by_two_lines_trains_as_before(run: Run) -> None:
    torch.manual_seed(0)
    theirs: Any = run.model(nn)
    for one in theirs.modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag):
            nn.init.normal_(one.weight, std=0.3)
    ours: Any = run.model(tierbed)
    ours.load_state_dict(theirs.state_dict())
    how = {"lr": RATES[run.optimizer], "weight_decay": run.decay}
    expected = train(theirs, THEIRS[run.optimizer](theirs.parameters(), **how), run)
    losses = train(ours, tierbed.EagerOptimizer(OURS[run.optimizer](ours.parameters(), **how)), run)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    state, expected_state = tierbed.to_dense_state_dict(ours), theirs.state_dict()
    assert list(state) == list(expected_state)
    torch.testing.assert_close(dict(state), dict(expected_state), rtol=1e-6, atol=1e-6)
