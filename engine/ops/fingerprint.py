"""Whether tensors are still those of an earlier lookup: by their objects, by their memory, or by their values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..options.lookup import Lookup


def write_count(tensor: Tensor) -> int | None:
    """Torch's count of writes to a tensor; None for one of inference mode, for which it counts none."""
    return None if tensor.is_inference() else tensor._version


def fingerprint(tensor: Tensor | None, by_memory: bool = False) -> Hashable:
    """A value that changes when torch writes to a tensor. Equal values mean the same tensor while that is kept alive.

    by_memory: equal values mean the same elements of the same memory, of this tensor or of another view.
    """
    if tensor is None:
        return None
    count = object() if tensor.is_inference() else tensor._version  # an object of its own: it may have been written to
    return (tensor.data_ptr(), count, tensor.dtype, tensor.shape, tensor.stride()) if by_memory else (id(tensor), count)


def same_values(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are None, or tensors of one shape, dtype and value. May wait for a device."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def same_lookups(some: Sequence[Lookup], others: Sequence[Lookup]) -> bool:
    """Whether both have the same ids, tables and bags. May wait for a device."""
    return len(some) == len(others) and all(map(_same_lookup, some, others))


def _same_lookup(one: Lookup, other: Lookup) -> bool:
    same_bags = one.pooling == other.pooling and one.feature_columns == other.feature_columns
    return same_bags and all(map(same_values, one.tensors, other.tensors))


def copied(lookup: Lookup, copy: Callable[[Tensor], Tensor] = torch.clone) -> Lookup:
    """A lookup of copies of its tensors."""
    ids, table_ids, offsets = (None if part is None else copy(part.detach()) for part in lookup.tensors)
    assert ids is not None
    return lookup._replace(ids=ids, table_ids=table_ids, offsets=offsets)
