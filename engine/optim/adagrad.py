"""Adagrad, like torch.optim.Adagrad: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adagrad.html

    s += g * g
    w -= lr / (1 + (t - 1) * lr_decay) * (g / (sqrt(s) + eps))

`maximize` negates `g`; weight decay then adds `weight_decay * w` to `g`. `t` counts the embedding's steps. If
sqrt(s) + eps is 0 (eps = 0 and no gradient so far), `w` stays unchanged, while torch makes `w` NaN.
"""

from __future__ import annotations

import torch

from .kernel import RuleKernel
from .rule import ParamGroup, Rule

ADAGRAD = RuleKernel(
    name="adagrad",
    hyperparams="lr weight_decay maximize eps",
    element_states=("sum",),
    element_body="""
        g = add_decay(g, w, weight_decay, maximize);
        sum = sum + g * g;
        w = w - lr * quotient(g, square_root(sum) + eps);
    """,
)


def _compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    return {"lr": float(group["lr"]) / (1.0 + (step - 1) * float(group["lr_decay"]))}


def _compute_initial(group: ParamGroup) -> dict[str, float]:
    return {"sum": float(group["initial_accumulator_value"])}


RULES = (Rule(ADAGRAD, torch.optim.Adagrad, _compute_hyperparams, _compute_initial),)
