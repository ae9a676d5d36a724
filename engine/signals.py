"""Defers signal handlers in blocks where native memory and Python's view of that memory must change together."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal makes enums, which slows a step
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType

# Signals that users handle: Ctrl-C raises an exception, and a SIGTERM handler may save a checkpoint.
_DEFERRED_SIGNALS = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM))
)
# Signals deferred by the main thread's current `defer_signals` block. The value is None outside a block.
_received_signals: list[tuple[int, FrameType | None]] | None = None

_NO_HANDLER = (None, int(signal.SIG_DFL), int(signal.SIG_IGN))  # None: the handler was not installed from Python
Handler = Callable[[int, FrameType | None], object]


class defer_signals:  # a class, because a generator is slower and each step enters several blocks
    """A context manager for the main thread. Defers Python signal handlers until the block and all outer blocks end."""

    __slots__ = ("_handlers", "_signals")

    def __enter__(self) -> None:
        global _received_signals
        self._handlers: dict[int, Handler] = {}
        if _received_signals is not None or threading.current_thread() is not threading.main_thread():
            return  # Python runs signal handlers only in the main thread
        signals: list[tuple[int, FrameType | None]] = []
        self._signals = signals

        def record_signal(number: int, frame: FrameType | None) -> None:
            signals.append((number, frame))

        current_handlers = zip(_DEFERRED_SIGNALS, map(getsignal, _DEFERRED_SIGNALS), strict=True)
        handlers = {number: handler for number, handler in current_handlers if handler not in _NO_HANDLER}
        if not handlers:  # nothing to defer; the next block checks again
            return
        try:
            for number in handlers:
                set_handler(number, record_signal)
        except BaseException:  # raised by a signal handler that was not replaced yet
            for number, handler in handlers.items():
                set_handler(number, handler)
            raise
        self._handlers, _received_signals = handlers, signals

    def __exit__(self, *error: object) -> None:
        global _received_signals
        if not self._handlers:
            return
        _received_signals = None
        try:
            for number, handler in self._handlers.items():
                set_handler(number, handler)
        except BaseException:  # raised by a signal handler that was already restored
            for number, handler in self._handlers.items():
                set_handler(number, handler)
            raise
        finally:
            for number, frame in self._signals:
                self._handlers[number](number, frame)


def list_deferred_signals() -> list[int]:
    """Returns the signals deferred by this thread's block so far, in order of arrival.

    A block that waits for another process calls this function, and raises if a signal came. So a signal ends the wait.
    """
    if _received_signals is None or threading.current_thread() is not threading.main_thread():
        return []
    return [number for number, _ in _received_signals]
