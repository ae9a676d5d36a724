"""SGD with layer-wise rates: You et al., "Large batch training of convolutional networks", 2017. A row takes the role
of the paper's layer, as in FBGEMM's LARS_SGD (https://github.com/pytorch/FBGEMM, split table batched embeddings):

    a  = lr * eta * |w| / (|g| + weight_decay * |w|)
    b  = momentum * b + a * (g + weight_decay * w)
    w -= b

|x| is a row's L2 norm. `maximize` negates `g`. A row's buffer decays only in steps that touch the row. If |w| or the
divisor is 0, a = lr. FBGEMM has no such exception: FBGEMM never changes a row of zeros, and divides even by 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import DenseOptimizer, ParamsT, read_number
from .kernel import RuleKernel
from .rule import ParamGroup, Rule

LARS_SGD = RuleKernel(
    name="lars_sgd",
    hyperparams="lr eta momentum weight_decay maximize",
    element_states=("momentum_buffer",),
    element_body="g = add_decay(g, w, 0.0f, maximize);",
    norms=(("weight_squares", "square(w)"), ("gradient_squares", "square(g)")),
    row_from_norms="""
        const float norm = square_root(weight_squares);
        const float divisor = square_root(gradient_squares) + weight_decay * norm;
        row_lr = weight_squares == 0.0f || divisor == 0.0f ? lr : lr * eta * norm / divisor;
    """,
    row_values=("row_lr",),
    second_pass="""
        momentum_buffer = momentum * momentum_buffer + row_lr * (g + weight_decay * w);
        w = w - momentum_buffer;
    """,
)


class LarsSGD(DenseOptimizer):
    """SGD with momentum. Each row (a slice along the last dimension) has its own rate. See docs/optimizers.md.

    Sources: You et al., "Large batch training of convolutional networks", 2017, and FBGEMM's LARS_SGD.

    Args:
        params: The parameters or param groups.
        lr: The learning rate.
        momentum: The momentum factor.
        weight_decay: The coefficient of L2 decay.
        eta: The trust coefficient.
        maximize: Maximize the loss instead of minimizing it.

    Raises:
        OptimizerError: If an argument is negative.
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

    def update_parameter(self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup) -> None:
        hyperparams = _compute_hyperparams(group, 1)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(w)
        b = state["momentum_buffer"]
        g = -g if group["maximize"] else g
        norm, gradient_norm = (y.square().sum(-1, keepdim=True).sqrt() for y in (w, g))
        divisor = gradient_norm + hyperparams["weight_decay"] * norm
        has_no_ratio = (norm == 0) | (divisor == 0)
        a = torch.where(has_no_ratio, hyperparams["lr"], hyperparams["lr"] * hyperparams["eta"] * norm / divisor)
        b.mul_(hyperparams["momentum"]).add_(a * (g + hyperparams["weight_decay"] * w))
        w.sub_(b)


def _compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    return {name: read_number(group, name) for name in ("lr", "eta", "momentum", "weight_decay")}


RULES = (Rule(LARS_SGD, LarsSGD, _compute_hyperparams),)
