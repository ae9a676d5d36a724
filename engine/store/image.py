"""Images: the rows of a table as of one step, for a thread that reads them while training continues."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Condition, RLock
from typing import Any, Protocol

import numpy as np

from ..errors import ClosedError
from ..row_format import BUCKETS, Chunks, Keys, TableIds
from ..threads import POLL_SECONDS
from .contract import TableImage

MAX_BEFORE_IMAGE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20  # read at once, while steps wait


class Image(Protocol):
    """The rows of a table as of one step; by default one that needs no before-images.

    An image is made under the table's lock, and callers of `before_write` and `before_erase` hold that lock.
    """

    def chunks(self) -> Chunks:
        """Every row, as `Tier.scan`; called once, from one thread.

        Raises StoreError, and ClosedError once the image or its table is closed.
        """

    def close(self) -> None:
        """Stop saving before-images. May be called again."""

    @property
    def is_urgent(self) -> bool:
        """Whether steps may soon wait until more of the image is read."""
        return False

    def wait_for_memory(self, is_unread: Callable[[], bool]) -> None:
        """Wait while the before-images take too much memory. Called before rows change.

        The image is closed if `is_unread` returns True: no thread reads it any more.
        """
        return

    def before_write(self, batch: Any) -> None:
        """Save before-images of a pinned batch. Called before its lines are written."""
        return

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Save before-images of rows, given once each. Called before they are erased."""
        return


class DiskImage(Image):
    """A scan of RocksDB, which is a consistent view. `on_close` is called after `close`, with the table's lock."""

    def __init__(self, rows: Chunks, dtype: np.dtype[np.void], lock: Any, on_close: Callable[[Image], None]) -> None:
        self._rows, self._dtype = rows, dtype
        self._reading = RLock()
        self._lock, self._on_close = lock, on_close
        self._closed = False
        self._first = next(rows, None)  # this opens the scan

    def chunks(self) -> Chunks:
        chunk = self._first
        while chunk is not None:
            yield chunk[0], chunk[1].view(self._dtype)
            with self._reading:
                if self._closed:
                    raise _closed_error()
                chunk = next(self._rows, None)

    def close(self) -> None:
        with self._lock, self._reading:
            if not self._closed:
                self._closed = True
                with suppress(ValueError):  # garbage collection during a read: RocksDB closes its scans itself
                    self._rows.close()  # type: ignore[attr-defined]
                self._on_close(self)


class MemoryImage(Image):
    """The rows of a full table, as rows of `dtype`; there may be a cache above it.

    A before-image is saved of each row that changes before it was read. `max_bytes` bounds their memory, which the rows
    of one step may exceed. `on_close` is called after `close`, with the table's lock.
    """

    def __init__(
        self, table: TableImage, dtype: np.dtype[np.void], max_bytes: int, lock: Any, on_close: Callable[[Image], None]
    ) -> None:
        self._table: TableImage | None = table
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._on_close = on_close
        self._changed = Condition(lock)
        self.waits = 0  # how often steps waited for memory

    def chunks(self) -> Chunks:
        most = max(1, CHUNK_BYTES // self._dtype.itemsize)
        for bucket in range(BUCKETS):
            with self._changed:
                self._open().list(bucket)
            if (table := self._table) is not None:
                table.sort()  # this may take long, and needs no lock
            while True:
                rows = np.empty(most, self._dtype)
                with self._changed:
                    count = self._open().next(rows.view(np.uint8))
                    self._changed.notify_all()
                if count == 0:
                    break
                yield bucket, rows[:count]

    def close(self) -> None:
        with self._changed:
            if self._table is not None:
                self._table = None
                self._on_close(self)
            self._changed.notify_all()

    @property
    def is_urgent(self) -> bool:
        with self._changed:
            return self._table is not None and 2 * self._table.before_image_bytes > self._max_bytes

    def wait_for_memory(self, is_unread: Callable[[], bool]) -> None:
        if self._has_memory():
            return
        self.waits += 1
        while not self._has_memory():
            if is_unread():
                self.close()
            else:
                self._changed.wait(POLL_SECONDS)

    def before_write(self, batch: Any) -> None:
        self._open().save_before_images(batch)

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        self._open().save_before_images_of(tables, keys)

    def _has_memory(self) -> bool:
        return self._table is None or self._table.before_image_bytes < self._max_bytes

    def _open(self) -> TableImage:
        if self._table is None:
            raise _closed_error()
        return self._table


def _closed_error() -> ClosedError:
    return ClosedError("the table was closed, or its rows were replaced, before all of them were saved")
