"""Compares the row files that recovery linked from a RocksDB checkpoint with their checksums, while training runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

from ...engine.errors import SnapshotError
from ...engine.table.background_save import PAUSE_RATIO
from ...engine.threads import Thread
from ...snapshots.files.reader import Snapshot

log = logging.getLogger("tierbed")


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
        self._thread.join()

    def _run(self) -> None:
        from ...snapshots.files.rocksdb_files import find_damaged_file  # needs RocksDB

        assert self._snapshot.manifest.rocksdb is not None
        wait = lambda seconds: self._stopped.wait(PAUSE_RATIO * seconds)  # noqa: E731
        error = find_damaged_file(self._snapshot.folder, self._snapshot.manifest.rocksdb, wait)
        if error is not None:
            log.error("%s", error)
            self._report(error)
