"""`run_row_step` runs a training step: all training steps update rows through this function.

Compiled steps, `EagerOptimizer`, optimizers in backward and table-batched embeddings all use `run_row_step`. This
function ensures three things: only one thread at a time trains an embedding, the step's optimizer updates the rows, and
a failed step leaves no row pinned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from threading import Thread, current_thread
from typing import Any, TypeVar

from ..errors import GraphError
from ..ops.embedding_base import EmbeddingBase
from ..optim.row_optimizer import RowOptimizer
from ..signals import defer_signals

T = TypeVar("T")

_running_steps: dict[int, tuple[Thread, str]] = {}  # by embedding_id: the running step's thread and caller
os.register_at_fork(after_in_child=_running_steps.clear)


def run_row_step(
    pairs: Sequence[tuple[EmbeddingBase, RowOptimizer]], caller: str, body: Callable[..., T], *arguments: Any
) -> T:
    """Run `body(*arguments)`, a function that pins and updates rows of the embeddings in `pairs`. Returns its result.

    Each embedding first gets the optimizer paired with it. Ctrl-C waits until the step ends. `caller` names the step's
    caller in errors. Raises GraphError if another thread is training one of the embeddings.
    """
    this_step = current_thread(), caller
    locked_ids: list[int] = []
    with defer_signals():
        try:
            for embedding, _ in pairs:
                running_step = _running_steps.setdefault(embedding.embedding_id, this_step)
                if running_step is this_step:
                    locked_ids.append(embedding.embedding_id)
                elif (thread := running_step[0]) is not this_step[0]:
                    raise GraphError(
                        f"a step of {caller} in thread {this_step[0].name!r} cannot train embedding {embedding.name!r} "
                        f"while a step of {running_step[1]} in thread {thread.name!r} trains the embedding. Run all "
                        "training steps of an embedding in one thread, or hold a lock around each step"
                    )
            try:
                for embedding, optimizer in pairs:
                    if embedding.row_optimizer is not optimizer:
                        embedding.use_optimizer(optimizer)  # another optimizer trained the embedding in between
                return body(*arguments)
            except BaseException as error:
                embeddings = [embedding for embedding, _ in pairs]
                groups = dict.fromkeys(embedding.group for embedding in embeddings if embedding.group is not None)
                for group in groups:  # before `unpin_rows`, because pins show which rows were not updated
                    group.mark_if_partly_updated(embeddings, error)
                for embedding in embeddings:
                    embedding.unpin_rows()
                raise
        finally:
            for embedding_id in locked_ids:
                del _running_steps[embedding_id]


def is_trained_by_other_thread(embeddings: Iterable[EmbeddingBase]) -> bool:
    threads = [_running_steps[e.embedding_id][0] for e in embeddings if e.embedding_id in _running_steps]
    return any(thread is not current_thread() for thread in threads)
