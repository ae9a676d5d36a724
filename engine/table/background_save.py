"""Saves snapshots while training continues, in a background thread or in the calling thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from math import inf
from threading import Condition, Event, current_thread, get_native_id, main_thread
from time import monotonic, thread_time
from typing import Any, Protocol, TypeVar

from .. import _core
from ..errors import StoreError
from ..row_format import Chunks
from ..store.image import Image
from ..threads import POLL_SECONDS, Thread

NICENESS = 10  # how much nicer the saving thread is than training threads
PAUSE_RATIO = 5.0  # pause / processor time of the thread; limits memory and disk traffic, unlike a low priority

log = logging.getLogger("tierbed")
T = TypeVar("T")


class SaveHandle(Protocol):
    """A save that may still be running. `label` names the snapshot in messages."""

    label: str

    @property
    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ForegroundSave:
    """A save by the calling thread, from an image of the rows. Other threads can use the table meanwhile."""

    def __init__(self, label: str, image: Image, lock: Any) -> None:
        """`lock` is the table's lock, held by the caller."""
        self.label, self.image = label, image
        self._condition, self._thread = Condition(lock), current_thread()
        self.done = self.is_running = False

    @property
    def is_run_by_other_thread(self) -> bool:
        """True while another, living thread runs this save."""
        return not self.done and current_thread() is not self._thread and self._thread.is_alive()

    def read(self, write: Callable[[list[Chunks]], T]) -> T:
        """Pass the image's parts to `write`, close the image, and return the result. The save runs until `end`."""
        self.is_running = True
        try:
            with ExitStack() as stack:  # closes the parts, because a traceback would keep them open
                return write([stack.enter_context(closing(part)) for part in self.image.parts()])  # type: ignore[type-var]
        finally:
            self.image.close()

    def chunks(self) -> Iterator[Any]:
        """Yield the image's chunks, then end the save. The iterator is closed or exhausted by the save's thread."""
        self.is_running = True
        try:
            with closing(self.image.chunks()) as chunks:  # type: ignore[type-var]
                yield from chunks
        finally:
            self.end()

    def end(self) -> None:
        """Mark the save as ended, after its snapshot was published or dropped. May be called again."""
        self.image.close()
        with self._condition:
            self.done = True
            self._condition.notify_all()

    def finish(self) -> None:
        """If another thread runs this save, wait until the save ends."""
        with self._condition:
            while self.is_run_by_other_thread:
                self._condition.wait(POLL_SECONDS)


class BackgroundSave:
    """A save by a background thread, which passes an image's rows to `write` and then closes the image.

    `label` names the snapshot in messages. `lock` is the table's lock; a waiting call releases this lock. Raises
    RuntimeError if the system cannot start a thread.
    """

    def __init__(self, label: str, image: Image, write: Callable[[Chunks], object], lock: Any) -> None:
        self.label = label
        self._process_id = os.getpid()
        self._condition = Condition(lock)
        self._hurry_event = Event()  # set when another thread starts to wait for the save
        self._end_event = Event()
        self._error: BaseException | None = None
        self._is_error_raised, self.image = False, image
        self._thread = Thread(target=self._run, args=(write,), name="tierbed-save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        is_alive = self._thread.is_alive()  # read before `_end_event`, because the thread sets the event, then ends
        if not is_alive and not self._end_event.is_set() and self._process_id == os.getpid():
            thread_error = MemoryError(f"{self.label}: the saving thread died without raising an error")
            self._error = self._error or thread_error
            self.image.close()
            self._end_event.set()
            log.error("%s was not saved: %s", self.label, self._error)
        return self._end_event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save ends, for at most `timeout` seconds. Returns False if the save still runs.

        Ctrl-C ends the wait, not the save. If the save failed, there is no snapshot, and `wait` raises its error.
        Raises StoreError in a forked process, because the thread does not exist there.
        """
        if not self.done and self._process_id != os.getpid():
            raise StoreError(f"{self.label} is being saved by process {self._process_id}; wait for it there")
        done = self._wait_for_end(timeout)
        if self._error is not None:
            self._is_error_raised = True
            raise self._error
        return done

    def skip_pauses(self) -> None:
        self._hurry_event.set()

    def await_end(self) -> None:
        """Wait until the save ends, except in the saving thread. Its error is raised later."""
        if self._process_id == os.getpid() and current_thread() is not self._thread:
            self._wait_for_end()

    def finish(self) -> BaseException | None:
        """As `await_end`, but returns the save's error, unless it was raised or returned before."""
        self.await_end()
        if not self.done or self._is_error_raised:
            return None
        self._is_error_raised = True
        return self._error

    def _wait_for_end(self, timeout: float | None = None) -> bool:
        self._hurry_event.set()
        end = inf if timeout is None else monotonic() + timeout
        # A signal handler that waits in the middle of a step must release the lock. Other callers do not hold the lock.
        is_lock_held = self._condition._is_owned()  # type: ignore[attr-defined]
        while not self.done and monotonic() < end:
            (self._condition if is_lock_held else self._end_event).wait(min(POLL_SECONDS, end - monotonic()))
        return self.done

    def _read_paced(self, image: Image) -> Chunks:
        """Yield the image's rows with pauses, to slow down steps as little as possible."""
        begin = thread_time()  # not the wall time, which grows with the load and with waits for steps
        with closing(image.chunks()) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                yield chunk
                if not image.is_urgent and main_thread().is_alive():  # neither a step nor the program's exit waits
                    self._hurry_event.wait(PAUSE_RATIO * (thread_time() - begin))
                begin = thread_time()

    def _run(self, write: Callable[[Chunks], object]) -> None:
        try:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
            _core.use_own_pool(1)
            with closing(self._read_paced(self.image)) as chunks:  # type: ignore[type-var]  # as in `read`
                write(chunks)
        except BaseException as error:
            self._error = error
            log.error("%s was not saved: %s", self.label, error)
        finally:
            try:
                self.image.close()
            finally:
                with self._condition:
                    self._end_event.set()
                    self._condition.notify_all()
