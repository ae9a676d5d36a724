"""The tensors that `build` gets instead of the live ones while it is traced, and how the live ones are put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase

trace_lock = RLock()  # modules and optimizers that a trace changes may be shared with a graph of another thread

_MUTABLE = dict | list | set | deque
_TRACED = FakeTensor | torch.SymInt | torch.SymFloat | torch.SymBool
_WALKED = nn.Module | _MUTABLE | tuple | _TRACED
_TABLES = ("_parameters", "_buffers", "_modules")


def set_grads(tensors: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad


@contextmanager
def unused_grads(tensors: list[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Give each live trainable parameter a `grad` whose use a trace can see, and yield these by the parameter's id.

    Puts the old gradients back. GraphError if `build` replaced one: it reached a parameter that is not traced.
    """
    live = [*dict.fromkeys(tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad)]
    before = [parameter.grad for parameter in live]
    unused = {id(p): torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).requires_grad_() for p in live}
    set_grads(live, unused.values())
    changed = False
    try:
        yield unused
        changed = any(parameter.grad is not unused[id(parameter)] for parameter in live)
    finally:
        set_grads(live, before)
    if changed:
        raise GraphError(
            "build sets the gradient of a parameter that it does not reach through self: by a list of parameters made "
            "earlier, or by an optimizer that is not the graph's; use self.<module>.parameters(), and add_optimizer"
        )


class _Settings(dict[str, Any]):
    """A param group during a trace, read-only."""

    def __init__(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        super().__init__(group)
        self._optimizer = optimizer

    def __setitem__(self, name: str, value: Any) -> None:
        raise changed_setting(self._optimizer, name)

    def update(self, *others: Any, **settings: Any) -> None:
        raise changed_setting(self._optimizer, next(iter(dict(*others, **settings)), ""))


def changed_setting(optimizer: Optimizer, name: str) -> GraphError:
    """The error for a `build` that changes a setting of a param group: only its trace would change it."""
    return GraphError(
        f"build sets {name!r} of a param group of {type(optimizer).__name__}, as step() of a scheduler does, and a "
        "compiled step does not repeat that; leave it out: add_optimizer(optimizer, lr_sch=scheduler) steps a "
        "scheduler, and anything else may be set between calls"
    )


@contextmanager
def swapped(
    root: nn.Module, optimizers: Iterable[Optimizer], swaps: dict[int, Tensor], names: dict[int, str]
) -> Iterator[None]:
    """Replace the tensors that modules and optimizers of the graph hold by those of `swaps`, found by id, in a block.

    Undone at the end. GraphError if build left another tensor on a module, called step() of an optimizer or of its
    schedule, or set a learning rate.
    """
    before = [(value, value.copy()) for _, value in _reachable(root) if isinstance(value, _MUTABLE)]
    slots = [
        (module, "shadow" if isinstance(module, EmbeddingBase) else name, live)  # `weight` of an Embedding is its rows
        for module in root.modules()
        for name, live in [*module._parameters.items(), *module._buffers.items()]
        if live is not None
    ]
    groups = [(optimizer, list(optimizer.param_groups)) for optimizer in optimizers]
    params = [(group, group["params"]) for _, own in groups for group in own]
    hooks = [optimizer.register_step_pre_hook(_refuse_step) for optimizer in optimizers]
    _put((module, name, swaps[id(live)]) for module, name, live in slots)
    for group, parameters in params:  # which build may have kept from before
        group["params"] = [swaps[id(live)] for live in parameters]
    for optimizer, own in groups:
        optimizer.param_groups[:] = map(_Settings, own, repeat(optimizer))
    rebound = leaked = None
    try:
        yield
        rebound = next((live for m, name, live in slots if getattr(m, name, None) is not swaps[id(live)]), None)
    finally:
        for hook in hooks:
            hook.remove()
        for optimizer, own in groups:
            optimizer.param_groups[:] = own
        for group, parameters in params:
            group["params"] = parameters
        _put(slots)
        leaked = next((where for where, value in _reachable(root) if isinstance(value, _TRACED)), None)
        if leaked is not None or rebound is not None:
            for container, copy in before:
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(copy)
    if rebound is not None:
        raise GraphError(f"build replaces {names[id(rebound)]} by another tensor; change it in place (copy_, add_)")
    if leaked is not None:
        raise GraphError(
            f"build keeps a tensor in the attribute {leaked}, which only the first call would set; return it, or "
            "register a buffer in __init__ and write to it in place (copy_); for nn.utils.weight_norm and "
            "spectral_norm use those of torch.nn.utils.parametrizations"
        )


def _put(slots: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    for module, name, tensor in slots:
        setattr(module, name, tensor)  # not into the dicts: an LSTM also keeps a list of its tensors


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise GraphError(
        f"build calls step() of {type(optimizer).__name__}, which the graph itself calls after build; leave it out"
    )


def _reachable(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """The objects that modules under `root` hold, in attributes and in containers, each with the attribute's name."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        where, value = pending.pop()
        if isinstance(value, nn.Module):
            where, value = type(value).__name__, vars(value)
        yield where, value
        if isinstance(value, _MUTABLE | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
            pending += (
                (where if key is None or key in _TABLES else f"{where}.{key}", item)
                for key, item in items
                if isinstance(item, _WALKED)  # a vocabulary may have millions of words
            )
