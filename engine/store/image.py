"""An image is a table's rows at one step. A thread reads the image while training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from threading import Condition, RLock
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from .. import _core
from ..errors import ClosedError
from ..row_format import BUCKETS, ROW_KEY_DTYPE, Change, Chunks, Keys, RowArray, TableIds
from ..threads import POLL_SECONDS
from .interfaces import TableImage
from .merging import merge_sorted, replace_rows

MAX_BEFORE_IMAGE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20  # bytes per chunk; steps wait while a chunk is read
CHANGES_READ_ROWS = 1 << 8  # rows that an `IncrementImage` reads at once; few, because each may be a read of the disk
CHANGES_CHUNK_ROWS = 1 << 12  # rows per chunk of an `IncrementImage`
LOCK_SECONDS = 4e-3  # an `IncrementImage` reads rows for this long while steps wait


class Image(Protocol):
    """A table's rows at one step. The default methods suit an image that needs no before-images.

    Hold the table's lock while you make an image or call `before_write` or `before_erase`. `is_urgent` is True if steps
    may soon have to wait for the reader; `chunks` updates it.
    """

    is_urgent: bool = False

    def chunks(self) -> Chunks:
        """Yield all rows, once and in one thread. Raises StoreError, or ClosedError if the image or table is closed."""

    def parts(self) -> list[Chunks]:
        """Return iterators over all rows, divided by bucket. Each may be read by another thread."""
        return [self.chunks()]

    def close(self) -> None:
        """Stop saving before-images. May be called more than once."""

    def wait_for_memory(self, is_abandoned: Callable[[], bool]) -> None:
        """Before rows change, wait while before-images use too much memory. Closes the image if `is_abandoned()`."""
        return

    def before_write(self, batch: Any) -> None:
        """Save before-images of a pinned batch's rows, before these rows are written."""
        return

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Save before-images of distinct rows, before these rows are erased."""
        return


class DiskImage(Image):
    """An image that reads RocksDB's rows, divided into `scans`. `close` calls `on_close` with the table's lock held.

    The scans are from one moment if the caller holds the table's lock, and no cache has rows to write back.
    """

    def __init__(
        self, scans: list[Chunks], dtype: np.dtype[np.void], lock: Any, on_close: Callable[[Image], None]
    ) -> None:
        self._dtype, self._lock, self._on_close, self._is_closed = dtype, lock, on_close, False
        self._scans = [(scan, RLock()) for scan in scans]
        for scan in scans:
            next(scan)  # opens the scan, and reads no rows

    def chunks(self) -> Chunks:
        return merge_sorted(self.parts())

    def parts(self) -> list[Chunks]:
        return [self._read(*scan) for scan in self._scans]

    def _read(self, scan: Chunks, read_lock: Any) -> Chunks:
        while True:
            with read_lock:
                if self._is_closed:
                    raise _make_closed_error()
                chunk = next(scan, None)
            if chunk is None:
                return
            yield chunk[0], chunk[1].view(self._dtype)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for scan, read_lock in self._scans:
                with read_lock, suppress(ValueError):  # if garbage collection calls this during a read, it closes later
                    scan.close()  # type: ignore[attr-defined]
            self._on_close(self)


class MemoryImage(Image):
    """An image of a full table, with rows of `dtype`. A cache may be above the table.

    Before an unread row changes, its before-image is saved. `max_bytes` limits the memory for before-images; a single
    step may exceed this limit. `close` calls `on_close` with the table's lock held.
    """

    def __init__(
        self, image: TableImage, dtype: np.dtype[np.void], max_bytes: int, lock: Any, on_close: Callable[[Image], None]
    ) -> None:
        self._table_image: TableImage | None = image
        self._dtype, self._max_bytes, self._on_close = dtype, max_bytes, on_close
        self._condition = Condition(lock)
        self.num_waits = 0  # how many times a step waited for memory

    def chunks(self) -> Chunks:
        chunk_rows = max(1, CHUNK_BYTES // self._dtype.itemsize)
        for bucket in range(BUCKETS):
            with self._hold_lock():
                self._require_open().open_bucket(bucket)
            if (image := self._table_image) is not None:
                image.sort_bucket()  # sorting is slow, and needs no lock
            while True:
                rows = np.empty(chunk_rows, self._dtype)
                with self._hold_lock():
                    count = self._require_open().read_next(rows.view(np.uint8))
                if count == 0:
                    break
                yield bucket, rows[:count]

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the table's lock while `chunks` reads rows. Steps that wait for memory go on afterwards."""
        with self._condition:
            yield
            self.is_urgent = 2 * self._require_open().before_image_bytes > self._max_bytes
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            if self._table_image is not None:
                self._table_image = None
                self._on_close(self)
            self._condition.notify_all()

    def wait_for_memory(self, is_abandoned: Callable[[], bool]) -> None:
        if self._has_memory():
            return
        self.num_waits += 1
        self.is_urgent = True
        while not self._has_memory():
            if is_abandoned():
                self.close()
            else:
                self._condition.wait(POLL_SECONDS)

    def before_write(self, batch: Any) -> None:
        self._require_open().save_before_images(batch)

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        self._require_open().save_before_images_by_key(tables, keys)

    def _has_memory(self) -> bool:
        return self._table_image is None or self._table_image.before_image_bytes < self._max_bytes

    def _require_open(self) -> TableImage:
        if self._table_image is None:
            raise _make_closed_error()
        return self._table_image


