"""Holds signal handlers back while native memory and what Python knows of it must change together."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's own makes enums, which a step would notice
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType

# the signals that users handle: Ctrl-C raises, and a SIGTERM handler may save a checkpoint
_HELD = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)))
_holding: list[tuple[int, FrameType | None]] | None = (
    None  # what came in such a block of the main thread, if it is in one
)

_NO_HANDLER = (None, int(signal.SIG_DFL), int(signal.SIG_IGN))  # None: set by code that is not Python's
Handler = Callable[[int, FrameType | None], object]


class uninterrupted:  # a class and no generator, which costs more: a step enters several
    """A block in which signal handlers written in Python wait. They run when the outermost such block ends.

    Handlers run in the main thread alone.
    """

    __slots__ = ("_came", "_handlers")

    def __enter__(self) -> None:
        global _holding
        self._handlers: dict[int, Handler] = {}
        if _holding is not None or threading.current_thread() is not threading.main_thread():
            return
        came: list[tuple[int, FrameType | None]] = []
        self._came = came

        def note(number: int, frame: FrameType | None) -> None:
            came.append((number, frame))

        found = zip(_HELD, map(getsignal, _HELD), strict=True)
        handlers = {number: handler for number, handler in found if handler not in _NO_HANDLER}
        if not handlers:  # there may be handlers when the next block begins
            return
        try:
            for held in handlers:
                set_handler(held, note)
        except BaseException:  # raised by a handler that was not yet replaced
            for held, handler in handlers.items():
                set_handler(held, handler)
            raise
        self._handlers, _holding = handlers, came

    def __exit__(self, *error: object) -> None:
        global _holding
        if not self._handlers:
            return
        _holding = None
        try:
            for held, handler in self._handlers.items():
                set_handler(held, handler)
        except BaseException:  # raised by a handler that is back already
            for held, handler in self._handlers.items():
                set_handler(held, handler)
            raise
        finally:
            for number, frame in self._came:
                self._handlers[number](number, frame)


def deferred_signals() -> list[int]:
    """The signals that wait for the end of the block in which this thread is, in the order in which they came.

    For a block that waits for another process, which may never answer: it fails then, and the handlers run at its end.
    """
    if _holding is None or threading.current_thread() is not threading.main_thread():
        return []
    return [number for number, _ in _holding]
