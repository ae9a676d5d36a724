"""Opens a RocksDB checkpoint's files as live rows without reading them, and checks them while training runs.

Linking a checkpoint's files takes about as long for a billion rows as for a thousand. Names and sizes are checked at
once, as are the files without rows. RocksDB checks each block that it reads. A thread compares the rest. If increments
follow the checkpoint, they are read and applied to the linked rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Event, current_thread
from typing import Any

from ...engine.durable import remove_folder
from ...engine.errors import SnapshotError, undo_on_error
from ...engine.optim.row_state import RowState
from ...engine.options.table_spec import TableSpec
from ...engine.store.table_counts import read_counts
from ...engine.table.background_save import PAUSE_RATIO
from ...engine.table.table import OpenTable
from ...engine.threads import Thread
from ...snapshots.files.reader import Snapshot, exhaust, read_changes
from .increments import apply_changes

log = logging.getLogger("tierbed")


def list_linkable(snapshot: Snapshot, spec: TableSpec, state: RowState | None) -> list[Snapshot]:
    """Return the snapshot's chain if live rows can use its first snapshot's files, otherwise an empty list.

    spec, state: the live rows' spec and optimizer state. state: None for any state.
    """
    try:
        chain = snapshot.chain
    except SnapshotError:
        return []  # `load` raises the error
    state = RowState.from_description(snapshot.description) if state is None else state
    is_linkable = spec.make_row_format(state).fields == chain[0].manifest.row_format.fields
    return chain if chain[0].manifest.rocksdb is not None and is_linkable else []


def link_rows(chain: Sequence[Snapshot], folder: Path) -> dict[str, Any]:
    """Make `folder` live rows with the files of the chain's first snapshot; see `add_increments` for the others.

    Return a description of the chain's last snapshot. Raises SnapshotError, OSError.
    """
    from ...snapshots.files.rocksdb_files import link_checkpoint  # needs RocksDB

    rocksdb = chain[0].manifest.rocksdb
    assert rocksdb is not None
    link_checkpoint(chain[0].folder, rocksdb, folder)
    return {**chain[-1].description, "rows": chain[-1].manifest.rows, "shards": rocksdb.shards}


def add_increments(table: OpenTable, chain: Sequence[Snapshot]) -> None:
    """Verify a chain's increments, and durably change the linked rows of `table`. Closes `table` if this fails."""
    with undo_on_error(table.close):
        assert table.stack is not None
        bottom = table.stack.bottom  # the caches are empty
        exhaust(apply_changes(bottom, bottom, read_changes(chain[1:])))
        table.counts.set_initial_counts(read_counts(vars(chain[-1].manifest), table.spec.num_tables))
        table.flush()


def remove_table(table: OpenTable, path: Path | None) -> None:
    """Close an unused table, and remove its files in the folder `path`, if there are any."""
    table.close()
    if path is not None:
        with contextlib.suppress(OSError):  # keep the first error; the next open removes the folder
            remove_folder(path)


class FileCheck:
    """A background thread that compares a checkpoint's row files with their checksums, until `stop`.

    Recovery opens these files without reading them all. RocksDB checks each block that it reads.
    """

    def __init__(self, snapshot: Snapshot, table: OpenTable) -> None:
        """table: its next call raises an error that names a damaged file. Closes the table if no thread starts."""
        self._snapshot, self._table, self._stopped = snapshot, table, Event()
        self._thread = Thread(target=self._run, name="tierbed-file-check", daemon=True)
        with undo_on_error(table.close):
            self._thread.start()
        self.attach(table)

    def attach(self, table: OpenTable) -> None:
        """Report to `table` from now on, and stop when it closes."""
        old_table, self._table, table.on_close = self._table, table, self.stop
        if old_table.reader_error is not None:
            table.defer_error(old_table.reader_error)

    def stop(self) -> None:
        """End the thread, and wait until it has ended. May be called again."""
        self._stopped.set()
        if current_thread() is not self._thread:  # garbage collection may close the table in any thread
            self._thread.join()

    def _run(self) -> None:
        from ...snapshots.files.rocksdb_files import find_damaged_file  # needs RocksDB

        assert self._snapshot.manifest.rocksdb is not None
        wait = lambda seconds: self._stopped.wait(PAUSE_RATIO * seconds)  # noqa: E731
        error = find_damaged_file(self._snapshot.folder, self._snapshot.manifest.rocksdb, wait)
        if error is not None:
            log.error("%s", error)
            self._table.defer_error(error)
