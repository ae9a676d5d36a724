"""Batches made ready before their step: ids deduplicated and rows brought up, by a thread of its own.

What is announced is a hint. A step takes a prepared batch only where its ids are those that were announced, and reads
values when it runs, so hints change when work is done and never a row.
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
from ..spec.inputs import Lookup
from ..store.contract import Store
from ..threads import Thread, wait_for

if TYPE_CHECKING:
    from ..processors.processor import Processor

WINDOW = 31  # batches that a store knows of ahead, beside that of the step; more wait here
QUEUE = 4 * WINDOW  # batches that wait at most


class _Coming:
    """An announced batch: copies of its lookups, since the caller may fill its tensors anew."""

    def __init__(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> None:
        self.lookups = [_copy(lookup) for lookup in lookups]
        self.copied = processor.mark()
        # a device is not waited for to see that its memory holds the same ids still, which `hand_over` checks late
        self._given = [_places(lookup) for lookup in lookups] if processor.checks_late else None
        self._kept = lookups  # so that nothing else comes into their memory
        self.batch: Any = None
        self.made: Any = None  # a mark as well
        self.announced = False  # the store knows of it
        self.fetched = False  # its rows are up
        self.error: BaseException | None = None

    def is_of(self, lookups: Sequence[Lookup]) -> bool:
        if self._given is not None and self._given == [_places(lookup) for lookup in lookups]:
            return True
        return len(self.lookups) == len(lookups) and all(map(_same, self.lookups, lookups))


def _copy(lookup: Lookup) -> Lookup:
    ids, table_ids, offsets = (None if part is None else part.detach().clone() for part in lookup[:3])
    assert ids is not None
    return Lookup(ids, table_ids, offsets, lookup.pooling)


def _places(lookup: Lookup) -> tuple[Any, ...]:
    """What says that two lookups are of the same memory, and that torch has not written there in between."""
    return lookup.pooling, *(
        part if part is None else (part.data_ptr(), _version(part), part.dtype, part.shape, part.stride())
        for part in lookup[:3]
    )


def _version(part: Tensor) -> Any:
    return object() if part.is_inference() else part._version  # the former counts no writes


def _same(one: Lookup, other: Lookup) -> bool:
    if one.pooling != other.pooling:
        return False
    for here, there in zip(one[:3], other[:3], strict=True):
        if here is None or there is None:
            if here is not there:
                return False
        elif here.shape != there.shape or here.dtype != there.dtype or not torch.equal(here, there):
            return False
    return True


class Prefetcher:
    """Prepares the announced batches of one table in their order. Its thread starts with the first of them."""

    def __init__(self, processor: Processor[Any], store: Store[Any], threads: int) -> None:
        self._processor = processor
        self._store = store
        self._threads = threads
        self.counts = {"prefetch_hits": 0, "prefetch_misses": 0, "prefetch_dropped": 0}
        self._coming: deque[_Coming] = deque()  # empty where there is no thread
        self._changed = Condition()
        self._thread: Thread | None = None  # the one that goes on; another ends
        self._process = 0  # that the thread is of
        self._busy = False  # the thread is at work outside of the lock
        self._paused = False  # the thread may not begin anything
        self._ended = 0  # steps
        self._full = False  # the store takes no more batches ahead until a step ends
        self._unmatched = 0  # steps in a row that nobody announced

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def announce(self, lookups: Sequence[Lookup]) -> None:
        """A coming step has these lookups; steps are announced in their order.

        Raises RuntimeError where the system gives no thread.
        """
        if len(self._coming) == QUEUE:  # nobody takes them
            self.counts["prefetch_dropped"] += 1
            return
        coming = _Coming(lookups, self._processor)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._busy = False
                thread = Thread(target=self._run, name="tierbed-prefetch", daemon=True)
                thread.start()  # may fail; it waits for the lock
                self._thread, self._process = thread, os.getpid()
            self._coming.append(coming)
            self._changed.notify_all()

    @contextmanager
    def step(self, lookups: Sequence[Lookup] | None) -> Iterator[Any]:
        """Around pinning the rows of a step: its batch where it was announced, else None.

        Without `lookups` it is no step, and takes no announced batch. Raises what preparing the batch raised.
        """
        if not self._coming:
            yield None
            return
        skipped = next((i for i, coming in enumerate(self._coming) if lookups and coming.is_of(lookups)), None)
        if skipped == 0 and lookups is not None:
            batch = self._take(lookups)
            try:
                yield batch
            except BaseException:  # it may not have come to be pinned: the store forgets it as well
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
        """A step is over: there is room for another batch."""
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
        if thread is not current_thread():  # garbage may be collected in it, and close the table
            thread.join()
        self._busy = self._full = False
        self._store.cancel()

    def _take(self, lookups: Sequence[Lookup]) -> Any:
        """The batch that was announced first, for a step with these lookups."""
        with self._changed:
            first = self._coming[0]
            if not wait_for(self._changed, lambda: first.announced or first.error, self._thread):
                while len(self._coming) > 1:  # these go the plain way
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
        """Pause the thread and let the store forget every batch; they are announced again after `_resume`.

        Returns the batch number `wanted`, as far as it was made, and drops it and those before it. `lookups`: of a
        step.
        """
        with self._changed:
            self._paused = True
            if not wait_for(self._changed, lambda: not self._busy, self._thread):
                self._busy = False  # it is no more
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
            if self._unmatched > WINDOW:  # hints that no step wants
                self._coming.clear()
            return None

    def _hand_over(self, coming: _Coming, lookups: Sequence[Lookup]) -> Any:
        """Its batch as far as it was made, for the thread of the step."""
        if coming.batch is not None:
            self._processor.follow(coming.made)
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
                with self._processor.beside():
                    self._prepare(coming)
            except BaseException as error:
                with self._changed:
                    coming.error = error

    def _next(self) -> _Coming | None:
        """What to work on: every batch of the window becomes known before any is fetched."""
        unfetched = None
        for coming in islice(self._coming, WINDOW):
            if coming.error is not None:
                break  # the step that meets it raises; what follows waits
            if not coming.announced:
                return coming
            if not coming.fetched and unfetched is None:
                unfetched = coming
        return None if self._full else unfetched

    def _prepare(self, coming: _Coming) -> None:
        if coming.announced:
            ended = self._ended
            fetched = self._store.prefetch(coming.batch)
            with self._changed:
                coming.fetched = fetched
                self._full = not fetched and ended == self._ended
            return
        if coming.batch is None:
            self._processor.follow(coming.copied)
            batch = self._processor.batch(coming.lookups, ahead=True)
            coming.made = self._processor.mark()
            coming.batch = batch
        self._store.announce(coming.batch)
        with self._changed:
            coming.announced = True
            self._changed.notify_all()
