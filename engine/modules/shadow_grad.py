"""The object in `grad` of an embedding's parameter after backward() in a plain PyTorch loop."""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ..errors import GraphError
from ..ops.rows_contract import TRACED, Rows
from ..options.inputs import Lookup
from .row_gradients import RowGradients

# the EagerOptimizer that steps an embedding, by its handle
holders: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) - torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# the functions by which torch, and torch.compile, look at what a tensor is, but at none of its numbers
_LOOKS = {"__get__", "_is_view", "dim", "is_complex", "is_conj", "is_floating_point", "is_inference", "is_neg", "size"}
_LOOKS |= {"storage_offset", "stride", "untyped_storage"}


class ShadowGrad(Tensor):
    """Stands for the gradients of rows, which no tensor holds. Setting `grad` to None drops them, as any gradient.

    Computing with it raises GraphError: a norm or a sum over the gradients of all parameters would leave the rows out.
    """

    rows: RowGradients

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShadowGrad(rows of embedding {self.rows.embedding.name!r})"

    @classmethod
    def of(cls, rows: RowGradients) -> ShadowGrad:
        """`rows` as the gradient of the parameter that their embedding has."""
        plain = torch.zeros_like(rows.embedding.shadow)
        grad = torch.Tensor._make_subclass(cls, plain)  # no view, unlike as_subclass
        grad.rows = rows
        return grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):  # such as .data and .T are
                return found
        leaves = pytree.tree_leaves((args, kwargs))
        name = next(leaf.rows.embedding.name for leaf in leaves if isinstance(leaf, cls))
        raise GraphError(
            f"{func.__name__} of the gradient of embedding {name!r}: no tensor holds the gradients of its rows; "
            "step by the EagerOptimizer, clip by its clip_grad_norm_(parameters, max_norm) in place of that of torch, "
            "or rows alone by clip_grad_row_norm in their param group, and leave the embedding's parameters out of "
            "GradScaler"
        )


def check_not_traced(embedding: Rows) -> None:
    """Raises GraphError while another thread traces a graph with the embedding: it has no gradient then."""
    traced = getattr(embedding.shadow, TRACED, None)
    if traced is not None and traced[0] != get_ident():
        raise GraphError(
            f"embedding {embedding.name!r} cannot be trained while another thread traces a graph that has it; let the "
            "first call of each signature end before other threads train its rows"
        )


def is_reached(embedding: Rows) -> bool:
    """Whether the backward pass under way reaches the embedding's parameter: autograd.grad of others does not.

    In a trace this is not known here, and the answer is True. GraphError for autograd.grad of the parameter itself, and
    for create_graph=True.
    """
    if detect_fake_mode() is not None:
        return True
    check_not_traced(embedding)
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
    node = torch._C._current_autograd_node()
    if node is not None and node.name().startswith("CompiledFunction"):  # it computes the gradients of all its inputs
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _NO_KEYS):
            if not is_reached(embedding):
                return
    name, shadow = embedding.name, embedding.shadow
    if embedding.handle not in holders:
        raise GraphError(
            f"embedding {name!r}: backward() outside a graph; call it in the build() of a tierbed.Graph, give the "
            "optimizer to a tierbed.EagerOptimizer to train in a loop, or read under torch.no_grad()"
        )
    if shadow._backward_hooks or shadow._post_accumulate_grad_hooks:
        raise GraphError(
            f"embedding {name!r}: its parameter has a gradient hook, and no tensor holds the gradients of its rows; "
            "remove the hook, and register it on what a lookup returns"
        )
    if not isinstance(shadow.grad, ShadowGrad):
        shadow.grad = ShadowGrad.of(RowGradients(embedding))
    shadow.grad.rows.add(lookup, grad, weights, order)
