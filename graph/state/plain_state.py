"""States of optimizers and schedulers as plain values and named tensors, so that loading them runs no code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import cache
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ...engine.errors import GraphError

_KINDS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "list": list, "tuple": tuple}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in _KINDS.items()}
_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)
_TAKEN = ("", "__metadata__")  # names that no tensor in a safetensors file has
_ITEMS = 1 << 16  # the most items of a container that `unseal` reads
_REMEDY = "leave it out of the state, or save graph.state_dict() your own way"


def encode(value: Any, tensors: dict[str, Tensor], where: str, name: str = "") -> Any:
    """`value` with containers as [tag, items] and tensors as ["tensor", name]; tensors are added to `tensors`.

    A name is the keys that lead to the tensor, with dots between. GraphError for any other value, naming its place.
    """
    if isinstance(value, Tensor):
        _check_tensor(value, where)
        while name in tensors or name in _TAKEN:
            name += "'"
        tensors[name] = value.detach()
        return ["tensor", name]
    if value is None:
        return None
    if type(value) in _TAGS:
        if len(value) > _ITEMS:
            raise GraphError(
                f"{where} has {len(value)} items, and a container in a checkpoint at most {_ITEMS}; keep them in a "
                "tensor, or in several containers"
            )
        if isinstance(value, dict):
            items = [
                [_key(key, where), encode(item, tensors, f"{where}[{key!r}]", _join(name, key))]
                for key, item in value.items()
            ]
        else:
            items = [encode(item, tensors, f"{where}[{i}]", _join(name, i)) for i, item in enumerate(value)]
        return [_TAGS[type(value)], items]
    for kind in _PLAIN:  # a subclass, such as NumPy's float64, becomes the plain type
        if isinstance(value, kind) and (kind is not int or _is_held(value)):
            return kind(value)
    raise GraphError(
        f"{where} is a {type(value).__name__}{' of over 64 bits' * isinstance(value, int)}, which a checkpoint cannot "
        f"hold; {_REMEDY}"
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `encode` was given. ValueError, KeyError for what `encode` does not make."""
    if not isinstance(value, list):
        return value
    tag, content = value
    if tag == "tensor":
        return tensors[str(content)]  # format 1 of checkpoints had numbers as names
    if tag not in _KINDS:
        raise ValueError(f"unknown kind {tag!r}")
    if tag in ("list", "tuple"):
        return _KINDS[tag](decode(item, tensors) for item in content)
    return _KINDS[tag]({key: decode(item, tensors) for key, item in content})


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _key(key: Any, where: str) -> Any:
    if type(key) is str or (type(key) is int and _is_held(key)):
        return key
    raise GraphError(
        f"{where} has the key {key!r}, and a checkpoint holds strings and whole numbers of 64 bits as keys; {_REMEDY}"
    )


def _is_held(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 64


def _check_tensor(tensor: Tensor, where: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or not _is_held_dtype(tensor.dtype):
        raise GraphError(
            f"{where} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which a checkpoint cannot "
            f"hold; make it a dense one of another dtype, register a buffer with persistent=False, or {_REMEDY}"
        )


@cache
def _is_held_dtype(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError, TypeError, ValueError):  # its versions know different ones
        return False
    return True
