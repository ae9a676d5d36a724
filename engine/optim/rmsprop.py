"""RMSprop, like torch.optim.RMSprop with `momentum=0` and `centered=False`:
https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html

    v  = alpha * v + (1 - alpha) * g * g
    w -= lr * g / (sqrt(v) + eps)

`maximize` negates `g`; weight decay then adds `weight_decay * w` to `g`. Lazy: a row's `v` decays only in steps that
touch the row. If `g` would be divided by 0 (eps = 0 and no gradient so far), `w` stays unchanged; torch makes `w` NaN.
"""

from __future__ import annotations

import torch

from ..errors import OptimizerError
from .base import read_number
from .kernel import RuleKernel
from .rule import ParamGroup, Rule

RMSPROP = RuleKernel(
    name="rmsprop",
    hyperparams="lr weight_decay maximize alpha one_minus_alpha eps",
    element_states=("square_avg",),
    element_body="""
        g = add_decay(g, w, weight_decay, maximize);
        square_avg = alpha * square_avg + (one_minus_alpha * g) * g;
        w = w - lr * quotient(g, square_root(square_avg) + eps);
    """,
)


def _compute_hyperparams(group: ParamGroup, step: int) -> dict[str, float]:
    if float(group["momentum"]):
        raise OptimizerError(
            f"param group: momentum={group['momentum']!r}; RMSprop trains rows without momentum: use momentum=0"
        )
    return {"one_minus_alpha": 1.0 - read_number(group, "alpha", high=1.0)}


RULES = (Rule(RMSPROP, torch.optim.RMSprop, _compute_hyperparams),)
