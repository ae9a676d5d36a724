"""RocksDB as the last tier. Its folder is scratch until `flush`; nothing here is read back without a clean mark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .. import _core
from ..errors import StoreError
from .contract import Chunks, Found, Keys, Lines, Tables, row_dtype
from .durable import fsync_dir, make_folder

SHARDS = 4
BLOCK_CACHE_BYTES = 32 << 20
WRITE_BUFFER_BYTES = 32 << 20  # a shard
SCAN_BYTES = 1 << 20  # a chunk


def require_rocksdb() -> None:
    """Raises StoreError where the package was built without RocksDB."""
    if not _core.has_rocksdb:
        raise StoreError(
            "cached_ssd: this build of tierbed has no RocksDB; install it (apt install librocksdb-dev) and build "
            "tierbed again (pip install --force-reinstall --no-deps . in its source folder)"
        )


class RocksDB:
    """Rows of `width` floats in `folder`, one database a shard.

    `shards`: how many the folder has, all of which must be there; None makes a new one with SHARDS.
    """

    def __init__(self, folder: Path, width: int, shards: int | None = None, block_bytes: int = 4096) -> None:
        require_rocksdb()
        self.shards = shards or SHARDS
        self._folder = folder
        self._width = width
        self._counts = {"hits": 0, "misses": 0, "rows_written": 0}
        with self._errors():
            make_folder(folder)
            self._db: _core.RocksTier | None = _core.RocksTier(
                str(folder),
                width,
                create=shards is None,
                shards=self.shards,
                block_bytes=block_bytes,
                block_cache_bytes=BLOCK_CACHE_BYTES,
                write_buffer_bytes=WRITE_BUFFER_BYTES,
            )
            fsync_dir(folder)  # RocksDB makes what is in a shard durable, not the shard's name
        self._scans: list[_core.RocksTier.Scan] = []

    def read(self, tables: Tables, keys: Keys, lines: Lines) -> Found:
        with self._errors():
            found = self._open().read(tables, keys, lines)
        self._counts["hits"] += int(found.sum())
        self._counts["misses"] += len(found) - int(found.sum())
        return found

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        with self._errors():
            self._open().write(tables, keys, lines)
        self._counts["rows_written"] += len(keys)

    def scan(self) -> Chunks:
        dtype = row_dtype(self._width)
        most = max(1, SCAN_BYTES // dtype.itemsize)
        with self._errors():
            scan = self._open().scan()
        self._scans.append(scan)
        try:
            while True:
                rows = np.empty(most, dtype)
                with self._errors():
                    bucket, n = scan.next(rows.view(np.uint8), most)
                if n == 0:
                    return
                yield bucket, rows[:n]
        finally:
            scan.close()
            self._scans.remove(scan)

    def flush(self) -> None:
        with self._errors():
            self._open().flush()

    def close(self) -> None:
        for scan in self._scans:
            scan.close()
        if self._db is not None:
            self._db.close()
            self._db = None

    def metrics(self) -> dict[str, dict[str, int]]:
        db = self._open()
        sizes = {
            "sst_bytes": db.property("rocksdb.total-sst-files-size"),
            "memtable_bytes": db.property("rocksdb.cur-size-all-mem-tables"),
        }
        return {"ssd": {**self._counts, **sizes}}

    def _open(self) -> _core.RocksTier:
        if self._db is None:
            raise StoreError(f"RocksDB in {self._folder} was closed")
        return self._db

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"RocksDB in {self._folder}: {error}; check the disk, then reopen from the last snapshot"
            ) from error
