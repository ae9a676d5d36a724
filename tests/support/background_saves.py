"""What the tests of saves in the background share: a writer that waits, and waiting for what comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pytest

from support.embeddings import make
from support.images import change, changed, joined, table_of
from support.stores import options
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


class Saving(NamedTuple):
    """An embedding of some rows, and what saves them."""

    embedding: MultiTableEmbedding
    writer: Writer
    save: Any
    expected: bytes

    def check(self) -> None:
        """It goes on, and writes the rows of when it began."""
        self.writer.let_go()
        assert self.save.wait()
        assert self.save.done
        assert self.writer.rows == self.expected


@contextmanager
def saving(how: Any, *max_bytes: int, changes: int = 1, allowed: int = 0) -> Iterator[Saving]:
    """It waits after that many chunks."""
    with make(how, "adagrad") as embedding:
        for number in range(changes):
            change(embedding, number)
        expected, writer = changed(options("host"), range(changes)), Writer(allowed)
        save = table_of(embedding).observers.save_in_background("snapshot 'one'", writer, *max_bytes)
        try:
            yield Saving(embedding, writer, save, expected)
        finally:
            writer.let_go()


def waits_of(embedding: MultiTableEmbedding) -> int:
    image = table_of(embedding).observers.image
    assert isinstance(image, MemoryImage)
    return image.num_waits


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
