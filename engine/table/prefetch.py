"""Prefetch: a separate thread deduplicates the ids of announced lookups and fetches their rows before their step.

An announcement is a hint. A step uses a prepared batch only if its ids are the announced ones, and it reads values when
it runs. So hints change when work is done, but never a row.

A step may take several announcements, as where gradients accumulate over micro-batches. The first step that has the
lookups of several shows how many belong together; their batch is prepared once all of them are announced.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Condition, current_thread
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..ops.fingerprint import copied, fingerprint, same_lookups
from ..options.lookup import Lookup
from ..processors.processor import Processor
from ..store.contract import TopTier
from ..threads import Thread, wait_for

WINDOW = 31  # announced batches that a store knows, in addition to the batch of the step; more wait here
QUEUE = 4 * WINDOW  # the maximum of batches that wait

NOTHING_ANNOUNCED = {"prefetch_hits": 0, "prefetch_misses": 0, "prefetch_dropped": 0}


class _AnnouncedLookups:
    """The lookups of an announcement. They are copies, since the caller may reuse its tensors.

    The first announcement of a step also has the step's batch.
    """

    def __init__(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> None:
        copy = torch.clone if processor.defers_errors else _copy
        self.lookups = [copied(lookup, copy) for lookup in lookups]
        self.copied = processor.record_event()
        # if comparing ids would wait for a device, the same memory counts as equal; `adopt` checks it asynchronously
        self._memories = [_memory(lookup) for lookup in lookups] if processor.defers_errors else None
        self._kept = lookups  # so that no other tensor gets their memory
        self.batch: Any = None
        self.ready_event: Any = None  # an event: the batch exists
        self.is_known = False  # whether the store knows the batch
        self.is_fetched = False  # whether its rows are resident
        self.error: BaseException | None = None

    def is_of(self, lookups: Sequence[Lookup]) -> bool:
        if self._memories is not None and self._memories == [_memory(lookup) for lookup in lookups]:
            return True
        return same_lookups(self.lookups, lookups)


def _lookups(step: Sequence[_AnnouncedLookups]) -> list[Lookup]:
    return [lookup for announced in step for lookup in announced.lookups]


def _copy(part: Tensor) -> Tensor:
    """A copy on the CPU. Torch makes a large one on its threads, which would wait for cores that fetch rows."""
    return torch.from_numpy(part.numpy().copy())


def _memory(lookup: Lookup) -> tuple[Any, ...]:
    """A value that is equal for lookups of the same memory, unless torch has written to it in between."""
    memory = (fingerprint(part, by_memory=True) for part in lookup.tensors)
    return lookup.pooling, lookup.feature_columns, *memory


class Prefetcher:
    """Prepares the announced batches of one table in their order. Its thread starts at the first announcement."""

    def __init__(self, processor: Processor[Any], store: TopTier[Any], threads: int) -> None:
        self._processor = processor
        self._store = store
        self._threads = threads
        self.counts = dict(NOTHING_ANNOUNCED)
        self._announced: deque[_AnnouncedLookups] = deque()  # empty if there is no thread
        self._changed = Condition()
        self._thread: Thread | None = None  # the thread that continues; any other one ends
        self._process = 0  # of the thread
        self._busy = False  # whether the thread works without the lock
        self._paused = False  # whether the thread may begin no work
        self._steps_done = 0  # how many steps have ended
        self._full = False  # whether the store can fetch nothing more until a step ends
        self._unmatched = 0  # how many steps in a row were not announced
        self._per_step = 1  # how many announcements the last announced step took

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def announce(self, lookups: Sequence[Lookup]) -> None:
        """Announce the lookups of a future step. Steps are announced in their order.

        Raises RuntimeError if the system starts no thread.
        """
        if len(self._announced) == QUEUE:  # no step uses these batches
            self.counts["prefetch_dropped"] += 1
            if not self._is_idle:
                return
        announced = _AnnouncedLookups(lookups, self._processor)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._busy = False
                thread = Thread(target=self._run, name="tierbed-prefetch", daemon=True)
                thread.start()  # start may fail; the thread waits for the lock
                self._thread, self._process = thread, os.getpid()
            if len(self._announced) == QUEUE:
                self._announced.popleft()
            self._announced.append(announced)
            self._changed.notify_all()

    @property
    def _is_idle(self) -> bool:
        """True after many steps that were not announced. Announcements then wait until a step has one of them."""
        return self._unmatched > WINDOW

    @contextmanager
    def step(self, lookups: Sequence[Lookup] | None) -> Iterator[Any]:
        """A block that pins the rows of a step. Yields the step's batch if it was announced and prepared, else None.

        Without `lookups` the block is not a step, and uses no announced batch. Raises the error of making the batch.
        """
        if not self._announced:
            yield None
            return
        found = self._find(lookups) if lookups else None
        if lookups is not None and found == (0, self._per_step) and not self._is_idle:
            batch = self._take(lookups)
            try:
                yield batch
            except BaseException:  # the batch may not be pinned: the store forgets it as well
                self._interrupt(None, None)
                self._resume()
                raise
            return
        batch = self._interrupt(found, lookups)
        try:
            yield batch
        finally:
            self._resume()

    def step_ended(self) -> None:
        """Note that a step has ended, after which the store may fetch another batch."""
        if self._thread is not None:
            with self._changed:
                self._steps_done += 1
                self._full = False
                self._changed.notify_all()

    def close(self) -> None:
        """Forget the announced batches and end the thread; the next announcement starts another."""
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return
        with self._changed:
            self._thread = None
            self._unmatched = 0
            self._announced.clear()
            self._changed.notify_all()
        if thread is not current_thread():  # garbage collection in the thread may close the table
            thread.join()
        self._busy = self._full = False
        self._store.cancel()

    def _find(self, lookups: Sequence[Lookup]) -> tuple[int, int] | None:
        """The position and the number of the announcements that together have these lookups, if there are any."""
        for start in range(len(self._announced)):
            end = 0
            for count, announced in enumerate(islice(self._announced, start, None), 1):
                begin, end = end, end + len(announced.lookups)
                if not announced.is_of(lookups[begin:end]):
                    break
                if end == len(lookups):
                    return start, count
        return None

    def _take(self, lookups: Sequence[Lookup]) -> Any:
        """Take the oldest announced batch. Its lookups are those of the step."""
        with self._changed:
            first = self._announced[0]
            if not wait_for(self._changed, lambda: first.is_known or first.error, self._thread):
                while len(self._announced) > self._per_step:  # the steps of these are not prefetched
                    self._announced.pop()
                first.error = MemoryError("the prefetch thread died without raising an error")
            if first.error is None:
                self._unmatched = 0
                self.counts["prefetch_hits"] += 1
                return self._adopt(self._per_step, lookups)
        self._interrupt((0, self._per_step), lookups)
        self._resume()
        raise first.error

    def _interrupt(self, found: tuple[int, int] | None, lookups: Sequence[Lookup] | None) -> Any:
        """Pause the thread and let the store forget every batch. Batches are announced again after `_resume`.

        Returns the batch of the announcements that `_find` found, or None if it is not made, and drops them and those
        before them. lookups: those of the step, if there is one.
        """
        with self._changed:
            self._paused = True
            if not wait_for(self._changed, lambda: not self._busy, self._thread):
                self._busy = False  # the thread died
            self._store.cancel()
            for announced in self._announced:
                announced.is_known = announced.is_fetched = False
            self._full = False
            if lookups is not None:
                self.counts["prefetch_misses"] += 1
                self._unmatched += 1
            if found is not None and lookups is not None:
                for _ in range(found[0]):
                    self._announced.popleft()
                self._unmatched = 0
                return self._adopt(found[1], lookups)
            if self._unmatched > QUEUE:  # no step uses the oldest hint
                self._announced.popleft()
                self._unmatched *= bool(self._announced)
            return None

    def _adopt(self, count: int, lookups: Sequence[Lookup]) -> Any:
        """Drop the oldest announcements, and let the thread of their step use its batch. None if it is not made."""
        if count != self._per_step:  # batches that are made are of another number of announcements
            self._per_step = count
            for announced in self._announced:
                announced.batch = None
        first, *others = [self._announced.popleft() for _ in range(count)]
        if first.batch is not None:
            self._processor.wait_event(first.ready_event)
            self._processor.adopt(first.batch, _lookups([first, *others]), lookups)
        return first.batch

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
                step = self._changed.wait_for(lambda: self._thread is not me or (not self._paused and self._next()))
                if not isinstance(step, list):  # another thread continues, or none
                    return
                self._busy = True
            try:
                with self._processor.side_stream():
                    self._prepare(step)
            except BaseException as error:
                with self._changed:
                    step[0].error = error

    def _next(self) -> list[_AnnouncedLookups] | None:
        """The announcements of the step to work on. The store knows every batch of the window before any is fetched."""
        size, position = self._per_step, None
        steps = 0 if self._is_idle else min(len(self._announced) // size, WINDOW)
        for number, announced in enumerate(islice(self._announced, 0, steps * size, size)):
            if announced.error is not None:
                break  # its step raises the error; later batches wait
            if not announced.is_known:
                return [*islice(self._announced, number * size, (number + 1) * size)]
            if not announced.is_fetched and not self._full and position is None:
                position = number * size
        return None if position is None else [*islice(self._announced, position, position + size)]

    def _prepare(self, step: list[_AnnouncedLookups]) -> None:
        announced = step[0]
        if announced.is_known:
            steps_done = self._steps_done
            fetched = self._store.prefetch(announced.batch)
            with self._changed:
                announced.is_fetched = fetched
                self._full = not fetched and steps_done == self._steps_done
            return
        if announced.batch is None:
            for part in step:
                self._processor.wait_event(part.copied)
            batch = self._processor.batch(_lookups(step), ahead=True)
            announced.ready_event = self._processor.record_event()
            announced.batch = batch
        self._store.announce(announced.batch)
        with self._changed:
            announced.is_known = True
            self._changed.notify_all()
