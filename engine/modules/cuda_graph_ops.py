"""What a step calls, in place of the functions of `row_ops.py`, while a device records it: what launches, and no more.

What the host does at each step, it does around each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from ..options.inputs import Lookup
from ..signals import uninterrupted
from ..table.pinned import PinnedBatch
from ..table.replay import begin_replay, record_peek, record_pin, record_update
from ..table.table import OpenTable
from .saved_rows import SavedRows


def pin(embedding: SavedRows, lookups: list[Lookup], like: PinnedBatch | None = None) -> PinnedBatch:
    """Launch what `row_ops.pin` launches. `gather` and `weights_grad` of `row_ops` take the batch that it returns."""
    return record_pin(embedding.opened().own_table, lookups, embedding.output_dtype, like)


def update(batch: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
    """Launch what `row_ops.update` launches."""
    record_update(batch, batch.gradients(grads, weights))


def read(embedding: SavedRows, lookup: Lookup, weights: Tensor | None = None) -> Tensor:
    """Launch what `row_ops.read` launches."""
    table = embedding.opened().own_table
    return table.processor.gather(record_peek(table, lookup), 0, lookup, weights, embedding.output_dtype)


def read_weights_grad(embedding: SavedRows, lookup: Lookup, grad: Tensor) -> Tensor:
    """Launch what `row_ops.read_weights_grad` launches."""
    table = embedding.opened().own_table
    return table.processor.weights_grad(record_peek(table, lookup), 0, lookup, grad)


@contextmanager
def locked(tables: Sequence[OpenTable]) -> Iterator[None]:
    """Nobody else uses these tables."""
    with ExitStack() as stack:
        for table in sorted(tables, key=id):  # in one order: another graph may want the same
            stack.enter_context(table.lock)
        with uninterrupted():
            yield


@contextmanager
def replayed(trained: Sequence[OpenTable], read: Sequence[OpenTable], clip_value: float | None) -> Iterator[None]:
    """Around one replay, with the tables `locked`: what the host does in a step that trains and reads these tables.

    Raises what the step would, before the replay.
    """
    for table in read:
        begin_replay(table, False, None)
    begun = [(table, begin_replay(table, True, clip_value)) for table in trained]
    try:
        yield
    except BaseException as error:
        for table in trained:
            table.failure = error  # some of its lines may be written
        raise
    for table, (step, hyper) in begun:
        table.updated(step, hyper)
