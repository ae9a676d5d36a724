"""Base classes for optimizers that torch.optim lacks, and checks of param group settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT as ParamsT  # other optimizers import this type from here

from ..checks import as_number
from ..errors import OptimizerError, undo_on_error
from . import adam
from .rule import ParamGroup, load_rules

MIN_VALUE, MAX_VALUE = 2.0**-126, 2.0**127  # range of positive numbers that float32 holds with full precision


def read_number(group: ParamGroup, name: str, low: float = 0.0, high: float = MAX_VALUE) -> float:
    """Return a param group's setting. Raises OptimizerError unless the setting is at least `low` and below `high`."""
    value: Any = group[name]
    try:
        setting = float(value)
    except (TypeError, ValueError, OverflowError):
        setting = math.nan
    if not low <= setting < high:
        raise OptimizerError(f"param group: {name}={value!r}; give a number that is at least {low} and below {high}")
    return setting


def check_positive(name: str, value: float | None) -> float | None:
    """Return `value`. Raises OptimizerError unless it is None, or a positive number that is normal in float32."""
    if value is None:
        return None
    number = as_number(value)
    if number is None or not MIN_VALUE <= number < MAX_VALUE:
        raise OptimizerError(f"{name}={value!r}: give a number from {MIN_VALUE:.3g} to {MAX_VALUE:.3g}, or None")
    return float(number)


def read_betas(group: ParamGroup) -> tuple[float, float]:
    """Return the setting `betas`. Raises OptimizerError unless both numbers are at least 0 and below 1."""
    value: Any = group["betas"]
    try:
        first, second = map(float, value)
    except (TypeError, ValueError, OverflowError):
        first = second = math.nan
    if not (0.0 <= first < 1.0 and 0.0 <= second < 1.0):
        raise OptimizerError(f"param group: betas={value!r}; give two numbers that are at least 0 and below 1")
    return first, second


def read_choice(group: ParamGroup, name: str, choices: tuple[str, ...]) -> str:
    """Return a param group's setting. Raises OptimizerError unless the setting is one of `choices`."""
    value: Any = group[name]
    if value not in choices:
        raise OptimizerError(f"param group: {name}={value!r}; give one of {', '.join(map(repr, choices))}")
    return str(value)


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that checks each param group's settings and raises OptimizerError if its rules cannot use them."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a param group after checking its settings."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        with undo_on_error(self.param_groups.pop):
            if group.get("amsgrad"):
                raise OptimizerError(f"{type(self).__name__}: amsgrad=True is not supported; use amsgrad=False")
            for rule in load_rules():
                if isinstance(self, rule.optimizer):
                    rule.compute_hyperparams(group, 1)
                    rule.compute_initial(group)


class DenseOptimizer(CheckedOptimizer):
    """Implements `step()` for dense parameters. A subclass updates one parameter in `update_parameter`."""

    def update_parameter(self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup) -> None:
        """Update the parameter `w` in place from its gradient `g`. `state` is empty in the first step."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter with a gradient.

        Args:
            closure: A function that recomputes the loss and the gradients; called first.

        Returns:
            The result of `closure`, or None.

        Raises:
            OptimizerError: If a gradient is sparse. In this case, no parameter changes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in trained:
            if parameter.grad.layout is not torch.strided:
                raise OptimizerError(
                    f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} has a gradient of layout "
                    f"{parameter.grad.layout}; use dense gradients, such as those of nn.Embedding(sparse=False)"
                )
        for parameter, group in trained:
            self.update_parameter(parameter, parameter.grad, self.state[parameter], group)
        return loss


class DenseAdam(DenseOptimizer):
    """Base class for variants of Adam. Holds the settings and computes the moments."""

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
    def reduce_squares(squares: Tensor) -> Tensor:
        """Return the values that the second moment averages: by default, the squared gradients."""
        return squares

    def update_moments(
        self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup
    ) -> tuple[dict[str, float], Tensor, Tensor]:
        """Update a parameter's step count and moments. Return (hyper-parameters, first moment, its divisor)."""
        if not state:
            state |= {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(self.reduce_squares(w))}
        count = state.setdefault("step", torch.tensor(0.0))  # a tensor, as in torch's optimizers
        count += 1
        hyperparams, m, v = compute_hyperparams(group, int(count)), state["exp_avg"], state["exp_avg_sq"]
        g = -g if group["maximize"] else g
        m.lerp_(g, hyperparams["one_minus_beta1"])
        v.mul_(hyperparams["beta2"]).add_(hyperparams["one_minus_beta2"] * self.reduce_squares(g.square()))
        return hyperparams, m, v.sqrt() / hyperparams["sqrt_correction2"] + hyperparams["eps"]


def compute_row_mean(squares: Tensor) -> Tensor:
    """Return the mean over the last dimension. The result keeps this dimension, with size 1."""
    return squares.mean(-1, keepdim=True)


def compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    """Return `adam.compute_hyperparams` and the group's checked settings. Raises OptimizerError."""
    read_betas(group)
    settings = {name: read_number(group, name) for name in ("lr", "eps", "weight_decay")}
    return {**settings, **adam.compute_hyperparams(group, step)}
