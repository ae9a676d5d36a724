"""LAMB, also with a scalar second moment per row: You et al., "Large batch optimization for deep learning", ICLR 2020.
A row takes the role of the paper's layer, as in FBGEMM's LAMB and PARTIAL_ROWWISE_LAMB
(https://github.com/pytorch/FBGEMM, split table batched embeddings):

    m += (g - m) * (1 - beta1)
    v  = beta2 * v + (1 - beta2) * g * g                            lamb
    v  = beta2 * v + (1 - beta2) * mean over the row of g * g       partial_rowwise_lamb
    r  = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * w
    w -= lr * |w| / |r| * r

|x| is a row's L2 norm. `maximize` negates `g`. `t` counts the embedding's steps. Lazy: a row's `m` and `v` decay only
in steps that touch the row. If |w| or |r| is 0, w changes by lr * r, while FBGEMM divides by 0. If m would be divided
by 0 (eps = 0 and no gradient so far), this quotient counts as 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .base import DenseAdam, compute_hyperparams, compute_row_mean
from .kernel import RuleKernel
from .rule import ParamGroup, Rule

LAMB_KERNEL = RuleKernel(
    name="lamb",
    hyperparams="lr weight_decay maximize one_minus_beta1 beta2 one_minus_beta2 correction1 sqrt_correction2 eps",
    element_states=("exp_avg", "exp_avg_sq"),
    element_body="""
        g = add_decay(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        exp_avg_sq = beta2 * exp_avg_sq + (one_minus_beta2 * g) * g;
        g = quotient(exp_avg / correction1, square_root(exp_avg_sq) / sqrt_correction2 + eps) + weight_decay * w;
    """,
    norms=(("weight_squares", "square(w)"), ("step_squares", "square(g)")),
    row_from_norms="""
        const float trust = square_root(weight_squares) / square_root(step_squares);
        row_lr = weight_squares == 0.0f || step_squares == 0.0f ? lr : lr * trust;
    """,
    row_values=("row_lr",),
    second_pass="w = w - row_lr * g;",
)

PARTIAL_ROWWISE_LAMB_KERNEL = replace(
    LAMB_KERNEL,
    name="partial_rowwise_lamb",
    element_states=("exp_avg",),
    row_states=("exp_avg_sq",),
    reduction_term="square(g)",
    row_body="""
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (total / dim);
        root = square_root(exp_avg_sq) / sqrt_correction2 + eps;
    """,
    element_body="""
        g = add_decay(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        g = quotient(exp_avg / correction1, root) + weight_decay * w;
    """,
    row_values=("root", "row_lr"),
)


class LAMB(DenseAdam):
    """LAMB with a trust ratio for each row. A row is a slice along the last dimension. See docs/optimizers.md.

    Source: You et al., "Large batch optimization for deep learning", ICLR 2020. Equals FBGEMM's LAMB.

    Args:
        params: The parameters or param groups.
        lr: The learning rate.
        betas: The decay rates of the first and the second moment.
        eps: Added to the divisor.
        weight_decay: The weight decay coefficient. The trust ratio also scales the decay.
        maximize: Maximize the loss instead of minimizing it.

    Raises:
        OptimizerError: If an argument is negative, or a beta is not below 1.
    """

    def update_parameter(self, w: Tensor, g: Tensor, state: dict[str, Any], group: ParamGroup) -> None:
        hyperparams, m, root = self.update_moments(w, g, state, group)
        r = torch.where(root == 0, 0, m / hyperparams["correction1"] / root) + hyperparams["weight_decay"] * w
        weight_norm, step_norm = (y.square().sum(-1, keepdim=True).sqrt() for y in (w, r))
        ratio = torch.where((weight_norm == 0) | (step_norm == 0), 1, weight_norm / step_norm)
        w.sub_(hyperparams["lr"] * ratio * r)


class PartialRowWiseLAMB(LAMB):
    """`LAMB` with a scalar second moment per row, like FBGEMM's PARTIAL_ROWWISE_LAMB. The arguments are the same."""

    reduce_squares = staticmethod(compute_row_mean)


RULES = (
    Rule(LAMB_KERNEL, LAMB, compute_hyperparams),
    Rule(PARTIAL_ROWWISE_LAMB_KERNEL, PartialRowWiseLAMB, compute_hyperparams),
)
