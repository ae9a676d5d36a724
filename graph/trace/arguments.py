"""The arguments of a call: their leaves, how the user wrote each, and which sizes their containers leave open."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Given = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments, as the user gave them
Dims = frozenset[tuple[int, int]]  # (input tensor, dimension) pairs

NONE_OPEN: frozenset[int] = frozenset()

# the containers of TorchRec by module and name, with the leaves that have a place for each id
_TORCHREC = "torchrec.sparse.jagged_tensor"
_OF_TORCHREC = {"JaggedTensor": frozenset({0, 1}), "KeyedJaggedTensor": frozenset({0, 1})}


class Call(NamedTuple):
    """The arguments of a call, flattened. opened: the leaves whose containers leave their first dimension open."""

    given: Given
    leaves: list[Any]
    spec: pytree.TreeSpec
    opened: frozenset[int]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def open(self) -> Dims:
        """The dimensions that are open from the first call."""
        where = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return frozenset((i, 0) for i, leaf in enumerate(where) if leaf in self.opened and is_open(self.leaves[leaf]))


@cache
def tensors_spec(count: int) -> pytree.TreeSpec:
    """The tree of a call with so many tensors and nothing else. Kept, since flattening takes a while."""
    return pytree.tree_structure((tuple(range(count)), {}))


def open_leaves(spec: pytree.TreeSpec) -> frozenset[int]:
    """The leaves whose first dimension may change from call to call, as their containers say.

    A container says so by its class attribute `open_leaves`, the places of such leaves among what it flattens to.
    """
    opened: set[int] = set()
    first, pending = 0, [spec]
    while pending:
        node = pending.pop()
        if node.is_leaf():
            first += 1
            continue
        children = node.children()
        places = _open_places(node.type)
        if places and all(child.is_leaf() for child in children):
            opened.update(first + place for place in places if place < len(children))
        pending += reversed(children)
    return frozenset(opened)


def _open_places(kind: Any) -> frozenset[int]:
    own: Any = getattr(kind, "open_leaves", None)
    if own is None and getattr(kind, "__module__", "") == _TORCHREC:
        own = _OF_TORCHREC.get(kind.__name__)
    return own or NONE_OPEN


def is_open(tensor: Tensor) -> bool:
    """Whether the first dimension of a container's leaf can be left open: its layout says nothing of the size."""
    return tensor.layout is torch.strided and tensor.dim() > 0 and tensor.is_contiguous()


def argument_names(build: Callable[..., Any], given: Given) -> list[str]:
    """How the user wrote each leaf of a call: `ids`, `batch['user']`, `features.values`. Builds no object anew."""
    args, kwargs = given
    names = list(inspect.signature(build).parameters)
    names += [f"number {i}" for i in range(len(names), len(args))]
    named = [*zip(names, args, strict=False), *kwargs.items()]
    return [name + path for name, value in named for path in _paths(value)]


def _paths(value: Any) -> list[str]:
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    except ValueError:  # it has an object of a class that was registered without field names
        return [""] * len(pytree.tree_leaves(value))
