"""Defers signal handlers while native memory and Python's view of it must change together."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal makes enums, which slows a step
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType

# the signals that users handle: Ctrl-C raises, and a SIGTERM handler may save a checkpoint
_DEFERRED = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM))
)
_received: list[tuple[int, FrameType | None]] | None = None  # signals in a block of the main thread, if it is in one

_NO_HANDLER = (None, int(signal.SIG_DFL), int(signal.SIG_IGN))  # None: set by code that is not Python's
Handler = Callable[[int, FrameType | None], object]


class uninterrupted:  # a class, since a generator costs more and a step enters several
    """A block that defers signal handlers written in Python. They run when the outermost such block ends.

    Handlers run only in the main thread.
    """

    __slots__ = ("_handlers", "_signals")

    def __enter__(self) -> None:
        global _received
        self._handlers: dict[int, Handler] = {}
        if _received is not None or threading.current_thread() is not threading.main_thread():
            return
        signals: list[tuple[int, FrameType | None]] = []
        self._signals = signals

        def note(number: int, frame: FrameType | None) -> None:
            signals.append((number, frame))

        found = zip(_DEFERRED, map(getsignal, _DEFERRED), strict=True)
        handlers = {number: handler for number, handler in found if handler not in _NO_HANDLER}
        if not handlers:  # there may be handlers when the next block begins
            return
        try:
            for number in handlers:
                set_handler(number, note)
        except BaseException:  # raised by a handler that was not yet replaced
            for number, handler in handlers.items():
                set_handler(number, handler)
            raise
        self._handlers, _received = handlers, signals

    def __exit__(self, *error: object) -> None:
        global _received
        if not self._handlers:
            return
        _received = None
        try:
            for number, handler in self._handlers.items():
                set_handler(number, handler)
        except BaseException:  # raised by a handler that was set again already
            for number, handler in self._handlers.items():
                set_handler(number, handler)
            raise
        finally:
            for number, frame in self._signals:
                self._handlers[number](number, frame)


def deferred_signals() -> list[int]:
    """The signals that this thread's block defers, in the order in which they arrived.

    A block that waits for another process, which may never answer, raises if there are some; then their handlers run.
    """
    if _received is None or threading.current_thread() is not threading.main_thread():
        return []
    return [number for number, _ in _received]
