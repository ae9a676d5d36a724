"""Observers of an open table's changes: they track changed keys, and keep images of all rows for saves.

A snapshot shows all rows as they were at one step, but saving it takes longer than a step. So a save reads an *image*:
the rows as of the save's step. Before a later step changes a row in memory, the table notifies its `ChangeObservers`,
and the image keeps a copy of the row (a before-image) until the save has read it. With RocksDB as the bottom tier, the
image is a RocksDB read view and needs no copies.

An incremental snapshot holds only the rows that changed since its parent. `ChangeTracker` records these rows' keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import _core
from ..cache.cached import CpuCachedStore
from ..errors import StoreError
from ..row_format import BUCKETS, Change, Chunks, Keys, TableIds, keys_of
from ..signals import uninterrupted
from ..store.contract import ChangeSource, TopTier
from ..store.image import MAX_BEFORE_IMAGE_BYTES, DiskImage, Image, MemoryImage
from ..store.rocksdb import RocksDB
from .background_save import BackgroundSave, ForegroundSave
from .row_scan import line_addresses, locked

Table = Any  # an OpenTable; table.py imports this file
CHUNK_BYTES = 1 << 23  # rows are read in chunks of this size


class ChangeTracker:
    """The keys of rows that changed since the snapshot with id `since`. Callers hold the table's lock."""

    def __init__(self, since: str, source: ChangeSource[Any] | None) -> None:
        self.since = since
        self._source = source  # tracks changes inside the top tier; None if `_core.ChangedRows` can track them
        self._saving: _core.ChangedRows | None = None  # keys changed before the last `start_delta`
        self._later = _core.ChangedRows()  # later changes, which are not in the snapshot that is being saved

    def note(self, batch: Any) -> None:
        (self._source or self._later).note(batch)

    def note_rows(self, tables: TableIds, keys: Keys) -> None:
        self._later.note_rows(tables, keys)

    def start_delta(self) -> None:
        """Separate the changes to save now from later changes. If the save fails, the next save includes both."""
        if self._source is not None:
            self._later.note_rows(*self._source.names())
            self._source.forget()
        later = _core.ChangedRows(room=self._later.size)  # expect about as many changes again
        if self._saving is None:
            self._saving = self._later
        else:
            self._saving.merge(self._later)
        self._later = later

    def note_saved(self, since: str) -> None:
        """Record that the snapshot with id `since` holds all changes before the last `start_delta`."""
        self.since, self._saving = since, None

    def rows(self, top: TopTier[Any], dtype: np.dtype[np.void]) -> Iterator[Change]:
        """Yield the changes before the last `start_delta` in chunks, with each row's current value from `top`.

        Buckets ascend. Within a bucket, rows ascend by (table, key), and so do the keys of removed rows. Removed rows
        may include rows that were inserted after the snapshot.
        """
        changed = self._saving
        assert changed is not None
        size = max(1, CHUNK_BYTES // dtype.itemsize)
        for bucket in range(BUCKETS):
            tables, keys = changed.rows(bucket)
            for begin in range(0, len(keys), size):
                part = slice(begin, begin + size)
                rows = np.empty(len(keys[part]), dtype)
                rows["table"], rows["key"] = tables[part], keys[part]
                exists = top.read(tables[part], keys[part], line_addresses(rows), False)
                yield bucket, rows if exists.all() else rows[exists], keys_of(rows[~exists])


class ChangeObservers:
    """The observers of a table. The table notifies its observers before rows change."""

    def __init__(self, table: Table) -> None:
        self._table: Table = weakref.proxy(table)
        self.saving: BackgroundSave | ForegroundSave | None = None  # the latest save; it may have ended
        self.changes: ChangeTracker | None = None
        self._image: Image | None = None
        self.is_active = False  # if False, calls of `before_update` and `wait_for_memory` are unnecessary

    @property
    def has_image(self) -> bool:
        """True if an image is open, because an open image may need before-images."""
        return self._image is not None

    def track_changes(self, since: str) -> None:
        """Track changes from now on. The current rows equal the snapshot with id `since`."""
        with self._table.lock:
            if self.changes is not None:
                self.changes.start_delta()
                self.changes.note_saved(since)
            else:
                self.is_active = True  # set first, in case a signal handler changes rows in between
                self.changes = ChangeTracker(since, self._table.finish_erasures().change_source())

    def changes_since(self, since: str) -> Iterator[Change] | None:
        """Returns an iterator over the changes since the snapshot with id `since`; None if the changes are unknown.

        Call `note_saved` when the changes are saved. Otherwise the next call returns the same changes again, along with
        later changes. Raises StoreError while a snapshot is being saved in the background.
        """
        with self._table.lock:
            store = self._table.finish_erasures()
            self.check_not_saving()
            if self.changes is None or self.changes.since != since:
                return None
            self.changes.start_delta()
            return locked(
                self.changes.rows(store, self._table.form.dtype), self._table.lock, self._table.finish_erasures
            )

    def note_saved(self, since: str) -> None:
        """Record that the snapshot with id `since` holds the rows that `changes_since` or `image` returned last."""
        with self._table.lock:
            if self.changes is not None:
                self.changes.note_saved(since)

    def image(self, max_bytes: int = MAX_BEFORE_IMAGE_BYTES) -> Image:
        """Open an image of all current rows. Another thread may read the image while the rows change.

        `max_bytes` limits the memory for before-images; at the limit, steps wait for the reader. Raises StoreError, for
        example if another image is open.
        """
        with self._table.lock, uninterrupted():
            top = self._table.finish_erasures()
            self._table.check()
            self.check_not_saving()
            if self._image is not None:
                raise StoreError(f"embedding {self._table.spec.name!r} has an image already; close that image first")
            if isinstance(top, CpuCachedStore):
                top.write_back()  # no slow flush is needed, because the snapshot itself will be durable
            else:
                top.flush()
            if self.changes is not None:
                self.changes.start_delta()
            bottom, dtype, lock = self._table.stack.bottom, self._table.form.dtype, self._table.lock
            if isinstance(bottom, RocksDB):
                self._image = DiskImage(bottom.scan(), dtype, lock, self._forget_image)
            else:
                self._image = MemoryImage(bottom.image(top), dtype, max_bytes, lock, self._forget_image)
            self.is_active = True
            return self._image

    def save_in_background(
        self, what: str, write: Callable[[Chunks], object], max_bytes: int = MAX_BEFORE_IMAGE_BYTES
    ) -> BackgroundSave:
        """Start a thread that passes all current rows to `write`. `write` must not wait for a lock that steps hold.

        `what` names the snapshot in messages; `max_bytes` and errors are as in `image`.
        """
        with self._table.lock:
            image = self.image(max_bytes)
            try:
                self.saving = BackgroundSave(what, image, write, self._table.lock)
            except BaseException:
                image.close()
                raise
            return self.saving

    def begin_foreground_save(self, what: str) -> ForegroundSave:
        """Begin a save of all current rows by the calling thread, which need not hold the lock to read them."""
        with self._table.lock:
            self.saving = save = ForegroundSave(what, self.image(), self._table.lock)
            return save

    @property
    def is_saved_by_another(self) -> bool:
        """True while another thread saves the rows in the foreground."""
        return isinstance(self.saving, ForegroundSave) and self.saving.is_by_another

    def wait_for_foreground(self) -> None:
        if isinstance(self.saving, ForegroundSave):
            self.saving.finish()

    @contextmanager
    def between_saves(self) -> Iterator[None]:
        """Hold the table's lock for a block, at a time when no other thread saves the rows in the foreground."""
        while True:
            self.wait_for_foreground()
            with self._table.lock:
                if not self.is_saved_by_another:
                    yield
                    return

    def check_not_saving(self) -> None:
        """Raise StoreError while a snapshot is being saved in the background."""
        saving = self.saving
        if isinstance(saving, ForegroundSave) and not saving.is_running and not saving.is_by_another:
            saving.end()  # Ctrl-C interrupted the save before it ran
        elif saving is not None and not saving.done:
            raise StoreError(still_saving_text(saving.what))

    @property
    def is_saving(self) -> bool:
        return isinstance(self.saving, BackgroundSave) and not self.saving.done

    def finish_saving(self) -> BaseException | None:
        """Wait for the background save. Returns the save's error, if not raised or returned before."""
        return None if self.saving is None else self.saving.finish()

    def before_update(self, batch: Any) -> None:
        """Notify the observers before a pinned batch's lines are written."""
        if self._image is not None:
            self._image.before_write(batch)
        if self.changes is not None:
            self.changes.note(batch)

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Notify the observers before distinct rows are erased."""
        if self._image is not None:
            self._image.before_erase(tables, keys)
        if self.changes is not None:
            self.changes.note_rows(tables, keys)

    def wait_for_memory(self) -> None:
        """Wait while the image's memory for before-images is full. Called before rows change."""
        if self._image is not None:
            with self._table.lock:
                if self._image is not None:
                    self._image.wait_for_memory(self._is_unread)

    def close(self) -> None:
        """Close the image. May be called again."""
        if self._image is not None:
            self._image.close()

    def _forget_image(self, image: Image) -> None:
        self._image = None
        self.is_active = self.changes is not None

    def _is_unread(self) -> bool:
        """True if nobody reads the image any more, because its save has ended."""
        return self.saving is not None and self.saving.image is self._image and self.saving.done


def still_saving_text(what: str) -> str:
    """Returns the error text for a save that must wait for a background save."""
    return (
        f"{what} is still being saved in the background, and only one save can run at a time: call wait() on the "
        "result of save_snapshot, then try again"
    )
