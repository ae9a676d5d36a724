"""Imports rows as snapshots, from arrays, dense embeddings, snapshots, exports and other programs' files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...engine.checks import validate_arguments
from ...engine.errors import InputError
from ...engine.optim.rule import depends_on_step
from ...engine.options.table_names import NAMED_LIKE_TENSORS, TABLE_NAMES, Names, are_table_names, read_table_names
from ...engine.options.table_spec import check_dtype
from ...engine.row_format import RowFormat
from ..files.format import Manifest, check_name
from ..files.writer import ProgressCallback, check_name_free, write_snapshot
from ..store.folder import StoreFolder
from ..store.selection import convert_description, read_dtypes
from .columns import EMBEDDING, KEY, STEP, TABLE, UPDATES, Columns
from .descriptions import description_for, drop_state, read_description, validate_description
from .sorting import RowSorter
from .sources import Source, open_source


@validate_arguments("store", "keys", "tensor", "states", "progress")
def import_snapshot(
    store: str | Path,
    name: str,
    source: Source | str | Path | NDArray[Any] | Tensor | nn.Embedding,
    *,
    keys: NDArray[Any] | Tensor | str | Path | None = None,
    table_ids: int | str | NDArray[Any] | Tensor | Path | None = None,
    tensor: str | Sequence[str] | None = None,
    states: Mapping[str, Any] | None = None,
    description: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Write rows as a snapshot in a store folder. `load_snapshot` or `tierbed snapshot load` then loads the snapshot.

    Runs no code from files. Sorts rows in 64 parts. Sorting needs a few times the memory of one part (see `RowSorter`).

    Args:
        store: The store folder, `<persistent_path>/<embedding name>`. The import creates it if missing, and locks it.
        name: The new snapshot's name.
        source: A file of rows and keys, a snapshot's folder, or a dense table. Snapshots and exports are imported bit
            for bit. Another program's .parquet, .npz or .safetensors file needs columns `key` and `embedding`; `table`,
            `updates`, `step` and optimizer states are optional. Other columns are ignored. A dense table is float32,
            float16 or bfloat16 [n, dim]: an array, a tensor, an `nn.Embedding` or a .npy file. For a table in a .npz,
            .safetensors, .pt, .pth, .bin or .ckpt file, give the table's name as `tensor`.
        keys: A dense table's keys [n] of the key type, or the path of a .npy file. If None, keys are row numbers. The
            row at padding_idx must be zeros, and is skipped. If a table repeats a key, the key's last row is used.
        table_ids: An array [n] with the table id of each row, or the path of a .npy file. Only for dense tables. One
            number or name assigns all rows to one table.
        tensor: The dense table's name in the file. A tensor in an inner dict has a name like "outer.inner". For
            several tables, give a list of names in the order of the tables.
        states: A dense table's optimizer states by name: [n, dim], or [n] for one number per row. Give arrays or paths
            as for `keys`; with `tensor`, give tensor names. States need a description with an optimizer and a step.
        description: From `description_for`. None uses the source's description, otherwise the store's, otherwise an
            embedding's defaults. If the source lacks optimizer states, rows are imported without state.
        dtype: The dtype of embeddings in the snapshot: torch.float32, float16 or bfloat16. None keeps the description's
            dtype. Optimizer state always keeps the description's dtype.
        progress: Called with the number of rows read, and later with the number of rows written.

    Returns:
        The new snapshot's manifest.

    Raises:
        InputError: If rows do not fit the table.
        SnapshotError: If a file cannot be read, or if the name is taken or invalid.
        StoreError: If the store is in use.
        OptionError: If pyarrow is missing or dtype is not supported.
    """
    check_name(name)
    source = open_source(source, keys, table_ids, tensor, states)
    if description is not None:
        description = validate_description(description, "description")
    dtype_name = None if dtype is None else check_dtype(dtype)
    with StoreFolder(Path(store), "import_snapshot") as folder:
        description = _fit_description(description or source.description or _find_description(folder, source), source)
        _check_order(read_table_names(description), source)
        if dtype_name is not None:
            description = convert_description(dict(description), (dtype_name, read_dtypes(description)[1] or "float32"))
        target = folder.snapshots_path / name
        check_name_free(target, None)
        with closing(RowSorter(folder.snapshots_path, RowFormat.from_description(description).dtype)) as sorter:
            for rows in _read_rows(source, description):
                sorter.add(rows)
                if progress is not None:
                    progress(len(rows))
            return write_snapshot(target, dict(description), sorter.chunks(), progress)


