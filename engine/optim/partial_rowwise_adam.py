"""Adam with one second moment a row. The formula is FBGEMM's PARTIAL_ROWWISE_ADAM
(https://github.com/pytorch/FBGEMM, split table batched embeddings), with decoupled weight decay:

    m += (g - m) * (1 - beta1)
    v  = beta2 * v + (1 - beta2) * mean over the row of g * g
    w  = w * (1 - lr * weight_decay) - lr / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) * m

`g` is negated for `maximize`. `t` counts the steps of the embedding. Lazy: `m` and `v` of a row decay only in steps
that touch it. Where the divisor of m is 0 (eps = 0, and no gradient yet), w takes no step by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .adam import hyper
from .arithmetic import row_sum
from .base import OwnOptimizer, adam_settings, step_of
from .kernel import Kernel
from .rule import Group, Row, Rule, decayed, quotient

PARTIAL_ROWWISE_ADAM = Kernel(
    name="partial_rowwise_adam",
    hypers=("step_size", "decay", "maximize", "one_minus_beta1", "beta2", "one_minus_beta2", "sqrt_correction2", "eps"),
    element_states=("exp_avg",),
    row_states=("exp_avg_sq",),
    term="square(g)",
    row="""
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (total / dim);
        size = quotient(step_size, square_root(exp_avg_sq) / sqrt_correction2 + eps);
    """,
    row_values=("size",),
    element="""
        g = decayed(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        w = w * decay - size * exp_avg;
    """,
)


class PartialRowWiseAdam(OwnOptimizer):
    """Adam with one second moment for each row of a parameter, its last dimension; see the formula above.

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
        for group in self.param_groups:
            adam_settings(group)

    def move(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> None:
        if not state:
            state |= {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w.sum(-1, keepdim=True))}
        x, m, v = _hyper(group, step_of(state)), state["exp_avg"], state["exp_avg_sq"]
        g = -g if x["maximize"] else g
        m.lerp_(g, x["one_minus_beta1"])
        v.mul_(x["beta2"]).add_(x["one_minus_beta2"] * g.square().mean(-1, keepdim=True))
        root = v.sqrt() / x["sqrt_correction2"] + x["eps"]
        size = torch.where(root == 0, 0, x["step_size"] / root)
        w.mul_(x["decay"]).sub_(size * m)


def partial_rowwise_adam(x: Row) -> None:
    x.exp_avg_sq[:] = x.beta2 * x.exp_avg_sq + x.one_minus_beta2 * (row_sum(x.g * x.g) / x.dim)
    size = quotient(x.step_size, np.sqrt(x.exp_avg_sq) / x.sqrt_correction2 + x.eps)
    g = decayed(x.g, x.w, np.float32(0), x.maximize)
    x.exp_avg += (g - x.exp_avg) * x.one_minus_beta1
    x.w[:] = x.w * x.decay - size * x.exp_avg


def _hyper(group: Group, step: int) -> dict[str, float]:
    adam_settings(group)
    return hyper(group, step)


RULES = (Rule(PARTIAL_ROWWISE_ADAM, PartialRowWiseAdam, _hyper, partial_rowwise_adam),)
