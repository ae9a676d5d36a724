"""Threads whose end also ends every wait for them: for lack of memory, a thread may end at any of its lines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any
from weakref import ref

LOOK = 0.05  # seconds between two looks at whether the awaited thread lives


class Thread(threading.Thread):
    """`threading.Thread`, whose `start` raises RuntimeError where the new thread ended before it had begun.

    CPython's own `start` waits for ever then (https://github.com/python/cpython/issues/140746).
    """

    def start(self) -> None:
        held = _Held()  # held by what the thread runs, whatever ends that
        self._bootstrap = partial(_run, held, super()._bootstrap)  # type: ignore[misc]
        self._started = _Started(ref(held), partial(delattr, self, "_bootstrap"))
        del held
        try:
            super().start()
        except _NeverRanError as error:
            threading._limbo.pop(self, None)  # type: ignore[attr-defined]  # where a started thread takes itself out
            raise RuntimeError("can't start new thread: it ended at once, as where memory runs out") from error


def wait_for(
    condition: threading.Condition,
    predicate: Callable[[], Any],
    thread: threading.Thread | None,
    timeout: float | None = None,
) -> Any:
    """`condition.wait_for(predicate, timeout)`, but no longer than `thread` lives, which is to fulfil the predicate."""
    end = None if timeout is None else monotonic() + timeout
    while not (value := predicate()):
        if thread is None or not thread.is_alive():
            return predicate()  # the thread may have fulfilled it right before its end
        if end is not None and monotonic() >= end:
            return value
        condition.wait(LOOK if end is None else min(LOOK, end - monotonic()))
    return value


class _Held:
    pass


class _NeverRanError(Exception):
    pass


class _Started(threading.Event):
    """The event that `start` waits for once there is a thread. The wait ends where what the thread runs is let go.

    `begun` is called before the wait.
    """

    def __init__(self, held: Callable[[], object], begun: Callable[[], None]) -> None:
        super().__init__()
        self._held, self._begun = held, begun

    def wait(self, timeout: float | None = None) -> bool:
        self._begun()
        while not super().wait(LOOK):
            if self._held() is None and not self.is_set():
                raise _NeverRanError
        return True


def _run(held: object, bootstrap: Callable[[], None]) -> None:
    bootstrap()