def _find_description(store: StoreFolder, source: Source) -> dict[str, Any]:
    """Return the description of the store's rows. For an empty store, makes a description with default options."""
    if (description := read_description(store)) is not None:
        return description
    if source.num_tables is None:
        raise InputError(f"{source.label}: the number of tables is unknown; give description=description_for(...)")
    key_dtype = getattr(torch, source.key_type or "int64")
    defaults = description_for(store.path.name, source.dim, key_dtype, padding_idx=source.padding_idx)
    names, count = source.table_names, source.num_tables
    is_named = count > 1 and any(names) and are_table_names(names, count)
    name_fields = {TABLE_NAMES: names, NAMED_LIKE_TENSORS: True} if is_named else {}
    return {**defaults, "tables": defaults["tables"] * count, **name_fields}


def _check_order(names: Names, source: Source) -> None:
    """Raises InputError if the tensors from TorchRec are not in the same order as the tables that they belong to."""
    for index, name in enumerate(source.table_names):
        is_other = name is not None and name in names and names.index(name) != index
        if is_other and source.num_tables is not None and source.num_tables > 1:
            raise InputError(
                f"{source.label}: the tensor at position {index} belongs to table {name!r}, but table {index} is "
                f"{names[index]!r}. List the tensors in the order of the tables: {', '.join(map(str, names))}"
            )


def _fit_description(description: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """Return the description, without state if the source lacks state. Raises InputError if rows do not fit."""
    dim = sum(description["columns"])
    if source.dim != dim:
        raise InputError(f"{source.label} has rows of {source.dim} floats, but the table has {dim}: use another store")
    if source.key_type not in (None, description["key_type"]):
        raise InputError(
            f"{source.label} has keys of {source.key_type}, but the table has {description['key_type']}: convert the "
            "keys, or give a description"
        )
    if unknown := source.states - set(description["states"]):
        raise InputError(
            f"states: {min(unknown)!r} is not among the description's states, {description['states'] or 'none'}: give "
            "description=description_for(..., optimizer=row_optimizer(...), step=...)"
        )
    if source.states and not description["step"] and depends_on_step(description["optimizer"]):
        raise InputError(
            f"states: {description['optimizer']} counts steps, but the description has step=0; call description_for "
            "with step="
        )
    missing = [state for state in description["states"] if state not in source.names]
    if missing and len(missing) < len(description["states"]):
        raise InputError(f"{source.label} lacks optimizer state {', '.join(missing)}: give all states, or none")
    return drop_state(description) if missing else description


def _read_rows(source: Source, description: Mapping[str, Any]) -> Iterator[NDArray[np.void]]:
    columns = Columns(description)
    names = [KEY, TABLE, EMBEDDING, *description["states"], UPDATES, *([STEP] if description["step"] else [])]
    for batch in source.batches(names):
        arrays = batch if source.key_type is not None else _number_rows(batch, columns, source)
        yield from columns.make_rows(arrays, source.label)


def _number_rows(batch: dict[str, Any], columns: Columns, source: Source) -> dict[str, Any]:
    """Return a batch of a dense table with row numbers as keys, and without the row at padding_idx."""
    keys, padding = batch[KEY], columns.description["padding_idx"]
    if source.padding_idx is not None and source.padding_idx != padding:
        raise InputError(
            f"{source.label} has padding_idx={source.padding_idx}, but the table has {padding}: give both the same"
        )
    if keys[-1] > np.iinfo(columns.key_dtype).max:
        raise InputError(
            f"{source.label} has {source.num_rows} rows, too many for {columns.key_dtype} keys; use 64-bit keys"
        )
    keyed = {**batch, KEY: keys.astype(columns.key_dtype)}
    if padding is None:
        return keyed
    is_row = keys != padding
    if batch[EMBEDDING][~is_row].any():
        raise InputError(
            f"{source.label}: row {padding} must be zeros, because padding_idx={padding}; set the row to zeros, or "
            "give a description with padding_idx=None"
        )
    return {name: column[is_row] if isinstance(column, np.ndarray) else column for name, column in keyed.items()}
