"""A snapshot that is saved by a thread of its own, while training goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Condition, Event, current_thread, get_native_id, main_thread
from time import monotonic, perf_counter
from typing import Any, Protocol

from .. import _core
from ..errors import StoreError
from ..row_format import Chunks
from ..store.image import Image
from ..threads import POLL_SECONDS, Thread, wait_for

NICER = 10  # the niceness above that of the threads that train
REST = 5.0  # seconds of rest for each second of work: memory and disk are shared, whatever the priority

log = logging.getLogger("tierbed")


class SaveHandle(Protocol):
    """A snapshot that is saved in the background. `what` names it in messages."""

    what: str

    @property
    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class BackgroundSave:
    """Hands the rows of an image to `write` in a thread of its own, and closes the image after it.

    `what` names the snapshot in messages. `lock` is the table's lock, which a call that waits releases meanwhile.
    Raises RuntimeError where the system gives no thread.
    """

    def __init__(self, what: str, image: Image, write: Callable[[Chunks], object], lock: Any) -> None:
        self.what = what
        self._process = os.getpid()
        self._over = Condition(lock)
        self._hurry = Event()  # set while somebody waits
        self._ended = Event()
        self._error: BaseException | None = None
        self._told = False
        self.image = image
        self._thread = Thread(target=self._run, args=(write,), name="tierbed-save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        alive = self._thread.is_alive()  # asked first: a thread sets its result before it ends
        if not alive and not self._ended.is_set() and self._process == os.getpid():
            self._lose()
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save ends, for `timeout` seconds at most; False where it goes on. Ctrl-C ends the wait alone.

        Raises what went wrong with the save: then there is no snapshot. StoreError in a forked process, which lacks the
        thread.
        """
        if not self.done and self._process != os.getpid():
            raise StoreError(f"{self.what} is being saved by process {self._process}; wait for it there")
        self._hurry.set()
        if self._over._is_owned():  # type: ignore[attr-defined]  # by a step that a signal came in; its handler waits
            with self._over:
                wait_for(self._over, self._ended.is_set, self._thread, timeout)
        else:
            end = None if timeout is None else monotonic() + timeout
            while not self.done and (end is None or monotonic() < end):  # not for the lock: a step may hold it long
                self._ended.wait(POLL_SECONDS if end is None else min(POLL_SECONDS, end - monotonic()))
        done = self.done  # finds as well that the thread is no more
        if self._error is not None:
            self._told = True
            raise self._error
        return done

    def hurry(self) -> None:
        """Let the save end as soon as it can."""
        self._hurry.set()

    def finish(self) -> BaseException | None:
        """Wait until the save ends, unless its own thread calls. Returns its error once, if `wait` did not raise it."""
        if not self.done and self._process == os.getpid() and current_thread() is not self._thread:
            self._hurry.set()
            with self._over:
                wait_for(self._over, self._ended.is_set, self._thread)
        if not self.done or self._told:
            return None
        self._told = True
        return self._error

    def _paced(self, image: Image) -> Chunks:
        """The rows of the image, read with rests, so that steps go on at nearly their pace."""
        begin = perf_counter()
        with closing(image.chunks()) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                yield chunk
                if not image.is_pressed and main_thread().is_alive():  # else steps or the exit of the process wait
                    self._hurry.wait(REST * (perf_counter() - begin))
                begin = perf_counter()

    def _lose(self) -> None:
        """Note that the thread of the save ended without a result."""
        self._error = self._error or MemoryError(f"{self.what}: the thread that saves it ended without a word")
        self.image.close()
        self._ended.set()
        log.error("%s was not saved: %s", self.what, self._error)

    def _run(self, write: Callable[[Chunks], object]) -> None:
        try:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))
            _core.use_own_pool(1)
            with closing(self._paced(self.image)) as chunks:  # type: ignore[type-var]  # an error's traceback holds it
                write(chunks)
        except BaseException as error:
            self._error = error
            log.error("%s was not saved: %s", self.what, error)
        finally:
            try:
                self.image.close()
            finally:
                with self._over:
                    self._ended.set()
                    self._over.notify_all()
