"""How rows follow a `torch.optim` optimizer.

Rows are lazy: a row and its optimizer state move only in steps whose batch holds it. So SGD and Adagrad without weight
decay equal dense torch, while momentum, weight decay and Adam's averages act on touched rows alone; Adam's bias
correction counts the steps of the embedding, not of the row. NaN gradients make NaN rows, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import OptimizerError

Group = dict[str, Any]


@dataclass(frozen=True)
class RowRule:
    """One formula of the native update. A state is as wide as the embedding."""

    name: str
    states: tuple[str, ...]
    initial: Callable[[Group], list[float]]
    hyper: Callable[[Group, int], list[float]]


class RowOptimizer:
    """One param group of an optimizer as rows see it. Settings are read from the group at each step.

    Attributes: `rule`, the name that `_core.update` takes; `states`, the names of the states that a row carries;
    `initial`, the value each of them begins with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self._optimizer = optimizer
        # by place: load_state_dict replaces the dict itself
        self._index = next(index for index, other in enumerate(optimizer.param_groups) if other is group)
        rule = _rule_of(optimizer, group)
        self.rule = rule.name
        self.states = rule.states
        self.initial = rule.initial(group)

    def hyper(self, step: int) -> list[float]:
        """The numbers that the rule takes at the embedding's step `step`, which counts from 1.

        Raises OptimizerError where the group now asks for another rule than at the start.
        """
        group = self._optimizer.param_groups[self._index]
        rule = _rule_of(self._optimizer, group)
        if rule.name != self.rule:
            raise OptimizerError(
                f"{type(self._optimizer).__name__} began as rule {self.rule!r} and now asks for {rule.name!r}, whose"
                " state the rows lack; keep momentum (zero or not) and decoupled_weight_decay as they were"
            )
        return rule.hyper(group, step)


def row_optimizer(optimizer: torch.optim.Optimizer, group: Group) -> RowOptimizer:
    """The row optimizer of one of `optimizer.param_groups`.

    Raises OptimizerError for any but SGD, Adagrad, Adam and AdamW by exact type, and for amsgrad or differentiable.
    """
    return RowOptimizer(optimizer, group)


def _rule_of(optimizer: torch.optim.Optimizer, group: Group) -> RowRule:
    choose = _RULES.get(type(optimizer))
    if choose is None:
        supported = ", ".join(cls.__name__ for cls in _RULES)
        kind = type(optimizer)
        raise OptimizerError(
            f"optimizer {kind.__module__}.{kind.__qualname__} cannot update rows; use torch.optim's {supported},"
            " not a subclass, which may change the formula"
        )
    for option in ("amsgrad", "differentiable"):
        if group.get(option):
            raise OptimizerError(f"{type(optimizer).__name__}: {option}=True is not supported; use {option}=False")
    return choose(group)


def _sgd(group: Group, step: int) -> list[float]:
    return [float(group["lr"]), float(group["weight_decay"]), float(group["maximize"])]


def _sgd_momentum(group: Group, step: int) -> list[float]:
    return [*_sgd(group, step), float(group["momentum"]), 1.0 - float(group["dampening"]), float(group["nesterov"])]


def _adagrad(group: Group, step: int) -> list[float]:
    lr = float(group["lr"]) / (1.0 + (step - 1) * float(group["lr_decay"]))
    return [lr, float(group["weight_decay"]), float(group["maximize"]), float(group["eps"])]


def _adam(group: Group, step: int) -> list[float]:
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    decoupled = group["decoupled_weight_decay"]
    return [
        lr / (1.0 - beta1**step),
        0.0 if decoupled else weight_decay,
        float(group["maximize"]),
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        float(group["eps"]),
        1.0 - lr * weight_decay if decoupled else 1.0,
    ]


def _zeros(count: int) -> Callable[[Group], list[float]]:
    return lambda group: [0.0] * count


SGD = RowRule("sgd", (), _zeros(0), _sgd)
SGD_MOMENTUM = RowRule("sgd_momentum", ("momentum_buffer",), _zeros(1), _sgd_momentum)
ADAGRAD = RowRule("adagrad", ("sum",), lambda group: [float(group["initial_accumulator_value"])], _adagrad)
ADAM = RowRule("adam", ("exp_avg", "exp_avg_sq"), _zeros(2), _adam)
ADAMW = RowRule("adamw", ("exp_avg", "exp_avg_sq"), _zeros(2), _adam)


def _choose_adam(group: Group) -> RowRule:
    return ADAMW if group["decoupled_weight_decay"] else ADAM


_RULES: dict[type[torch.optim.Optimizer], Callable[[Group], RowRule]] = {
    torch.optim.SGD: lambda group: SGD_MOMENTUM if float(group["momentum"]) else SGD,
    torch.optim.Adagrad: lambda group: ADAGRAD,
    torch.optim.Adam: _choose_adam,
    torch.optim.AdamW: _choose_adam,
}
