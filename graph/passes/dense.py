"""The node of a compiled step that updates dense parameters: the user's own optimizer, run as it is."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from ..trace.swap import one_trace


def dense_step(optimizer: Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    """`optimizer.step()` with these gradients. Its learning rates, schedulers and step counts are live.

    A parameter of the optimizer that is not in `params` keeps `grad` None, so torch leaves it as it is.
    """
    with one_trace:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        try:
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        finally:
            for parameter in params:
                parameter.grad = None
