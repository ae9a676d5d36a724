"""Detects if a lookup's tensors changed since an earlier call. Compares objects, memory or values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..options.lookup import Lookup


def get_version(tensor: Tensor) -> int | None:
    """Return torch's count of writes to a tensor; None for inference tensors, whose writes are not counted."""
    return None if tensor.is_inference() else tensor._version


def fingerprint(tensor: Tensor | None, by_memory: bool = False) -> Hashable:
    """Return a value that changes when torch writes to the tensor. Keep the tensor alive while you compare values.

    Each tensor object has its own fingerprint. With `by_memory`, equal views of the same memory share a fingerprint.
    """
    if tensor is None:
        return None
    # torch does not count writes to inference tensors, so each call returns a different value for them
    count = object() if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), count, tensor.dtype, tensor.shape, tensor.stride()) if by_memory else (id(tensor), count)


def are_values_equal(left: Tensor | None, right: Tensor | None) -> bool:
    """True if `left` and `right` are None, or have equal shape, dtype and values. May wait for a device."""
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


def are_lookups_equal(left: Sequence[Lookup], right: Sequence[Lookup]) -> bool:
    """True if all ids, table ids and bags are equal. May wait for a device."""
    return len(left) == len(right) and all(map(_is_lookup_equal, left, right))


def _is_lookup_equal(left: Lookup, right: Lookup) -> bool:
    same_bags = left.pooling == right.pooling and left.feature_columns == right.feature_columns
    return same_bags and all(map(are_values_equal, left.tensors, right.tensors))


def copy_lookup(lookup: Lookup, copy: Callable[[Tensor], Tensor] = torch.clone) -> Lookup:
    ids, table_ids, offsets = (None if part is None else copy(part.detach()) for part in lookup.tensors)
    assert ids is not None
    return lookup._replace(ids=ids, table_ids=table_ids, offsets=offsets)
