"""Batches made ready before their step: ids deduplicated and rows brought up, by a thread of its own.

An announcement is a hint. A step takes a prepared batch only where its ids are the announced ones, and it reads values
when it runs. So hints change the time of work, and never a row.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Condition, current_thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _core
from ..options.lookup import Lookup
from ..store.contract import TopTier
from ..threads import Thread, wait_for

if TYPE_CHECKING:
    from ..processors.processor import Processor

WINDOW = 31  # the batches that a store knows of ahead, beside the batch of the step; more wait here
QUEUE = 4 * WINDOW  # the most batches that wait

NOTHING_ANNOUNCED = {"prefetch_hits": 0, "prefetch_misses": 0, "prefetch_dropped": 0}


class _AnnouncedBatch:
    """An announced batch: copies of its lookups, since the caller may fill its tensors anew."""

    def __init__(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> None:
        self.lookups = [copied(lookup) for lookup in lookups]
        self.copied = processor.record_event()
        # where comparing ids would wait for a device, the same memory counts as equal; `hand_over` checks it late
        self._given = [_memory(lookup) for lookup in lookups] if processor.defers_errors else None
        self._kept = lookups  # kept, so that nothing else gets their memory
        self.batch: Any = None
        self.made: Any = None  # an event: the batch is made
        self.announced = False  # whether the store knows of the batch
        self.fetched = False  # whether its rows are up
        self.error: BaseException | None = None

    def is_of(self, lookups: Sequence[Lookup]) -> bool:
        if self._given is not None and self._given == [_memory(lookup) for lookup in lookups]:
            return True
        return same_lookups(self.lookups, lookups)


def copied(lookup: Lookup) -> Lookup:
    """A lookup of copies of its tensors."""
    ids, table_ids, offsets = (None if part is None else part.detach().clone() for part in lookup.tensors)
    assert ids is not None
    return lookup._replace(ids=ids, table_ids=table_ids, offsets=offsets)


def _memory(lookup: Lookup) -> tuple[Any, ...]:
    """A value that is equal for lookups of the same memory to which torch has not written in between."""
    memory = (
        part if part is None else (part.data_ptr(), _version(part), part.dtype, part.shape, part.stride())
        for part in lookup.tensors
    )
    return lookup.pooling, lookup.places, *memory


def _version(part: Tensor) -> Any:
    return object() if part.is_inference() else part._version  # tensors of inference mode count no writes


def same_lookups(some: Sequence[Lookup], others: Sequence[Lookup]) -> bool:
    """Whether both have the same ids, tables and bags. May wait for a device."""
    return len(some) == len(others) and all(map(_same, some, others))


def _same(one: Lookup, other: Lookup) -> bool:
    if one.pooling != other.pooling or one.places != other.places:
        return False
    for here, there in zip(one.tensors, other.tensors, strict=True):
        if here is None or there is None:
            if here is not there:
                return False
        elif here.shape != there.shape or here.dtype != there.dtype or not torch.equal(here, there):
            return False
    return True


class Prefetcher:
    """Prepares the announced batches of one table in their order. Its thread starts at the first announcement."""

    def __init__(self, processor: Processor[Any], store: TopTier[Any], threads: int) -> None:
        self._processor = processor
        self._store = store
        self._threads = threads
        self.counts = dict(NOTHING_ANNOUNCED)
        self._coming: deque[_AnnouncedBatch] = deque()  # empty where there is no thread
        self._changed = Condition()
        self._thread: Thread | None = None  # the thread that goes on; any other ends
        self._process = 0  # the process of the thread
        self._busy = False  # whether the thread is at work outside of the lock
        self._paused = False  # whether the thread may begin nothing
        self._ended = 0  # how many steps have ended
        self._full = False  # whether the store takes no more batches ahead until a step ends
        self._unmatched = 0  # how many steps in a row nobody announced

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def announce(self, lookups: Sequence[Lookup]) -> None:
        """Announce the lookups of a coming step. Steps are announced in their order.

        Raises RuntimeError where the system gives no thread.
        """
        if len(self._coming) == QUEUE:  # no step takes these batches
            self.counts["prefetch_dropped"] += 1
            return
        coming = _AnnouncedBatch(lookups, self._processor)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._busy = False
                thread = Thread(target=self._run, name="tierbed-prefetch", daemon=True)
                thread.start()  # start may fail; the thread waits for the lock
                self._thread, self._process = thread, os.getpid()
            self._coming.append(coming)
            self._changed.notify_all()

    @contextmanager
    def step(self, lookups: Sequence[Lookup] | None) -> Iterator[Any]:
        """A block that pins the rows of a step. Yields the step's batch where it was announced, else None.

        Without `lookups` the block is no step, and takes no announced batch. Raises the error of making the batch.
        """
        if not self._coming:
            yield None
            return
        skipped = next((i for i, coming in enumerate(self._coming) if lookups and coming.is_of(lookups)), None)
        if skipped == 0 and lookups is not None:
            batch = self._take(lookups)
            try:
                yield batch
            except BaseException:  # the batch may not be pinned: the store forgets it as well
                self._interrupt(None, None)
                self._resume()
                raise
            return
        batch = self._interrupt(skipped, lookups)
        try:
            yield batch
        finally:
            self._resume()

    def ended(self) -> None:
        """Note that a step is over, and that there is room for another batch."""
        if self._thread is not None:
            with self._changed:
                self._ended += 1
                self._full = False
                self._changed.notify_all()

    def close(self) -> None:
        """Forget what was announced and end the thread; the next announcement starts another."""
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return
        with self._changed:
            self._thread = None
            self._coming.clear()
            self._changed.notify_all()
        if thread is not current_thread():  # garbage collected in the thread may close the table
            thread.join()
        self._busy = self._full = False
        self._store.cancel()

    def _take(self, lookups: Sequence[Lookup]) -> Any:
        """Take the batch that was announced first, for a step with these lookups."""
        with self._changed:
            first = self._coming[0]
            if not wait_for(self._changed, lambda: first.announced or first.error, self._thread):
                while len(self._coming) > 1:  # the steps of these go the plain way
                    self._coming.pop()
                first.error = MemoryError("the thread that makes announced batches ready ended without a word")
            if first.error is None:
                self._unmatched = 0
                self.counts["prefetch_hits"] += 1
                return self._hand_over(self._coming.popleft(), lookups)
        self._interrupt(0, lookups)
        self._resume()
        raise first.error

    def _interrupt(self, wanted: int | None, lookups: Sequence[Lookup] | None) -> Any:
        """Pause the thread and let the store forget every batch. Batches are announced again after `_resume`.

        Returns the announced batch number `wanted`, None where it is not made, and drops it and the batches before it.
        lookups: those of the step, if there is one.
        """
        with self._changed:
            self._paused = True
            if not wait_for(self._changed, lambda: not self._busy, self._thread):
                self._busy = False  # the thread is no more
            self._store.cancel()
            for coming in self._coming:
                coming.announced = coming.fetched = False
            self._full = False
            if lookups is not None:
                self.counts["prefetch_misses"] += 1
                self._unmatched += 1
            if wanted is not None and lookups is not None:
                for _ in range(wanted):
                    self._coming.popleft()
                self._unmatched = 0
                return self._hand_over(self._coming.popleft(), lookups)
            if self._unmatched > WINDOW:  # no step wants these hints
                self._coming.clear()
            return None

    def _hand_over(self, coming: _AnnouncedBatch, lookups: Sequence[Lookup]) -> Any:
        """Give an announced batch to the thread of its step. Returns None where the batch is not made."""
        if coming.batch is not None:
            self._processor.wait_event(coming.made)
            self._processor.hand_over(coming.batch, coming.lookups, lookups)
        return coming.batch

    def _resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _run(self) -> None:
        _core.use_own_pool(self._threads)
        me = current_thread()
        while True:
            with self._changed:
                if self._thread is me:
                    self._busy = False
                    self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._thread is not me or (not self._paused and self._next() is not None)
                )
                if self._thread is not me:
                    return
                coming = self._next()
                assert coming is not None
                self._busy = True
            try:
                with self._processor.side_stream():
                    self._prepare(coming)
            except BaseException as error:
                with self._changed:
                    coming.error = error

    def _next(self) -> _AnnouncedBatch | None:
        """The batch to work on. Every batch of the window becomes known to the store before any is fetched."""
        unfetched = None
        for coming in islice(self._coming, WINDOW):
            if coming.error is not None:
                break  # its step raises the error; later batches wait
            if not coming.announced:
                return coming
            if not coming.fetched and unfetched is None:
                unfetched = coming
        return None if self._full else unfetched

    def _prepare(self, coming: _AnnouncedBatch) -> None:
        if coming.announced:
            ended = self._ended
            fetched = self._store.prefetch(coming.batch)
            with self._changed:
                coming.fetched = fetched
                self._full = not fetched and ended == self._ended
            return
        if coming.batch is None:
            self._processor.wait_event(coming.copied)
            batch = self._processor.batch(coming.lookups, ahead=True)
            coming.made = self._processor.record_event()
            coming.batch = batch
        self._store.announce(coming.batch)
        with self._changed:
            coming.announced = True
            self._changed.notify_all()
