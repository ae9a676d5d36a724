"""Holds signal handlers back while native memory and what Python knows of it must change together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# what users handle: Ctrl-C raises, and a SIGTERM handler may save a checkpoint
_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handlers written in Python wait until the block ends. They run in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers = {number: handler for number in _HELD if callable(handler := signal.getsignal(number))}
    for held in handlers:
        signal.signal(held, note)
    try:
        yield
    finally:
        for held, handler in handlers.items():
            signal.signal(held, handler)
        for came_number, frame in came:
            handlers[signal.Signals(came_number)](came_number, frame)
