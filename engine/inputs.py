"""Checks of what users pass to lookups. They look at shapes and dtypes alone, so they hold in a trace as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import InputError
from .spec import KEY_TYPES, TableSpec

Lookup = tuple[Tensor, Tensor | None]  # ids, and table ids of the same shape or None


def check_lookup(spec: TableSpec, ids: Tensor, table_ids: Tensor | None) -> Lookup:
    """Ids as they are, table ids broadcast to their shape (None: column j is of table j). Raises InputError."""
    where = f"ids of embedding {spec.name!r}"
    if not isinstance(ids, Tensor):
        raise InputError(f"{where}: got {type(ids).__name__}; give a torch.Tensor of {spec.key_type}")
    if ids.dtype != spec.key_type:
        raise InputError(
            f"{where}: dtype {ids.dtype}, but key_type is {spec.key_type}; convert them by ids.to({spec.key_type})"
        )
    _check_place(where, "ids", ids)
    if table_ids is None:
        if spec.num_tables > 1 and (ids.dim() < 2 or ids.shape[-1] != spec.num_tables):
            raise InputError(
                f"{where}: shape {tuple(ids.shape)} is not (..., {spec.num_tables}), one column for each table; give "
                "that, or table_ids that say which table each id belongs to"
            )
        return ids, None
    where = f"table_ids of embedding {spec.name!r}"
    if (
        not isinstance(table_ids, Tensor)
        or table_ids.dtype.is_floating_point
        or table_ids.dtype.is_complex
        or table_ids.dtype == torch.bool
    ):
        kind = table_ids.dtype if isinstance(table_ids, Tensor) else type(table_ids).__name__
        raise InputError(f"{where}: got {kind}; give a torch.Tensor of an integer dtype")
    _check_place(where, "table_ids", table_ids)
    try:
        return ids, table_ids.broadcast_to(ids.shape)
    except RuntimeError:
        raise InputError(
            f"{where}: shape {tuple(table_ids.shape)} does not broadcast to that of ids, {tuple(ids.shape)}; "
            "give one table id for each id, or for each column"
        ) from None


def _check_place(where: str, name: str, values: Tensor) -> None:
    if values.device.type != "cpu":
        raise InputError(f"{where} are on {values.device}; tables run on the CPU in this version: give {name}.cpu()")
    if values.layout != torch.strided:
        raise InputError(f"{where} are {values.layout}; give {name}.to_dense()")


def keys_from(spec: TableSpec, keys: Any) -> Tensor:
    """Keys of an array or nested lists of whole numbers as a tensor of the key type. Raises InputError."""
    error = f"keys of embedding {spec.name!r}: give whole numbers that {spec.key_type} can hold"
    given = _array(keys, error)
    wanted = given.astype(KEY_TYPES[spec.key_type]) if given.dtype.kind in "iu" or given.size == 0 else None
    if wanted is None or (wanted.astype(object) != given.astype(object)).any():
        raise InputError(error)
    return torch.from_numpy(wanted)


def table_ids_from(spec: TableSpec, table_ids: Any) -> Tensor | None:
    """Table ids of an array or nested lists as a tensor. Raises InputError."""
    if table_ids is None or isinstance(table_ids, Tensor):
        return table_ids
    error = f"table_ids of embedding {spec.name!r}: give whole numbers"
    given = _array(table_ids, error)
    if given.dtype.kind not in "iu" or (given.astype(np.int64) != given).any():
        raise InputError(error)
    return torch.from_numpy(given.astype(np.int64))


def rows_from(spec: TableSpec, rows: Any, shape: torch.Size) -> NDArray[np.float32]:
    """Rows for keys of that shape as an array [n, dim]. Raises InputError."""
    where, wanted = f"rows of embedding {spec.name!r}", (*shape, spec.dim)
    if isinstance(rows, Tensor):
        if rows.device.type == "meta":
            raise InputError(f"{where} are on {rows.device} and have no values; give them on the CPU")
        given = rows.detach().cpu()
    else:
        array = _array(rows, f"{where}: give float32 {wanted}")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        # numbers of Python have no dtype of their own
        given = torch.from_numpy(array if isinstance(rows, np.ndarray) else array.astype(np.float32))
    if given.dtype != torch.float32 or tuple(given.shape) != wanted:
        raise InputError(f"{where}: {given.dtype} {tuple(given.shape)}; give float32 {wanted}")
    return given.reshape(-1, spec.dim).contiguous().numpy()


def _array(values: Any, error: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(error) from None
    if array.dtype.kind not in "iuf":
        raise InputError(error)
    return array
