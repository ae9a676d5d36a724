"""LAMB, and LAMB with one second moment a row: You et al., "Large batch optimization for deep learning", ICLR 2020. The
layers of the paper are rows, as in FBGEMM's LAMB and PARTIAL_ROWWISE_LAMB
(https://github.com/pytorch/FBGEMM, split table batched embeddings):

    m += (g - m) * (1 - beta1)
    v  = beta2 * v + (1 - beta2) * g * g                            lamb
    v  = beta2 * v + (1 - beta2) * mean over the row of g * g       partial_rowwise_lamb
    r  = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * w
    w -= lr * |w| / |r| * r

|x| is the L2 norm of a row. `g` is negated for `maximize`. `t` counts the steps of the embedding. Lazy: `m` and `v` of
a row decay only in steps that touch it. If |w| or |r| is 0, w changes by lr * r; FBGEMM divides by 0. If m would be
divided by 0 (eps = 0, and no gradient so far), that part of r is 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .base import OwnAdam, hyper, row_mean
from .kernel import Kernel
from .rule import Group, Rule

LAMB_KERNEL = Kernel(
    name="lamb",
    hypers="lr weight_decay maximize one_minus_beta1 beta2 one_minus_beta2 correction1 sqrt_correction2 eps",
    element_states=("exp_avg", "exp_avg_sq"),
    element="""
        g = decayed(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        exp_avg_sq = beta2 * exp_avg_sq + (one_minus_beta2 * g) * g;
        g = quotient(exp_avg / correction1, square_root(exp_avg_sq) / sqrt_correction2 + eps) + weight_decay * w;
    """,
    norms=(("weights", "square(w)"), ("steps", "square(g)")),
    after="""
        const float trust = square_root(weights) / square_root(steps);
        size = weights == 0.0f || steps == 0.0f ? lr : lr * trust;
    """,
    row_values=("size",),
    finish="w = w - size * g;",
)

PARTIAL_ROWWISE_LAMB_KERNEL = replace(
    LAMB_KERNEL,
    name="partial_rowwise_lamb",
    element_states=("exp_avg",),
    row_states=("exp_avg_sq",),
    term="square(g)",
    row="""
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (total / dim);
        root = square_root(exp_avg_sq) / sqrt_correction2 + eps;
    """,
    element="""
        g = decayed(g, w, 0.0f, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        g = quotient(exp_avg / correction1, root) + weight_decay * w;
    """,
    row_values=("root", "size"),
)


class LAMB(OwnAdam):
    """LAMB with a trust ratio for each row of a parameter, its last dimension; see the formula above."""

    def move(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> None:
        x, m, root = self.moments(w, g, state, group)
        r = torch.where(root == 0, 0, m / x["correction1"] / root) + x["weight_decay"] * w
        weights, steps = (y.square().sum(-1, keepdim=True).sqrt() for y in (w, r))
        ratio = torch.where((weights == 0) | (steps == 0), 1, weights / steps)
        w.sub_(x["lr"] * ratio * r)


class PartialRowWiseLAMB(LAMB):
    """`LAMB` with one second moment for each row."""

    second_moment_input = staticmethod(row_mean)


RULES = (
    Rule(LAMB_KERNEL, LAMB, hyper),
    Rule(PARTIAL_ROWWISE_LAMB_KERNEL, PartialRowWiseLAMB, hyper),
)
