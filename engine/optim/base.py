"""Base classes of the optimizers that torch.optim does not have, and checks of their settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..checks import as_number
from ..errors import OptimizerError
from . import adam
from .rule import Group, all_rules

SMALLEST, LARGEST = 2.0**-126, 2.0**127  # of numbers that float32 holds with full precision


def number(group: Group, name: str, low: float = 0.0, high: float = LARGEST) -> float:
    """A setting of a param group, from `low` up to below `high`. Raises OptimizerError."""
    value: Any = group[name]
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not low <= found < high:
        raise OptimizerError(f"param group: {name}={value!r}; give a number that is at least {low} and below {high}")
    return found


def positive(name: str, value: float | None) -> float | None:
    """OptimizerError for anything but None or a number above 0 that float32 holds with full precision."""
    if value is None:
        return None
    number = as_number(value)
    if number is None or not SMALLEST <= number < LARGEST:
        raise OptimizerError(f"{name}={value!r}: give a number from {SMALLEST:.3g} to {LARGEST:.3g}, or None")
    return float(number)


def betas(group: Group) -> tuple[float, float]:
    """The setting `betas`, two numbers from 0 up to below 1. Raises OptimizerError."""
    given: Any = group["betas"]
    try:
        first, second = map(float, given)
    except (TypeError, ValueError, OverflowError):
        first = second = math.nan
    if not (0.0 <= first < 1.0 and 0.0 <= second < 1.0):
        raise OptimizerError(f"param group: betas={given!r}; give two numbers that are at least 0 and below 1")
    return first, second


def choice(group: Group, name: str, choices: tuple[str, ...]) -> str:
    """A setting that is one of `choices`. Raises OptimizerError."""
    value: Any = group[name]
    if value not in choices:
        raise OptimizerError(f"param group: {name}={value!r}; give one of {', '.join(map(repr, choices))}")
    return str(value)


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that raises OptimizerError for a param group with settings that its rules do not accept."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, and check its settings."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group.get("amsgrad"):
                raise OptimizerError(f"{type(self).__name__}: amsgrad=True is not supported; use amsgrad=False")
            for rule in all_rules():
                if isinstance(self, rule.optimizer):
                    rule.hyper(group, 1)
                    rule.initial(group)
        except BaseException:
            self.param_groups.pop()
            raise


class OwnOptimizer(CheckedOptimizer):
    """An optimizer with `step()` for dense parameters. A subclass updates one parameter in `move`."""

    def move(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> None:
        """Update a parameter in place, given its gradient; `state` is empty at first."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the result of `closure`, which computes the gradients.

        Raises OptimizerError for a sparse gradient, and no parameter has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reached = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in reached:
            if parameter.grad.layout is not torch.strided:
                raise OptimizerError(
                    f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} has a gradient of layout "
                    f"{parameter.grad.layout}; give dense ones, as nn.Embedding(sparse=False) does"
                )
        for parameter, group in reached:
            self.move(parameter, parameter.grad, self.state[parameter], group)
        return loss


class OwnAdam(OwnOptimizer):
    """Adam's settings. A subclass may override `second_moment_input`, and updates a parameter in `move`.

    Raises OptimizerError for negative arguments, and for betas that are not below 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @staticmethod
    def second_moment_input(squares: Tensor) -> Tensor:
        """What is averaged in the second moment, from the squares of gradients."""
        return squares

    def moments(
        self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group
    ) -> tuple[dict[str, float], Tensor, Tensor]:
        """Count a step of a parameter: the numbers of `hyper`, the first moment, and its divisor."""
        if not state:
            state |= {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(self.second_moment_input(w))}
        count = state.setdefault("step", torch.tensor(0.0))  # a tensor, as in torch's optimizers
        count += 1
        x, m, v = hyper(group, int(count)), state["exp_avg"], state["exp_avg_sq"]
        g = -g if group["maximize"] else g
        m.lerp_(g, x["one_minus_beta1"])
        v.mul_(x["beta2"]).add_(x["one_minus_beta2"] * self.second_moment_input(g.square()))
        return x, m, v.sqrt() / x["sqrt_correction2"] + x["eps"]


def row_mean(squares: Tensor) -> Tensor:
    """The mean over each row, its last dimension, which is kept."""
    return squares.mean(-1, keepdim=True)


def hyper(group: Group, step: int) -> dict[str, float]:
    """The numbers of `adam.hyper` and the settings of a group, checked. Raises OptimizerError."""
    betas(group)
    settings = {name: number(group, name) for name in ("lr", "eps", "weight_decay")}
    return {**settings, **adam.hyper(group, step)}
