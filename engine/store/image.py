"""The rows of a table as they were at one instant, for a thread that reads them while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Condition, RLock
from typing import Any, Protocol

import numpy as np

from ..errors import ClosedError
from ..row_format import BUCKETS, Chunks, Keys, TableIds
from ..threads import LOOK
from .contract import TableImage

KEPT_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20  # read at once, while steps wait


class Image(Protocol):
    """The rows of a table at one instant.

    An image is made under the table's lock, and callers of `before_write` and `before_erase` hold that lock.
    """

    def chunks(self) -> Chunks:
        """Every row, as `Tier.scan`; called once, from one thread.

        Raises StoreError, and ClosedError once the image or its table is closed.
        """

    def close(self) -> None:
        """Let the rows change freely from here on. May be called again."""

    @property
    def is_pressed(self) -> bool:
        """Whether steps may soon have to wait until more of the image is read."""

    def wait_for_room(self, is_unread: Callable[[], bool]) -> None:
        """Wait while the rows kept aside take too much memory. Called before rows change, without the lock.

        The image is closed where nobody reads it any more.
        """

    def before_write(self, batch: Any) -> None:
        """Keep the rows of a pinned batch aside. Called before their lines are written."""

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Keep rows aside, given once each. Called before they are erased."""


class DiskImage:
    """A scan of RocksDB, which is a view of one instant. `closed` is called after `close`, with the table's lock."""

    def __init__(self, rows: Chunks, dtype: np.dtype[np.void], lock: Any, closed: Callable[[Image], None]) -> None:
        self._rows, self._dtype = rows, dtype
        self._reading = RLock()
        self._lock, self._tell = lock, closed
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
                with suppress(ValueError):  # garbage collection in the midst of it: RocksDB closes its scans itself
                    self._rows.close()  # type: ignore[attr-defined]
                self._tell(self)

    @property
    def is_pressed(self) -> bool:
        return False

    def wait_for_room(self, is_unread: Callable[[], bool]) -> None:
        """Does nothing: RocksDB's view takes none of this memory."""

    def before_write(self, batch: Any) -> None:
        """Does nothing: RocksDB's view keeps its rows."""

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Does nothing: RocksDB's view keeps its rows."""


class MemoryImage:
    """The rows of a full table, as rows of `dtype`, over which there may be a cache.

    A row that changes before it was read is kept aside as it was. `kept_bytes` bounds the memory for such rows, and the
    rows of one step may exceed it. `closed` is called once the image was closed, with the table's lock.
    """

    def __init__(
        self,
        table: TableImage,
        dtype: np.dtype[np.void],
        kept_bytes: int,
        lock: Any,
        closed: Callable[[Image], None],
    ) -> None:
        self._table: TableImage | None = table
        self._dtype = dtype
        self._kept_bytes = kept_bytes
        self._tell = closed
        self._changed = Condition(lock)
        self.waits = 0  # how often steps waited for room

    def chunks(self) -> Chunks:
        most = max(1, CHUNK_BYTES // self._dtype.itemsize)
        for bucket in range(BUCKETS):
            with self._changed:
                self._open().list(bucket)
            self._sort()
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
                self._tell(self)
            self._changed.notify_all()

    @property
    def is_pressed(self) -> bool:
        with self._changed:
            return self._table is not None and 2 * self._table.before_image_bytes > self._kept_bytes

    def wait_for_room(self, is_unread: Callable[[], bool]) -> None:
        if self._has_room():
            return
        self.waits += 1
        while not self._has_room():
            if is_unread():
                self.close()
            else:
                self._changed.wait(LOOK)

    def before_write(self, batch: Any) -> None:
        self._open().save_before_images(batch)

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        self._open().save_before_images_of(tables, keys)

    def _sort(self) -> None:
        table = self._table
        if table is not None:
            table.sort()  # sorting may take long, and needs no lock

    def _has_room(self) -> bool:
        return self._table is None or self._table.before_image_bytes < self._kept_bytes

    def _open(self) -> TableImage:
        if self._table is None:
            raise _closed_error()
        return self._table


def _closed_error() -> ClosedError:
    return ClosedError("the table was closed, or its rows were replaced, before all of them were saved")
