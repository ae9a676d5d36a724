"""FTRL-Proximal: McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1. The exponent p
of the accumulator n is not fixed to 1/2. The arguments are the same as in OneFlow's `one_embedding.Ftrl`. Formula:

    n'  = n + g * g
    z  += g - (n'^p - n^p) / lr * w;  n = n'
    w   = 0                                                                  if |z| <= lambda1
          -(z - sign(z) * lambda1) / ((beta + n^p) / lr + lambda2)           otherwise

If the denominator is 0 (n starts at 0 and g * g underflows), w stays unchanged. `g` is the gradient plus
`weight_decay * w`. By default, p = -lr_power. If lr_power is negative, steps shrink as the accumulator grows. The
default lr_power = -0.5 takes the square root. With lr_power = 0, steps do not shrink. `z` starts at 0, so the initial
weight enters a row's first step only through the term (n'^p - n^p) / lr * w.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import MIN_VALUE, DenseOptimizer, ParamsT, read_choice, read_number
from .kernel import RuleKernel
from .rule import ParamGroup, Rule

FTRL = RuleKernel(
    name="ftrl",
    hyperparams="lr weight_decay power_of_sum lambda1 lambda2 beta",
    element_states=("sum", "z"),
    element_body="""
        g = add_decay(g, w, weight_decay, 0.0f);
        const float old_power = power(sum, power_of_sum);
        sum = sum + g * g;
        const float new_power = power(sum, power_of_sum);
        z = z + (g - (new_power - old_power) / lr * w);
        const float soft_threshold = z > 0.0f ? z - lambda1 : z + lambda1;
        const float denominator = (beta + new_power) / lr + lambda2;
        const float new_w = denominator == 0.0f ? w : -soft_threshold / denominator;
        w = absolute(z) <= lambda1 ? 0.0f : new_w;
    """,
)


class Ftrl(DenseOptimizer):
    """FTRL-Proximal (McMahan et al., KDD 2013) for rows and dense parameters; docs/optimizers.md gives the formula.

    Args:
        params: The parameters or param groups.
        lr: The learning rate, above 0.
        weight_decay: The coefficient of L2 decay, added to the gradient.
        lr_power: Sets the accumulator's exponent, by default to `-lr_power`. The default takes the square root.
        initial_accumulator_value: The initial accumulator `n`. Must be above 0 if the exponent is negative.
        lambda1: The strength of L1 regularization.
        lambda2: The strength of L2 regularization.
        beta: Added to `n^p`, where `n` is the accumulator and `p` the exponent.
        power_sign: The accumulator's exponent: "-lr_power" (default), or "lr_power" as in OneFlow's kernel. If the
            exponent is negative, steps grow as the accumulator grows.

    Raises:
        OptimizerError: If an argument is out of range. `lr_power` may be -8 to 8; other numbers may not be negative.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        lambda1: float = 0.0,
        lambda2: float = 0.0,
        beta: float = 0.0,
        power_sign: str = "-lr_power",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "lr_power": lr_power,
            "initial_accumulator_value": initial_accumulator_value,
            "lambda1": lambda1,
            "lambda2": lambda2,
            "beta": beta,
            "power_sign": power_sign,
        }
        super().__init__(params, defaults)

    @property
    def support_sparse(self) -> bool:
        """False, because sparse gradients are not supported. OneFlow's optimizers have this property."""
        return False

    def update_parameter(self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup) -> None:
        hyperparams = _compute_hyperparams(group, 1)
        if not state:
            state["sum"] = torch.full_like(w, group["initial_accumulator_value"])
            state["z"] = torch.zeros_like(w)
        g = g + hyperparams["weight_decay"] * w
        old_power = state["sum"] ** hyperparams["power_of_sum"]
        state["sum"] += g * g
        new_power = state["sum"] ** hyperparams["power_of_sum"]
        z = state["z"].add_(g - (new_power - old_power) / hyperparams["lr"] * w)
        denominator = (hyperparams["beta"] + new_power) / hyperparams["lr"] + hyperparams["lambda2"]
        new_w = torch.where(denominator == 0, w, -(z - z.sign() * hyperparams["lambda1"]) / denominator)
        w.copy_(torch.where(z.abs() <= hyperparams["lambda1"], 0, new_w))


def _compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    power = read_number(group, "lr_power", low=-8.0, high=8.0)
    is_negated = read_choice(group, "power_sign", ("-lr_power", "lr_power")) == "-lr_power"
    settings = {name: read_number(group, name) for name in ("weight_decay", "lambda1", "lambda2", "beta")}
    return {**settings, "lr": read_number(group, "lr", low=MIN_VALUE), "power_of_sum": -power if is_negated else power}


def _compute_initial(group: ParamGroup) -> dict[str, float]:
    low = MIN_VALUE if _compute_hyperparams(group, 1)["power_of_sum"] < 0 else 0.0
    return {"sum": read_number(group, "initial_accumulator_value", low=low)}


RULES = (Rule(FTRL, Ftrl, _compute_hyperparams, _compute_initial),)
