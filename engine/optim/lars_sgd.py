"""SGD with layer-wise rates: You et al., "Large batch training of convolutional networks", 2017, with the layers of the
paper being rows, as in FBGEMM's LARS_SGD (https://github.com/pytorch/FBGEMM, split table batched embeddings):

    a  = lr * eta * |w| / (|g| + weight_decay * |w|)
    b  = momentum * b + a * (g + weight_decay * w)
    w -= b

|x| is the L2 norm of a row. `g` is negated for `maximize`. The buffer of a row decays only in steps that touch it.
If |w| or the divisor is 0, a = lr; FBGEMM divides by 0, and never changes a row of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import OwnOptimizer, number
from .kernel import Kernel
from .rule import Group, Rule

LARS_SGD = Kernel(
    name="lars_sgd",
    hypers="lr eta momentum weight_decay maximize",
    element_states=("momentum_buffer",),
    element="g = decayed(g, w, 0.0f, maximize);",
    norms=(("weights", "square(w)"), ("gradients", "square(g)")),
    after="""
        const float norm = square_root(weights);
        const float divisor = square_root(gradients) + weight_decay * norm;
        size = weights == 0.0f || divisor == 0.0f ? lr : lr * eta * norm / divisor;
    """,
    row_values=("size",),
    finish="""
        momentum_buffer = momentum * momentum_buffer + size * (g + weight_decay * w);
        w = w - momentum_buffer;
    """,
)


class LarsSGD(OwnOptimizer):
    """SGD with momentum and a rate for each row of a parameter, its last dimension; see the formula above.

    eta: the trust coefficient. Raises OptimizerError for negative arguments.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "maximize": maximize}
        super().__init__(params, defaults)

    def move(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> None:
        x = _hyper(group, 1)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(w)
        b = state["momentum_buffer"]
        g = -g if group["maximize"] else g
        norm, gradients = (y.square().sum(-1, keepdim=True).sqrt() for y in (w, g))
        divisor = gradients + x["weight_decay"] * norm
        still = (norm == 0) | (divisor == 0)
        a = torch.where(still, x["lr"], x["lr"] * x["eta"] * norm / divisor)
        b.mul_(x["momentum"]).add_(a * (g + x["weight_decay"] * w))
        w.sub_(b)


def _hyper(group: Group, step: int) -> dict[str, float]:
    return {name: number(group, name) for name in ("lr", "eta", "momentum", "weight_decay")}


RULES = (Rule(LARS_SGD, LarsSGD, _hyper),)
