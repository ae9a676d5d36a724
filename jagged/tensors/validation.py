"""Checks of jagged and keyed tensors when they are constructed, and of values that a trace does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ...engine.errors import GraphError, InputError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_traced() -> bool:
    """Whether a graph is being traced, with tensors that have no values."""
    return bool(torch._C._len_torch_dispatch_stack()) and detect_fake_mode() is not None


def refuse_trace(what: str, remedy: str) -> None:
    """GraphError if a graph is being traced. what: the call, which reads values."""
    if is_traced():
        raise GraphError(f"{what} needs values, and build is traced without them; {remedy}")


def statically_true(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes holds. With dynamic sizes of a trace: whether it holds for all of them."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_empty(given: object) -> bool:
    """Whether it is a tensor without elements, for all sizes of a trace."""
    return isinstance(given, Tensor) and not given.is_nested and statically_true(given.numel() == 0)


def is_list_of(given: object, kind: Any) -> bool:
    """True for a list or tuple whose items are all of a type."""
    return isinstance(given, (list, tuple)) and all(isinstance(one, kind) for one in given)


def check_type(name: str, given: object, kind: type) -> None:
    """InputError unless an argument is of a type."""
    if not isinstance(given, kind):
        raise InputError(f"{name}={given!r:.80}: give a {kind.__name__}")


def check_integers(name: str, given: Sequence[int]) -> Sequence[int]:
    """The argument itself. InputError unless it is a sequence of integers."""
    if not isinstance(given, Iterable) or not all(hasattr(one, "__index__") for one in given):
        raise InputError(f"{name}={given!r:.80}: give a list of integers")
    return given


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Keys as a tuple of distinct strings. InputError."""
    if isinstance(keys, str) or not isinstance(keys, Iterable) or not all(isinstance(key, str) for key in keys):
        raise InputError(f"keys={keys!r}: give a list of strings")
    names = tuple(keys)
    if len(set(names)) < len(names):
        repeated = next(key for key in names if names.count(key) > 1)
        raise InputError(f"keys={list(keys)}: {repeated!r} occurs {names.count(repeated)} times; give each key once")
    return names


def check_values(values: Tensor, weights: Tensor | None) -> None:
    """InputError unless values are a tensor [n, ...], and weights None, or [n] or [n, ...] on the same device."""
    if not isinstance(values, Tensor) or values.is_nested or values.dim() == 0:
        raise InputError(f"values: {_describe(values)}; give a tensor [n, ...], and a nested tensor to from_nested")
    if weights is None:
        return
    fits = isinstance(weights, Tensor) and weights.shape[1:] in ((), values.shape[1:]) and weights.dim() > 0
    if not fits or statically_true(weights.shape[0] != values.shape[0]):
        raise InputError(f"weights: {_describe(weights)}; give a tensor [{values.shape[0]}], one for each of values")
    if weights.device != values.device:
        raise InputError(f"weights are on {weights.device} and values on {values.device}; move them to one device")


def check_offsets(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Offsets int64 [bags + 1], computed from lengths [bags] if None. InputError.

    As in TorchRec, lengths may have two dimensions, and what is empty any shape and dtype: it is of no bags.
    """
    if is_empty(offsets) and (lengths is not None or is_empty(values)):
        offsets = None
    if is_empty(lengths) or (lengths is None and offsets is None and is_empty(values)):
        lengths = torch.empty(0, dtype=torch.int64, device=values.device)
    elif isinstance(lengths, Tensor) and lengths.dim() == 2:
        lengths = lengths.flatten()
    for name, given in (("lengths", lengths), ("offsets", offsets)):
        if given is None:
            continue
        if not isinstance(given, Tensor) or given.dim() != 1 or given.dtype not in INTEGERS:
            raise InputError(
                f"{name}: {_describe(given)}; give a tensor of integers with one dimension, feature by feature"
            )
        if given.device != values.device:
            raise InputError(f"{name} are on {given.device} and values on {values.device}; move them to one device")
    if offsets is None:
        if lengths is None:
            raise InputError("lengths=None and offsets=None: give one of them")
        return offsets_of(lengths)
    if statically_true(offsets.shape[0] == 0):
        raise InputError("offsets: a tensor [0]; give a 0, and then the end of each bag")
    if lengths is not None and statically_true(lengths.shape[0] != offsets.shape[0] - 1):
        raise InputError(
            f"lengths [{lengths.shape[0]}] and offsets [{offsets.shape[0]}]: offsets have one more; give one of the two"
        )
    has_values = offsets.device.type == "cpu" and not is_traced()
    if lengths is not None and has_values and not torch.equal(offsets.diff(), lengths.to(offsets.dtype)):
        raise InputError("lengths are not the differences of offsets; give one of the two")
    return offsets.to(torch.int64)


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets int64 [bags + 1] of lengths [bags]."""
    ends = lengths.cumsum(0, dtype=torch.int64)
    return torch.cat([ends.new_zeros(1), ends])  # F.pad would make the sizes of a trace static


def check_ascending(offsets: Sequence[int], count: int, bag_names: Sequence[str] | None = None) -> None:
    """InputError unless offsets ascend from 0 to `count`, the number of values. bag_names: for the error."""
    if offsets[0] != 0:
        raise InputError(f"offsets[0]={offsets[0]}: give offsets that begin with 0")
    for bag, (begin, end) in enumerate(pairwise(offsets)):
        if end < begin:
            name = f" of {bag_names[bag]}" if bag_names else ""
            raise InputError(
                f"lengths[{bag}]={end - begin}{name}: offsets {begin}, {end} descend; give lengths of 0 or more"
            )
    if offsets[-1] != count:
        raise InputError(
            f"offsets[-1]={offsets[-1]} of {count} values: give offsets that end with {count}, or lengths of that sum"
        )


def joined(empty: Tensor, parts: Sequence[Tensor], chosen: Iterable[int]) -> Tensor:
    """The chosen parts, one after another; `empty` if there are none."""
    return torch.cat([empty, *(parts[at] for at in chosen)])


def check_alike(argument: str, what: str, of: Mapping[Any, Any]) -> None:
    """InputError unless the parts have the same value. of: the value of each part. what: its name."""
    first, *others = of.values() or (None,)
    if any(statically_true(other != first) for other in others):
        raise InputError(f"{argument}: parts differ in their {what}, {dict(of)}; give parts that agree")


def in_order(keys: Sequence[str], names: Sequence[str], indices: Tensor) -> Tensor:
    """The rows of inverse indices [names, batch] in the order of keys, as int64. InputError."""
    if not isinstance(indices, Tensor) or indices.dim() != 2 or indices.shape[0] != len(names):
        raise InputError(f"inverse_indices: give names and a tensor [{len(names)}, batch], a row for each of them")
    if indices.dtype not in INTEGERS:
        raise InputError(f"inverse_indices: a tensor of {indices.dtype}; give integers")
    rows = {name: row for row, name in enumerate(names)}
    if missing := [key for key in keys if key not in rows]:
        raise InputError(f"inverse_indices have no row for {missing}; give one for each key")
    order = [rows[key] for key in keys]
    if order != [*range(len(names))]:
        indices = indices[order]
    return indices.to(torch.int64)


def _describe(value: object) -> str:
    """A wrong argument in the text of an error."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.is_nested:
        return "a nested tensor"
    return f"a tensor {list(value.shape)} of {value.dtype}"
