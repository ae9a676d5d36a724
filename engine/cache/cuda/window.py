"""Batches that a cache on a device brings up ahead of their steps, in another thread and on a stream of its own.

The lock of a table lets one call at a time use the cache. The thread that works ahead holds no such lock: it uses sets
and staging memory between those calls, in turns. The lines of a batch that is up are pinned, so a step may work on them
while the thread brings up others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from ...errors import StoreError
from ...ops.cuda.batch import Batch
from ...ops.cuda.device import Device, Event
from ...signals import uninterrupted
from .cache import Admission, Cache


class _Coming:
    """An announced batch, and whether its rows are up."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.event: Event = None
        self.admission: Admission | None = None  # None until the rows of the batch are up


class CudaWindow:
    """The pinned batch, and the announced batches in the order of their steps."""

    def __init__(self, device: Device, cache: Cache) -> None:
        self._device, self._cache = device, cache
        self._pinned: Admission | None = None
        self._coming: deque[_Coming] = deque()
        self._changed = Condition()
        self._wanted = 0  # how many steps wait for their turn
        # what work ahead must come after: an event after the launches of steps, and the last batch that is over by then
        self._of_steps: tuple[Event, int] = (device.record_event(), cache.now)
        self._ahead = device.record_event()  # an event after what was launched ahead of steps

    @property
    def over(self) -> int:
        """The number of the last batch that is over: it pins no row any more."""
        first = self._pinned or (self._coming[0].admission if self._coming else None)
        return self._cache.now if first is None else (first.number - 1) % (1 << 32)

    @property
    def up(self) -> list[Batch]:
        """The batches whose rows are up."""
        ahead = [coming.batch for coming in tuple(self._coming) if coming.admission is not None]
        return ahead if self._pinned is None else [self._pinned.batch, *ahead]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which this thread alone uses the cache, for all but work ahead of steps. Blocks may be nested."""
        with uninterrupted():
            self._wanted += 1
            with self._changed:
                self._wanted -= 1
                try:
                    self._device.wait_event(self._ahead)
                    try:
                        yield
                    finally:
                        self._of_steps = self._device.record_event(), self.over
                finally:
                    self._changed.notify_all()

    def announce(self, batch: Batch) -> None:
        self._coming.append(_Coming(batch))

    def bring_up(self, batch: Batch, admit: Callable[[int], Admission | None]) -> bool:
        """Let `admit(over)` bring the rows of an announced batch up, ahead of its step.

        Returns False where `admit` returned None because it could not, or where the batch is not the next to come up.
        Returns True otherwise, also where nobody waits for the batch any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted)
            waiting = [one for one in tuple(self._coming) if one.admission is None]
            if not any(one.batch is batch for one in waiting):
                return True
            coming = waiting[0]
            if coming.batch is not batch:  # the step of the batch has begun, and brings its rows up
                return False
            event, over = self._of_steps
            self._device.wait_event(event)
            try:
                admission = admit(over)
            finally:
                coming.event = self._ahead = self._device.record_event()
            coming.admission = admission
            return admission is not None

    def pin(self, batch: Batch, admit: Callable[[int], Admission | None]) -> bool:
        """Pin a batch. Returns whether its rows were up; if not, `admit(over)` has brought them up, or raises."""
        if self._take(batch):
            return True
        with self.turn():
            if self._take(batch):  # the rows came up while this thread waited
                return True
            if self._coming:
                self._coming.popleft()
            batch.faults |= batch.wrong
            self._pinned = admit(self.over)
            return False

    def unpin(self, batch: Batch) -> None:
        if self._pinned is None or self._pinned.batch is not batch:
            raise StoreError("unpin of a batch that is not pinned")
        self._pinned = None

    def cancel(self) -> None:
        """Forget the announced batches. Rows that are up for them stay, like any row that no batch pins."""
        if self._coming:
            with self.turn():
                self._coming.clear()

    def close(self) -> None:
        """Forget every batch, the pinned one included."""
        self._pinned = None
        self._coming.clear()

    def _take(self, batch: Batch) -> bool:
        """Pin a batch if its rows are up. Returns whether they were. Needs no turn."""
        if self._pinned is not None:
            raise StoreError("a batch is still pinned; one step at a time")
        if not self._coming:
            return False
        first = self._coming[0]
        if first.batch is not batch:
            raise StoreError("another batch was announced; cancel it")
        if first.admission is None:
            return False
        self._coming.popleft()
        self._device.wait_event(first.event)
        self._pinned = first.admission
        self._of_steps = self._device.record_event(), self.over
        return True
