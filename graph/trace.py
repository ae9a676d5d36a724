"""One run of `build` on fake tensors, recorded with its backward as aten calls."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import engine
from ..engine.errors import GraphError
from .names import name_of, tensor_names
from .signature import argument_name

if TYPE_CHECKING:
    from .graph import Graph

_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, engine.__file__, __file__))


@dataclass(frozen=True)
class Trace:
    """A recorded step. Its placeholders are the input tensors, then the live tensors; its output is one flat list."""

    module: fx.GraphModule
    spec: pytree.TreeSpec  # of what build returned
    constants: list[Any]  # leaves of what build returned, None where the recording gives a tensor
    is_tensor: list[bool]
    inputs: list[str]  # names of the input tensors
    with_grad: list[int]  # live tensors whose gradients follow the outputs in the recording's output


def trace(root: Graph, leaves: list[Any], spec: pytree.TreeSpec, tensors: list[Tensor]) -> Trace:
    """Record `root.build` for arguments with these leaves. GraphError for what a static graph cannot hold.

    `tensors` are the parameters and buffers under `root`; a tied one may be repeated.
    """
    names = tensor_names(root)
    _refuse_hooks(tensors, names)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found: dict[str, Any] = {"inputs": [argument_name(root.build, spec, i) for i in where]}

    def step(*flat: Tensor) -> list[Tensor]:
        arguments = list(leaves)
        for i, fake in zip(where, flat, strict=False):
            arguments[i] = fake.detach().requires_grad_(leaves[i].requires_grad)
        swaps: dict[int, Tensor] = {}
        for fake, live in zip(flat[len(inputs) :], tensors, strict=True):
            swaps.setdefault(id(live), _leaf(fake, live))
        args, kwargs = pytree.tree_unflatten(arguments, spec)
        with _swapped(root, swaps, names), _RefuseForeign(root):
            result = root.build(*args, **kwargs)
        for i in where:
            if arguments[i].grad is not None:
                raise GraphError(
                    f"argument {argument_name(root.build, spec, i)} requires grad, but a graph keeps no gradient of "
                    "its arguments; pass it detached, or use torch.autograd.grad in build"
                )
        values, found["spec"] = pytree.tree_flatten(result)
        found["is_tensor"] = [isinstance(value, Tensor) for value in values]
        found["constants"] = [None if isinstance(value, Tensor) else value for value in values]
        grads = {live: swap.grad for live, swap in swaps.items() if swap.grad is not None}
        with_grad = {id(live): i for i, live in enumerate(tensors) if id(live) in grads}
        found["with_grad"] = list(with_grad.values())
        outputs = [value.detach() if value.requires_grad else value for value in values if isinstance(value, Tensor)]
        return outputs + [grads[live] for live in with_grad]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    grad_mode = torch.is_grad_enabled()  # inference_mode(False) turns it on
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode), mode:
        # detach: a tensor that is given twice needs two fakes, since another call may give two tensors
        fakes = [mode.from_tensor(tensor).detach() for tensor in [*inputs, *tensors]]
        try:
            module = make_fx(step, _allow_non_fake_inputs=True)(*fakes)
        except Exception as error:
            if _is_data_dependent(error):
                raise GraphError(_data_dependent(error)) from error
            raise
        for node in module.graph.nodes:
            # each use of a closure tensor was given memory of its own: let aliases of it be seen
            if node.op == "get_attr":
                node.meta["val"] = mode.from_tensor(getattr(module, node.target))
    return Trace(module, **found)


def _leaf(fake: Tensor, live: Tensor) -> Tensor:
    """What build sees for a parameter or buffer: a leaf of its own, so that no gradient reaches the live one."""
    return nn.Parameter(fake, live.requires_grad) if isinstance(live, nn.Parameter) else fake


def _refuse_hooks(tensors: list[Tensor], names: dict[int, str]) -> None:
    for tensor in tensors:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise GraphError(
                f"{names[id(tensor)]} has a gradient hook, which a graph would skip; change gradients in build"
            )


@contextmanager
def _swapped(root: Graph, swaps: dict[int, Tensor], names: dict[int, str]) -> Iterator[None]:
    """Set each swap where modules hold the tensor of that id. GraphError if build leaves another tensor on a module."""
    modules = list(root.modules())
    slots = [
        (module, name, live)
        for module in modules
        for name, live in [*module._parameters.items(), *module._buffers.items()]
        if live is not None
    ]
    before = [dict(vars(module)) for module in modules]
    for module, name, live in slots:
        setattr(module, name, swaps[id(live)])
    rebound, leaked = None, None
    try:
        yield
        rebound = next((live for m, name, live in slots if getattr(m, name) is not swaps[id(live)]), None)
    finally:
        for module, name, live in slots:
            setattr(module, name, live)
        for module, attributes in zip(modules, before, strict=True):
            for name, value in list(vars(module).items()):
                if isinstance(value, FakeTensor):
                    leaked = f"{type(module).__name__}.{name}"
                    delattr(module, name)
                    if name in attributes:
                        setattr(module, name, attributes[name])
    if rebound is not None:
        raise GraphError(f"build replaces {names[id(rebound)]} by another tensor; change it in place (copy_, add_)")
    if leaked is not None:
        raise GraphError(
            f"build keeps a tensor in the attribute {leaked}, which only the first call would set; "
            "return it, or register a buffer and write to it in place (copy_)"
        )


class _RefuseForeign(TorchDispatchMode):
    """GraphError at the first use of a trainable tensor from outside the graph, which a step would not train."""

    def __init__(self, root: Graph) -> None:
        super().__init__()
        self._root = root

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.requires_grad:
                raise GraphError(
                    f"build uses the tensor {name_of(self._root, value)}, which requires grad but is in no module "
                    "of the graph; assign its module to self in __init__, or detach it"
                )
        return func(*args, **(kwargs or {}))


def _is_data_dependent(error: Exception) -> bool:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    return isinstance(error, RuntimeError) and "get value out of a tracing tensor" in str(error)


def _data_dependent(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    frame = frames[-1]
    return (
        f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: `{frame.line}` needs the value of a '
        "tensor, and a static graph is recorded without values; use torch.where or a mask, or compute it outside and "
        "pass it to the graph"
    )
