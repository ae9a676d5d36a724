"""The time between two steps of a table, when another thread may have its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Event, Lock, RLock
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


class StepGate:
    """Lets one thread at a time visit a table, or tables that are trained together, between two steps.

    A step waits for a visitor before it begins. The locks of the tables do not suffice. The thread of the steps may
    take a lock again before the visitor gets it. And between the pin and the update of a step the lock is free, while
    the rows that it evicts have left already.
    """

    def __init__(self) -> None:
        self.wanted = False  # whether a visitor waits; steps look at it without a lock
        self.closed = False  # whether a step has updated one of the tables, and is to pin others
        self._one = Lock()  # visitor at a time
        self._tables: Sequence[Visited] = ()
        self._arrived = Event()  # set when a step waits, so none is under way
        self._over = Event()

    def give_way(self, table: Visited) -> None:
        """Wait until the visitor has gone. Called before a step, where `wanted` is set. Ctrl-C ends the wait.

        In the middle of a step, where another of the tables is pinned, it goes on: the visitor waits for its end.
        """
        table.release()
        if self.closed or any(other.in_step for other in self._tables):
            return
        self._arrived.set()
        self._over.wait()

    @contextmanager
    def visit(self, tables: Callable[[], Sequence[Visited]], give_up: Callable[[], bool]) -> Iterator[bool]:
        """A block of another thread between two steps, with the locks of the tables held and no step under way.

        Yields False where `give_up` returned True while the visitor waited; then the block must not use the tables.
        Raises the error of an earlier step that the device found late. The thread of the steps raises it as well.
        """
        while not self._one.acquire(timeout=_LOOK_AGAIN):
            if give_up():
                yield False
                return
        with ExitStack() as held:
            held.callback(self._one.release)
            self._arrived.clear()
            self._over.clear()
            self._tables = tables()
            self.wanted = True
            held.callback(self._end)
            entered = self._enter(held, give_up)
            if entered:
                for table in self._tables:
                    _catch_up_with_device(table)
            yield entered

    def _end(self) -> None:
        self.wanted = False
        self._over.set()

    def _enter(self, held: ExitStack, give_up: Callable[[], bool]) -> bool:
        while not give_up():
            with ExitStack() as locks:
                if not all(_locked(table, locks) for table in sorted(self._tables, key=id)):
                    continue
                if not self.closed and not any(table.in_step for table in self._tables):
                    held.enter_context(locks.pop_all())
                    return True
            self._arrived.wait(_LOOK_AGAIN)
            self._arrived.clear()
        return False


def _locked(table: Visited, locks: ExitStack) -> bool:
    if not table.lock.acquire(timeout=_LOOK_AGAIN):
        return False
    locks.callback(table.lock.release)
    return True


def _catch_up_with_device(table: Visited) -> None:
    table.processor.wait()  # steps may run on another stream than this thread
    if late := table.deferred_error(wait=True):
        table.visitors_error = late
        raise late
