"""Threads whose death ends every wait for them: if memory runs out, a thread may die at any of its lines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

POLL_SECONDS = 0.05  # between two checks of whether the awaited thread lives


class Thread(threading.Thread):
    """`threading.Thread`, whose `start` raises RuntimeError if the new thread dies before it has begun.

    CPython's own `start` hangs then (https://github.com/python/cpython/issues/140746).
    """

    def start(self) -> None:
        self._bootstrap = partial(super()._bootstrap)  # type: ignore[misc]  # only the thread refers to it when it runs
        self._started = _Started(ref(self._bootstrap), partial(delattr, self, "_bootstrap"))
        try:
            super().start()
        except RuntimeError:
            threading._limbo.pop(self, None)  # type: ignore[attr-defined]  # a thread that starts leaves it by itself
            raise


def wait_for(condition: threading.Condition, predicate: Callable[[], Any], thread: threading.Thread | None) -> Any:
    """`condition.wait_for(predicate)`, which also ends if `thread` dies, which has to fulfil the predicate."""
    while not (value := predicate()):
        if thread is None or not thread.is_alive():
            return predicate()  # the thread may have fulfilled it right before its end
        condition.wait(POLL_SECONDS)
    return value


class _Started(threading.Event):
    """The event that `Thread.start` waits for. The wait ends with an error once nothing refers to what the thread runs.

    forget: called before the wait, so that only the thread refers to it.
    """

    def __init__(self, running: Callable[[], object], forget: Callable[[], None]) -> None:
        super().__init__()
        self._running, self._forget = running, forget

    def wait(self, timeout: float | None = None) -> bool:
        self._forget()
        while not super().wait(POLL_SECONDS):
            if self._running() is None and not self.is_set():
                raise RuntimeError("can't start new thread: it died at once, as if memory had run out")
        return True
