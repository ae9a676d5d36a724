"""Reads and writes rows of a snapshot as NumPy arrays of keys and values, without an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.checks import checked_arguments
from ...engine.errors import ClosedError, InputError, OptionError
from ...engine.options.table_spec import KEY_TYPES, check_key_type
from ...engine.table.row_scan import caught_up
from ..files.format import check_name
from ..files.reader import Snapshot
from ..files.writer import check_free, write_snapshot
from ..store.folder import StoreFolder
from ..store.status import existing_store
from .columns import EMBEDDING, KEY, TABLE, VALUES, Columns
from .descriptions import checked_description, description_for, stored_description, without_state
from .sorting import RowSorter
from .sources import path_of

Chunk = tuple[NDArray[Any], ...]


class PersistentTableReader(AbstractContextManager["PersistentTableReader"], Iterator[Chunk]):
    """Iterates over a snapshot's rows, as of `make_persistent_table_reader`. A context manager closes its files."""

    def __init__(self, snapshot: Snapshot, storage_dim: int, table_ids: bool) -> None:
        self._name, self._closed = snapshot.name, False
        self._columns = Columns(snapshot.description)
        self._dim = storage_dim
        self._table_ids = table_ids
        chunks = snapshot.chunks()
        whole = storage_dim == self._columns.storage_dim
        self._chunks = chunks if whole else caught_up(snapshot.description, chunks)

    def __next__(self) -> Chunk:
        if self._closed:
            raise ClosedError(f"the reader of snapshot {self._name!r} was closed: make another")
        _, rows = next(self._chunks)
        form = self._columns.form
        parts = [form.numbers(rows, name) for name in (form.counts if self._dim > form.dim else (EMBEDDING,))]
        keys, values = self._columns.user_keys(rows["key"]), np.concatenate(parts, axis=1)
        return (keys, values, rows["table"].copy()) if self._table_ids else (keys, values)

    def close(self) -> None:
        """End the iteration. May be called again."""
        self._closed = True
        self._chunks.close()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self.close()


class PersistentTableWriter(AbstractContextManager["PersistentTableWriter"]):
    """Writes a snapshot, as of `make_persistent_table_writer`: call `write` any number of times, then `close`."""

    def __init__(self, folder: StoreFolder, name: str, description: Mapping[str, Any]) -> None:
        self._folder = folder
        self._place = folder.snapshots / name
        self._description = dict(description)
        self._columns = Columns(description)
        self._sorter = RowSorter(folder.snapshots, self._columns.form.dtype)
        self._closed = False

    def write(self, keys: NDArray[Any], values: NDArray[np.float32], table_ids: Any = None) -> None:
        """Add rows in any order; of rows with the same (table, key), the last is used.

        keys: [n] of the key type. values: float32 [n, storage_dim]. table_ids: whole numbers [n], or one table for
        all rows, by number or name; None if there is one table. Raises InputError and adds no row; SnapshotError,
        ClosedError.
        """
        if self._closed:
            raise ClosedError(f"the writer of snapshot {self._place.name!r} was closed: make another")
        arrays = {KEY: keys, VALUES: values} | ({} if table_ids is None else {TABLE: table_ids})
        for rows in self._columns.rows(arrays, f"snapshot {self._place.name!r}"):
            self._sorter.add(rows)

    def close(self) -> None:
        """Write the snapshot, durable when this returns. May be called again. Raises SnapshotError."""
        if not self._closed:
            try:
                write_snapshot(self._place, self._description, self._sorter.chunks())
            finally:
                self.discard()

    def discard(self) -> None:
        """Drop what was written, and make no snapshot. May be called again."""
        self._closed = True
        self._sorter.close()
        self._folder.release()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


@checked_arguments("table_ids")
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
    """Read a snapshot of any kind as chunks of (keys [n] of the key type, values float32 [n, storage_dim]) in NumPy.

    path: the store folder, `<persistent_path>/<embedding name>`; a running trainer may have it open.
    value_type: torch.float32. storage_dim: how many floats of a row are read: those of the embedding, or also
    those of the optimizer's states after them. physical_block_size: has no effect; for OneFlow's signature.
    table_ids: whether chunks are (keys, values, table_ids uint32 [n]), which several tables need.

    Without the states, values are what a lookup returns. With the states, values are those of the latest write of a
    row; only `export_snapshot` has the step of that write. Checksums are compared while a bucket is read, so that a
    damaged bucket raises SnapshotError at its end. Raises InputError for an argument that does not fit the snapshot,
    SnapshotError if it is missing, StoreError if there is no store.
    """
    _check_value_type(value_type)
    check_name(snapshot_name)
    snapshot = Snapshot.open(existing_store(path_of(path, "path")) / "snapshots" / snapshot_name)
    _check_kind(snapshot.description, key_type, storage_dim, f"snapshot {snapshot_name!r}")
    if len(snapshot.description["tables"]) > 1 and not table_ids:
        raise InputError(
            f"snapshot {snapshot_name!r} has {len(snapshot.description['tables'])} tables, which may share keys: "
            "give table_ids=True, for chunks of (keys, values, table_ids)"
        )
    return PersistentTableReader(snapshot, storage_dim, table_ids)


@checked_arguments()
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
    """A writer that makes snapshot `snapshot_name` of rows given as NumPy arrays, which `load` then makes live.

    path: the store folder, created if it is missing, and locked until the writer is closed. The next arguments are as
    of `make_persistent_table_reader`. description: of the table, from `description_for`; None for that of the store, or
    for an empty store that of an embedding of one table with defaults.

    Rows count as written once, at the step of the description. They are stored in 64 temporary files and sorted one
    file at a time in memory, which takes a few times 1/64 of all rows. Leaving the `with` block by an exception makes
    no snapshot. Raises InputError for an argument that does not fit the table, SnapshotError for a name that is taken
    or invalid, StoreError if the store is in use.
    """
    _check_value_type(value_type)
    check_key_type(key_type)
    check_name(snapshot_name)
    if description is not None:
        description = checked_description(description, "description")
    folder = StoreFolder(path_of(path, "path"), "a PersistentTableWriter")
    try:
        check_free(folder.snapshots / snapshot_name, None)
        description = description or stored_description(folder)
        description = description or description_for(folder.path.name, storage_dim, key_type)
        _check_kind(description, key_type, storage_dim, f"the table of {str(folder.path)!r}")
        if storage_dim != Columns(description).storage_dim:
            description = without_state(description)
        return PersistentTableWriter(folder, snapshot_name, description)
    except BaseException:
        folder.release()
        raise


def _check_value_type(value_type: Any) -> None:
    if value_type is not torch.float32:
        raise OptionError(
            f"value_type={value_type!r}: values are float32, whatever the dtype of stored rows; give that"
        )


def _check_kind(description: Mapping[str, Any], key_type: torch.dtype, storage_dim: int, what: str) -> None:
    if KEY_TYPES[check_key_type(key_type)] != description["key_type"]:
        raise InputError(f"key_type={key_type}: {what} has keys of {description['key_type']}; give that")
    dim = sum(description["columns"])
    whole = dim + sum(description["state_widths"])
    if type(storage_dim) is not int or storage_dim not in (dim, whole):
        states = f", or {whole} with optimizer state {', '.join(description['states'])}" if whole > dim else ""
        raise InputError(f"storage_dim={storage_dim!r}: {what} has rows of {dim} floats{states}; give that")
