"""The object in `grad` of an embedding's parameter after backward() in a plain PyTorch loop."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ..errors import GraphError
from ..ops.rows_contract import Rows
from ..spec.inputs import Lookup
from .row_gradients import RowGradients

# the EagerOptimizer that steps an embedding, by its handle
holders: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()

# the functions that torch calls to look at a tensor, and when a module moves
_HARMLESS = {"__get__", "__repr__", "is_complex", "is_floating_point"}
_HARMLESS |= {"__set__", "_has_compatible_shallow_copy_type", "cpu", "cuda", "float", "to"}


class ShadowGrad(Tensor):
    """Stands for the gradients of rows, which no tensor holds. Setting `grad` to None drops them, as any gradient.

    Computing with it raises GraphError: a norm or a sum over the gradients of all parameters would leave the rows out.
    """

    rows: RowGradients

    @classmethod
    def of(cls, embedding: Rows) -> ShadowGrad:
        grad = torch.zeros_like(embedding.shadow).as_subclass(cls)
        grad.rows = RowGradients(embedding)
        return grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _HARMLESS:
            leaves = pytree.tree_leaves((args, kwargs))
            name = next(leaf.rows.embedding.name for leaf in leaves if isinstance(leaf, cls))
            raise GraphError(
                f"{func.__name__} of the gradient of embedding {name!r}: no tensor holds the gradients of its rows; "
                "step by the EagerOptimizer, leave the embedding's parameters out of clip_grad_norm_ and of "
                "GradScaler, and clip rows by clip_grad_row_norm in its param group"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def is_reached(embedding: Rows) -> bool:
    """Whether the backward pass under way reaches the embedding's parameter: autograd.grad of others does not.

    In a trace this is not known here, and the answer is True. GraphError for autograd.grad of the parameter itself, and
    for create_graph=True.
    """
    if detect_fake_mode() is not None:
        return True
    try:
        reached = bool(torch._C._will_engine_execute_node(get_gradient_edge(embedding.shadow).node))
    except RuntimeError:  # torch raises it where the gradient of the leaf itself is asked for
        raise GraphError(
            f"embedding {embedding.name!r}: torch.autograd.grad of its parameter, but no tensor holds the gradients of "
            "its rows; call backward(), or ask for the gradient of the rows that a lookup returned"
        ) from None
    if reached and torch.is_grad_enabled():
        raise GraphError(
            f"embedding {embedding.name!r}: a lookup has no second derivative; leave out create_graph=True"
        )
    return reached


def accumulate(embedding: Rows, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
    """Add the gradient of a lookup to `grad` of the embedding's parameter, as `RowGradients.add`. GraphError."""
    name, shadow = embedding.name, embedding.shadow
    if embedding.handle not in holders:
        raise GraphError(
            f"embedding {name!r}: backward() outside a graph; call it in the build() of a tierbed.Graph, give the "
            "optimizer to a tierbed.EagerOptimizer to train in a loop, or read under torch.no_grad()"
        )
    if not isinstance(shadow.grad, ShadowGrad):
        shadow.grad = ShadowGrad.of(embedding)
    shadow.grad.rows.add(lookup, grad, weights, order)
