"""Ensures that one thread at a time is in a training step of an embedding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread

from ..errors import GraphError
from ..ops.rows_contract import Rows

_training: dict[int, tuple[Thread, str]] = {}  # by the handle of an embedding: its step's thread and owner
os.register_at_fork(after_in_child=_training.clear)


@contextmanager
def training_step(embeddings: Iterable[Rows], owner: str) -> Iterator[None]:
    """A block for a step that pins rows of `embeddings`: a step in another thread would take its pins away.

    owner: whose step it is, for messages. GraphError where another thread is in a step of one of them.
    """
    mine = current_thread(), owner
    held = []
    try:
        for embedding in embeddings:
            thread, other = first = _training.setdefault(embedding.handle, mine)
            if thread is not mine[0]:
                raise GraphError(
                    f"a step of {owner} in thread {mine[0].name!r} trains embedding {embedding.name!r} while a step of "
                    f"{other} in thread {thread.name!r} does; let one thread make all training steps of an embedding, "
                    "or hold a lock of your own around each"
                )
            if first is mine:
                held.append(embedding.handle)
        yield
    finally:
        for handle in held:
            del _training[handle]
