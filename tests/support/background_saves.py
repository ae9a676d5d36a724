"""What the tests of saves in the background share: a writer that waits, and waiting for what comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from support.images import joined, table_of
from tierbed import MultiTableEmbedding
from tierbed.engine.row_format import Chunks
from tierbed.engine.store.image import MemoryImage


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for writer in Writer.all:
        writer.let_go()
    Writer.all.clear()


class Writer:
    """Keeps what it is given. It reads `allowed` chunks, and the others once it is released."""

    all: ClassVar[list[Writer]] = []

    def __init__(self, allowed: int = 0) -> None:
        self.all.append(self)
        self.rows = b""
        self._allowed = threading.Semaphore(allowed)
        self._let_go = False
        self.began = threading.Event()

    def __call__(self, chunks: Chunks) -> None:
        def slowly() -> Chunks:
            while True:
                self.began.set()
                if not self._let_go:
                    self._allowed.acquire()
                if (chunk := next(chunks, None)) is None:
                    return
                yield chunk

        self.rows = joined(slowly())

    def let_go(self) -> Writer:
        """It waits no more. A semaphore is not released a million times: Python's counts in a loop."""
        self._let_go = True
        self._allowed.release()
        return self


def waits_of(embedding: MultiTableEmbedding) -> int:
    image = table_of(embedding).observers._image
    assert isinstance(image, MemoryImage)
    return image.waits


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
