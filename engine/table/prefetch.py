"""Prefetch: a separate thread prepares the batches of future steps while the current step runs.

The user announces the lookups of future steps. The thread prepares one step after another. First, the thread
deduplicates the step's ids into a batch and announces the batch to the top tier, which keeps the rows cached.
Then the thread fetches and pins the rows. When the step runs, it takes the prepared batch instead of making its own.

An announcement is only a hint. A step uses a prepared batch only if its ids equal the announced ids. Row values are
still read when the step itself runs, so an announcement changes when work is done, never the results. If a step was not
announced, or is out of order, the thread pauses and the tier forgets all batches. The others are announced again later.

One step may match several announcements, for example when gradients accumulate over micro-batches. The first such step
shows how many announcements belong together. From then on, the thread joins that many announcements into each batch.
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
from ..store.interfaces import TopTier
from ..threads import Thread, wait_for

MAX_WINDOW = 31  # maximum number of future batches that the store knows; the queue holds later announcements
MAX_QUEUE = 4 * MAX_WINDOW  # maximum number of waiting announcements

ZERO_COUNTS = {"prefetch_hits": 0, "prefetch_misses": 0, "prefetch_dropped": 0}


class _Announcement:
    """An announcement's lookups, copied because the caller may reuse its tensors."""

    def __init__(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> None:
        copy = torch.clone if processor.defers_errors else _copy_tensor
        self.lookups = [copy_lookup(lookup, copy) for lookup in lookups]
        self.copy_event = processor.record_event()
        # Comparing ids on a GPU would make the CPU wait. Lookups in the same memory therefore count as equal here, and
        # `adopt` compares the ids later.
        self._memory_keys = [_make_memory_key(lookup) for lookup in lookups] if processor.defers_errors else None
        self._originals = lookups  # keeps the tensors alive, so no other tensor gets their memory
        self.batch: Any = None  # the whole step's batch, if this is the step's first announcement
        self.ready_event: Any = None  # a GPU event that was recorded when `batch` was made
        self.is_announced = False  # True if the batch was announced to the top tier
        self.is_fetched = False  # True if the batch's rows are in the top tier
        self.error: BaseException | None = None

    def matches(self, lookups: Sequence[Lookup]) -> bool:
        if self._memory_keys is not None and self._memory_keys == [_make_memory_key(lookup) for lookup in lookups]:
            return True
        return are_lookups_equal(self.lookups, lookups)


def _join_lookups(announcements: Sequence[_Announcement]) -> list[Lookup]:
    return [lookup for announcement in announcements for lookup in announcement.lookups]


def _copy_tensor(part: Tensor) -> Tensor:
    """Copy a CPU tensor with NumPy. For large tensors, torch's copy would use threads and slow down row fetches."""
    return torch.from_numpy(part.numpy().copy())


def _make_memory_key(lookup: Lookup) -> tuple[Any, ...]:
    """Return a value to compare. Lookups in the same memory have equal values, until torch writes to this memory."""
    memory = (fingerprint(part, by_memory=True) for part in lookup.tensors)
    return lookup.pooling, lookup.feature_columns, *memory


class Prefetcher:
    """Prepares a table's announced batches in order. The thread starts at the first announcement."""

    def __init__(self, processor: Processor[Any], top_tier: TopTier[Any], num_threads: int) -> None:
        self._processor, self._top_tier, self._num_threads = processor, top_tier, num_threads
        self.counts = dict(ZERO_COUNTS)
        self._announcements: deque[_Announcement] = deque()  # not used yet, oldest first; empty if no thread runs
        self._condition = Condition()
        self._thread: Thread | None = None  # the thread that prepares batches; any older thread ends
        self._process_id = 0  # the process that started the thread
        self._is_busy = False  # True while the thread works without holding the lock
        self._is_paused = False  # True while the thread must not begin work
        self._num_steps = 0
        self._is_tier_full = False  # True if the tier has no room for more rows until a step ends
        self._num_unmatched = 0  # consecutive steps that were not announced
        self._announcements_per_step = 1  # how many announcements the last announced step matched

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def announce(self, lookups: Sequence[Lookup]) -> None:
        """Announce a future step's lookups, in the order of steps. Raises RuntimeError if no thread can be started."""
        if len(self._announcements) == MAX_QUEUE:  # no step has used the waiting announcements so far
            self.counts["prefetch_dropped"] += 1
            if not self._is_idle:
                return
        announcement = _Announcement(lookups, self._processor)
        with self._condition:
            if self._thread is None or not self._thread.is_alive():
                self._is_busy = False
                thread = Thread(target=self._run, name="tierbed-prefetch", daemon=True)
                thread.start()  # may raise RuntimeError; the new thread waits for the lock
                self._thread, self._process_id = thread, os.getpid()
            if len(self._announcements) == MAX_QUEUE:
                self._announcements.popleft()
            self._announcements.append(announcement)
            self._condition.notify_all()

    @property
    def _is_idle(self) -> bool:
        """True after many unannounced steps. The thread then does nothing until a step matches an announcement."""
        return self._num_unmatched > MAX_WINDOW

    @contextmanager
    def enter_step(self, lookups: Sequence[Lookup] | None) -> Iterator[Any]:
        """Enter a block that pins a step's rows. Yields the step's prepared batch, or None if no batch is prepared.

        If `lookups` is None, the block is not a step and uses no announced batch. Raises the thread's error if the
        thread failed to prepare this step's batch.
        """
        if not self._announcements:
            yield None
            return
        match = self._find_match(lookups) if lookups else None
        if lookups is not None and match == (0, self._announcements_per_step) and not self._is_idle:
            batch = self._take_batch(lookups)
            try:
                yield batch
            except BaseException:  # the batch may not be pinned, so the tier must forget it as well
                self._interrupt(None, None)
                self._resume()
                raise
            return
        batch = self._interrupt(match, lookups)
        try:
            yield batch
        finally:
            self._resume()

    def record_step_end(self) -> None:
        """Record that a step has ended. The tier may now have room to fetch another batch."""
        if self._thread is not None:
            with self._condition:
                self._num_steps += 1
                self._is_tier_full = False
                self._condition.notify_all()

    def close(self) -> None:
        """Forget the announced batches and end the thread. The next announcement starts a new thread."""
        thread = self._thread
        if thread is None or self._process_id != os.getpid():
            return
        with self._condition:
            self._thread, self._num_unmatched = None, 0
            self._announcements.clear()
            self._condition.notify_all()
        if thread is not current_thread():  # a garbage collection in the thread itself may close the table
            thread.join()
        self._is_busy = self._is_tier_full = False
        self._top_tier.cancel_announced()

    def _find_match(self, lookups: Sequence[Lookup]) -> tuple[int, int] | None:
        """Return (position, count) of consecutive announcements that together hold these lookups, or None."""
        for start in range(len(self._announcements)):
            end = 0
            for count, announcement in enumerate(islice(self._announcements, start, None), 1):
                begin, end = end, end + len(announcement.lookups)
                if not announcement.matches(lookups[begin:end]):
                    break
                if end == len(lookups):
                    return start, count
        return None

    def _take_batch(self, lookups: Sequence[Lookup]) -> Any:
        """Remove and return the oldest announced batch. The caller has checked that the batch matches the step."""
        with self._condition:
            first = self._announcements[0]
            if not wait_for(self._condition, lambda: first.is_announced or first.error, self._thread):
                while len(self._announcements) > self._announcements_per_step:  # later steps are not prefetched
                    self._announcements.pop()
                first.error = MemoryError(
                    "the prefetch thread ended without an error, probably because memory ran out; free memory or "
                    "announce fewer batches"
                )
            if first.error is None:
                self._num_unmatched = 0
                self.counts["prefetch_hits"] += 1
                return self._adopt_batch(self._announcements_per_step, lookups)
        self._interrupt((0, self._announcements_per_step), lookups)
        self._resume()
        raise first.error

    def _interrupt(self, match: tuple[int, int] | None, lookups: Sequence[Lookup] | None) -> Any:
        """Pause the thread and make the tier forget every batch. After `_resume`, the thread announces batches again.

        If `match` (from `_find_match`) is not None, drop the matching announcements and all earlier announcements.
        Return the batch that was made for the matching announcements, if there is one.
        """
        with self._condition:
            self._is_paused = True
            if not wait_for(self._condition, lambda: not self._is_busy, self._thread):
                self._is_busy = False  # the thread died
            self._top_tier.cancel_announced()
            for announcement in self._announcements:
                announcement.is_announced = announcement.is_fetched = False
            self._is_tier_full = False
            if lookups is not None:
                self.counts["prefetch_misses"] += 1
                self._num_unmatched += 1
            if match is not None and lookups is not None:
                for _ in range(match[0]):
                    self._announcements.popleft()
                self._num_unmatched = 0
                return self._adopt_batch(match[1], lookups)
            if self._num_unmatched > MAX_QUEUE:  # probably no step will match the oldest announcement
                self._announcements.popleft()
                self._num_unmatched *= bool(self._announcements)
            return None

    def _adopt_batch(self, count: int, lookups: Sequence[Lookup]) -> Any:
        """Drop the `count` oldest announcements. If their batch exists, make it usable by this thread and return it."""
        if count != self._announcements_per_step:  # drop the prepared batches, because each joins a different count
            self._announcements_per_step = count
            for announcement in self._announcements:
                announcement.batch = None
        first, *others = [self._announcements.popleft() for _ in range(count)]
        if first.batch is not None:
            self._processor.wait_event(first.ready_event)
            self._processor.adopt(first.batch, _join_lookups([first, *others]), lookups)
        return first.batch

    def _resume(self) -> None:
        with self._condition:
            self._is_paused = False
            self._condition.notify_all()

    def _run(self) -> None:
        _core.use_own_pool(self._num_threads)
        this_thread = current_thread()
        while True:
            with self._condition:
                if self._thread is this_thread:
                    self._is_busy = False
                    self._condition.notify_all()
                announcements = self._condition.wait_for(lambda: self._thread is not this_thread or self._find_work())
                if not isinstance(announcements, list):  # this thread was replaced or closed
                    return
                self._is_busy = True
            try:
                with self._processor.enter_side_stream():
                    self._prepare(announcements)
            except BaseException as error:
                with self._condition:
                    announcements[0].error = error

    def _find_work(self) -> list[_Announcement] | None:
        """Return the announcements of the step to work on, or None. All steps are announced before rows are fetched."""
        size, position = self._announcements_per_step, None
        steps = 0 if self._is_idle or self._is_paused else min(len(self._announcements) // size, MAX_WINDOW)
        for number, announcement in enumerate(islice(self._announcements, 0, steps * size, size)):
            if announcement.error is not None:
                break  # the step will raise the error; later batches wait until then
            if not announcement.is_announced:
                return [*islice(self._announcements, number * size, (number + 1) * size)]
            if not announcement.is_fetched and not self._is_tier_full and position is None:
                position = number * size
        return None if position is None else [*islice(self._announcements, position, position + size)]

    def _prepare(self, announcements: list[_Announcement]) -> None:
        first = announcements[0]
        if first.is_announced:
            num_steps = self._num_steps
            is_fetched = self._top_tier.prefetch(first.batch)
            with self._condition:
                first.is_fetched = is_fetched
                self._is_tier_full = not is_fetched and num_steps == self._num_steps
            return
        if first.batch is None:
            for announcement in announcements:
                self._processor.wait_event(announcement.copy_event)
            batch = self._processor.make_batch(_join_lookups(announcements), is_future=True)
            first.ready_event = self._processor.record_event()
            first.batch = batch
        self._top_tier.announce(first.batch)
        with self._condition:
            first.is_announced = True
            self._condition.notify_all()
