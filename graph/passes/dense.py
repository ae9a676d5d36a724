"""The node of a compiled step that updates dense parameters: the user's own optimizer, run as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def numbers_of(optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    """The settings of optimizers by name and group, to be compared between ranks."""
    return {
        f"{type(optimizer).__name__} {place}, group {index}": {
            name: _plain(value) for name, value in group.items() if name != "params"
        }
        for place, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
    }


def _plain(value: Any) -> Any:
    """A setting as msgpack carries it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__
