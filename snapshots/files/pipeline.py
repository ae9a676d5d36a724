"""Threads that read rows ahead of their use, and threads that write files in the background.

These threads release the GIL while they read, write or compute checksums. So they run in parallel with the table's
work. While the interpreter exits, no thread can start, so the calling thread does all the work.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypeVar
from weakref import finalize

from ...engine.durable import fsync_file
from ...engine.threads import POLL_SECONDS, Thread

T = TypeVar("T")
Task = Callable[[], Any]

_END = object()
_READ_AHEAD_ITEMS = 3  # how many items are read ahead
_MAX_WAITING_TASKS = 2  # how many tasks may wait before `TaskThread.submit` blocks
_SLOW_SECONDS, _SYNC_THREADS = 3e-3, 4


@contextmanager
def read_ahead(items: Generator[T, None, None]) -> Iterator[Iterator[T]]:
    """Yield an iterator over `items`, which a thread reads ahead. The thread ends with the `with` block."""
    thread, read_next = TaskThread("tierbed-ahead"), partial(next, items, _END)

    def take_items() -> Iterator[T]:
        while (item := thread.next_result()) is not _END:
            thread.add(read_next)
            yield item

    try:
        for _ in range(_READ_AHEAD_ITEMS):
            thread.add(read_next)
        yield take_items()
    finally:
        thread.cancel()
        thread.add(items.close)  # close in the thread, because it may still read `items`
        thread.end()


def run_syncs(tasks: Sequence[Task]) -> None:
    """Run tasks that sync files. If syncs are slow, run them in several threads: a disk merges parallel syncs."""
    start, count = perf_counter(), 0
    while count < len(tasks) and perf_counter() - start < _SLOW_SECONDS:
        tasks[count]()
        count += 1
    with ExitStack() as stack:
        threads = [stack.enter_context(TaskThread("tierbed-sync")) for _ in tasks[count : count + _SYNC_THREADS]]
        for thread, task in zip(cycle(threads), tasks[count:], strict=False):
            thread.add(task)


def sync_new_files(folder: Path) -> None:
    """Make a folder durable, with its subfolders and files. Skips hard links to durable files. Raises OSError."""
    paths = (folder, *folder.rglob("*"))
    run_syncs([partial(fsync_file, path) for path in paths if path.is_dir() or path.stat().st_nlink == 1])


class TaskThread(AbstractContextManager["TaskThread"]):
    """Runs tasks in one thread, in the order of `add` calls. After a task has failed, no more tasks run.

    Works like an executor with one thread, but a wait never hangs if the thread dies because memory runs out.
    """

    def __init__(self, name: str) -> None:
        self._pending: deque[Future[Any]] = deque()
        self._errors: list[BaseException] = []
        self._queue: SimpleQueue[tuple[Task, Future[Any]] | None] = SimpleQueue()  # `put` is safe in a finalizer
        # Ctrl-C may interrupt __enter__ or __exit__, so garbage collection of this object also ends the thread
        finalize(self, self._queue.put, None).atexit = False
        self._thread = Thread(target=_run_tasks, args=(self._queue, self._errors), name=name, daemon=True)
        self._has_thread = False
        # after Ctrl-C, a close may run while the interpreter exits; Python 3.11 then waits forever for new threads
        if not sys.is_finalizing():
            with suppress(RuntimeError):
                self._thread.start()
                self._has_thread = True

    def add(self, task: Task) -> None:
        """Add a task. Each call of `next_result` returns the result of the next task."""
        future: Future[Any] = Future()
        self._pending.append(future)
        if self._has_thread:
            self._queue.put((task, future))
        else:
            _run_task(task, future, self._errors)

    def next_result(self) -> Any:
        """Wait for the next task, and return its result. Raises the error of this task or of an earlier task."""
        future = self._pending.popleft()
        while not future.done() and self._thread.is_alive():
            with suppress(TimeoutError):  # raised if the wait timed out; a task's error is returned, not raised
                future.exception(POLL_SECONDS)
        if not future.done():
            raise MemoryError(f"thread {self._thread.name} died without raising an error")
        return future.result()

    def submit(self, task: Task) -> None:
        """Add a task whose result is not needed. Raises the error of an earlier task."""
        if len(self._pending) > _MAX_WAITING_TASKS:
            self.next_result()
        self.add(task)

    def cancel(self) -> None:
        """Cancel the tasks that have not started."""
        with suppress(IndexError):
            while True:  # another thread may add tasks meanwhile
                self._pending.popleft().cancel()

    def end(self) -> None:
        """Wait until all tasks are done and the thread has ended. Errors of tasks are not raised."""
        if self._has_thread:
            self._queue.put(None)
            self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.cancel()
        finally:
            self.end()
        while self._pending:
            self.next_result()


def _run_tasks(queue: SimpleQueue[tuple[Task, Future[Any]] | None], errors: list[BaseException]) -> None:
    """Run tasks in the thread. Keeps no reference to the `TaskThread`, which can thus be garbage collected."""
    while (item := queue.get()) is not None:
        _run_task(*item, errors)
        del item


def _run_task(task: Task, future: Future[Any], errors: list[BaseException]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        if errors:
            raise errors[0]
        future.set_result(task())
    except BaseException as error:
        errors.append(error)
        future.set_exception(error)
