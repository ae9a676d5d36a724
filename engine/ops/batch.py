"""Converts lookups and their gradients to flat arrays for the native core.

Table ids, offsets and ids are checked here, when the step runs, because a trace sees only shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..errors import InputError
from ..options.lookup import Lookup, check_weights
from ..options.table_spec import TableSpec

LARGE_ALLOCATION_BYTES = 1 << 20  # bytes; for larger allocations, the system clears new memory page by page

# (keys, each bag's table id or None, bags). The third item is the length of all bags, offsets, or None without pooling
LookupArguments = tuple[NDArray[np.uint64], NDArray[np.uint32] | None, int | NDArray[np.int64] | None]
# keys, table ids and bags as in LookupArguments; then each result column's feature [columns]; then the batch size
FeatureLookupArguments = tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint32], int]


class Gradients(NamedTuple):
    """The gradients of a batch's lookup results. A row's gradient is summed over its occurrences in all lookups."""

    lookups: Sequence[Lookup]
    grads: Sequence[Tensor]  # one per lookup: lookup.shape + (dim,), of `dtype`
    weights: Sequence[Tensor | None]  # each lookup's pooling weights
    dtype: torch.dtype


def check_gradients(
    spec: TableSpec, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None], dtype: torch.dtype
) -> Gradients:
    """Bundle one gradient and one weights tensor per lookup. Raises InputError if a tensor does not fit its lookup."""
    for lookup, grad, pooling_weights in zip(lookups, grads, weights, strict=True):
        shape = lookup.ids.shape if lookup.pooling is None else lookup.shape  # `lookup.shape` is slower
        expected = (*shape, spec.dim)
        if grad.dtype != dtype or tuple(grad.shape) != expected or grad.device != lookup.ids.device:
            raise InputError(
                f"gradient of embedding {spec.name!r}: got {grad.dtype} {tuple(grad.shape)} on {grad.device}; give "
                f"{dtype} {expected} on {lookup.ids.device}, as the lookup returned"
            )
        if pooling_weights is not None:
            check_weights(spec, lookup, pooling_weights)
    return Gradients(lookups, grads, weights, dtype)


def convert_gradients(gradients: Gradients) -> tuple[list[Any], list[bool], list[Any]]:
    """Return three lists for the core, each with one item per lookup: gradients, "is mean" flags, pooling weights."""
    means = [lookup.pooling == "mean" for lookup in gradients.lookups]
    weights = [None if tensor is None else flatten_weights(tensor) for tensor in gradients.weights]
    return [as_array(grad) for grad in gradients.grads], means, weights


def make_lookup_arguments(spec: TableSpec, lookup: Lookup) -> LookupArguments | FeatureLookupArguments:
    """Convert a lookup for `_core.Batch`, which checks its offsets. Raises InputError for table ids out of range."""
    keys, feature_columns = to_keys(lookup.ids), lookup.feature_columns
    if feature_columns is None:
        tables = None if lookup.table_ids is None else _convert_table_ids(spec, lookup.table_ids)
        return keys, tables, _convert_bags(lookup)
    assert lookup.offsets is not None
    batch_size, columns = lookup.shape
    if lookup.table_ids is None:
        tables = _make_default_tables(columns, spec.num_tables)
    else:
        table_array = _make_table_array(spec.num_tables, tuple(lookup.table_ids.tolist()))
        tables = _convert_table_ids(spec, lookup.table_ids) if table_array is None else table_array
    return keys, tables, _convert_offsets(lookup.offsets), invert_feature_columns(feature_columns), batch_size


@cache
def invert_feature_columns(feature_columns: tuple[int, ...]) -> NDArray[np.uint32]:
    """Invert `Lookup.feature_columns`: return each result column's feature, [columns]."""
    columns = {column: feature for feature, column in enumerate(feature_columns)}
    return np.array([columns[column] for column in range(len(feature_columns) - feature_columns.count(-1))], np.uint32)


@cache
def _make_default_tables(columns: int, num_tables: int) -> NDArray[np.uint32]:
    """Return default table ids [columns]. Column c gets table c, or table 0 if there is only one table."""
    return np.zeros(columns, np.uint32) if num_tables == 1 else np.arange(columns, dtype=np.uint32)


@lru_cache(maxsize=64)
def _make_table_array(num_tables: int, table_ids: tuple[int, ...]) -> NDArray[np.uint32] | None:
    """Return `table_ids` as an array, or None if a table id is out of range."""
    return np.array(table_ids, np.uint32) if all(0 <= table < num_tables for table in table_ids) else None


def make_batch(spec: TableSpec, lookups: Sequence[Lookup], strict: bool = False) -> _core.Batch:
    """Deduplicate lookups on the CPU. Raises InputError for bad lookups; if `strict`, also for ids to be dropped."""
    arrays = [make_lookup_arguments(spec, lookup) for lookup in lookups]
    try:
        flags = () if strict else spec.drops_illegal
        batch = _core.Batch(arrays, spec.num_tables, spec.padding_key, spec.max_ids, flags)
    except ValueError:
        for lookup in lookups:
            check_offsets(spec, lookup)
        raise
    if spec.max_ids is not None and batch.first_illegal_id is not None:
        raise make_illegal_id_error(spec, *batch.first_illegal_id)
    return batch


