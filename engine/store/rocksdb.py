"""RocksDB as the last tier. Rows become durable at `flush`. Rows without a clean marker are never served again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..durable import choose_remedy, fsync_dir, make_folder
from ..errors import OptionError, StoreError
from ..options.store_options import ROCKSDB_CACHE_MB, require_rocksdb
from ..row_format import Chunks, row_dtype
from .interfaces import NativeTier

SHARDS = 4
WRITE_BUFFER_BYTES = 64 << 20  # limit for the memtables of all shards together
MIN_READS = 8  # rows that a thread reads at least; also in rocksdb_tier.cpp
READ_THREADS = 64  # more threads would not read faster
SCAN_BYTES = 1 << 20  # bytes per chunk
MB = 1 << 20


def rocksdb_info() -> dict[str, Any]:
    """Return RocksDB's `version`, and `async_io`, True if RocksDB can read by io_uring. Raises StoreError."""
    require_rocksdb()
    return {"version": _core.rocksdb_version, "async_io": _core.rocksdb_has_async_io()}


class DatabaseFile(NamedTuple):
    """A RocksDB file, as it was at one moment."""

    name: str  # shard-N/<file>, relative to the tier's folder
    size: int  # in bytes, at that moment; the file may grow later
    crc32c: int | None  # the checksum that RocksDB computed as it wrote a file of rows; None for other files
    content: bytes | None  # the bytes to copy, for a file that RocksDB may replace; None for other files


class RocksDB(NativeTier):
    """Rows of `width` 4-byte words in `folder`. Each shard is one RocksDB database.

    `shards` is the number of shards in an existing folder; None creates a folder with `new_shards`. If `read_only`,
    nothing is written to the folder, and writing rows raises StoreError. A folder on a full disk also opens read-only,
    until `make_writable` is called. `read_threads` limits how many threads wait for the disk at the same time.
    `options`, a string from `format_options`, overrides tierbed's defaults.
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
        index_mb: float | None = None,
        read_mode: str = "buffered",
        async_io: bool = True,
        read_threads: int = READ_THREADS,
        options: str = "",
        read_only: bool = False,
    ) -> None:
        require_rocksdb()
        self.folder, self.shards, self._width = folder, shards or new_shards, width
        self._scans: list[_core.RocksTier.Scan] = []
        try:
            if not read_only:
                make_folder(folder)
            try:
                self.native = _core.RocksTier(
                    str(folder),
                    width,
                    create_if_missing=shards is None,
                    read_only=read_only,
                    num_shards=self.shards,
                    block_bytes=block_bytes,
                    data_cache_bytes=int(cache_mb * MB),
                    index_bytes=int((index_mb or 0) * MB),
                    write_buffer_bytes=WRITE_BUFFER_BYTES,
                    read_mode=read_mode,
                    async_io=async_io,
                    max_read_threads=read_threads,
                    options=_core.parse_rocksdb_options(options),
                )
            except StoreError as error:
                if "irect I/O" not in str(error):
                    raise
                reason = str(error).rpartition("; ")[0]
                raise OptionError(f"read_mode={read_mode!r}: {reason}; give 'buffered'") from error
            if not read_only:
                fsync_dir(folder)  # RocksDB syncs the files of a shard, but not the shard's folder entry
        except OSError as error:
            remedy = choose_remedy(error, "check the disk and the folder's permissions")
            raise StoreError(f"RocksDB in {folder}: {error}; {remedy}") from error

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        counters = self.native.locate(table, key)
        if counters is None:
            return []
        bucket = _core.buckets(np.array([table], np.uint32), np.array([key], np.uint64))[0]
        return [{"tier": "ssd", **counters, "shard": int(bucket) % self.shards}]

    def scan(self, part: int = 0, num_parts: int = 1) -> Chunks:
        dtype = row_dtype(self._width)
        chunk_rows = max(1, SCAN_BYTES // dtype.itemsize)
        scan = self.native.scan(part, num_parts)
        self._scans.append(scan)
        try:
            yield part, np.empty(0, dtype)  # the view is fixed now; the next chunk is the first that reads rows
            while True:
                rows = np.empty(chunk_rows, dtype)
                bucket, n = scan.next(rows.view(np.uint8), chunk_rows)
                if n == 0:
                    return
                yield bucket, rows[:n]
        finally:
            scan.close()
            self._scans.remove(scan)

    def scan_parts(self) -> list[Chunks]:
        """Return two scans, which two threads may read; each has half of the buckets. One scan if `shards` is odd."""
        num_parts = math.gcd(self.shards, 2)
        return [self.scan(part, num_parts) for part in range(num_parts)]

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Write distinct rows faster during the block, into an empty tier. They are readable when the block ends.

        Rows should be written in the order of `scan`: such rows go to sorted files, other rows are slower.
        """
        self.native.begin_load()
        yield
        self.native.finish_load()

    def flush(self) -> None:
        self.native.flush()

    def compact(self) -> None:
        """Merge each shard's files to free the space of replaced rows. Raises StoreError."""
        self.native.compact()

    def make_writable(self) -> None:
        """Reopen databases that are read-only because the disk was full. Call before rows change. Raises StoreError."""
        self.native.make_writable()

    @property
    def has_failed(self) -> bool:
        """True if a call failed halfway, for example because memory ran out. All later calls raise."""
        return self.native.has_failed

    def read_versions(self) -> list[list[str | int]]:
        """Return each shard's database identity and the number of its last write. Raises StoreError.

        These values reveal truncated files and files copied at another moment. RocksDB opens such files without error.
        """
        return [[*version] for version in self.native.read_versions()]

    @contextlib.contextmanager
    def hold_files(self) -> Iterator[list[DatabaseFile]]:
        """Yield the files of all rows, kept until the block ends. Blocks must not overlap. Raises StoreError."""
        files = [DatabaseFile(*file) for file in self.native.hold_files()]
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
        """Return `rocksdb_info`, the process's `flush_threads` and `compaction_threads`, and `memtable_bytes_max`.

        `memtable_bytes_max` limits written rows that are not in files yet; `async_io` says if this tier uses io_uring.
        """
        return {**rocksdb_info(), **self.native.info()}
