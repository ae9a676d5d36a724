"""RocksDB as the last tier. Its folder is scratch until `flush`; without a clean marker none of it is read again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..durable import fsync_dir, make_folder, remedy_for
from ..errors import OptionError, StoreError
from ..options.store_options import ROCKSDB_CACHE_MB, require_rocksdb
from ..row_format import Chunks, row_dtype
from .contract import NativeTier

SHARDS = 4
WRITE_BUFFER_BYTES = 64 << 20  # the maximum for the memtables of all shards
READ_THREADS = 64  # more make no disk faster
SCAN_BYTES = 1 << 20  # of a chunk
MB = 1 << 20


def rocksdb_info() -> dict[str, Any]:
    """The RocksDB of this build: `version`, and `async_io`, whether it reads by io_uring. Raises StoreError."""
    require_rocksdb()
    return {"version": _core.rocksdb_version, "async_io": _core.rocksdb_has_async_io()}


class LiveFile(NamedTuple):
    """A file of the databases at one moment. `name`: shard-N/<file>, in their folder.

    `size`: in bytes; a file that is still being written may be longer. `crc32c`: the checksum of a file of rows, which
    RocksDB computed while writing it; None for other files, and for files of early versions of tierbed. `content`: what
    a copy must hold instead of the present content; None if a copy is to hold the same.
    """

    name: str
    size: int
    crc32c: int | None
    content: bytes | None


class RocksDB(NativeTier):
    """Rows of `width` 4-byte words in `folder`, with one database for each shard.

    `shards`: how many shards the folder has, all of which must exist; None makes a new folder with `new_shards`.
    `read_only`: nothing is written to the folder, and a write of rows raises StoreError. A folder on a full disk is
    also opened like this, until `make_writable`.
    `read_threads`: the maximum of threads that wait for the disk at once.
    `options`: the string of `options_text`; its options override tierbed's own.
    """

    def __init__(
        self,
        folder: Path,
        width: int,
        shards: int | None = None,
        *,
        new_shards: int = SHARDS,
        block_bytes: int = 4096,
        cache_mb: float = ROCKSDB_CACHE_MB,
        read_mode: str = "buffered",
        async_io: bool = True,
        read_threads: int = READ_THREADS,
        options: str = "",
        read_only: bool = False,
    ) -> None:
        require_rocksdb()
        self.shards = shards or new_shards
        self.folder = folder
        self._width = width
        self._scans: list[_core.RocksTier.Scan] = []
        try:
            if not read_only:
                make_folder(folder)
            try:
                self.native = _core.RocksTier(  # for a cache above
                    str(folder),
                    width,
                    create=shards is None,
                    read_only=read_only,
                    shards=self.shards,
                    block_bytes=block_bytes,
                    cache_bytes=int(cache_mb * MB),
                    buffer_bytes=WRITE_BUFFER_BYTES,
                    read_mode=read_mode,
                    async_io=async_io,
                    read_threads=read_threads,
                    options=_core.parse_rocksdb_options(options),
                )
            except StoreError as error:
                if "irect I/O" not in str(error):
                    raise
                reason = str(error).rpartition("; ")[0]
                raise OptionError(f"read_mode={read_mode!r}: {reason}; give 'buffered'") from error
            if not read_only:
                fsync_dir(folder)  # RocksDB makes the files in a shard durable, but not the shard's name
        except OSError as error:
            remedy = remedy_for(error, "check the disk and the folder's permissions")
            raise StoreError(f"RocksDB in {folder}: {error}; {remedy}") from error

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        record = self.native.locate(table, key)
        if record is None:
            return []
        bucket = _core.buckets(np.array([table], np.uint32), np.array([key], np.uint64))[0]
        return [{"tier": "ssd", **record, "shard": int(bucket) % self.shards}]

    def scan(self) -> Chunks:
        dtype = row_dtype(self._width)
        most = max(1, SCAN_BYTES // dtype.itemsize)
        scan = self.native.scan()
        self._scans.append(scan)
        try:
            while True:
                rows = np.empty(most, dtype)
                bucket, n = scan.next(rows.view(np.uint8), most)
                if n == 0:
                    return
                yield bucket, rows[:n]
        finally:
            scan.close()
            self._scans.remove(scan)

    def flush(self) -> None:
        self.native.flush()

    def compact(self) -> None:
        """Merge the files of each shard, which frees the space of replaced rows. Raises StoreError."""
        self.native.compact()

    def make_writable(self) -> None:
        """Open for writing what a full disk let be opened only for reading. Called before rows change. StoreError."""
        self.native.make_writable()

    @property
    def failed(self) -> bool:
        """Whether a call failed halfway, for example because memory ran out. Every later call raises then."""
        return self.native.failed

    def versions(self) -> list[list[str | int]]:
        """The identity of each shard's database, and the number of its last write. Raises StoreError.

        Files that were cut, or that are of another moment, have others: RocksDB opens both without an error.
        """
        return [[*version] for version in self.native.versions()]

    @contextlib.contextmanager
    def live_files(self) -> Iterator[list[LiveFile]]:
        """The files that hold all rows written so far. While the block runs none of them is removed. StoreError.

        Only one such block may run at a time.
        """
        files = [LiveFile(*file) for file in self.native.hold_files()]
        try:
            yield files
        finally:
            self.native.release_files()

    def close(self) -> None:
        for scan in self._scans:
            scan.close()
        self.native.close()

    def metrics(self) -> dict[str, dict[str, float]]:
        return {"ssd": self.native.metrics()}

    def info(self) -> dict[str, Any]:
        """How the databases run: `rocksdb_info` and

        - `flush_threads`, `compaction_threads`: of the process, shared by every database in it;
        - `memtable_bytes_max`: the maximum of memory for written rows that are not in files yet;
        - `async_io`: whether this tier reads by io_uring.
        """
        return {**rocksdb_info(), **self.native.info()}
