"""Reads rows ahead of the code that uses them, and writes files behind the code that makes them, each in a thread.

Reading, checksums and writing release the GIL, so that disk, checksums and the table work at the same time. At the end
of the interpreter, when no thread can be started any more, the caller does all of it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Self, TypeVar
from weakref import finalize

from ...engine.threads import POLL_SECONDS, Thread

T = TypeVar("T")
Task = Callable[[], Any]

_END = object()
_AHEAD = 3  # items of a source that are taken ahead
_WAITING = 2  # tasks that may wait before another is done
_SLOW_SECONDS, _SYNC_THREADS = 3e-3, 4


@contextmanager
def read_ahead(source: Generator[T, None, None]) -> Iterator[Iterator[T]]:
    """The items of `source`. A thread takes some of them ahead; it ends when the block ends.

    An exception of the source is raised instead of the item that it prevented.
    """
    thread, take = TaskThread("tierbed-ahead"), partial(next, source, _END)

    def take_items() -> Iterator[T]:
        while (item := thread.next_result()) is not _END:
            thread.add(take)
            yield item

    try:
        for _ in range(_AHEAD):
            thread.add(take)
        yield take_items()
    finally:
        thread.cancel()
        thread.add(source.close)  # in the thread, which may be running it
        thread.end()


def do_all(tasks: Sequence[Task]) -> None:
    """Do tasks that sync files. Once they take long, several threads do the rest: a disk merges syncs that overlap."""
    begin, done = perf_counter(), 0
    while done < len(tasks) and perf_counter() - begin < _SLOW_SECONDS:
        tasks[done]()
        done += 1
    with ExitStack() as stack:
        threads = [stack.enter_context(TaskThread("tierbed-sync")) for _ in tasks[done : done + _SYNC_THREADS]]
        for thread, task in zip(cycle(threads), tasks[done:], strict=False):
            thread.add(task)


class TaskThread:
    """Does tasks in a thread, in the order in which they are added, and none after one that failed.

    An executor of one thread, but no wait for it hangs if the thread dies, as it may if memory runs out.
    """

    def __init__(self, name: str) -> None:
        self._pending: deque[Future[Any]] = deque()
        self._errors: list[BaseException] = []
        self._queue: SimpleQueue[tuple[Task, Future[Any]] | None] = SimpleQueue()  # may be used by a finalizer
        # Ctrl-C may interrupt __enter__ or __exit__: the thread also ends when this object is collected
        finalize(self, self._queue.put, None).atexit = False
        self._thread = Thread(target=_run, args=(self._queue, self._errors), name=name, daemon=True)
        self._has_thread = _starts(self._thread)

    def add(self, task: Task) -> None:
        """Add a task, whose result `next_result` returns after those of earlier tasks."""
        future: Future[Any] = Future()
        self._pending.append(future)
        if self._has_thread:
            self._queue.put((task, future))
        else:
            _do(task, future, self._errors)

    def next_result(self) -> Any:
        """Wait for the earliest task whose result was not returned yet. Raises what the task, or one before it, did."""
        future = self._pending.popleft()
        while not future.done() and self._thread.is_alive():
            with suppress(TimeoutError):  # of this wait: a TimeoutError of the task is returned
                future.exception(POLL_SECONDS)
        if not future.done():
            raise MemoryError(f"thread {self._thread.name} died without raising an error")
        return future.result()

    def do(self, task: Task) -> None:
        """Add a task that has no result. Raises what an earlier one did."""
        if len(self._pending) > _WAITING:
            self.next_result()
        self.add(task)

    def cancel(self) -> None:
        """Drop the tasks that have not begun."""
        with suppress(IndexError):
            while True:  # another thread may add some meanwhile
                self._pending.popleft().cancel()

    def end(self) -> None:
        """Wait until all tasks are done and the thread has ended. Raises nothing of theirs."""
        if self._has_thread:
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.cancel()
        finally:
            self.end()
        while self._pending:
            self.next_result()


def _run(queue: SimpleQueue[tuple[Task, Future[Any]] | None], errors: list[BaseException]) -> None:
    """The thread. It holds no reference to its `TaskThread`, which can be collected while it runs."""
    while (item := queue.get()) is not None:
        _do(*item, errors)
        del item


def _do(task: Task, future: Future[Any], errors: list[BaseException]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        if errors:
            raise errors[0]
        future.set_result(task())
    except BaseException as error:
        errors.append(error)
        future.set_exception(error)


def _starts(thread: Thread) -> bool:
    if sys.is_finalizing():  # a close that Ctrl-C delayed until here: Python 3.11 would wait for a thread forever
        return False
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
