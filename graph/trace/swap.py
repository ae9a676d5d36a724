"""Swap real tensors for fake tensors while `build` is traced, and put the real tensors back afterwards.

`build` reaches parameters and buffers through modules and optimizers, so the swap replaces tensors in these objects.
The real tensors are put back even after an error. Fake tensors that `build` leaves in modules raise GraphError.
"""

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
from ...engine.ops.embedding_base import EmbeddingBase

trace_lock = RLock()  # another thread's graph may share modules and optimizers that a trace changes

_MUTABLE_TYPES = dict | list | set | deque
_TRACED_TYPES = FakeTensor | torch.SymInt | torch.SymFloat | torch.SymBool
_WALKED_TYPES = nn.Module | _MUTABLE_TYPES | tuple | _TRACED_TYPES
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


def set_grads(tensors: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad


@contextmanager
def set_sentinel_grads(tensors: list[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Give each trainable parameter a `grad` whose use a trace detects. Raises GraphError if build replaces a grad."""
    real = [*dict.fromkeys(tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad)]
    old_grads = [parameter.grad for parameter in real]
    sentinels = {id(p): torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).requires_grad_() for p in real}
    set_grads(real, sentinels.values())
    was_replaced = False
    try:
        yield sentinels
        was_replaced = any(parameter.grad is not sentinels[id(parameter)] for parameter in real)
    finally:
        set_grads(real, old_grads)
    if was_replaced:
        raise GraphError(
            "build sets the gradient of a parameter, but not through self. The parameter comes from an older list or "
            "another optimizer; use self.<module>.parameters(), and pass the optimizer to add_optimizer"
        )


class _ReadOnlyParamGroup(dict[str, Any]):
    """A read-only param group for use during a trace."""

    def __init__(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        super().__init__(group)
        self._optimizer = optimizer

    def __setitem__(self, name: str, value: Any) -> None:
        raise make_setting_error(self._optimizer, name)

    def update(self, *others: Any, **settings: Any) -> None:
        raise make_setting_error(self._optimizer, next(iter(dict(*others, **settings)), ""))


def make_setting_error(optimizer: Optimizer, name: str) -> GraphError:
    """Return the error for a `build` that changes a param group, because compiled steps would not repeat the change."""
    return GraphError(
        f"build sets {name!r} of a param group of {type(optimizer).__name__}, but compiled steps would not do so. Make "
        "the change between calls. For a scheduler, call add_optimizer(optimizer, lr_sch=scheduler)"
    )


@contextmanager
def swap_tensors(
    root: nn.Module, optimizers: Iterable[Optimizer], swaps: dict[int, Tensor], names: dict[int, str]
) -> Iterator[None]:
    """Replace the tensors in modules and optimizers until the block ends. swaps: a real tensor's id -> its replacement.

    Raises GraphError if build left another tensor on a module, called an optimizer's step(), or set a learning rate.
    """
    containers = [(value, value.copy()) for _, value in _walk_objects(root) if isinstance(value, _MUTABLE_TYPES)]
    attributes = [
        (module, "shadow" if isinstance(module, EmbeddingBase) else name, real)  # an Embedding's `weight` returns rows
        for module in root.modules()
        for name, real in [*module._parameters.items(), *module._buffers.items()]
        if real is not None
    ]
    optimizer_groups = [(optimizer, list(optimizer.param_groups)) for optimizer in optimizers]
    params = [(group, group["params"]) for _, param_groups in optimizer_groups for group in param_groups]
    hooks = [optimizer.register_step_pre_hook(_refuse_step) for optimizer in optimizers]
    _set_attributes((module, name, swaps[id(real)]) for module, name, real in attributes)
    for group, parameters in params:  # build may hold an older reference to the group
        group["params"] = [swaps[id(real)] for real in parameters]
    for optimizer, param_groups in optimizer_groups:
        optimizer.param_groups[:] = map(_ReadOnlyParamGroup, param_groups, repeat(optimizer))
    replaced = leak = None
    try:
        yield
        replaced = next((real for m, name, real in attributes if getattr(m, name, None) is not swaps[id(real)]), None)
    finally:
        for hook in hooks:
            hook.remove()
        for optimizer, param_groups in optimizer_groups:
            optimizer.param_groups[:] = param_groups
        for group, parameters in params:
            group["params"] = parameters
        _set_attributes(attributes)
        leak = next((attribute for attribute, value in _walk_objects(root) if isinstance(value, _TRACED_TYPES)), None)
        if leak is not None or replaced is not None:
            for container, old_items in containers:
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(old_items)
    if replaced is not None:
        raise GraphError(f"build replaces {names[id(replaced)]} with another tensor; change it in place (copy_, add_)")
    if leak is not None:
        raise GraphError(
            f"build keeps a tensor in the attribute {leak}, but only the first call would set it. Return the tensor, "
            "or register a buffer in __init__ and change the buffer in place (copy_). Instead of "
            "nn.utils.weight_norm and spectral_norm, use torch.nn.utils.parametrizations"
        )


def _set_attributes(attributes: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    for module, name, tensor in attributes:
        setattr(module, name, tensor)  # setattr, because an LSTM also keeps a list of its tensors


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise GraphError(
        f"build calls step() of {type(optimizer).__name__}, but the graph calls it after build; remove that call"
    )


def _walk_objects(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (attribute name, object) for all objects in attributes of modules under `root`, also in containers."""
    seen_ids: set[int] = set()
    pending_objects: list[tuple[str, Any]] = [("", root)]
    while pending_objects:
        attribute, value = pending_objects.pop()
        if isinstance(value, nn.Module):
            attribute, value = type(value).__name__, vars(value)
        yield attribute, value
        if isinstance(value, _MUTABLE_TYPES | tuple) and id(value) not in seen_ids:
            seen_ids.add(id(value))
            items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
            pending_objects += (
                (attribute if key is None or key in _MODULE_DICTS else f"{attribute}.{key}", item)
                for key, item in items
                if isinstance(item, _WALKED_TYPES)  # skip plain values: a dict may hold millions of strings
            )
