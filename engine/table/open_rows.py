"""The rows of an open table as a whole: what scans, saves, erases and closes them, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import _core
from ..errors import ClosedError, StoreError, TierbedError
from ..interrupts import uninterrupted
from ..lifecycle.lifecycle import Lifecycle
from ..ops.segments import rows_of
from ..optim.rule import catches_up
from ..row_format import Chunks, Keys, Tables
from ..spec.inputs import Lookup
from ..store.contract import Store
from ..store.image import KEPT_BYTES, DiskImage, Image, MemoryImage
from ..store.rocksdb import RocksDB
from ..store.table_counts import Counts, by_label, counted, counted_chunks
from .background import BackgroundSave
from .boundary import Boundary
from .changes import Changes
from .prefetch import Prefetcher
from .scanned import checked_rows, line_addresses
from .stack import Stack

if TYPE_CHECKING:
    from ..optim.optimizers import RowOptimizer
    from ..optim.row_state import RowState
    from ..processors.processor import Processor
    from ..row_format import Change
    from ..spec.table_spec import TableSpec
    from .pinned import PinnedBatch

T = TypeVar("T")


class OpenRows:
    """Rows in a stack of tiers, used on a processor.

    `stored_rows` were there when it was opened, `stored` of each table or None where that is not known; `step` counts
    the updates of the whole table. `state` is what rows carry beside the embedding; `optimizer` is None where the table
    is open for reading and `put` alone. `before_write` is told, before each write, the step that it is of.
    """

    def __init__(
        self,
        spec: TableSpec,
        processor: Processor[Any],
        stack: Stack,
        state: RowState,
        lifecycle: Lifecycle,
        before_write: Callable[[int], None],
        io_threads: int,
    ) -> None:
        self.spec = spec
        self.processor = processor
        self.layout = processor.layout
        self.stack: Stack | None = stack
        self.state = state
        self.hyper: list[float] = []  # the rule's numbers at its last update; empty before its first
        self.optimizer: RowOptimizer | None = None
        self.stored_rows = 0
        self.stored: Counts | None = np.zeros(spec.num_tables, np.int64)
        self.step = 0
        self.updates = 0  # that the processor was asked for
        self.failure: BaseException | None = None  # what left the rows in doubt
        self.lifecycle = lifecycle
        self._leaving: tuple[Tables, Keys, Counts, str] | None = None  # what `_erase` was told and has not finished
        self._before_write = before_write
        self._pinned: PinnedBatch | None = None
        self._prefetcher = Prefetcher(processor, stack.top, io_threads)
        self.untold: TierbedError | None = None  # found late by a visitor of the boundary
        self.boundary = Boundary()
        self.saving: BackgroundSave | None = None  # the last one, which may have ended
        self._image: Image | None = None
        self._changes: Changes | None = None
        self.lock = RLock()  # native loops let other threads of Python run

    @property
    def rows(self) -> int:
        """How many were written so far and did not leave; may wait for the device."""
        return self.stored_rows + int(self._change.sum())

    @property
    def known_table_rows(self) -> Counts | None:
        """`rows` by table, where it is known without a scan."""
        return None if self.stored is None else self.stored + self._change

    @property
    def table_rows(self) -> Counts:
        """`rows` by table. Where the store does not tell, all rows are scanned once. StoreError, SnapshotError."""
        with self.lock:
            if self.stored is None:
                chunks = checked_rows(self.scan(), self.spec.num_tables)
                self.stored = counted_chunks(chunks, self.spec.num_tables) - self._change
            return self.stored + self._change

    @property
    def _change(self) -> Counts:
        """How many rows of each table came since it was opened and did not leave."""
        leaving = self._leaving  # once: who asks for the status does not hold the lock
        change = self.processor.written - self.lifecycle.gone
        return change if leaving is None else change - leaving[2]  # which the next use of the tiers erases

    @property
    def is_lost(self) -> bool:
        """Whether a call that failed in the middle left rows in doubt: they are never marked clean."""
        bottom = None if self.stack is None else self.stack.bottom
        return self.failure is not None or (isinstance(bottom, RocksDB) and bottom.failed)

    @property
    def in_step(self) -> bool:
        return self._pinned is not None

    def describe(self) -> dict[str, Any]:
        return self.spec.describe(self.state, self.hyper, self.step)

    def scan(self) -> Chunks:
        """Every written row, as `Tier.scan`. Raises ClosedError if the table is closed or replaced on the way."""
        yield from self._locked(self._store().scan())

    def settled(self) -> Chunks:
        """`scan`, with every row as it is after the last step, where rows catch up late."""
        for bucket, rows in self.scan():
            if rule := self._lagging:
                rows = rows.copy()
                with self.lock:
                    _core.catch_up(self.layout, line_addresses(rows), rule, self._hyper_now(), self.step + 1)
            yield bucket, rows

    @property
    def is_tracking(self) -> bool:
        """Whether changes are noted."""
        return self._changes is not None

    def track_changes(self, since: str) -> None:
        """Note which rows change from here on; as they are now, they are those of the snapshot of that id."""
        with self.lock:
            if self._changes is not None:
                self._changes.cut()
                self._changes.saved(since)
            else:
                self._changes = Changes(since, self._store().tracker())

    def changed(self, since: str) -> Iterator[Change] | None:
        """What changed since the snapshot of that id, read while it is asked for; None where that was not noted.

        To be followed by `changes_saved`; without it, the same and what changes later is found by the next call. Raises
        StoreError while a snapshot is being saved in the background.
        """
        with self.lock:
            store = self._store()
            self.check_not_saving()
            if self._changes is None or self._changes.since != since:
                return None
            self._changes.cut()
            return self._locked(self._changes.rows(store, self.layout.width))

    def changes_saved(self, since: str) -> None:
        """What `changed` gave last, or the last `image` has, is in the snapshot of that id."""
        with self.lock:
            if self._changes is not None:
                self._changes.saved(since)

    def image(self, kept_bytes: int = KEPT_BYTES) -> Image:
        """All rows as they are now, for another thread to read while they change, until it is closed.

        Where they are in memory, up to about `kept_bytes` are kept aside; then steps wait until some were read.
        Raises StoreError, also while there is another.
        """
        with self.lock, uninterrupted():
            top = self._store()
            self.check()
            self.check_not_saving()
            if self._image is not None:
                raise StoreError(f"embedding {self.spec.name!r} has an image already; close it first")
            top.flush()
            if self._changes is not None:
                self._changes.cut()
            assert self.stack is not None
            bottom = self.stack.bottom
            if isinstance(bottom, RocksDB):
                self._image = DiskImage(bottom.scan(), self.lock, self._forget_image)
            else:
                table, width = bottom.image(top), self.layout.width
                self._image = MemoryImage(table, width, kept_bytes, self.lock, self._forget_image)
            return self._image

    def save_in_background(
        self, what: str, write: Callable[[Chunks], object], kept_bytes: int = KEPT_BYTES
    ) -> BackgroundSave:
        """Let a thread hand all rows as they are now to `write`, which must not wait for what steps hold.

        Raises StoreError as `image`, which has `kept_bytes`, and while another is being saved. `what`: for messages.
        """
        with self.lock:
            image = self.image(kept_bytes)
            try:
                self.saving = BackgroundSave(what, image, write, self.lock)
            except BaseException:
                image.close()
                raise
            return self.saving

    def check_not_saving(self) -> None:
        """Raises StoreError while a snapshot is being saved in the background."""
        if self.saving is not None and not self.saving.done:
            raise StoreError(
                f"{self.saving.what} is still being saved in the background, and there is one save at a time: call "
                "wait() of what save_snapshot returned, then try again"
            )

    def finish_saving(self) -> BaseException | None:
        """Wait for what is being saved in the background. Returns what went wrong with it, if nobody was told yet."""
        return None if self.saving is None else self.saving.finish()

    def flush(self) -> None:
        with self.lock, uninterrupted():
            self._store().flush()

    def compact(self) -> None:
        with self.lock, uninterrupted():
            self._store()
            assert self.stack is not None
            self.stack.compact()

    @property
    def has_thread(self) -> bool:
        """Whether one makes announced batches ready."""
        return self._prefetcher.has_thread

    def rest(self) -> None:
        """Forget announced batches, and end the thread that makes them ready."""
        with self.lock, uninterrupted():
            self._prefetcher.close()

    def close(self) -> None:
        """Release memory and files without flushing. May be called again."""
        with self.lock, uninterrupted():
            stack, self.stack, self._pinned = self.stack, None, None
            if stack is not None:
                if self._image is not None:
                    self._image.close()
                self._prefetcher.close()
                stack.top.close()

    def metrics(self) -> dict[str, dict[str, Any]]:
        with self.lock:
            store = self._opened()
            self.check()
            counts = {**self.lifecycle.metrics, **self._prefetcher.counts}
            tiers, (hits, misses) = store.metrics(), store.asked().T
            next(iter(tiers.values())).update(hits=int(hits.sum()), misses=int(misses.sum()))  # of one instant
            return {
                "table": {"rows": self.rows, "step": self.step, **counts},
                **tiers,
                "tables": by_label(self.spec.labels, rows=self.table_rows, hits=hits, misses=misses),
            }

    def where(self, lookup: Lookup) -> tuple[list[dict[str, Any]], str | None]:
        """Where the row of one id is, `Level.where`, and why it is not stored; None where it is. Changes nothing."""
        with self.lock:
            store = self._store()
            self.check()
            tables, keys = rows_of(self.spec, lookup)
            if not len(keys):
                return [], f"padding_idx={self.spec.padding_idx} is no row"
            tiers = store.where(int(tables[0]), int(keys[0]))
            if not tiers:
                return [], self.lifecycle.why_absent()
            return tiers, None if tiers[0]["updates"] else "brought up for a step that has not written it"

    def check(self) -> None:
        """Wait for the processor, and raise what an earlier call did wrong. InputError, CapacityError."""
        self._raise_late(wait=True)

    def late_error(self, wait: bool) -> TierbedError | None:
        """What an earlier call did wrong and the processor found late, once; the steps since did not happen."""
        untold, self.untold = self.untold, None
        late = None if untold else self.processor.late(wait)
        if late is None:
            return untold
        undone, self.updates = self.updates - late.taken, late.taken
        self.step -= undone
        if undone and self.optimizer is not None:
            self.hyper = self.optimizer.hyper(self.step) if self.step else []
        return late.error

    def _raise_late(self, wait: bool) -> None:
        error = self.late_error(wait)
        if error is not None:
            raise error

    def _forget_image(self, image: Image) -> None:
        self._image = None

    def _before_batch(self, batch: Any) -> None:
        """The lines of a pinned batch will be written."""
        if self._image is not None:
            self._image.before_write(batch)
        if self._changes is not None:
            self._changes.note(batch)

    def _wait_for_image(self) -> None:
        """Before a call that changes rows, and before it has begun anything: what is being saved may hold it up."""
        if self._image is not None:
            with self.lock:
                if self._image is not None:
                    self._image.wait_for_room(self._is_unread)

    def _is_unread(self) -> bool:
        """Whether the thread that was to read the image is no more."""
        return self.saving is not None and self.saving.image is self._image and self.saving.done

    def _locked(self, items: Iterator[T]) -> Iterator[T]:
        """What is read of the rows, each item with the lock."""
        while True:
            with self.lock, uninterrupted():
                self._store()
                item = next(items, None)
            if item is None:
                return
            yield item

    def _erase(self, tables: Tables, keys: Keys, cause: str, there: Counts | None = None) -> None:
        """Take rows out of every tier; `there` of each table had been written, all where it is None.

        Where StoreError is raised, all are there, or some may be out: then no tier is used before the rest is as well.
        """
        self._before_write(self.step)  # first: where there is no room to write, the rows can still be read
        there = counted(tables, self.spec.num_tables) if there is None else there
        self._leaving = tables, keys, there, cause
        self._store()

    def _finish_erase(self, store: Store[Any], tables: Tables, keys: Keys, there: Counts, cause: str) -> None:
        with uninterrupted():
            if self._image is not None:
                self._image.before_erase(tables, keys)
            if self._changes is not None:
                self._changes.note_rows(tables, keys)
            self._before_write(self.step)
            try:
                store.erase(tables, keys)
                self.lifecycle.left(tables, keys, there, cause)
                self._leaving = None
            except StoreError:
                raise  # erased again by the next call
            except BaseException as error:
                self.failure = error
                raise

    def _store(self) -> Store[Any]:
        store = self._opened()
        if self._leaving is not None:
            self._finish_erase(store, *self._leaving)
        return store

    def _opened(self) -> Store[Any]:
        if self.stack is None:
            raise ClosedError(f"embedding {self.spec.name!r} was closed or its rows were replaced; use it anew")
        if self.failure is not None:
            raise StoreError(
                f"embedding {self.spec.name!r} failed in the middle of a write ({self.failure!r}); create it again: "
                "with a persistent_path it goes back to its last snapshot"
            ) from self.failure
        return self.stack.top

    @property
    def _lagging(self) -> str | None:
        """The rule, where rows may lack steps that they take when they are next used."""
        return self.state.rule if self.hyper and catches_up(self.state.rule) else None

    def _hyper_now(self) -> list[float]:
        return self.hyper if self.optimizer is None else self.optimizer.hyper(self.step + 1)
