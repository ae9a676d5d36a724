"""Prefetch: a separate thread prepares the batches of future steps while the current step runs.

The user announces the lookups of future steps. For each announced step in order, the thread deduplicates the ids into a
batch, announces the batch to the store (so the store knows which rows to keep cached), and fetches and pins its rows.
When the step runs, it takes the prepared batch instead of making its own.

An announcement is only a hint. A step uses a prepared batch only if its ids equal the announced ids, and reads row
values only when it runs. So announcements change when work is done, but never a row's values. If a step was not
announced, or comes out of order, the thread pauses, the store forgets all batches, and the remaining batches are
announced again later.

One step may match several announcements, for example when gradients accumulate over micro-batches. The first such step
shows how many announcements belong together. From then on, each batch is prepared from this number of announcements.
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
from ..ops.fingerprint import are_lookups_equal, copy_lookup, fingerprint
from ..options.lookup import Lookup
from ..processors.processor import Processor
from ..store.contract import TopTier
from ..threads import Thread, wait_for

WINDOW = 31  # limit for batches announced to the store, besides the current step's; later announcements wait
QUEUE = 4 * WINDOW  # maximum number of waiting announcements

NOTHING_ANNOUNCED = {"prefetch_hits": 0, "prefetch_misses": 0, "prefetch_dropped": 0}


class _AnnouncedLookups:
    """An announcement's lookups, copied because the caller may reuse its tensors."""

    def __init__(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> None:
        copy = torch.clone if processor.defers_errors else _copy
        self.lookups = [copy_lookup(lookup, copy) for lookup in lookups]
        self.copied = processor.record_event()
        # On a GPU, comparing ids would wait. Lookups in the same memory count as equal; `adopt` checks the ids later.
        self._memories = [_memory(lookup) for lookup in lookups] if processor.defers_errors else None
        self._originals = lookups  # keeps the tensors alive, so no other tensor gets their memory
        self.batch: Any = None  # the whole step's batch, if this is the step's first announcement
        self.ready_event: Any = None  # recorded when the batch exists
        self.is_known = False  # the batch was announced to the store
        self.is_fetched = False  # the batch's rows are resident
        self.error: BaseException | None = None

    def matches(self, lookups: Sequence[Lookup]) -> bool:
        if self._memories is not None and self._memories == [_memory(lookup) for lookup in lookups]:
            return True
        return are_lookups_equal(self.lookups, lookups)


def _lookups(step: Sequence[_AnnouncedLookups]) -> list[Lookup]:
    return [lookup for announced in step for lookup in announced.lookups]


def _copy(part: Tensor) -> Tensor:
    """Copy a CPU tensor with NumPy. For large tensors, torch would use its threads and slow down row fetches."""
    return torch.from_numpy(part.numpy().copy())


def _memory(lookup: Lookup) -> tuple[Any, ...]:
    """Returns a value that is equal for two lookups in the same memory, if torch wrote nothing there in between."""
    memory = (fingerprint(part, by_memory=True) for part in lookup.tensors)
    return lookup.pooling, lookup.feature_columns, *memory


class Prefetcher:
    """Prepares a table's announced batches in order. The thread starts at the first announcement."""

    def __init__(self, processor: Processor[Any], store: TopTier[Any], threads: int) -> None:
        self._processor = processor
        self._store = store
        self._threads = threads
        self.counts = dict(NOTHING_ANNOUNCED)
        self._announced: deque[_AnnouncedLookups] = deque()  # empty if there is no thread
        self._changed = Condition()
        self._thread: Thread | None = None  # the current thread; a replaced thread ends
        self._process = 0  # the process that started the thread
        self._busy = False  # the thread is working, without the lock
        self._paused = False  # the thread must not begin work
        self._steps_done = 0
        self._full = False  # the store cannot fetch more until a step ends
        self._unmatched = 0  # consecutive steps that were not announced
        self._per_step = 1  # announcements per step, as in the last announced step

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def announce(self, lookups: Sequence[Lookup]) -> None:
        """Announce a future step's lookups, in the order of steps. Raises RuntimeError if no thread can be started."""
        if len(self._announced) == QUEUE:  # so far no step used these announcements
            self.counts["prefetch_dropped"] += 1
            if not self._is_idle:
                return
        announced = _AnnouncedLookups(lookups, self._processor)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._busy = False
                thread = Thread(target=self._run, name="tierbed-prefetch", daemon=True)
                thread.start()  # may raise; the new thread waits for the lock
                self._thread, self._process = thread, os.getpid()
            if len(self._announced) == QUEUE:
                self._announced.popleft()
            self._announced.append(announced)
            self._changed.notify_all()

    @property
    def _is_idle(self) -> bool:
        """True after many unannounced steps. The thread then does nothing until a step matches an announcement."""
        return self._unmatched > WINDOW

    @contextmanager
    def step(self, lookups: Sequence[Lookup] | None) -> Iterator[Any]:
        """Enter a block that pins a step's rows. Yields the step's prepared batch, or None if no batch is prepared.

        Without `lookups`, the block is not a step and uses no announced batch. Raises an error if preparation failed.
        """
        if not self._announced:
            yield None
            return
        match = self._find(lookups) if lookups else None
        if lookups is not None and match == (0, self._per_step) and not self._is_idle:
            batch = self._take(lookups)
            try:
                yield batch
            except BaseException:  # the batch may not be pinned, so the store must forget it as well
                self._interrupt(None, None)
                self._resume()
                raise
            return
        batch = self._interrupt(match, lookups)
        try:
            yield batch
        finally:
            self._resume()

    def step_ended(self) -> None:
        """Note that a step has ended, so the store may have room to fetch another batch."""
        if self._thread is not None:
            with self._changed:
                self._steps_done += 1
                self._full = False
                self._changed.notify_all()

    def close(self) -> None:
        """Forget the announced batches and end the thread. The next announcement starts a new thread."""
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return
        with self._changed:
            self._thread = None
            self._unmatched = 0
            self._announced.clear()
            self._changed.notify_all()
        if thread is not current_thread():  # a garbage collection in the thread itself may close the table
            thread.join()
        self._busy = self._full = False
        self._store.cancel()

    def _find(self, lookups: Sequence[Lookup]) -> tuple[int, int] | None:
        """Returns (position, count) of consecutive announcements that together hold these lookups, or None."""
        for start in range(len(self._announced)):
            end = 0
            for count, announced in enumerate(islice(self._announced, start, None), 1):
                begin, end = end, end + len(announced.lookups)
                if not announced.matches(lookups[begin:end]):
                    break
                if end == len(lookups):
                    return start, count
        return None

    def _take(self, lookups: Sequence[Lookup]) -> Any:
        """Remove and return the oldest announced batch. The caller knows that the batch matches the step."""
        with self._changed:
            first = self._announced[0]
            if not wait_for(self._changed, lambda: first.is_known or first.error, self._thread):
                while len(self._announced) > self._per_step:  # later steps are not prefetched
                    self._announced.pop()
                first.error = MemoryError("the prefetch thread died without raising an error")
            if first.error is None:
                self._unmatched = 0
                self.counts["prefetch_hits"] += 1
                return self._adopt(self._per_step, lookups)
        self._interrupt((0, self._per_step), lookups)
        self._resume()
        raise first.error

    def _interrupt(self, match: tuple[int, int] | None, lookups: Sequence[Lookup] | None) -> Any:
        """Pause the thread and make the store forget every batch. After `_resume`, batches are announced again.

        If a step's `lookups` match announcements (`match`, from `_find`), drops these and all earlier announcements.
        Returns the batch of the matching announcements, or None if no batch was made yet.
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
            if match is not None and lookups is not None:
                for _ in range(match[0]):
                    self._announced.popleft()
                self._unmatched = 0
                return self._adopt(match[1], lookups)
            if self._unmatched > QUEUE:  # probably no step will match the oldest announcement
                self._announced.popleft()
                self._unmatched *= bool(self._announced)
            return None

    def _adopt(self, count: int, lookups: Sequence[Lookup]) -> Any:
        """Drop the `count` oldest announcements and return their batch for this thread's use, None if not made yet."""
        if count != self._per_step:  # existing batches combine a different number of announcements
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
                if not isinstance(step, list):  # this thread was replaced or closed
                    return
                self._busy = True
            try:
                with self._processor.side_stream():
                    self._prepare(step)
            except BaseException as error:
                with self._changed:
                    step[0].error = error

    def _next(self) -> list[_AnnouncedLookups] | None:
        """Returns the announcements of the next step to work on, or None. Announces all batches before fetching one."""
        size, position = self._per_step, None
        steps = 0 if self._is_idle else min(len(self._announced) // size, WINDOW)
        for number, announced in enumerate(islice(self._announced, 0, steps * size, size)):
            if announced.error is not None:
                break  # the step will raise the error; later batches wait until then
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
