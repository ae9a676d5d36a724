"""Work in threads beside the caller's: reading a source ahead of its user, and doing tasks behind their giver.

Reading, checksums and writing let other threads of Python run, so that disk, checksum and table work at one time. At
the end of the interpreter, where no thread can be started any more, the caller does all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue, SimpleQueue
from threading import Semaphore
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import finalize

from ...engine.threads import POLL_SECONDS, Thread

T = TypeVar("T")

_END = object()


@contextmanager
def read_ahead(source: Generator[T, None, None], items: int = 2) -> Iterator[Iterator[T]]:
    """The items of `source`. A thread takes `items` of them ahead; it ends when the block ends.

    An exception of the source is raised where its item would have come.
    """
    taken: Queue[Any] = Queue(items)
    wanted = True

    def take() -> None:
        error = None
        try:
            for item in source:
                taken.put((item, None))
                if not wanted:
                    break
            source.close()
        except BaseException as raised:
            error = raised
        taken.put((_END, error))

    def next_taken() -> Any:
        while True:
            alive = thread.is_alive()
            with suppress(Empty):
                return taken.get(timeout=POLL_SECONDS) if alive else taken.get_nowait()
            if not alive:
                raise MemoryError("the thread that reads ahead ended without a word")

    def given() -> Iterator[T]:
        while True:
            item, error = next_taken()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item

    thread = Thread(target=take, name="tierbed-ahead", daemon=True)
    if not _starts(thread):
        yield source
        return
    try:
        yield given()
    finally:
        wanted = False
        while thread.is_alive():
            with suppress(Empty):
                taken.get(timeout=0.01)
        thread.join()


class WriterThread:
    """Does tasks in a thread, in the order in which they are given. Few tasks wait at a time.

    An exception of a task is raised by a later `do` or by the end of the block, and no task after it is begun.
    """

    def __init__(self, waiting: int = 2) -> None:
        self._tasks = _Tasks(waiting)
        # Ctrl-C may cut off the block's beginning or end; no cycle with an error, whose traceback holds this object
        finalize(self, self._tasks.queue.put, None).atexit = False
        self._thread = Thread(target=self._tasks.run, name="tierbed-behind", daemon=True)
        self._has_thread = _starts(self._thread)

    def do(self, task: Callable[[], None]) -> None:
        if self._tasks.error is not None:
            raise self._tasks.error
        if self._has_thread:
            self._tasks.add(task, self._thread)
        else:
            task()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tasks.error = error
        if self._has_thread:
            self._tasks.queue.put(None)
            self._thread.join()
            if not self._tasks.ended and self._tasks.error is None:
                self._tasks.error = _silent()
        if self._tasks.error is not None and error is None:
            raise self._tasks.error


class _Tasks:
    """The tasks of a `WriterThread`. Its thread holds them and not the `WriterThread`, which can be let go."""

    def __init__(self, waiting: int) -> None:
        self.error: BaseException | None = None
        self.ended = False  # whether all tasks are done
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # garbage may be collected in the midst
        self._room = Semaphore(waiting)

    def add(self, task: Callable[[], None], thread: Thread) -> None:
        while not self._room.acquire(timeout=POLL_SECONDS):
            if not thread.is_alive():
                raise self.error or _silent()
        self.queue.put(task)

    def run(self) -> None:
        while (task := self.queue.get()) is not None:
            self._room.release()
            if self.error is None:
                try:
                    task()
                except BaseException as error:
                    self.error = error
        self.ended = True


def _silent() -> MemoryError:
    return MemoryError("the thread that writes behind ended without a word")


def _starts(thread: Thread) -> bool:
    if sys.is_finalizing():  # a close that Ctrl-C put off until here: Python 3.11 would wait for a thread for ever
        return False
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
