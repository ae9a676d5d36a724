"""Threads that nobody waits for forever: if memory runs out, a thread may die at any line, and waits must then end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

POLL_SECONDS = 0.05  # how often a wait checks that the thread is still alive


class Thread(threading.Thread):
    """A `threading.Thread` whose `start` raises RuntimeError if the new thread dies before it runs.

    CPython's `start` would hang (https://github.com/python/cpython/issues/140746).
    """

    def start(self) -> None:
        self._bootstrap = partial(super()._bootstrap)  # type: ignore[misc]  # later only the thread refers to it
        self._started = _Started(ref(self._bootstrap), partial(delattr, self, "_bootstrap"))
        try:
            super().start()
        except RuntimeError:
            threading._limbo.pop(self, None)  # type: ignore[attr-defined]  # the thread did not remove itself
            raise


def wait_for(condition: threading.Condition, predicate: Callable[[], Any], thread: threading.Thread | None) -> Any:
    """Wait like `condition.wait_for(predicate)`, but return if `thread` dies, as only it makes the predicate true."""
    while not (value := predicate()):
        if thread is None or not thread.is_alive():
            return predicate()  # the thread may have made it true just before it ended
        condition.wait(POLL_SECONDS)
    return value


class _Started(threading.Event):
    """The event that `Thread.start` waits for. The wait fails once the callable that the thread runs was freed."""

    def __init__(self, running: Callable[[], object], forget: Callable[[], None]) -> None:
        super().__init__()
        self._running, self._forget = running, forget

    def wait(self, timeout: float | None = None) -> bool:
        self._forget()  # so that only the thread holds a reference to the callable
        while not super().wait(POLL_SECONDS):
            if self._running() is None and not self.is_set():
                raise RuntimeError("can't start new thread: it died immediately, probably because memory ran out")
        return True
