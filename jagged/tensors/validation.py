"""Argument checks for jagged and keyed tensors. While a graph is traced, the checks must not read values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ...engine.errors import GraphError, InputError

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_tracing() -> bool:
    """True while a graph or torch.compile traces, with tensors that lack values."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and detect_fake_mode() is not None


def check_eager(call: str, remedy: str) -> None:
    """Raise GraphError if a graph is being traced. call: the name of the call that would read values."""
    if is_tracing():
        raise GraphError(f"{call} needs values, but build is traced without values; {remedy}")


def is_statically_true(condition: bool | torch.SymBool) -> bool:
    """True if a comparison of sizes holds. In a trace with dynamic sizes, True only if it holds for every size."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_empty(value: object) -> bool:
    """True for a tensor without elements. In a trace with dynamic sizes, True only if it is always empty."""
    return isinstance(value, Tensor) and not value.is_nested and is_statically_true(value.numel() == 0)


def is_list_of(value: object, item_type: Any) -> bool:
    """True for a list or tuple whose items all have type `item_type`."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, item_type) for item in value)


def check_type(name: str, value: object, expected_type: type) -> None:
    """Raise InputError unless an argument has type `expected_type`."""
    if not isinstance(value, expected_type):
        raise InputError(f"{name}={value!r:.80}: give a {expected_type.__name__}")


def check_integers(name: str, values: Sequence[int]) -> Sequence[int]:
    """Return the argument. Raises InputError unless it is a sequence of integers."""
    if not isinstance(values, Iterable) or not all(hasattr(value, "__index__") for value in values):
        raise InputError(f"{name}={values!r:.80}: give a list of integers")
    return values


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return keys as a tuple. Raises InputError unless they are distinct strings."""
    if isinstance(keys, str) or not isinstance(keys, Iterable) or not all(isinstance(key, str) for key in keys):
        raise InputError(f"keys={keys!r}: give a list of strings")
    names = tuple(keys)
    if len(set(names)) < len(names):
        duplicate, count = next((key, names.count(key)) for key in names if names.count(key) > 1)
        raise InputError(f"keys={list(names)}: {duplicate!r} occurs {count} times; give each key once")
    return names


def check_values(values: Tensor, weights: Tensor | None) -> None:
    """Raise InputError unless values are [n, ...], and weights are None, [n] or [n, ...] on the same device."""
    if not isinstance(values, Tensor) or values.is_nested or values.dim() == 0:
        raise InputError(f"values: {_describe(values)}; give a tensor [n, ...]. For a nested tensor, use from_nested")
    if weights is None:
        return
    is_valid = isinstance(weights, Tensor) and weights.shape[1:] in ((), values.shape[1:]) and weights.dim() > 0
    if not is_valid or is_statically_true(weights.shape[0] != values.shape[0]):
        raise InputError(f"weights: {_describe(weights)}; give a tensor [{values.shape[0]}], a weight for each value")
    if weights.device != values.device:
        raise InputError(f"weights are on {weights.device} and values on {values.device}; move them to one device")


def check_offsets(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Return offsets as int64 [bags + 1], computed from lengths [bags] if offsets are None. Raises InputError.

    As in TorchRec, lengths may have two dimensions. Empty tensors may have any shape and dtype; they mean no bags.
    """
    if is_empty(offsets) and (lengths is not None or is_empty(values)):
        offsets = None
    if is_empty(lengths) or (lengths is None and offsets is None and is_empty(values)):
        lengths = torch.empty(0, dtype=torch.int64, device=values.device)
    elif isinstance(lengths, Tensor) and lengths.dim() == 2:
        lengths = lengths.flatten()
    for name, tensor in (("lengths", lengths), ("offsets", offsets)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.dtype not in INTEGER_DTYPES:
            expected = "a tensor of integers with one dimension, feature by feature"
            raise InputError(f"{name}: {_describe(tensor)}; give {expected}")
        if tensor.device != values.device:
            raise InputError(f"{name} are on {tensor.device} and values on {values.device}; move them to one device")
    if offsets is None:
        if lengths is None:
            raise InputError("lengths=None and offsets=None: give one of them")
        return lengths_to_offsets(lengths)
    if is_statically_true(offsets.shape[0] == 0):
        raise InputError("offsets: the tensor is empty; give 0, then the end of each bag")
    if lengths is not None and is_statically_true(lengths.shape[0] != offsets.shape[0] - 1):
        remedy = "offsets need one element more than lengths; give only one of the two"
        raise InputError(f"lengths [{lengths.shape[0]}] and offsets [{offsets.shape[0]}]: {remedy}")
    has_values = offsets.device.type == "cpu" and not is_tracing()
    if lengths is not None and has_values and not torch.equal(offsets.diff(), lengths.to(offsets.dtype)):
        raise InputError("lengths are not the differences of offsets; give one of the two")
    return offsets.to(torch.int64)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Convert lengths [bags] to offsets, int64 [bags + 1]."""
    ends = lengths.cumsum(0, dtype=torch.int64)
    return torch.cat([ends.new_zeros(1), ends])  # not F.pad, which would make a trace's sizes static


def check_ascending(offsets: Sequence[int], num_values: int, bag_names: Sequence[str] | None = None) -> None:
    """Raise InputError unless offsets ascend from 0 to `num_values`. bag_names: used in the error."""
    if offsets[0] != 0:
        raise InputError(f"offsets[0]={offsets[0]}: give offsets that begin with 0")
    for bag, (begin, end) in enumerate(pairwise(offsets)):
        if end < begin:
            length = f"lengths[{bag}]={end - begin}" + (f" of {bag_names[bag]}" if bag_names else "")
            raise InputError(f"{length}: offsets {begin}, {end} descend; give lengths of 0 or more")
    if (last := offsets[-1]) != num_values:
        remedy = f"give offsets that end with {num_values}, or lengths whose sum is {num_values}"
        raise InputError(f"offsets[-1]={last}, but there are {num_values} values; {remedy}")


def select_and_concat(empty: Tensor, parts: Sequence[Tensor], indices: Iterable[int]) -> Tensor:
    """Concatenate the parts at these indices. Return `empty` if there are no indices."""
    return torch.cat([empty, *(parts[index] for index in indices)])


def check_all_equal(argument: str, property_name: str, values: Mapping[Any, Any]) -> None:
    """Raise InputError unless all values are equal. values: {part: value}. property_name: what the values mean."""
    first, *others = values.values() or (None,)
    if any(is_statically_true(other != first) for other in others):
        raise InputError(f"{argument}: parts differ in their {property_name}, {dict(values)}; give parts that agree")


def reorder_inverse_indices(keys: Sequence[str], names: Sequence[str], indices: Tensor) -> Tensor:
    """Return inverse indices [names, batch] with rows in the order of keys, as int64. Raises InputError."""
    if not isinstance(indices, Tensor) or indices.dim() != 2 or indices.shape[0] != len(names):
        raise InputError(f"inverse_indices: give names and a tensor [{len(names)}, batch], a row for each name")
    if indices.dtype not in INTEGER_DTYPES:
        raise InputError(f"inverse_indices: a tensor of {indices.dtype}; give integers")
    row_by_name = {name: row for row, name in enumerate(names)}
    if missing := [key for key in keys if key not in row_by_name]:
        raise InputError(f"inverse_indices have no row for {missing}; give one for each key")
    row_order = [row_by_name[key] for key in keys]
    return (indices if row_order == [*range(len(names))] else indices[row_order]).to(torch.int64)


def _describe(value: object) -> str:
    """Describe a wrong argument for an error."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)} of {value.dtype}"
