"""Holds signal handlers back while native memory and what Python knows of it must change together."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's own makes enums, which a step would notice
from _signal import signal as set_handler
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# what users handle: Ctrl-C raises, and a SIGTERM handler may save a checkpoint
_HELD = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)))
_holding = False  # in the main thread


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handlers written in Python wait until the outermost such block ends. They run in the main thread alone."""
    global _holding
    if threading.current_thread() is not threading.main_thread() or _holding:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers = {number: handler for number in _HELD if callable(handler := getsignal(number))}
    try:
        for held in handlers:
            set_handler(held, note)
        _holding = True
        yield
    finally:
        _holding = False
        for held, handler in handlers.items():
            set_handler(held, handler)
        for came_number, frame in came:
            handlers[came_number](came_number, frame)
