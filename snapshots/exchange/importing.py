"""Imports rows as snapshots: from arrays, dense embeddings, other snapshots, and files of exports or other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...engine.checks import checked_arguments
from ...engine.errors import InputError
from ...engine.optim.rule import counts_steps
from ...engine.options.table_names import FIELD, OF_TENSORS, Names, are_names, names_in
from ...engine.options.table_spec import check_dtype
from ...engine.row_format import RowForm
from ..files.format import Manifest, check_name
from ..files.writer import ProgressCallback, check_free, write_snapshot
from ..store.folder import StoreFolder
from ..store.selection import converted_description, types_of
from .columns import EMBEDDING, KEY, STEP, TABLE, UPDATES, Columns
from .descriptions import checked_description, description_for, stored_description, without_state
from .sorting import RowSorter
from .sources import Source, open_source


@checked_arguments("store", "keys", "tensor", "states", "progress")
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
    """Make snapshot `name` in a store folder, `<persistent_path>/<embedding name>`, which `load` then makes live.

    source: one of
    - a file that an export wrote (.parquet, .npz, .safetensors), or a snapshot's folder: the same rows bit for bit;
      or a similar file of another program: `key` and `embedding`, and if present `table`, states, `updates` and `step`;
      other columns are ignored;
    - float32, float16 or bfloat16 [n, dim] as an array, a tensor, an `nn.Embedding` or a .npy file, or `tensor` of a
      .npz, .safetensors or torch file (.pt, .pth, .bin, .ckpt; inner dicts as "outer.inner"), or a list of names, one
      for each table, in order.
    keys: [n] of the key type, for the second kind; None if the key of a row is its number: then the row of padding_idx,
    which must be zeros, is skipped. table_ids: of the rows, [n], or one table by number or name. Both may be paths of
    .npy files. Of rows with the same (table, key), the last one is used.
    states: of the optimizer, for the second kind, by name: [n, dim], or [n] of one number a row, each like `keys`, or
    like `tensor` where that is given. The description then is of an optimizer, and has the step of the rows.
    description: of the table, by `description_for`; None for that of the source, else of the store, else, for an empty
    store, of an embedding with defaults. If the source lacks the optimizer's states, rows have no state.
    dtype: of the embedding's numbers in the snapshot, torch.float32, float16 or bfloat16; None for that of the
    description. Optimizer state keeps the dtype of the description.
    progress: called with the number of rows read, and again with the number written.

    No code in a file is run. Memory: a few times 1/64 of the rows, see `RowSorter`. Creates and locks the store folder.
    Raises InputError for rows that do not fit the table, SnapshotError for a file that cannot be read or a name that is
    taken or invalid, StoreError if the store is in use, OptionError without pyarrow and for another dtype.
    """
    check_name(name)
    opened = open_source(source, keys, table_ids, tensor, states or {})
    if description is not None:
        description = checked_description(description, "description")
    numbers = None if dtype is None else check_dtype(dtype)
    with StoreFolder(Path(store), "import_snapshot") as folder:
        described = _fitted(description or opened.description or _description_of(folder, opened), opened)
        _check_order(names_in(described), opened)
        if numbers is not None:
            described = converted_description(dict(described), (numbers, types_of(described)[1] or "float32"))
        place = folder.snapshots / name
        check_free(place, None)
        with closing(RowSorter(folder.snapshots, RowForm.described(described).dtype)) as sorter:
            for rows in _rows(opened, described):
                sorter.add(rows)
                if progress is not None:
                    progress(len(rows))
            return write_snapshot(place, dict(described), sorter.chunks(), progress)


def _description_of(store: StoreFolder, source: Source) -> dict[str, Any]:
    """The description for a source without one: of the store, or of an embedding with defaults."""
    stored = stored_description(store)
    if stored is not None:
        return stored
    if source.tables is None:
        raise InputError(f"{source.what}: its number of tables is unknown; give description=description_for(...)")
    key_type = getattr(torch, source.key_type or "int64")
    default = description_for(store.path.name, source.dim, key_type, padding_idx=source.padding_idx)
    is_named = source.tables > 1 and any(source.table_names) and are_names(source.table_names, source.tables)
    names = {FIELD: source.table_names, OF_TENSORS: True} if is_named else {}
    return {**default, "tables": default["tables"] * source.tables, **names}


def _check_order(names: Names, source: Source) -> None:
    """Raises InputError if tensors of TorchRec's tables are not in the order of the tables with their names."""
    for number, name in enumerate(source.table_names):
        is_other = name is not None and name in names and names.index(name) != number
        if is_other and source.tables is not None and source.tables > 1:
            raise InputError(
                f"{source.what}: tensor {number} is of table {name!r}, and table {number} is {names[number]!r}; list "
                f"the tensors in the order of the tables, {', '.join(map(str, names))}"
            )


def _fitted(description: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """The description, without optimizer state if the source has none. Raises InputError if they disagree."""
    dim = sum(description["columns"])
    if source.dim != dim:
        raise InputError(f"{source.what} has rows of {source.dim} floats, but the table of {dim}: it is another table")
    if source.key_type not in (None, description["key_type"]):
        raise InputError(
            f"{source.what} has keys of {source.key_type}, and the table of {description['key_type']}: convert them, "
            "or give a description"
        )
    if unknown := source.states - set(description["states"]):
        raise InputError(
            f"states: {min(unknown)!r} is none of the description, which has {description['states'] or 'none'}: give "
            "description=description_for(..., optimizer=row_optimizer(...), step=...)"
        )
    if source.states and not description["step"] and counts_steps(description["optimizer"]):
        raise InputError(
            f"states: {description['optimizer']} counts steps, and the description has step=0; give step= to "
            "description_for"
        )
    missing = [state for state in description["states"] if state not in source.names]
    if missing and len(missing) < len(description["states"]):
        raise InputError(f"{source.what} lacks optimizer state {', '.join(missing)}: give all states, or none")
    return without_state(description) if missing else description


def _rows(source: Source, description: Mapping[str, Any]) -> Iterator[NDArray[np.void]]:
    columns = Columns(description)
    names = [KEY, TABLE, EMBEDDING, *description["states"], UPDATES, *([STEP] if description["step"] else [])]
    for batch in source.batches(names):
        arrays = batch if source.key_type is not None else _numbered(batch, columns, source)
        yield from columns.rows(arrays, source.what)


def _numbered(batch: dict[str, Any], columns: Columns, source: Source) -> dict[str, Any]:
    """A batch of a dense table, with row numbers as keys of the key type, and without the row of padding_idx."""
    numbers, padding = batch[KEY], columns.description["padding_idx"]
    if source.padding_idx is not None and source.padding_idx != padding:
        raise InputError(
            f"{source.what} has padding_idx={source.padding_idx}, and the table {padding}: give both the same"
        )
    if numbers[-1] > np.iinfo(columns.key_dtype).max:
        raise InputError(
            f"{source.what} has {source.rows} rows, more than {columns.key_dtype} has keys; give 64-bit keys"
        )
    kept = {**batch, KEY: numbers.astype(columns.key_dtype)}
    if padding is None:
        return kept
    is_row = numbers != padding
    if batch[EMBEDDING][~is_row].any():
        raise InputError(
            f"{source.what}: row {padding} is that of padding_idx, which lookups return as zeros, but it holds other "
            "numbers: give a description with padding_idx=None, or make the row zeros"
        )
    return {name: column[is_row] if isinstance(column, np.ndarray) else column for name, column in kept.items()}
