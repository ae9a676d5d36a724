"""SGD, and SGD with momentum, like torch.optim.SGD: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html

    sgd            w -= lr * g
    sgd_momentum   b  = momentum * b + (1 - dampening) * g    (b = g when the row is first written)
                   w -= lr * b                                (w -= lr * (g + momentum * b) with nesterov)

`maximize` negates `g`; weight decay then adds `weight_decay * w` to `g`. `b` decays only in steps that touch the row.
"""

from __future__ import annotations

import torch

from .kernel import RuleKernel
from .rule import Rule

SGD = RuleKernel("sgd", "lr weight_decay maximize", "w = w - lr * add_decay(g, w, weight_decay, maximize);")

SGD_MOMENTUM = RuleKernel(
    name="sgd_momentum",
    hyperparams="lr weight_decay maximize momentum one_minus_dampening nesterov",
    element_states=("momentum_buffer",),
    element_body="""
        g = add_decay(g, w, weight_decay, maximize);
        momentum_buffer = first ? g : momentum * momentum_buffer + one_minus_dampening * g;
        w = w - lr * (nesterov != 0.0f ? g + momentum * momentum_buffer : momentum_buffer);
    """,
)

RULES = (
    Rule(SGD, torch.optim.SGD, applies_to=lambda group: not float(group["momentum"])),
    Rule(SGD_MOMENTUM, torch.optim.SGD, lambda group, step: {"one_minus_dampening": 1.0 - float(group["dampening"])}),
)
