"""What the optimizers share that torch.optim has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..numeric import real
from .rule import Group

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
    """OptimizerError for what is neither None nor a number above 0 that float32 holds with full precision."""
    if value is None:
        return None
    number = real(value)
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


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer with `step()` over dense parameters. A subclass says how one parameter moves."""

    def move(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> None:
        """Update a parameter in place, given its gradient; `state` is empty at first."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient. Returns what `closure`, which computes the gradients, returns.

        Raises OptimizerError for a sparse gradient, and no parameter has moved.
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
                    f"{parameter.grad.layout}; give dense ones, as of nn.Embedding(sparse=False)"
                )
        for parameter, group in reached:
            self.move(parameter, parameter.grad, self.state[parameter], group)
        return loss
