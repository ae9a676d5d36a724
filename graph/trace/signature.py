"""The signature of a call. A compiled step is valid for all calls with the same signature.

A signature consists of a key of the call's arguments (`make_call_key`) and the state of the modules (`Structure`).
Every call computes its signature, so this code is written for speed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable
from enum import Enum
from functools import cache
from itertools import chain
from operator import attrgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...embedding.optim.ddp_guard import check_not_sharded
from ...engine.errors import GraphError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments, as passed by the user
Dims = frozenset[tuple[int, int]]  # (input tensor, dimension) pairs

NO_DYNAMIC_LEAVES: frozenset[int] = frozenset()

# for each TorchRec container: the leaves that contain one element per id
_TORCHREC = "torchrec.sparse.jagged_tensor"
_TORCHREC_FIELDS = {"JaggedTensor": frozenset({0, 1}), "KeyedJaggedTensor": frozenset({0, 1})}
_get_training = attrgetter("training")
get_module_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_get_tensor_fields = attrgetter("shape", "dtype", "device", "requires_grad")
_get_backward_hooks, _get_post_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_get_stride = methodcaller("stride")
_BUILTIN_TYPES = (NoneType, bool, int, float, complex, str, bytes, range, type, FunctionType, BuiltinFunctionType)
_PLAIN_TYPES = (*_BUILTIN_TYPES, Enum, np.generic, torch.dtype, torch.device, torch.layout, torch.memory_format)
_INEXACT_TYPES = (float, complex, np.generic)


class Call(NamedTuple):
    """A call's flattened arguments. dynamic_leaves: indices of container leaves whose first dimension is dynamic."""

    arguments: Arguments
    leaves: list[Any]
    spec: pytree.TreeSpec
    dynamic_leaves: frozenset[int]

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def dynamic_dims(self) -> Dims:
        """The dimensions that are dynamic even in the first call."""
        tensor_leaves = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return frozenset(
            (i, 0) for i, n in enumerate(tensor_leaves) if n in self.dynamic_leaves and can_be_dynamic(self.leaves[n])
        )


@cache
def make_tensors_spec(count: int) -> pytree.TreeSpec:
    """Return the pytree spec of a call whose only arguments are `count` tensors. Cached, because flattening is slow."""
    return pytree.tree_structure((tuple(range(count)), {}))


def find_dynamic_leaves(spec: pytree.TreeSpec) -> frozenset[int]:
    """Return the leaves with a dynamic first dimension. Container classes list dynamic leaves in `open_leaves`."""
    dynamic_leaves: set[int] = set()
    num_leaves, pending_nodes = 0, [spec]
    while pending_nodes:
        node = pending_nodes.pop()
        if node.is_leaf():
            num_leaves += 1
            continue
        children = node.children()
        positions: Any = getattr(node.type, "open_leaves", None)
        if positions is None and getattr(node.type, "__module__", "") == _TORCHREC:
            positions = _TORCHREC_FIELDS.get(node.type.__name__)
        if positions and all(child.is_leaf() for child in children):
            dynamic_leaves.update(num_leaves + position for position in range(len(children)) if position in positions)
        pending_nodes += reversed(children)
    return frozenset(dynamic_leaves)


def split_by_key(arguments: Arguments) -> Arguments:
    """Split keyed containers into one leaf per key, so that the step sees how many values each key has."""
    return pytree.tree_map(lambda x: x.split_by_key() if _is_keyed(x) else x, arguments, is_leaf=_is_keyed)


def has_keyed_containers(arguments: Arguments) -> bool:
    return any(map(_is_keyed, pytree.tree_leaves(arguments, is_leaf=_is_keyed)))


def _is_keyed(value: Any) -> bool:
    return hasattr(value, "split_by_key")


def can_be_dynamic(tensor: Tensor) -> bool:
    """True if a tensor's first dimension can be dynamic. Contiguous strides do not depend on that dimension's size."""
    return tensor.layout is torch.strided and tensor.dim() > 0 and tensor.is_contiguous()


def name_arguments(build: Callable[..., Any], arguments: Arguments) -> list[str]:
    """Return each leaf's name in the user's code: `ids`, `batch['user']`, `features.values`."""
    args, kwargs = arguments
    names = list(inspect.signature(build).parameters)
    names += [f"number {i}" for i in range(len(names), len(args))]
    named_values = [*zip(names, args, strict=False), *kwargs.items()]
    return [name + path for name, value in named_values for path in _list_leaf_paths(value)]


def _list_leaf_paths(value: Any) -> list[str]:
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    except ValueError:  # `value` contains a class that was registered without field names
        return [""] * len(pytree.tree_leaves(value))


