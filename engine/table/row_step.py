"""A training step of rows, whoever computed their gradients.

Compiled steps, `EagerOptimizer`, optimizers in backward and table-batched embeddings all train rows by `row_step`. One
thread at a time trains an embedding, by the optimizer of its step, and a step that raises leaves no row pinned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from threading import Thread, current_thread
from typing import Any, TypeVar

from ..errors import GraphError
from ..ops.rows_contract import EmbeddingBase
from ..optim.row_optimizer import RowOptimizer
from ..signals import uninterrupted

T = TypeVar("T")

_training: dict[int, tuple[Thread, str]] = {}  # by the handle of an embedding: its step's thread and owner
os.register_at_fork(after_in_child=_training.clear)


def row_step(
    trained: Sequence[tuple[EmbeddingBase, RowOptimizer]], owner: str, step: Callable[..., T], *arguments: Any
) -> T:
    """The result of `step(*arguments)`, which pins rows of the `trained` embeddings and updates them.

    Each embedding gets the optimizer beside it first. Ctrl-C waits for the end of the step. If the step raises, its
    pins end. owner: whose step it is, for errors. GraphError if another thread trains one of the embeddings.
    """
    mine = current_thread(), owner
    locked: list[int] = []
    with uninterrupted():
        try:
            for embedding, _ in trained:
                first = _training.setdefault(embedding.handle, mine)
                if first is mine:
                    locked.append(embedding.handle)
                elif first[0] is not mine[0]:
                    raise _is_trained_twice(embedding, mine, first)
            try:
                for embedding, rows in trained:
                    if embedding.row_optimizer is not rows:
                        embedding.use_optimizer(rows)  # another owner trained the embedding since
                return step(*arguments)
            except BaseException as error:
                embeddings = [embedding for embedding, _ in trained]
                groups = {id(one.group): one.group for one in embeddings if one.group is not None}
                for group in groups.values():  # first: the pins show which rows have no update
                    group.note_failed_step(embeddings, error)
                for embedding in embeddings:
                    embedding.release()
                raise
        finally:
            for handle in locked:
                del _training[handle]


def is_trained_elsewhere(embeddings: Iterable[EmbeddingBase]) -> bool:
    """Whether another thread is in a step of one of them."""
    threads = [_training[one.handle][0] for one in embeddings if one.handle in _training]
    return any(thread is not current_thread() for thread in threads)


def _is_trained_twice(embedding: EmbeddingBase, mine: tuple[Thread, str], other: tuple[Thread, str]) -> GraphError:
    (thread, owner), (other_thread, other_owner) = mine, other
    return GraphError(
        f"a step of {owner} in thread {thread.name!r} trains embedding {embedding.name!r} while a step of "
        f"{other_owner} in thread {other_thread.name!r} does; let one thread make all training steps of an embedding, "
        "or hold a lock of your own around each"
    )
