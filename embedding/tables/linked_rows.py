"""Opens a RocksDB checkpoint's files as live rows without reading them, and checks them while training runs.

Linking a checkpoint's files takes about as long for a billion rows as for a thousand. Names and sizes are checked at
once, as are the files without rows. RocksDB checks each block that it reads. A thread compares the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread
from typing import Any

from ...engine.errors import SnapshotError
from ...engine.optim.row_state import RowState
from ...engine.options.table_spec import TableSpec
from ...engine.table.background_save import PAUSE_RATIO
from ...engine.table.table import OpenTable
from ...engine.threads import Thread
from ...snapshots.files.reader import Snapshot

log = logging.getLogger("tierbed")


def can_link(snapshot: Snapshot, spec: TableSpec, state: RowState | None) -> bool:
    """True if live rows with this spec and optimizer state can use the snapshot's files. state: None for any state."""
    manifest = snapshot.manifest
    if manifest.rocksdb is None:
        return False
    state = RowState.from_description(snapshot.description) if state is None else state
    return spec.make_row_format(state).fields == manifest.row_format.fields


def link_rows(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """Make `folder` live rows with the snapshot's files. Return their description. Raises SnapshotError, OSError."""
    from ...snapshots.files.rocksdb_files import link_checkpoint  # needs RocksDB

    rocksdb = snapshot.manifest.rocksdb
    assert rocksdb is not None
    link_checkpoint(snapshot.folder, rocksdb, folder)
    return {**snapshot.description, "rows": snapshot.manifest.rows, "shards": rocksdb.shards}


def check_files(table: OpenTable, snapshot: Snapshot) -> None:
    """Check the linked files of `table` in a thread. After damage, the next call raises. Closes the table on error."""
    try:
        table.on_close = FileCheck(snapshot, table.defer_error).stop
    except BaseException:  # as when the system cannot start a thread
        table.close()
        raise


class FileCheck:
    """A background thread that compares a checkpoint's row files with their checksums, until `stop`.

    Recovery opens these files without reading them all. RocksDB checks each block that it reads.
    """

    def __init__(self, snapshot: Snapshot, report: Callable[[SnapshotError], None]) -> None:
        """report: called by the thread with an error that names a damaged file."""
        self._snapshot, self._report, self._stopped = snapshot, report, Event()
        self._thread = Thread(target=self._run, name="tierbed-file-check", daemon=True)
        self._thread.start()

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
            self._report(error)
