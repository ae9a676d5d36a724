"""The time between two steps of a table, in which another thread may read its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Event, Lock
from typing import Any

from ..threads import POLL_SECONDS

Table = Any  # an open table, whose file imports this one


class StepGate:
    """Lets one other thread at a time, the reader, have a table between two steps, or tables that train together.

    A step waits for the reader before it begins. The locks of the tables do not suffice: the thread of the steps may
    take a lock again before the reader gets it, and between the pin and the update of a step the lock is free, although
    the rows that the step evicts have left the table.
    """

    def __init__(self) -> None:
        self.is_wanted = False  # whether a reader waits; steps read it without a lock
        self.closed = False  # whether a step has updated one of the tables and will pin others
        self._one_reader = Lock()
        self._tables: Sequence[Table] = ()
        self._step_waits = Event()  # so no step runs
        self._reader_left = Event()

    def yield_to_reader(self, table: Table) -> None:
        """Wait until the reader has left. Called before a step if `is_wanted` is set. Ctrl-C ends the wait.

        In the middle of a step, while another of the tables is pinned, this returns: the reader waits for its end.
        """
        table.release()
        if self.closed or any(other.in_step for other in self._tables):
            return
        self._step_waits.set()
        self._reader_left.wait()

    @contextmanager
    def between_steps(self, tables: Callable[[], Sequence[Table]], give_up: Callable[[], bool]) -> Iterator[bool]:
        """A block of the reader between two steps, which holds the locks of the tables.

        Yields False if `give_up` returned True while the reader waited; then the block must not use the tables. Raises
        the deferred error of an earlier step. The thread of the steps raises it as well.
        """
        while not self._one_reader.acquire(timeout=POLL_SECONDS):
            if give_up():
                yield False
                return
        with ExitStack() as stack:
            stack.callback(self._one_reader.release)
            self._step_waits.clear()
            self._reader_left.clear()
            self._tables = tables()
            self.is_wanted = True
            stack.callback(self._leave)
            entered = self._enter(stack, give_up)
            for table in self._tables if entered else ():
                table.processor.wait()  # steps may run on another stream than this thread
                if error := table.deferred_error(wait=True):
                    table.raise_later(error)
                    raise error
            yield entered

    def _leave(self) -> None:
        self.is_wanted = False
        self._reader_left.set()

    def _enter(self, stack: ExitStack, give_up: Callable[[], bool]) -> bool:
        while not give_up():
            with ExitStack() as locks:
                ordered = sorted(self._tables, key=id)
                if not all(
                    table.lock.acquire(timeout=POLL_SECONDS) and locks.callback(table.lock.release) for table in ordered
                ):
                    continue
                taken = any(table.in_step or table.observers.is_saved_by_another for table in self._tables)
                if not self.closed and not taken:
                    stack.enter_context(locks.pop_all())
                    return True
            self._step_waits.wait(POLL_SECONDS)
            self._step_waits.clear()
        return False
