"""The description of the table of imported rows: given, from its store, or by the defaults of an embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from ...engine.errors import InputError, OptimizerError, OptionError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.initializers import make_normal_initializer
from ...engine.options.table_spec import table_spec
from ..files.format import check_description
from ..files.reader import list_snapshots, snapshot_by_id
from ..store.closed_store import described
from ..store.folder import StoreFolder
from ..store.group_file import GroupFile
from ..store.recovery_rule import EMPTY
from ..store.selection import Selection


def description_for(
    name: str,
    embedding_dim: int | Sequence[int],
    key_type: torch.dtype = torch.int64,
    tables: Sequence[Mapping[str, Any]] | None = None,
    padding_idx: int | None = None,
    seed: int | None = None,
    optimizer: RowOptimizer | None = None,
    step: int = 0,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The description of a table, as in a snapshot of an embedding with the same arguments.

    optimizer: from `tierbed.row_optimizer`, for rows with its state; None for rows without state, which any optimizer
    may train. step: the number of steps that the rows were trained. dtype, state_dtype: as for an embedding.

    Raises OptionError, OptimizerError.
    """
    tables = [make_normal_initializer(0.0, 0.05)] if tables is None else tables
    if not isinstance(tables, (list, tuple)):
        raise OptionError(f"tables={tables!r}: give a list with the options of each table, as by make_table_options")
    if not isinstance(optimizer, (RowOptimizer, NoneType)):
        raise OptimizerError(f"optimizer={optimizer!r}: give what tierbed.row_optimizer makes of an optimizer, or None")
    spec = table_spec(name, embedding_dim, key_type, tables, padding_idx, seed, dtype, state_dtype)
    state = RowState() if optimizer is None else spec.state_of(optimizer)
    hyper = [] if optimizer is None or step == 0 else optimizer.hyper(step)
    return spec.describe(state, hyper, step)


def stored_description(store: StoreFolder) -> dict[str, Any] | None:
    """The description of a store's rows; None for an empty store.

    It describes the live rows if the store was closed cleanly, else the recovery snapshot. Rows without state have no
    optimizer in it. Raises StoreError, SnapshotError, and InputError if another version of tierbed wrote MARK.
    """
    marker, file = store.clean_marker, GroupFile(store)
    if marker is not None:
        found = described(marker)
    elif (commit := file.record.commit[file.store]) != EMPTY:
        found = snapshot_by_id(store.snapshots, commit).description
    elif snapshots := list_snapshots(store.snapshots).snapshots:
        found = snapshots[-1].description
    else:
        return None
    description = checked_description(found, f"store folder {str(store.path)!r}")
    return description if description["states"] else without_state(description)


def without_state(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the same rows without optimizer state, at step 0: an optimizer starts with new state."""
    return Selection(state=False).description(dict(description))


def checked_description(description: Any, where: str) -> dict[str, Any]:
    """The description. Raises InputError if it is invalid."""
    try:
        check_description(description)
    except ValueError as error:
        raise InputError(f"{where}: {error}; make one by description_for") from error
    return dict(description)
