"""Checks of what users pass to lookups. They look at shapes and dtypes alone, so they hold in a trace as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import InputError
from .spec import KEY_TYPES, TableSpec
from .table import Lookup


def check_lookup(spec: TableSpec, ids: Tensor, table_ids: Tensor | None) -> Lookup:
    """Ids as they are, table ids broadcast to their shape (None: column j is of table j). Raises InputError."""
    where = f"ids of embedding {spec.name!r}"
    if not isinstance(ids, Tensor):
        raise InputError(f"{where}: got {type(ids).__name__}; give a torch.Tensor of {spec.key_type}")
    if ids.dtype != spec.key_type:
        raise InputError(
            f"{where}: dtype {ids.dtype}, but key_type is {spec.key_type}; convert them by ids.to({spec.key_type})"
        )
    if ids.device.type != "cpu":
        raise InputError(
            f"{where} are on {ids.device}; tables run on the CPU in this version: look up ids.cpu() and move the rows"
        )
    if table_ids is None:
        columns = ids.shape[-1] if ids.dim() else 1
        if spec.num_tables > 1 and columns != spec.num_tables:
            raise InputError(
                f"{where}: shape {tuple(ids.shape)} has {columns} columns for {spec.num_tables} tables; "
                "give one column for each table, or table_ids that say which table each id belongs to"
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
    try:
        return ids, table_ids.broadcast_to(ids.shape)
    except RuntimeError:
        raise InputError(
            f"{where}: shape {tuple(table_ids.shape)} does not broadcast to that of ids, {tuple(ids.shape)}; "
            "give one table id for each id, or for each column"
        ) from None


def keys_from(spec: TableSpec, keys: Any) -> Tensor:
    """Keys of an array or nested lists of whole numbers as a tensor of the key type. Raises InputError."""
    given = np.asarray(keys)
    wanted = given.astype(KEY_TYPES[spec.key_type]) if given.dtype.kind in "iu" or given.size == 0 else None
    if wanted is None or (wanted.astype(object) != given.astype(object)).any():
        raise InputError(f"keys of embedding {spec.name!r}: give whole numbers that {spec.key_type} can hold")
    return torch.from_numpy(wanted)