class _Read(NamedTuple):
    """What an `IncrementImage` read at once: rows[begin:end], and the keys of rows that did not exist."""

    bucket: int
    rows: RowArray
    begin: int
    end: int
    missing: RowArray


class IncrementImage(MemoryImage):
    """An image of a list of rows, for an incremental snapshot. On a CPU only."""

    def chunks(self) -> Iterator[Change]:  # type: ignore[override]
        """Yield all listed rows, and the keys of listed rows that did not exist."""
        reads = self._read_rows()
        while True:
            with self._hold_lock():  # for many reads: a wait for a step is longer than the read of a small bucket
                limit, done = perf_counter() + LOCK_SECONDS, list[_Read]()
                for read in reads:
                    done.append(read)
                    if perf_counter() >= limit:
                        break
            if not done:
                return
            for (bucket, _), group in groupby(done, key=lambda read: (read.bucket, id(read.rows))):
                parts = [*group]
                yield bucket, parts[0].rows[parts[0].begin : parts[-1].end], np.concatenate([p.missing for p in parts])

    def _read_rows(self) -> Iterator[_Read]:
        """Read a few rows at a time. The caller holds the lock."""
        for bucket in range(BUCKETS):
            self._require_open().open_bucket(bucket)
            rows, end = np.empty(0, self._dtype), 0
            while True:
                if end == len(rows):
                    rows, end = np.empty(CHANGES_CHUNK_ROWS, self._dtype), 0
                begin, image = end, cast(_core.TableImage, self._require_open())
                end += image.read_next(rows[begin : begin + CHANGES_READ_ROWS].view(np.uint8))
                tables, keys = image.take_missing_keys()
                if end == begin and not len(keys):
                    break
                missing = np.empty(len(keys), ROW_KEY_DTYPE)
                missing["table"], missing["key"] = tables, keys
                yield _Read(bucket, rows, begin, end, missing)


class CachedDiskImage(IncrementImage):
    """An image of the rows in RocksDB and in caches above, on a CPU. Only listed rows may get before-images.

    `disk` has all rows except those that differ in a cache; the other arguments list these rows.
    """

    def __init__(self, disk: DiskImage, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._disk = disk

    def chunks(self) -> Chunks:  # type: ignore[override]
        return replace_rows(self._disk.chunks(), ((bucket, rows) for bucket, rows, _ in super().chunks()))

    def close(self) -> None:
        self._disk.close()
        super().close()


def _make_closed_error() -> ClosedError:
    return ClosedError("the table was closed, or its rows were replaced, before all of them were saved")
