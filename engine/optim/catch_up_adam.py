"""Adam whose rows catch up: lazy in work, equal to dense torch.optim.Adam in values.

A row changes only in steps that touch it. When it is next looked up or touched, the steps that it missed are applied
first. Those had a gradient of zero, so each of them, for s = last + 1 ... t - 1, is

    m -= (1 - beta1) * m;  v = beta2 * v
    w -= lr / (1 - beta1^s) * (m / (sqrt(v) / sqrt(1 - beta2^s) + eps))

At most `terms` of them are applied one by one. For the rest, w is unchanged, and m and v are multiplied by powers of
beta1 and beta2. Error: with r = beta1 / sqrt(beta2), the change of w in the j-th step after the first missed one is at
most r^j sqrt(1 + j) times the first change (sqrt(1 - beta2^s) grows by no more than sqrt(1 + j)). `terms` is the number
of steps after which the sum of the remaining bounds is below 2^-24, less than the rounding of the first step. The lr of
missed steps is taken to be the current one. Weight decay is not supported: it would change rows that were never
touched.

The bias corrections advance step by step in double. OneFlow's SmartDecayAdam has the same purpose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache

import torch
from torch.optim.optimizer import ParamsT

from ..errors import OptimizerError
from .adam import hyper as adam_hyper
from .base import SMALLEST, number
from .kernel import CatchUp, Kernel
from .rule import Group, Rule

ALL = 2**32 - 2**8  # missed steps: the largest number of them that float32 holds

CATCH_UP_ADAM = Kernel(
    name="catch_up_adam",
    hypers=("step_size", "maximize", "one_minus_beta1", "beta2", "one_minus_beta2", "sqrt_correction2", "eps", "terms"),
    doubles=("lr", "decay1", "decay2"),
    element_states=("exp_avg", "exp_avg_sq"),
    element="""
        g = decayed(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        exp_avg_sq = beta2 * exp_avg_sq + (one_minus_beta2 * g) * g;
        w = w - step_size * (exp_avg / (square_root(exp_avg_sq) / sqrt_correction2 + eps));
    """,
    catch_up=CatchUp(
        limit="terms",
        doubles=("power1", "power2"),
        values=("missed_size", "missed_correction2", "rest1", "rest2"),
        begin="""
            power1 = power(decay1, last);
            power2 = power(decay2, last);
        """,
        step="""
            power1 = power1 * decay1;
            power2 = power2 * decay2;
            missed_size = static_cast<float>(lr / (1.0 - power1));
            missed_correction2 = static_cast<float>(square_root(1.0 - power2));
        """,
        element="""
            exp_avg = exp_avg - exp_avg * one_minus_beta1;
            exp_avg_sq = beta2 * exp_avg_sq;
            w = w - missed_size * (exp_avg / (square_root(exp_avg_sq) / missed_correction2 + eps));
        """,
        rest="""
            rest1 = static_cast<float>(power(decay1, rest));
            rest2 = static_cast<float>(power(decay2, rest));
        """,
        rest_element="""
            exp_avg = exp_avg * rest1;
            exp_avg_sq = exp_avg_sq * rest2;
        """,
    ),
)


class CatchUpAdam(torch.optim.Adam):
    """torch.optim.Adam whose rows get the values of dense Adam, however rarely their ids occur; see above.

    Over dense parameters it is torch.optim.Adam. Raises OptimizerError for a weight decay, and for eps = 0: a row
    that was put has moments of 0, and its missed steps would be 0 / 0.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, maximize=maximize)
        for group in self.param_groups:
            _hyper(group, 1)


@cache
def terms(beta1: float, beta2: float) -> int:
    """How many missed steps are applied one by one: all, if their sum need not vanish."""
    ratio = beta1 / math.sqrt(beta2) if beta2 else math.inf

    def vanish(count: int) -> bool:  # the bounds from `count` on: a geometric sum of at most `growth`
        growth = ratio * math.sqrt((count + 2) / (count + 1))
        return growth < 1.0 and ratio**count * math.sqrt(count + 1) <= 2.0**-24 * (1.0 - growth)

    return bisect_left(range(ALL), True, key=vanish)


def _hyper(group: Group, step: int) -> dict[str, float]:
    if number(group, "weight_decay"):
        raise OptimizerError(
            f"param group: weight_decay={group['weight_decay']!r}; CatchUpAdam has none, since it would change rows "
            "that were never touched: use torch.optim.Adam or AdamW"
        )
    beta1, beta2 = map(float, group["betas"])
    lr = number(group, "lr")
    return {
        **adam_hyper(group, step),
        "lr": lr,
        "eps": number(group, "eps", low=SMALLEST),
        "decay1": beta1,
        "decay2": beta2,
        "terms": float(terms(beta1, beta2)),
    }


RULES = (Rule(CATCH_UP_ADAM, CatchUpAdam, _hyper),)
