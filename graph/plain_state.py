"""States of optimizers and schedulers as plain values and a list of tensors, so that loading them runs no code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from torch import Tensor

from ..engine.errors import GraphError

_KINDS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "list": list, "tuple": tuple}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in _KINDS.items()}
_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)


def encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """`value` with containers as [tag, items] and tensors as ["tensor", number], which are appended to `tensors`.

    GraphError naming the place of what is neither.
    """
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if value is None:
        return None
    if type(value) in _TAGS:
        if isinstance(value, dict):
            items = [[_key(key, where), encode(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()]
        else:
            items = [encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        return [_TAGS[type(value)], items]
    for kind in _PLAIN:  # a subclass, such as NumPy's float64, becomes the plain one
        if isinstance(value, kind):
            return kind(value)
    raise GraphError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; leave it out of the state, or save "
        "graph.state_dict() your own way"
    )


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """What `encode` was given. ValueError for what it does not make."""
    if not isinstance(value, list):
        return value
    tag, content = value
    if tag == "tensor":
        return tensors[content]
    if tag not in _KINDS:
        raise ValueError(f"unknown kind {tag!r}")
    if tag in ("list", "tuple"):
        return _KINDS[tag](decode(item, tensors) for item in content)
    return _KINDS[tag]({key: decode(item, tensors) for key, item in content})


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int):
        raise GraphError(f"{where} has the key {key!r}, and a checkpoint holds strings and whole numbers as keys")
    return key
