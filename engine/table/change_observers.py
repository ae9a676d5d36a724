"""What observes the rows of an open table while they change: which ones changed, an image of all, a background save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any

import numpy as np

from .. import _core
from ..errors import ClosedError, StoreError
from ..row_format import BUCKETS, Change, Chunks, Keys, TableIds, keys_of
from ..signals import uninterrupted
from ..store.contract import ChangeSource, TopTier
from ..store.image import KEPT_BYTES, DiskImage, Image, MemoryImage
from ..store.rocksdb import RocksDB
from .background_save import BackgroundSave
from .row_scan import line_addresses, locked
from .stack import Stack

CHUNK_BYTES = 1 << 23  # bytes of rows that are read at once


class ChangeTracker:
    """The names of rows that changed since the snapshot with the id `since`. All callers hold the table's lock.

    While a snapshot is being saved the names are in two sets, since changes of that time are not in the snapshot.
    """

    def __init__(self, since: str, tracker: ChangeSource[Any] | None) -> None:
        """tracker: of the top of the stack; None where the names are noted here."""
        self.since = since
        self._tracker = tracker
        self._saving: _core.ChangedRows | None = None  # names up to the last `cut`
        self._later = _core.ChangedRows()

    def note(self, batch: Any) -> None:
        """Note the rows of a batch that is written."""
        (self._tracker or self._later).note(batch)

    def note_rows(self, tables: TableIds, keys: Keys) -> None:
        """Note rows that are erased."""
        self._later.note_rows(tables, keys)

    def cut(self) -> None:
        """Begin to save what changed until now. If the save fails, the next save has these changes as well."""
        if self._tracker is not None:
            self._later.note_rows(*self._tracker.names())
            self._tracker.forget()
        later = _core.ChangedRows(room=self._later.size)  # about as many will change again
        if self._saving is None:
            self._saving = self._later
        else:
            self._saving.merge(self._later)
        self._later = later

    def saved(self, since: str) -> None:
        """Note that what changed until the last `cut` is in the snapshot with the id `since`."""
        self.since, self._saving = since, None

    def rows(self, top: TopTier[Any], dtype: np.dtype[np.void]) -> Iterator[Change]:
        """What changed until the last `cut`, as `top` has it now, in chunks of rows of `dtype`.

        Buckets ascend. Within a bucket the rows ascend by (table, key), and so do the keys of rows that are gone. Some
        of these keys may be of rows that came after the snapshot and went again.
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
    """The watchers of one table, which tells them of rows before it changes them.

    `lock` is the table's. `use` gives the top of `stack` where the table can be used, and raises where it cannot.
    `check` raises what an earlier call did wrong.
    """

    def __init__(
        self,
        name: str,
        stack: Stack,
        dtype: np.dtype[np.void],
        lock: RLock,
        use: Callable[[], TopTier[Any]],
        check: Callable[[], None],
    ) -> None:
        """dtype: of rows, as watchers give them."""
        self._name, self._dtype = name, dtype
        self._stack: Stack | None = stack
        self._lock, self._use, self._check = lock, use, check
        self.saving: BackgroundSave | None = None  # the last one, which may have ended
        self.changes: ChangeTracker | None = None
        self._image: Image | None = None
        self.watches = False  # whether anything does; where not, `before_batch` and `wait_for_room` need not be called

    @property
    def has_image(self) -> bool:
        """Whether an image is open, for which what changes is kept."""
        return self._image is not None

    def track_changes(self, since: str) -> None:
        """Note from here on which rows change. The rows are now those of the snapshot with the id `since`."""
        with self._lock:
            if self.changes is not None:
                self.changes.cut()
                self.changes.saved(since)
            else:
                self.watches = True  # first: no signal comes between a change and what notes it
                self.changes = ChangeTracker(since, self._use().tracker())

    def changed(self, since: str) -> Iterator[Change] | None:
        """What changed since the snapshot with the id `since`, read while it is iterated; None where that is unknown.

        Once it is saved, call `changes_saved`. Without that the next call gives the same changes, and later ones.
        Raises StoreError while a snapshot is being saved in the background.
        """
        with self._lock:
            store = self._use()
            self.check_not_saving()
            if self.changes is None or self.changes.since != since:
                return None
            self.changes.cut()
            return locked(self.changes.rows(store, self._dtype), self._lock, self._use)

    def changes_saved(self, since: str) -> None:
        """Note that the snapshot with the id `since` has what `changed` gave last, or the rows of the last `image`."""
        with self._lock:
            if self.changes is not None:
                self.changes.saved(since)

    def image(self, kept_bytes: int = KEPT_BYTES) -> Image:
        """An image of all rows as they are now. Another thread may read it while the rows change.

        Of rows in memory, up to about `kept_bytes` are kept aside as they were; then steps wait for the reader. Raises
        StoreError, also while another image is open.
        """
        with self._lock, uninterrupted():
            top = self._use()
            self._check()
            self.check_not_saving()
            if self._image is not None:
                raise StoreError(f"embedding {self._name!r} has an image already; close it first")
            top.flush()
            if self.changes is not None:
                self.changes.cut()
            assert self._stack is not None
            bottom = self._stack.bottom
            if isinstance(bottom, RocksDB):
                self._image = DiskImage(bottom.scan(), self._dtype, self._lock, self._forget)
            else:
                self._image = MemoryImage(bottom.image(top), self._dtype, kept_bytes, self._lock, self._forget)
            self.watches = True
            return self._image

    def save_in_background(
        self, what: str, write: Callable[[Chunks], object], kept_bytes: int = KEPT_BYTES
    ) -> BackgroundSave:
        """Let a thread hand all rows as they are now to `write`, which must not wait for what steps hold.

        what: names the snapshot in messages. kept_bytes: as in `image`. Raises StoreError as `image` does, and while
        another snapshot is being saved.
        """
        with self._lock:
            image = self.image(kept_bytes)
            try:
                self.saving = BackgroundSave(what, image, write, self._lock)
            except BaseException:
                image.close()
                raise
            return self.saving

    def check_not_saving(self) -> None:
        """Raises StoreError while a snapshot is being saved in the background."""
        if self.saving is not None and not self.saving.done:
            raise StoreError(still_saving(self.saving.what))

    def finish_saving(self) -> BaseException | None:
        """Wait for the snapshot that is being saved in the background. Returns its error, if nobody was told yet."""
        return None if self.saving is None else self.saving.finish()

    def before_batch(self, batch: Any) -> None:
        """Tell the watchers of a pinned batch before its lines are written."""
        if self._image is not None:
            self._image.before_write(batch)
        if self.changes is not None:
            self.changes.note(batch)

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Tell the watchers of rows, given once each, before they are erased."""
        if self._image is not None:
            self._image.before_erase(tables, keys)
        if self.changes is not None:
            self.changes.note_rows(tables, keys)

    def wait_for_room(self) -> None:
        """Wait while an image has no room to keep changing rows aside. Called before rows change."""
        if self._image is not None:
            with self._lock:
                if self._image is not None:
                    self._image.wait_for_room(self._is_unread)

    def close(self) -> None:
        """Close the image, and let go of the table and its stack. May be called again."""
        if self._image is not None:
            self._image.close()
        self._use, self._check, self._stack = self._refuse, _nothing, None

    def _refuse(self) -> TopTier[Any]:
        raise ClosedError(f"embedding {self._name!r} was closed or its rows were replaced; use it anew")

    def _forget(self, image: Image) -> None:
        self._image = None
        self.watches = self.changes is not None

    def _is_unread(self) -> bool:
        """Whether the thread that was to read the image is no more."""
        return self.saving is not None and self.saving.image is self._image and self.saving.done


def still_saving(what: str) -> str:
    """The error for a save that another one of the background is in the way of."""
    return (
        f"{what} is still being saved in the background, and there is one save at a time: call wait() of what "
        "save_snapshot returned, then try again"
    )


def _nothing() -> None:
    pass
