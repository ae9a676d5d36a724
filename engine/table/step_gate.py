"""`StepGate` lets another thread read rows between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Event, Lock
from typing import Any

from ..threads import POLL_SECONDS

Table = Any  # an OpenTable, whose module cannot be imported here because it imports this file


class StepGate:
    """Gives one reader thread at a time access to a table, or to all tables of a training group, between two steps.

    The next step waits until the reader is done. The tables' locks alone are not enough. The training thread
    could take a lock again before the reader gets it. Also, a step releases the lock after `pin` and takes it again for
    `update`. In between, the table already lacks the rows that the step evicts.
    """

    def __init__(self) -> None:
        self.has_reader = False  # a reader is waiting; steps read this without a lock
        self.is_mid_step = False  # a step has updated one of the tables and will pin others
        self._reader_lock = Lock()
        self._tables: Sequence[Table] = ()
        self._waiting_step_event = Event()  # set while the training thread waits, so no step runs
        self._reader_exit_event = Event()

    def yield_to_reader(self, table: Table) -> None:
        """Wait until the reader is done. Called before a step if `has_reader` is set. Ctrl-C ends the wait."""
        table.unpin_rows()
        if self.is_mid_step or any(other.is_in_step for other in self._tables):  # the reader waits until that step ends
            return
        self._waiting_step_event.set()
        self._reader_exit_event.wait()

    @contextmanager
    def between_steps(self, tables: Callable[[], Sequence[Table]], give_up: Callable[[], bool]) -> Iterator[bool]:
        """A `with` block that runs between two steps, with the tables' locks held.

        Yields False if `give_up` returned True while the reader waited; the block must then not use the tables. Raises
        the deferred error of an earlier step; the training thread will raise this error as well.
        """
        while not self._reader_lock.acquire(timeout=POLL_SECONDS):
            if give_up():
                yield False
                return
        with ExitStack() as stack:
            stack.callback(self._reader_lock.release)
            self._waiting_step_event.clear()
            self._reader_exit_event.clear()
            self._tables = tables()
            self.has_reader = True
            stack.callback(self._end_reading)
            has_entered = self._lock_tables(stack, give_up)
            for table in self._tables if has_entered else ():
                table.processor.wait()  # steps may use a different stream than this thread
                if error := table.take_deferred_error(wait=True):
                    table.defer_error(error)
                    raise error
            yield has_entered

    def _end_reading(self) -> None:
        self.has_reader = False
        self._reader_exit_event.set()

    def _lock_tables(self, stack: ExitStack, give_up: Callable[[], bool]) -> bool:
        while not give_up():
            with ExitStack() as locks:
                tables = sorted(self._tables, key=id)
                if not all(
                    table.lock.acquire(timeout=POLL_SECONDS) and locks.callback(table.lock.release) for table in tables
                ):
                    continue
                is_used = any(table.is_in_step or table.observers.is_being_saved_by_other_thread for table in tables)
                if not self.is_mid_step and not is_used:
                    stack.enter_context(locks.pop_all())
                    return True
            self._waiting_step_event.wait(POLL_SECONDS)
            self._waiting_step_event.clear()
        return False
