"""Makes table descriptions for imports, from one of three sources: arguments, the store, or embedding defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from ...engine.errors import InputError, OptimizerError, OptionError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.initializers import make_normal_initializer
from ...engine.options.table_spec import make_table_spec
from ..files.format import check_description
from ..files.reader import find_snapshot, list_snapshots
from ..store.closed_store import make_description
from ..store.folder import StoreFolder
from ..store.group_file import GroupFile
from ..store.recovery_rule import EMPTY_ID
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
    """Describe a table as a dict. Snapshots store the description of their table in the same form.

    Args:
        name, embedding_dim, key_type, tables, padding_idx, seed, dtype, state_dtype: As for an embedding.
        optimizer: From `tierbed.row_optimizer`, if the rows include this optimizer's state. None means that rows have
            no optimizer state; then any optimizer may train the rows.
        step: How many steps the rows were trained.

    Returns:
        The description, for `import_snapshot` or `make_persistent_table_writer`.

    Raises:
        OptionError, OptimizerError: If an argument is invalid.
    """
    tables = [make_normal_initializer(0.0, 0.05)] if tables is None else tables
    if not isinstance(tables, (list, tuple)):
        raise OptionError(f"tables={tables!r}: give a list with each table's options, from make_table_options")
    if not isinstance(optimizer, (RowOptimizer, NoneType)):
        raise OptimizerError(f"optimizer={optimizer!r}: give the result of tierbed.row_optimizer, or None")
    spec = make_table_spec(name, embedding_dim, key_type, tables, padding_idx, seed, dtype, state_dtype)
    state = RowState() if optimizer is None else spec.make_row_state(optimizer)
    hyperparams = [] if optimizer is None or step == 0 else optimizer.compute_hyperparams(step)
    return spec.describe(state, hyperparams, step)


def read_description(store: StoreFolder) -> dict[str, Any] | None:
    """Return the description of a store's rows, or None if the store is empty.

    Describes the live rows if the store was closed cleanly, otherwise the recovery snapshot. For rows without optimizer
    state, the description names no optimizer. Raises StoreError and SnapshotError. Raises InputError if the stored
    description is invalid for this version of tierbed, because another version wrote it.
    """
    marker, file = store.clean_marker, GroupFile(store)
    if marker is not None:
        stored = make_description(marker)
    elif (commit := file.record.commit[file.store_id]) != EMPTY_ID:
        stored = find_snapshot(store.snapshots_path, commit).description
    elif snapshots := list_snapshots(store.snapshots_path).snapshots:
        stored = snapshots[-1].description
    else:
        return None
    description = validate_description(stored, f"store folder {str(store.path)!r}")
    return description if description["states"] else drop_state(description)


def drop_state(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description without optimizer state and at step 0, so that training starts with new state."""
    return Selection(includes_state=False).describe(dict(description))


def validate_description(description: Any, label: str) -> dict[str, Any]:
    """Return a copy of the description. Raises InputError if the description is invalid."""
    try:
        check_description(description)
    except ValueError as error:
        raise InputError(f"{label}: {error}; make the description with description_for") from error
    return dict(description)
