"""Adam and AdamW, like torch.optim: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html

    adam    m += (g - m) * (1 - beta1)
            v  = beta2 * v + (1 - beta2) * g * g
            w -= lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
    adamw   w *= 1 - lr * weight_decay, then adam without weight decay

`maximize` negates `g`; adam's weight decay then adds `weight_decay * w` to `g`. `t` counts the embedding's steps. Both
optimizers are lazy: a row's `m` and `v` decay only in steps that touch the row. If `m` would be divided by 0 (eps = 0
and no gradient so far), `m` does not change `w`, while torch makes `w` NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .kernel import RuleKernel
from .rule import ParamGroup, Rule

ADAM = RuleKernel(
    name="adam",
    hyperparams="step_size weight_decay maximize one_minus_beta1 beta2 one_minus_beta2 sqrt_correction2 eps",
    element_states=("exp_avg", "exp_avg_sq"),
    element_body="""
        g = add_decay(g, w, weight_decay, maximize);
        exp_avg = exp_avg + (g - exp_avg) * one_minus_beta1;
        exp_avg_sq = beta2 * exp_avg_sq + (one_minus_beta2 * g) * g;
        w = w - step_size * quotient(exp_avg, square_root(exp_avg_sq) / sqrt_correction2 + eps);
    """,
)

ADAMW = replace(
    ADAM,
    name="adamw",
    hyperparams="step_size decay maximize one_minus_beta1 beta2 one_minus_beta2 sqrt_correction2 eps",
    element_body="w = w * decay;" + ADAM.element_body.replace("weight_decay", "0.0f"),
)


def compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    """Return the hyper-parameters of both rules as Python floats (double). The kernel rounds them to float32 once."""
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    return {
        "correction1": 1.0 - beta1**step,
        "step_size": lr / (1.0 - beta1**step),
        "decay": 1.0 - lr * float(group["weight_decay"]),
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1.0 - beta2,
        "sqrt_correction2": math.sqrt(1.0 - beta2**step),
    }


def is_decoupled(group: ParamGroup) -> bool:
    """True if weight decay is decoupled from the gradient, as in AdamW."""
    return bool(group["decoupled_weight_decay"])


RULES = tuple(
    rule
    for optimizer in (torch.optim.Adam, torch.optim.AdamW)
    for rule in (
        Rule(ADAMW, optimizer, compute_hyperparams, applies_to=is_decoupled),
        Rule(ADAM, optimizer, compute_hyperparams),
    )
)