def make_illegal_id_error(spec: TableSpec, table: int, key: int) -> InputError:
    """Return the error for an id beyond its table's last id. key: the id's 64 bits."""
    assert spec.max_ids is not None
    last = int(spec.max_ids[table])
    id_ = key - 2**64 if key >= 2**63 and spec.key_type != torch.uint64 else key
    return InputError(
        f"ids of embedding {spec.name!r}: {id_} is no id of table {spec.labels[table]}, whose ids are 0 to {last}; "
        "correct the ids, or give the table more ids. In a config, set num_embeddings; elsewhere, set ids. The value "
        "None allows any id. make_table_options(bad_ids='drop') ignores ids beyond the last id"
    )


def check_legal_ids(spec: TableSpec, lookup: Lookup) -> None:
    """Raise InputError if an id of an unpooled lookup, on any device, is beyond its table's last id."""
    if spec.max_ids is not None:
        make_batch(spec, [_copy_to_host(lookup)], strict=True)


def find_unique_rows(spec: TableSpec, lookup: Lookup) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Return an unpooled lookup's unique rows, tables [n] and keys [n], on any device. Raises InputError."""
    batch = make_batch(spec, [_copy_to_host(lookup)])
    return batch.tables.copy(), batch.keys.copy()


def _copy_to_host(lookup: Lookup) -> Lookup:
    return Lookup(lookup.ids.cpu(), None if lookup.table_ids is None else lookup.table_ids.cpu())


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor. A large tensor's memory is reused once it is freed."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_ALLOCATION_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")  # torch's default device may differ
    memory = _core.scratch(size)  # for float32, NumPy's views are faster than torch's
    if dtype == torch.float32:
        return torch.from_numpy(memory.view(np.float32).reshape(shape))
    return torch.from_numpy(memory).view(dtype).view(shape)


def empty_rows(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> tuple[Tensor, NDArray[Any]]:
    """Return an uninitialised CPU tensor, and the core's array [n, dim] with the same memory."""
    if dtype == torch.float32 and (size := math.prod(shape)) * 4 < LARGE_ALLOCATION_BYTES:
        array = np.empty((size // dim, dim), np.float32)  # faster than a tensor and its `numpy()`
        return torch.from_numpy(array.reshape(shape)), array
    out = empty(shape, dtype)
    return out, as_array(out, dim)


def as_array(tensor: Tensor, dim: int | None = None) -> NDArray[Any]:
    """Convert rows to the core's array [n, dim], 16-bit floats as uint16. Copies only if rows are not contiguous.

    dim: the rows' width. Default: the last dimension.
    """
    dim = tensor.shape[-1] if dim is None else dim
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor.numpy().reshape(-1, dim)
    rows = tensor.detach().contiguous().view(-1, dim)
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


def flatten_weights(weights: Tensor) -> NDArray[np.float32]:
    """Convert weights to an array [n], one number per id. Copies only if the weights are not contiguous."""
    return weights.detach().contiguous().view(-1).numpy()


def to_keys(ids: Tensor) -> NDArray[np.uint64]:
    """Convert ids to uint64 keys [n]. int32 ids are sign-extended, so -1 is the same row in int32 and int64."""
    if ids.dtype == torch.int64 and ids.is_contiguous():
        return ids.numpy().reshape(-1).view(np.uint64)
    flat = ids.detach().reshape(-1)
    if flat.dtype == torch.int32:
        flat = flat.to(torch.int64)
    return flat.contiguous().numpy().view(np.uint64)


def _convert_table_ids(spec: TableSpec, table_ids: Tensor) -> NDArray[np.uint32]:
    # NumPy is faster here than torch's ops
    flat = table_ids.detach().reshape(-1).numpy().astype(np.int64, copy=False)
    is_outside = flat.view(np.uint64) >= spec.num_tables
    if is_outside.any():
        position = int(is_outside.argmax())
        raise InputError(
            f"table_ids of embedding {spec.name!r}: table id {flat[position]} at position {position}; "
            f"table ids run from 0 to {spec.num_tables - 1}; if you meant bag offsets, pass them as offsets="
        )
    return flat.astype(np.uint32)


def _convert_bags(lookup: Lookup) -> int | NDArray[np.int64] | None:
    if lookup.pooling is None:
        return None
    if lookup.offsets is not None:
        return _convert_offsets(lookup.offsets)
    # if all bags are empty, only offsets tell the core how many bags there are
    return lookup.ids.shape[-1] or np.zeros(lookup.ids.shape[:-1].numel() + 1, np.int64)


def _convert_offsets(offsets: Tensor) -> NDArray[np.int64]:
    if offsets.dtype != torch.int64 or not offsets.is_contiguous():
        offsets = offsets.to(torch.int64).contiguous()
    return offsets.numpy()


def check_offsets(spec: TableSpec, lookup: Lookup) -> None:
    """Raise InputError unless the offsets of a lookup on the CPU ascend from 0 to the number of ids."""
    if lookup.offsets is None:
        return
    flat, num_ids = _convert_offsets(lookup.offsets), lookup.ids.shape[0]
    where = f"offsets of embedding {spec.name!r}"
    if flat[0] != 0 or flat[-1] != num_ids:
        raise InputError(
            f"{where}: the first is {flat[0]}, and the last is {flat[-1]}. They must be 0 and {num_ids}, the number of "
            f"ids. Give one offset more than there are bags"
        )
    descents = np.flatnonzero(flat[1:] < flat[:-1])
    if len(descents):
        at = int(descents[0])
        raise InputError(f"{where}: {flat[at]} at position {at} is followed by {flat[at + 1]}; offsets must ascend")
