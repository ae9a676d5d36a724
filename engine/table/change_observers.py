"""Observers of an open table's rows while they change: changed keys, an image of all rows, a save in the background."""

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

Table = Any  # an open table, whose file imports this one
CHUNK_BYTES = 1 << 23  # bytes of rows that are read at once


class ChangeTracker:
    """The keys of rows that changed since the snapshot with the id `since`. All callers hold the table's lock.

    While a snapshot is being saved the keys are in two sets, since changes of that time are not in the snapshot.
    """

    def __init__(self, since: str, source: ChangeSource[Any] | None) -> None:
        """source: of the top tier; None if it lets `_core.ChangedRows` observe its batches."""
        self.since = since
        self._source = source
        self._saving: _core.ChangedRows | None = None  # keys up to the last `start_delta`
        self._later = _core.ChangedRows()

    def note(self, batch: Any) -> None:
        """Note the rows of a batch that is written."""
        (self._source or self._later).note(batch)

    def note_rows(self, tables: TableIds, keys: Keys) -> None:
        """Note rows that are erased."""
        self._later.note_rows(tables, keys)

    def start_delta(self) -> None:
        """Start the next delta: begin to save the present changes. If the save fails, the next one has them as well."""
        if self._source is not None:
            self._later.note_rows(*self._source.names())
            self._source.forget()
        later = _core.ChangedRows(room=self._later.size)  # about the same number will change again
        if self._saving is None:
            self._saving = self._later
        else:
            self._saving.merge(self._later)
        self._later = later

    def saved(self, since: str) -> None:
        """Note that the changes until the last `start_delta` are in the snapshot with the id `since`."""
        self.since, self._saving = since, None

    def rows(self, top: TopTier[Any], dtype: np.dtype[np.void]) -> Iterator[Change]:
        """The changes until the last `start_delta`, with rows as `top` has them now, in chunks of rows of `dtype`.

        Buckets ascend. Within a bucket the rows ascend by (table, key), and so do the keys of removed rows. Some of
        these keys may be of rows that were inserted after the snapshot and removed again.
        """
        changed = self._saving
        assert changed is not None
        most = max(1, CHUNK_BYTES // dtype.itemsize)
        for bucket in range(BUCKETS):
            tables, keys = changed.rows(bucket)
            for begin in range(0, len(keys), most):
                rows = np.empty(len(keys[begin : begin + most]), dtype)
                rows["table"], rows["key"] = tables[begin : begin + most], keys[begin : begin + most]
                found = top.read(tables[begin : begin + most], keys[begin : begin + most], line_addresses(rows), False)
                yield bucket, rows if found.all() else rows[found], keys_of(rows[~found])


class ChangeObservers:
    """The observers of one table, which the table notifies of rows before it changes them."""

    def __init__(self, table: Table) -> None:
        self._table: Table = weakref.proxy(table)
        self.saving: BackgroundSave | ForegroundSave | None = None  # the last one, which may have ended
        self.changes: ChangeTracker | None = None
        self._image: Image | None = None
        self.is_active = False  # else `before_update` and `wait_for_memory` need not be called

    @property
    def has_image(self) -> bool:
        """Whether an image is open, which needs before-images."""
        return self._image is not None

    def track_changes(self, since: str) -> None:
        """Note which rows change from now on. The present rows are those of the snapshot with the id `since`."""
        with self._table.lock:
            if self.changes is not None:
                self.changes.start_delta()
                self.changes.saved(since)
            else:
                self.is_active = True  # first: no signal may come between a change and its observer
                self.changes = ChangeTracker(since, self._table.ready().change_source())

    def changed(self, since: str) -> Iterator[Change] | None:
        """The changes since the snapshot with the id `since`, read while they are iterated; None if they are unknown.

        Call `changes_saved` once they are saved. Otherwise the next call returns them again, with the later ones.
        Raises StoreError while a snapshot is being saved in the background.
        """
        with self._table.lock:
            store = self._table.ready()
            self.check_not_saving()
            if self.changes is None or self.changes.since != since:
                return None
            self.changes.start_delta()
            return locked(self.changes.rows(store, self._table.form.dtype), self._table.lock, self._table.ready)

    def changes_saved(self, since: str) -> None:
        """Note that the snapshot with the id `since` has the changes of the last `changed`, or the rows of `image`."""
        with self._table.lock:
            if self.changes is not None:
                self.changes.saved(since)

    def image(self, max_bytes: int = MAX_BEFORE_IMAGE_BYTES) -> Image:
        """An image of all rows as they are now. Another thread may read it while the rows change.

        max_bytes: for before-images of rows in memory; beyond it steps wait for the reader. Raises StoreError, also
        while another image is open.
        """
        with self._table.lock, uninterrupted():
            top = self._table.ready()
            self._table.check()
            self.check_not_saving()
            if self._image is not None:
                raise StoreError(f"embedding {self._table.spec.name!r} has an image already; close it first")
            if isinstance(top, CpuCachedStore):
                top.write_back()  # to be durable takes long, and is the snapshot's
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
        """Let a thread pass all rows as they are now to `write`, which must not wait for a lock that steps hold.

        what: names the snapshot in messages. max_bytes: as in `image`. Raises StoreError as `image` does, and while
        another snapshot is being saved.
        """
        with self._table.lock:
            image = self.image(max_bytes)
            try:
                self.saving = BackgroundSave(what, image, write, self._table.lock)
            except BaseException:
                image.close()
                raise
            return self.saving

    def save_here(self, what: str) -> ForegroundSave:
        """Begin a save of all rows as they are now by the calling thread, which reads them without the lock."""
        with self._table.lock:
            self.saving = save = ForegroundSave(what, self.image(), self._table.lock)
            return save

    @property
    def is_saved_by_another(self) -> bool:
        """Whether another thread saves the rows in the foreground now."""
        return isinstance(self.saving, ForegroundSave) and self.saving.is_by_another

    def wait_for_foreground(self) -> None:
        """Wait while another thread saves the rows in the foreground."""
        if isinstance(self.saving, ForegroundSave):
            self.saving.finish()

    @contextmanager
    def between_saves(self) -> Iterator[None]:
        """A block with the table's lock, while no other thread saves the rows in the foreground."""
        while True:
            self.wait_for_foreground()
            with self._table.lock:
                if not self.is_saved_by_another:
                    yield
                    return

    def check_not_saving(self) -> None:
        """Raises StoreError while a snapshot is being saved in the background."""
        saving = self.saving
        if isinstance(saving, ForegroundSave) and not saving.is_running and not saving.is_by_another:
            saving.end()  # Ctrl-C came before it ran
        elif saving is not None and not saving.done:
            raise StoreError(still_saving(saving.what))

    @property
    def is_saving(self) -> bool:
        """Whether a thread is saving rows in the background."""
        return isinstance(self.saving, BackgroundSave) and not self.saving.done

    def finish_saving(self) -> BaseException | None:
        """Wait for the save in the background. Returns its error, if it was neither raised nor returned before."""
        return None if self.saving is None else self.saving.finish()

    def before_update(self, batch: Any) -> None:
        """Notify the observers of a pinned batch before its lines are written."""
        if self._image is not None:
            self._image.before_write(batch)
        if self.changes is not None:
            self.changes.note(batch)

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Notify the observers of rows, given once each, before they are erased."""
        if self._image is not None:
            self._image.before_erase(tables, keys)
        if self.changes is not None:
            self.changes.note_rows(tables, keys)

    def wait_for_memory(self) -> None:
        """Wait while an image has no memory for more before-images. Called before rows change."""
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
        """Whether the thread that read the image has ended."""
        return self.saving is not None and self.saving.image is self._image and self.saving.done


def still_saving(what: str) -> str:
    """The error for a save that another save in the background prevents."""
    return (
        f"{what} is still being saved in the background, and there is one save at a time: call wait() of what "
        "save_snapshot returned, then try again"
    )
