"""Adam with a scalar second moment per row. The formula is FBGEMM's PARTIAL_ROWWISE_ADAM
(https://github.com/pytorch/FBGEMM, split table batched embeddings), with decoupled weight decay:

    m += (g - m) * (1 - beta1)
    v  = beta2 * v + (1 - beta2) * mean over the row of g * g
    w  = w * (1 - lr * weight_decay) - lr / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) * m

`maximize` negates `g`. `t` counts the embedding's steps. Lazy: a row's `m` and `v` decay only in steps that touch the
row. If `m` would be divided by 0 (eps = 0 and no gradient so far), `m` does not change `w`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import DenseAdam, compute_hyperparams, compute_row_mean
from .kernel import RuleKernel
from .rule import ParamGroup, Rule

PARTIAL_ROWWISE_ADAM = RuleKernel(
    name="partial_rowwise_adam",
    hyperparams="step_size decay maximize one_minus_beta1 beta2 one_minus_beta2 sqrt_correction2 eps",
    element_states=("exp_avg",),
    row_states=("exp_avg_sq",),
    reduction_term="square(g)",
    row_body="""
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (total / dim);
        multiplier = quotient(step_size, square_root(exp_avg_sq) / sqrt_correction2 + eps);
    """,
    row_values=("multiplier",),
    element_body="""
        g = add_decay(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        w = w * decay - multiplier * exp_avg;
    """,
)


class PartialRowWiseAdam(DenseAdam):
    """Adam with decoupled weight decay and a scalar second moment per row. A row is a slice along the last dimension.

    The formula is FBGEMM's PARTIAL_ROWWISE_ADAM; see docs/optimizers.md.

    Args:
        params: The parameters or param groups.
        lr: The learning rate.
        betas: The decay rates of the first and the second moment.
        eps: Added to the divisor.
        weight_decay: The coefficient of decoupled weight decay, as in `torch.optim.AdamW`.
        maximize: Maximize the loss instead of minimizing it.

    Raises:
        OptimizerError: If an argument is negative, or a beta is not below 1.
    """

    reduce_squares = staticmethod(compute_row_mean)

    def update_parameter(self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup) -> None:
        hyperparams, m, root = self.update_moments(w, g, state, group)
        multiplier = torch.where(root == 0, 0, hyperparams["step_size"] / root)
        w.mul_(hyperparams["decay"]).sub_(multiplier * m)


RULES = (Rule(PARTIAL_ROWWISE_ADAM, PartialRowWiseAdam, compute_hyperparams),)
