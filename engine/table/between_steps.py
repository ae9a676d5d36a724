"""The time between two steps of a table, when another thread may have its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, RLock
from typing import Any, Protocol

from ..errors import TierbedError

_LOOK_AGAIN = 0.05  # seconds between two looks of a waiting visitor


class Visited(Protocol):
    """What a visit between two steps needs of an open table."""

    lock: RLock
    processor: Any
    visitors_error: TierbedError | None

    @property
    def in_step(self) -> bool: ...

    def release(self) -> None: ...

    def deferred_error(self, wait: bool) -> TierbedError | None: ...


class BetweenSteps:
    """Lets one thread at a time visit the table between two steps. A step waits for a visitor before it begins.

    The lock of the table does not suffice. The thread of the steps may take the lock again before the visitor gets it.
    And between the pin and the update of a step the lock is free, while the rows that it evicts have left already.
    """

    def __init__(self) -> None:
        self.wanted = False  # whether a visitor waits; steps look at it without a lock
        self._arrived = Event()  # set when a step waits, so none is under way
        self._over = Event()

    def give_way(self, table: Visited) -> None:
        """Wait until the visitor has gone. Called before a step, where `wanted` is set. Ctrl-C ends the wait."""
        table.release()
        self._arrived.set()
        self._over.wait()

    @contextmanager
    def visit(self, table: Visited, give_up: Callable[[], bool]) -> Iterator[bool]:
        """A block of another thread between two steps, with the table's lock held and no step under way.

        Yields False where `give_up` returned True while the visitor waited; then the block must not use the table.
        Raises the error of an earlier step that the device found late. The thread of the steps raises it as well.
        """
        self._arrived.clear()
        self._over.clear()
        self.wanted = True
        entered = False
        try:
            entered = self._enter(table, give_up)
            if entered:
                _catch_up_with_device(table)
            yield entered
        finally:
            self.wanted = False
            if entered:
                table.lock.release()
            self._over.set()

    def _enter(self, table: Visited, give_up: Callable[[], bool]) -> bool:
        while not give_up():
            if not table.lock.acquire(timeout=_LOOK_AGAIN):
                continue
            if not table.in_step:
                return True
            table.lock.release()
            self._arrived.wait(_LOOK_AGAIN)
            self._arrived.clear()
        return False


def _catch_up_with_device(table: Visited) -> None:
    table.processor.wait()  # steps may run on another stream than this thread
    if late := table.deferred_error(wait=True):
        table.visitors_error = late
        raise late
