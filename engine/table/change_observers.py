"""Observers of an open table's changes: they track changed keys, and keep images of all rows for saves.

A snapshot shows all rows as they were at one step, but saving it takes longer than a step. So a save reads an *image*:
the rows as of the save's step. Before a later step changes a row in memory, the table notifies its `ChangeObservers`.
The image then copies the row. The save reads this copy, the row's before-image. With RocksDB as the bottom tier, a
RocksDB read view has the rows that do not differ in a cache, and these need no copies.

An incremental snapshot holds only the rows that changed since its parent. `ChangeTracker` records these rows' keys,
from the moment when the rows equal a snapshot. A store keeps the keys over a clean close. Each other consumer of
changes, such as a publisher, has its own tracker, but not on a GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import _core
from ..cache.cache_tier import CpuCacheTier
from ..errors import StoreError, undo_on_error
from ..row_format import BUCKETS, ROW_KEY_DTYPE, Change, Chunks, Keys, RowArray, TableIds, extract_row_keys
from ..signals import defer_signals
from ..store.image import MAX_BEFORE_IMAGE_BYTES, CachedDiskImage, DiskImage, Image, IncrementImage, MemoryImage
from ..store.interfaces import ChangeSource, TopTier
from ..store.rocksdb import RocksDB
from .background_save import BackgroundSave, ForegroundSave
from .row_scan import iterate_locked, locate_lines

Table = Any  # an OpenTable, whose module cannot be imported here because it imports this file
CHUNK_BYTES = 1 << 23  # rows are read in chunks of this size
NO_PARENT = ""  # the parent's id while the first snapshot is being saved
SNAPSHOTS = "snapshots"  # the consumer of changes that saves incremental snapshots; publishers are other consumers
log = logging.getLogger("tierbed")


class ChangeTracker:
    """The keys of rows that changed since the snapshot with id `parent_id`. Callers hold the table's lock."""

    def __init__(self, parent_id: str, table: Table) -> None:
        self.parent_id, self._table = parent_id, table
        # tracks changes inside the top tier; None if `_core.ChangedRows` can track them
        self._source: ChangeSource[Any] | None = table.prepare_top_tier().start_change_source()
        self._increment_keys: _core.ChangedRows | None = None  # keys changed before the last `start_increment`
        self._later_keys = _core.ChangedRows(table.step)  # later changes, not in the snapshot being saved

    def add_batch(self, batch: Any) -> None:
        if self._source is None:
            self._later_keys.add_batch(batch)
        else:
            self._source.add_batch(batch)

    def add_keys(self, tables: TableIds, keys: Keys) -> None:
        self._later_keys.add_keys(tables, keys)

    @property
    def bytes(self) -> int:
        """The host memory that the keys take."""
        sets = (self._increment_keys, self._later_keys, self._source)
        return sum(keys.bytes for keys in sets if keys is not None)

    def list_keys(self) -> RowArray:
        """Returns the keys [n] of all rows that changed since the parent, with dtype ROW_KEY_DTYPE."""
        self.start_increment()
        assert self._increment_keys is not None
        self._increment_keys.list_keys(0)  # drops duplicates
        keys = np.empty(self._increment_keys.size, ROW_KEY_DTYPE)
        end = 0
        for bucket in range(BUCKETS):
            tables, row_keys = self._increment_keys.list_keys(bucket)
            begin, end = end, end + len(row_keys)
            keys["table"][begin:end], keys["key"][begin:end] = tables, row_keys
        return keys

    def start_increment(self) -> None:
        """From now on, collect changes for the next save. If this save fails, the next save includes all changes."""
        if self._source is not None:
            self._later_keys.add_keys(*self._source.list_keys())
            self._source.forget()
        later = _core.ChangedRows(self._table.step)
        if self._increment_keys is None:
            self._increment_keys = self._later_keys
        else:
            self._increment_keys.merge(self._later_keys)
        self._later_keys = later

    def make_image(self, top_tier: TopTier[Any], max_bytes: int, on_close: Callable[[Image], None]) -> Image:
        """Make an image of the rows that changed before the last `start_increment`. On a CPU only."""
        table, changed = self._table, self._increment_keys
        assert changed is not None
        changed.list_keys(0)  # sorts the list
        image = _core.TableImage(changed, table.layout, top_tier.native)  # type: ignore[attr-defined]
        return IncrementImage(image, table.row_format.dtype, max_bytes, table.lock, on_close)

    def record_save(self, snapshot_id: str) -> None:
        """Record that the snapshot with id `snapshot_id` holds all changes before the last `start_increment`."""
        self.parent_id, self._increment_keys = snapshot_id, None

    def read_rows(self, top_tier: TopTier[Any], dtype: np.dtype[np.void]) -> Iterator[Change]:
        """Yield, in chunks, the rows that changed before the last `start_increment`; `top_tier` holds their values.

        Buckets ascend. Within a bucket, rows ascend by (table, key), and so do the keys of removed rows. Removed rows
        may include rows that were inserted after the snapshot.
        """
        changed = self._increment_keys
        assert changed is not None
        size = max(1, CHUNK_BYTES // dtype.itemsize)
        for bucket in range(BUCKETS):
            tables, keys = changed.list_keys(bucket)
            for begin in range(0, len(keys), size):
                part = slice(begin, begin + size)
                rows = np.empty(len(keys[part]), dtype)
                rows["table"], rows["key"] = tables[part], keys[part]
                exists = top_tier.read(tables[part], keys[part], locate_lines(rows), False)
                yield bucket, rows if exists.all() else rows[exists], extract_row_keys(rows[~exists])


class ChangeObservers:
    """The observers of a table. The table notifies its observers before rows change."""

    def __init__(self, table: Table) -> None:
        self._table: Table = weakref.proxy(table)
        self.last_save: BackgroundSave | ForegroundSave | None = None  # the latest save; it may have ended
        self.trackers: dict[str, ChangeTracker] = {}  # by consumer
        self.image: Image | None = None  # the open image; rows that change may need before-images
        self.max_key_bytes = 1 << 28  # memory limit for the keys of changed rows; beyond it, changes are not tracked

    @property
    def tracker(self) -> ChangeTracker | None:
        """The tracker for incremental snapshots."""
        return self.trackers.get(SNAPSHOTS)

    def track_changes(self, parent_id: str, changed_keys: RowArray | None = None, consumer: str = SNAPSHOTS) -> None:
        """Track changes from now on. The current rows equal the snapshot with id `parent_id`.

        changed_keys: the rows that differ from the snapshot [n], with dtype ROW_KEY_DTYPE.
        """
        with self._table.lock:
            if not self.max_key_bytes:
                return
            if (tracker := self.trackers.get(consumer)) is not None:
                tracker.start_increment()
                tracker.record_save(parent_id)
            else:
                tracker = self.trackers[consumer] = ChangeTracker(parent_id, self._table)
            if changed_keys is not None:
                tracker.add_keys(changed_keys["table"].copy(), changed_keys["key"].copy())

    def track_during_save(self, consumer: str = SNAPSHOTS) -> None:
        """Track the changes during a save of the current rows, which will be the next parent."""
        if consumer not in self.trackers:
            self.track_changes(NO_PARENT, consumer=consumer)

    def list_changed_keys(self) -> tuple[str, RowArray] | None:
        """Returns the parent's id and the keys [n] of rows that changed since; None if untracked or during a save."""
        with self._table.lock:
            is_saving = self.last_save is not None and not self.last_save.done  # the parent is about to change
            if self.tracker is None or self.tracker.parent_id == NO_PARENT or is_saving:
                return None
            return self.tracker.parent_id, self.tracker.list_keys()

    def read_changes(self, parent_id: str) -> Iterator[Change] | None:
        """Returns an iterator over the changes since the snapshot with id `parent_id`; None if the changes are unknown.

        Call `record_save` when the changes are saved. Otherwise the next call returns the same changes again, and later
        changes too. Raises StoreError while a snapshot is being saved in the background.
        """
        with self._table.lock:
            top_tier = self._table.prepare_top_tier()
            self.check_not_saving()
            if self.tracker is None or self.tracker.parent_id != parent_id:
                return None
            self.tracker.start_increment()
            changes = self.tracker.read_rows(top_tier, self._table.row_format.dtype)
            return iterate_locked(changes, self._table.lock, self._table.finish_erasures)

    def record_save(self, snapshot_id: str, consumer: str = SNAPSHOTS) -> None:
        """Record that snapshot `snapshot_id` holds the rows that `read_changes` or `open_image` returned last."""
        with self._table.lock:
            if (tracker := self.trackers.get(consumer)) is not None:
                tracker.record_save(snapshot_id)

    def knows_changes_since(self, parent_id: str, consumer: str = SNAPSHOTS) -> bool:
        """True if the keys of all rows that changed since the snapshot with id `parent_id` are known."""
        tracker = self.trackers.get(consumer)
        return tracker is not None and tracker.parent_id == parent_id

    def open_image(
        self,
        max_bytes: int = MAX_BEFORE_IMAGE_BYTES,
        parent_id: str | None = None,
        writes_back: bool = False,
        consumer: str = SNAPSHOTS,
    ) -> Image:
        """Open an image of all current rows. Another thread may read the image while the rows change.

        max_bytes: memory limit for before-images. At the limit, steps wait for the reader.
        parent_id: the id of a snapshot. The image then has only the rows that changed since (`knows_changes_since`).
        writes_back: write dirty rows to RocksDB first. Reading the image is then faster, and needs no before-images.
        Raises StoreError.
        """
        with self._table.lock, defer_signals():
            top_tier = self._table.prepare_top_tier()
            self._table.raise_deferred_error()
            self.check_not_saving()
            if self.image is not None:
                raise StoreError(f"embedding {self._table.spec.name!r} has an image already; close that image first")
            tracker = self.trackers.get(consumer)
            if parent_id is not None:
                assert tracker is not None
                tracker.start_increment()
                self.image = tracker.make_image(top_tier, max_bytes, self._forget_image)
                return self.image
            bottom, dtype, lock = self._table.stack.bottom, self._table.row_format.dtype, self._table.lock
            dirty = None
            if isinstance(top_tier, CpuCacheTier):
                if isinstance(bottom, RocksDB) and not writes_back:
                    dirty = top_tier.list_dirty(max_bytes // dtype.itemsize)  # so that no step waits for the reader
                if dirty is None:
                    top_tier.write_back()  # no slow flush is needed, because the snapshot itself will be durable
            else:
                top_tier.flush()
            if tracker is not None:
                tracker.start_increment()
            if dirty is not None:
                image = _core.TableImage(dirty, self._table.layout, top_tier.native)
                disk = DiskImage(bottom.scan_parts(), dtype, lock, lambda _: None)
                self.image = CachedDiskImage(disk, image, dtype, max_bytes, lock, self._forget_image)
            elif isinstance(bottom, RocksDB):
                self.image = DiskImage(bottom.scan_parts(), dtype, lock, self._forget_image)
            else:
                self.image = MemoryImage(bottom.make_image(top_tier), dtype, max_bytes, lock, self._forget_image)
            return self.image

    def save_in_background(
        self,
        label: str,
        write: Callable[[Chunks], object],
        max_bytes: int = MAX_BEFORE_IMAGE_BYTES,
        parent_id: str | None = None,
        consumer: str = SNAPSHOTS,
    ) -> BackgroundSave:
        """Start a thread that passes all current rows to `write`. `write` must not wait for a lock that steps hold.

        `label` names the snapshot in messages; the other arguments and errors are as in `open_image`.
        """
        with self._table.lock:
            image = self.open_image(max_bytes, parent_id, consumer=consumer)
            with undo_on_error(image.close):
                self.last_save = BackgroundSave(label, image, write, self._table.lock)
            return self.last_save

    def begin_foreground_save(
        self, label: str, parent_id: str | None = None, consumer: str = SNAPSHOTS
    ) -> ForegroundSave:
        """Begin a save by the calling thread. Reading the rows does not need the table's lock.

        `label` names the snapshot in messages. `parent_id` is as in `open_image`.
        """
        with self._table.lock:
            image = self.open_image(parent_id=parent_id, writes_back=True, consumer=consumer)
            self.last_save = save = ForegroundSave(label, image, self._table.lock)
            return save

    @property
    def is_being_saved_by_other_thread(self) -> bool:
        """True while another thread saves the rows in the foreground."""
        return isinstance(self.last_save, ForegroundSave) and self.last_save.is_run_by_other_thread

    def wait_for_foreground_save(self) -> None:
        if isinstance(self.last_save, ForegroundSave):
            self.last_save.finish()

    @contextmanager
    def between_saves(self) -> Iterator[None]:
        """Wait until no other thread saves rows in the foreground, then hold the table's lock for the `with` block."""
        while True:
            self.wait_for_foreground_save()
            with self._table.lock:
                if not self.is_being_saved_by_other_thread:
                    yield
                    return

    def check_not_saving(self) -> None:
        """Raise StoreError while a snapshot is being saved in the background."""
        save = self.last_save
        if isinstance(save, ForegroundSave) and not save.is_running and not save.is_run_by_other_thread:
            save.end()  # Ctrl-C interrupted the save before it ran
        elif save is not None and not save.done:
            raise StoreError(format_still_saving(save.label))

    @property
    def is_being_saved_in_background(self) -> bool:
        return isinstance(self.last_save, BackgroundSave) and not self.last_save.done

    def skip_pauses(self) -> None:
        """Let the background save run at full speed."""
        if isinstance(self.last_save, BackgroundSave):
            self.last_save.skip_pauses()

    def wait_for_background_save(self) -> None:
        if isinstance(self.last_save, BackgroundSave):
            self.last_save.await_end()

    def finish_saving(self) -> BaseException | None:
        """Wait for the background save. Returns the save's error, unless it was raised or returned before."""
        return None if self.last_save is None else self.last_save.finish()

    def before_update(self, batch: Any) -> None:
        """Notify the image, if one is open, before a pinned batch's lines are written."""
        if self.image is not None:
            self.image.before_write(batch)

    def after_update(self, batch: Any) -> None:
        """Notify the trackers after a pinned batch's lines were written, which fills in the rows' last steps."""
        for tracker in self.trackers.values():
            tracker.add_batch(batch)
        self._limit_memory()

    def before_erase(self, tables: TableIds, keys: Keys) -> None:
        """Notify the observers before distinct rows are erased."""
        if self.image is not None:
            self.image.before_erase(tables, keys)
        for tracker in self.trackers.values():
            tracker.add_keys(tables, keys)
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Stop tracking changes if the keys take too much memory."""
        for consumer in [name for name, tracker in self.trackers.items() if tracker.bytes > self.max_key_bytes]:
            is_for_snapshots = consumer == SNAPSHOTS
            log.info(
                "embedding %r: more rows have changed since the last %s than changed_keys_mb has room for; the next %s",
                self._table.spec.name,
                "snapshot" if is_for_snapshots else "publish",
                "incremental snapshot compares all rows with its parent" if is_for_snapshots else "one reads all rows",
            )
            del self.trackers[consumer]

    def wait_for_memory(self) -> None:
        """Wait while the image's memory for before-images is full. Called before rows change."""
        if self.image is not None:
            with self._table.lock:
                if self.image is not None:
                    self.image.wait_for_memory(self._is_image_abandoned)

    def close(self) -> None:
        """Close the image, if one is open."""
        if self.image is not None:
            self.image.close()

    def _forget_image(self, image: Image) -> None:
        self.image = None

    def _is_image_abandoned(self) -> bool:
        """True if nobody reads the image any more, because its save has ended."""
        return self.last_save is not None and self.last_save.image is self.image and self.last_save.done


def format_still_saving(label: str) -> str:
    """Returns the error text for a save that must wait for a background save."""
    return (
        f"{label} is still being saved in the background, and only one save can run at a time: call wait() on what "
        "that save returned, then try again"
    )
