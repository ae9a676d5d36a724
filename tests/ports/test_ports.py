"""Models that move from torch.nn to tierbed by two lines train as before: losses, and parameters after 60 steps.

The two lines are the module of `Embedding` and `EmbeddingBag`, and the optimizer: EagerOptimizer around torch's SGD or
Adagrad, or around CatchUpAdam or CatchUpAdamW in place of torch's Adam or AdamW. The rest is one text for both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

import tierbed
from support import ported_models as models

STEPS = 60
THEIRS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
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

    def __str__(self) -> str:
        names = [
            name for name, value in zip(self._fields[2:], self[2:], strict=True) if value not in (0, 1, None, False)
        ]
        return "-".join([self.model.__name__, self.optimizer, *names])


def cosine(optimizer: Optimizer) -> Any:
    return schedules.CosineAnnealingLR(optimizer, STEPS)


def one_cycle(optimizer: Optimizer) -> Any:
    return schedules.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1, cycle_momentum=False)


def warm_up(optimizer: Optimizer) -> Any:
    return schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def plateaus(optimizer: Optimizer) -> Any:
    return schedules.StepLR(optimizer, 15, 0.5)


RUNS = [
    Run(models.MatrixFactorization, "sgd", penalty=1e-3),
    Run(models.MatrixFactorization, "adam", decay=1e-3, early_stopping=True),
    Run(models.BayesianRanking, "sgd", bf16=True),
    Run(models.BayesianRanking, "adamw", decay=0.1, schedule=cosine),
    Run(models.WideAndDeep, "adagrad", clip_norm=0.1),
    Run(models.WideAndDeep, "adam", schedule=one_cycle),
    Run(models.DeepFM, "adam", decay=1e-4),
    Run(models.DeepFM, "sgd", accumulate=3),
    Run(models.DeepCrossV2, "adamw", decay=0.01, clip_norm=0.5),
    Run(models.DeepCrossV2, "adagrad", scaler=True),
    Run(models.NeuralFiltering, "sgd", bf16=True, schedule=plateaus),
    Run(models.NeuralFiltering, "adam", early_stopping=True),
    Run(models.SelfAttentive, "adam", clip_norm=1.0),
    Run(models.SelfAttentive, "adagrad", penalty=1e-3),
    Run(models.RecurrentSessions, "adagrad", schedule=warm_up),
    Run(models.RecurrentSessions, "adamw", decay=0.01, clip_norm=0.2),
    Run(models.TwoTower, "adagrad", accumulate=2),
    Run(models.TwoTower, "adam", schedule=warm_up, clip_value=0.01),
    Run(models.InterestNetwork, "adamw", decay=0.01, early_stopping=True),
    Run(models.InterestNetwork, "sgd", clip_value=0.02),
    Run(models.DeepRecommendation, "sgd", schedule=plateaus, clip_norm=0.1),
    Run(models.DeepRecommendation, "adagrad", bf16=True),
    Run(models.TextClassifier, "adam", scaler=True, clip_norm=0.5),
    Run(models.TextClassifier, "sgd"),
]


def train(model: Any, optimizer: Any, run: Run) -> list[Tensor]:
    """The losses. One text for both forms of a model."""
    scheduler = run.schedule(optimizer) if run.schedule else None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=20, enabled=run.scaler)
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
        if run.early_stopping and (step + 1) % 10 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(model(*model.batch()))
            model.train()
            if losses[-1] < best:
                best, best_state = losses[-1], copy.deepcopy(model.state_dict())
    if best_state is not None:
        model.load_state_dict(best_state)
    return losses


@pytest.mark.parametrize("run", RUNS, ids=str)
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