class Structure:
    """The modules under `root` and their state: parameters, buffers, and tensors in plain attributes."""

    def __init__(self, root: nn.Module, optimizers: Collection[Optimizer]) -> None:
        """optimizers: the graph's optimizers, in a collection that may grow later."""
        check_not_sharded(root)
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if is_lazy(tensor):
                raise GraphError(f"{name} has no shape yet; run its module once on a sample before the graph")
        modules = list(root.modules())
        self._modules, self._optimizers = modules, optimizers
        # hold the dicts themselves: a module never replaces its dicts
        self._parameters = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        self._children = [module._modules for module in modules]
        self._attributes = list(map(vars, modules))
        self._hooks = [hooks for module in modules for hooks in get_module_hooks(module)]
        tensors = [(d, name) for d in self._attributes for name, v in d.items() if isinstance(v, Tensor | None)]
        self._attribute_dicts, self._attribute_names = [d for d, _ in tensors], [name for _, name in tensors]
        self._layout = self._read_layout()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied graph builds a new Structure

    def read_state(self) -> tuple[list[Tensor], tuple[Hashable, ...]] | None:
        """Return the current parameters and buffers (tied tensors repeat), and a key of the whole state.

        Returns None if modules, their hooks or the number of their attributes have changed. The key contains the `id()`
        of each parameter and each attribute tensor, because optimizers and steps hold these objects.
        """
        if self._read_layout() != self._layout:
            return None
        parameters, buffers = _list_values(self._parameters), _list_values(self._buffers)
        identities = list(map(id, buffers))
        tied_buffers = len(set(identities)) == len(identities) or tuple(identities)
        tensors = [tensor for tensor in parameters + buffers if tensor is not None]
        attributes = map(dict.get, self._attribute_dicts, self._attribute_names)
        autocast = torch._C._is_any_autocast_enabled() and tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        )
        with DisableTorchFunctionSubclass():
            # id(v) stays unique, because a step keeps its tensors alive; values that are not tensors have the key None
            attribute_key = [
                (id(v), _get_tensor_fields(v), _get_stride(v)) if v is not None and isinstance(v, Tensor) else None
                for v in attributes
            ]
            return tensors, (
                self,
                (torch.is_grad_enabled(), torch.get_default_dtype(), autocast),
                tuple(map(_get_training, self._modules)),
                tuple(map(id, parameters)),
                tied_buffers,
                tuple(attribute_key),
                tuple(map(type, buffers)),
                any(map(_get_backward_hooks, tensors)) or any(map(_get_post_hooks, tensors)),
                tuple([(id(o), *[len(group["params"]) for group in o.param_groups]) for o in self._optimizers]),
                *map(_get_tensor_fields, tensors),
                *map(_get_stride, tensors),
            )

    def _read_layout(self) -> tuple[list[Any], list[int], list[int]]:
        # torch gives every hook a different number
        return _list_values(self._children), list(map(len, self._attributes)), list(chain.from_iterable(self._hooks))


def _list_values(dicts: list[Any]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def make_call_key(
    leaves: list[Any], dynamic_leaves: frozenset[int], build: Callable[..., Any], arguments: Arguments
) -> tuple[Hashable, ...]:
    """Return the key of a call's arguments, without dynamic sizes. Raises GraphError for unsupported arguments."""
    key: list[Hashable] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                raise _make_argument_error(leaf, name_arguments(build, arguments)[i])
            if i in dynamic_leaves and can_be_dynamic(leaf):
                key.append((leaf.shape[1:], *_get_tensor_fields(leaf)[1:]))
            else:
                key.append((_get_tensor_fields(leaf), leaf.layout, leaf.stride()))
        elif is_plain(leaf):
            # compare by repr, because 0.0 equals -0.0 and nan does not equal itself
            key.append((type(leaf), repr(leaf) if isinstance(leaf, _INEXACT_TYPES) else leaf))
        else:
            raise _make_argument_error(leaf, name_arguments(build, arguments)[i])
    return tuple(key)


def _make_argument_error(leaf: Any, name: str) -> GraphError:
    if isinstance(leaf, Tensor):
        return GraphError(
            f"argument {name} is a nested tensor, which a static graph cannot use; create it with "
            f"layout=torch.jagged and pass tierbed.jagged.JaggedTensor.from_nested({name}), or "
            "tierbed.jagged.KeyedJaggedTensor.from_nested for several features"
        )
    if isinstance(leaf, np.ndarray):
        return GraphError(f"argument {name} is a NumPy array, which steps would freeze; pass torch.from_numpy({name})")
    return GraphError(
        f"argument {name} is a {type(leaf).__name__}, which cannot be compared by value. Pass tensors, numbers or "
        f"strings, also in lists, tuples or dicts. Assign modules to self. Or {suggest_registration(leaf)}"
    )


def suggest_registration(value: Any) -> str:
    """Return the part of an error text that says how to make a user's class usable as an argument."""
    return f"make the class a dataclass and call torch.export.register_dataclass({type(value).__name__}) once"


def drop_sizes(key: tuple[Hashable, ...], leaves: list[Any]) -> tuple[Hashable, ...]:
    """Return a call's key that contains each tensor's number of dimensions instead of the tensor's shape."""
    return tuple(
        (leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout) if isinstance(leaf, Tensor) else entry
        for leaf, entry in zip(leaves, key, strict=True)
    )


def is_plain(value: Any) -> bool:
    """True if a value's type is immutable, so that it can be part of a key or a result."""
    return isinstance(value, _PLAIN_TYPES)
