"""Threads, and waits that end if the awaited thread dies. A thread may die at any line if memory runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

POLL_SECONDS = 0.05  # how often a wait checks that the thread is still alive


class Thread(threading.Thread):
    """A `threading.Thread` whose `start` raises RuntimeError if the new thread dies before it runs.

    In that case, CPython's `start` would hang (https://github.com/python/cpython/issues/140746).
    """

    def start(self) -> None:
        self._bootstrap = partial(super()._bootstrap)  # type: ignore[misc]  # soon only the thread refers to it
        self._started = _StartedEvent(ref(self._bootstrap), partial(delattr, self, "_bootstrap"))
        try:
            super().start()
        except RuntimeError:
            threading._limbo.pop(self, None)  # type: ignore[attr-defined]  # the thread did not remove itself
            raise


def wait_for(condition: threading.Condition, predicate: Callable[[], Any], thread: threading.Thread | None) -> Any:
    """Wait like `condition.wait_for(predicate)`, but return if `thread` dies. Only `thread` changes the predicate."""
    while not (value := predicate()):
        if thread is None or not thread.is_alive():
            return predicate()  # the thread may have made the predicate true just before the thread ended
        condition.wait(POLL_SECONDS)
    return value


class _StartedEvent(threading.Event):
    """The event that `Thread.start` waits for. `wait` raises RuntimeError once the thread's callable is freed."""

    def __init__(self, find_callable: Callable[[], object], drop_callable: Callable[[], None]) -> None:
        super().__init__()
        self._find_callable, self._drop_callable = find_callable, drop_callable

    def wait(self, timeout: float | None = None) -> bool:
        self._drop_callable()  # now only the thread holds a reference to the callable
        while not super().wait(POLL_SECONDS):
            if self._find_callable() is None and not self.is_set():
                raise RuntimeError("can't start new thread: the thread died at once, probably because memory ran out")
        return True
