"""FTRL-Proximal: McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1, with a free
power of the accumulator; the arguments are those of OneFlow's `one_embedding.Ftrl`.

    n'  = n + g * g
    z  += g - (n'^p - n^p) / lr * w;  n = n'
    w   = 0 if |z| <= lambda1, else -(z - sign(z) * lambda1) / ((beta + n^p) / lr + lambda2)

If that denominator is 0 (n = 0 at first, and g * g underflows), w is unchanged.
`g` is the gradient plus `weight_decay * w`. The convention is the usual one, p = -lr_power, so that steps shrink as
the accumulator grows: lr_power = -0.5 uses the square root, and lr_power = 0 never shrinks them. `z` begins at 0, so a
row's first step keeps of its initial weight only the part given by sigma = (n'^p - n^p) / lr.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import SMALLEST, OwnOptimizer, choice, number
from .kernel import Kernel
from .rule import Group, Rule

FTRL = Kernel(
    name="ftrl",
    hypers="lr weight_decay power_of_sum lambda1 lambda2 beta",
    element_states=("sum", "z"),
    element="""
        g = decayed(g, w, weight_decay, 0.0f);
        const float before = power(sum, power_of_sum);
        sum = sum + g * g;
        const float after = power(sum, power_of_sum);
        z = z + (g - (after - before) / lr * w);
        const float shrunk = z > 0.0f ? z - lambda1 : z + lambda1;
        const float scale = (beta + after) / lr + lambda2;
        const float moved = scale == 0.0f ? w : -shrunk / scale;
        w = absolute(z) <= lambda1 ? 0.0f : moved;
    """,
)


class Ftrl(OwnOptimizer):
    """FTRL-Proximal; see the formula above.

    lr_power: the accumulator's power, negated. `power_sign="lr_power"` does not negate it, like OneFlow's kernel: then
    steps grow with the accumulator for a negative lr_power. Raises OptimizerError for a negative argument other
    than lr_power, lr = 0, and an initial_accumulator_value of 0 if its power is negative.
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
        """Whether dense parameters may have sparse gradients, a property of OneFlow's optimizers: False."""
        return False

    def move(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> None:
        x = _hyper(group, 1)
        if not state:
            state["sum"] = torch.full_like(w, group["initial_accumulator_value"])
            state["z"] = torch.zeros_like(w)
        g = g + x["weight_decay"] * w
        before = state["sum"] ** x["power_of_sum"]
        state["sum"] += g * g
        after = state["sum"] ** x["power_of_sum"]
        z = state["z"].add_(g - (after - before) / x["lr"] * w)
        scale = (x["beta"] + after) / x["lr"] + x["lambda2"]
        updated = torch.where(scale == 0, w, -(z - z.sign() * x["lambda1"]) / scale)
        w.copy_(torch.where(z.abs() <= x["lambda1"], 0, updated))


def _hyper(group: Group, step: int) -> dict[str, float]:
    power = number(group, "lr_power", low=-8.0, high=8.0)
    is_negated = choice(group, "power_sign", ("-lr_power", "lr_power")) == "-lr_power"
    others = {name: number(group, name) for name in ("weight_decay", "lambda1", "lambda2", "beta")}
    return {**others, "lr": number(group, "lr", low=SMALLEST), "power_of_sum": -power if is_negated else power}


def _initial(group: Group) -> dict[str, float]:
    low = SMALLEST if _hyper(group, 1)["power_of_sum"] < 0 else 0.0
    return {"sum": number(group, "initial_accumulator_value", low=low)}


RULES = (Rule(FTRL, Ftrl, _hyper, _initial),)
