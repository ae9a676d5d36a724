"""Reads and writes a snapshot's rows as NumPy arrays of keys and values, without an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.checks import validate_arguments
from ...engine.errors import ClosedError, InputError, OptionError, undo_on_error
from ...engine.options.table_spec import KEY_TYPES, check_key_type
from ...engine.table.row_scan import catch_up_rows
from ..files.format import check_name
from ..files.reader import Snapshot
from ..files.writer import check_name_free, write_snapshot
from ..store.folder import StoreFolder
from ..store.status import require_store
from .columns import EMBEDDING, KEY, TABLE, VALUES, Columns
from .descriptions import description_for, drop_state, read_description, validate_description
from .sorting import RowSorter
from .sources import to_path

Chunk = tuple[NDArray[Any], ...]


class PersistentTableReader(AbstractContextManager["PersistentTableReader"], Iterator[Chunk]):
    """Iterates over a snapshot's rows; see `make_persistent_table_reader`. A `with` block closes the files."""

    def __init__(self, snapshot: Snapshot, storage_dim: int, table_ids: bool) -> None:
        self._name, self._closed = snapshot.name, False
        self._columns = Columns(snapshot.description)
        self._dim, self._table_ids = storage_dim, table_ids
        chunks = snapshot.chunks()
        is_whole = storage_dim == self._columns.storage_dim
        self._chunks = chunks if is_whole else catch_up_rows(snapshot.description, chunks)

    def __next__(self) -> Chunk:
        if self._closed:
            raise ClosedError(f"the reader of snapshot {self._name!r} was closed: make another reader")
        _, rows = next(self._chunks)
        row_format = self._columns.row_format
        names = row_format.counts if self._dim > row_format.dim else (EMBEDDING,)
        columns = [row_format.values(rows, name) for name in names]
        keys, values = self._columns.to_user_keys(rows["key"]), np.concatenate(columns, axis=1)
        return (keys, values, rows["table"].copy()) if self._table_ids else (keys, values)

    def close(self) -> None:
        """End the iteration, if it has not ended yet."""
        self._closed = True
        self._chunks.close()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self.close()


class PersistentTableWriter(AbstractContextManager["PersistentTableWriter"]):
    """Writes a snapshot; see `make_persistent_table_writer`. Call `write` any number of times, then `close`."""

    def __init__(self, folder: StoreFolder, name: str, description: Mapping[str, Any]) -> None:
        self._folder = folder
        self._target = folder.snapshots_path / name
        self._description = dict(description)
        self._columns = Columns(description)
        self._sorter = RowSorter(folder.snapshots_path, self._columns.row_format.dtype)
        self._closed = False

    def write(self, keys: NDArray[Any], values: NDArray[np.float32], table_ids: Any = None) -> None:
        """Add rows in any order. If several rows share (table, key), the last row is used.

        Args:
            keys: The rows' keys [n], of the key type.
            values: The rows, float32 [n, storage_dim].
            table_ids: Whole numbers [n], or one number or name for all rows, or None if there is only one table.

        Raises:
            InputError: If an argument is invalid; in this case, no row is added.
            SnapshotError: If the rows cannot be stored.
            ClosedError: If the writer is closed.
        """
        if self._closed:
            raise ClosedError(f"the writer of snapshot {self._target.name!r} was closed: make another writer")
        arrays = {KEY: keys, VALUES: values} | ({} if table_ids is None else {TABLE: table_ids})
        for rows in self._columns.make_rows(arrays, f"snapshot {self._target.name!r}"):
            self._sorter.add(rows)

    def close(self) -> None:
        """Write the snapshot durably. Later calls do nothing. Raises SnapshotError."""
        if not self._closed:
            try:
                write_snapshot(self._target, self._description, self._sorter.chunks())
            finally:
                self.discard()

    def discard(self) -> None:
        """Drop the rows without making a snapshot. Later calls do nothing."""
        self._closed = True
        self._sorter.close()
        self._folder.unlock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


@validate_arguments("table_ids")
def make_persistent_table_reader(
    path: str | Path,
    snapshot_name: str,
    key_type: torch.dtype,
    value_type: torch.dtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    table_ids: bool = False,
) -> PersistentTableReader:
    """Iterate over the rows of a snapshot of any kind, as NumPy arrays.

    If you read only embeddings, you get the values that a lookup returns. If you also read optimizer state, you get the
    values after each row's latest write. To get the step of the latest write too, use `export_snapshot`.
    Checksums are compared while files are read, so a damaged file raises SnapshotError only at the file's end.

    Args:
        path: The store folder, `<persistent_path>/<embedding name>`. A running trainer may have the store open.
        snapshot_name: The snapshot's name.
        key_type: The dtype of keys in the snapshot.
        value_type: Must be torch.float32.
        storage_dim: How many floats to read per row: the embedding alone, or the embedding and all optimizer states.
        physical_block_size: Ignored; exists for compatibility with OneFlow.
        table_ids: True to yield table ids too, which is required if the snapshot has several tables.

    Returns:
        An iterator of (keys [n], values float32 [n, storage_dim]); with `table_ids`, also table ids uint32 [n].

    Raises:
        InputError: If an argument does not fit the snapshot.
        SnapshotError: If the snapshot is missing or damaged.
        StoreError: If there is no store.
    """
    _check_value_type(value_type)
    check_name(snapshot_name)
    snapshot = Snapshot.open(require_store(to_path(path, "path")) / "snapshots" / snapshot_name)
    _check_types(snapshot.description, key_type, storage_dim, f"snapshot {snapshot_name!r}")
    if len(snapshot.description["tables"]) > 1 and not table_ids:
        raise InputError(
            f"snapshot {snapshot_name!r} has {len(snapshot.description['tables'])} tables, which may share keys: "
            "give table_ids=True, to get chunks (keys, values, table_ids)"
        )
    return PersistentTableReader(snapshot, storage_dim, table_ids)


@validate_arguments()
def make_persistent_table_writer(
    path: str | Path,
    snapshot_name: str,
    key_type: torch.dtype,
    value_type: torch.dtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    description: Mapping[str, Any] | None = None,
) -> PersistentTableWriter:
    """Create a writer that makes a snapshot from NumPy arrays, for `load_snapshot` or `tierbed snapshot load`.

    Each row gets the update count 1 and the description's step. Rows wait in 64 temporary files. Sorting a file needs a
    few times the file's size in memory. If the `with` block raises, no snapshot is made.

    Args:
        path: The store folder. The folder is created if missing, and locked until the writer is closed.
        snapshot_name, key_type, value_type, storage_dim, physical_block_size: See `make_persistent_table_reader`.
        description: A table's description, from `description_for`. Default: the description of the store's rows. If
            the store is empty, the default describes an embedding with one table and default options.

    Returns:
        The writer, for a `with` block.

    Raises:
        InputError: If an argument does not fit the table.
        SnapshotError: If the name is taken or invalid.
        StoreError: If the store is in use.
    """
    _check_value_type(value_type)
    check_key_type(key_type)
    check_name(snapshot_name)
    if description is not None:
        description = validate_description(description, "description")
    folder = StoreFolder(to_path(path, "path"), "a PersistentTableWriter")
    with undo_on_error(folder.unlock):
        check_name_free(folder.snapshots_path / snapshot_name, None)
        description = description or read_description(folder)
        description = description or description_for(folder.path.name, storage_dim, key_type)
        _check_types(description, key_type, storage_dim, f"the table of {str(folder.path)!r}")
        if storage_dim != Columns(description).storage_dim:
            description = drop_state(description)
        return PersistentTableWriter(folder, snapshot_name, description)


def _check_value_type(value_type: Any) -> None:
    if value_type is not torch.float32:
        raise OptionError(
            f"value_type={value_type!r}: values are float32 for any dtype of stored rows; give torch.float32"
        )


def _check_types(description: Mapping[str, Any], key_dtype: torch.dtype, storage_dim: int, label: str) -> None:
    if KEY_TYPES[check_key_type(key_dtype)] != description["key_type"]:
        raise InputError(f"key_type={key_dtype} does not fit {label}; give torch.{description['key_type']}")
    dim = sum(description["columns"])
    full_dim = dim + sum(description["state_widths"])
    if type(storage_dim) is not int or storage_dim not in (dim, full_dim):
        states = f", or {full_dim} with optimizer state {', '.join(description['states'])}" if full_dim > dim else ""
        raise InputError(f"storage_dim={storage_dim!r} does not fit {label}; give {dim} for the embedding{states}")
