"""What a step calls instead of an embedding's and a batch's methods while a CUDA graph captures it: launches alone.

What the host does at each step, it does around each replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...embedding.saved_rows import SavedRows
from ...engine.options.lookup import Lookup
from ...engine.table.table import OpenTable, PinnedBatch


def capture_pin(embedding: SavedRows, lookups: list[Lookup], dedup_from: PinnedBatch | None = None) -> PinnedBatch:
    """Launch the kernels of `embedding.pin`. `begin_replay` does the rest of it before each replay."""
    table = embedding.table_handle().local_table
    batch = table.processor.batch(lookups, None if dedup_from is None else dedup_from.core)
    table.require_open().pin(batch, table.capacity_limit)
    table.preview_catch_up(batch)
    return table.pinned(batch, lookups, embedding.output_dtype)


def capture_update(batch: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
    """Launch the kernels of `batch.update`, and end the pin."""
    table, gradients = batch.table, batch.gradients(grads, weights)
    table.check_pinned(batch)
    table.observers.before_update(batch.core)
    table.processor.update(batch.core, gradients, table.rule)
    table.release()


def capture_read(embedding: SavedRows, lookup: Lookup, weights: Tensor | None = None) -> Tensor:
    table = embedding.table_handle().local_table
    return table.processor.gather(_peek(table, lookup), 0, lookup, weights, embedding.output_dtype)


def capture_read_weights_grad(embedding: SavedRows, lookup: Lookup, grad: Tensor) -> Tensor:
    table = embedding.table_handle().local_table
    return table.processor.weights_grad(_peek(table, lookup, trains=True), 0, lookup, grad)


def _peek(table: OpenTable, lookup: Lookup, trains: bool = False) -> Any:
    """Launch the kernels that find the rows of a lookup that only reads. Returns the batch of the lookup."""
    batch = table.processor.batch([lookup])
    table.require_open().peek(batch, trains)
    table.preview_catch_up(batch)
    return batch


@contextmanager
def replayed(trained: Sequence[OpenTable], read: Sequence[OpenTable], clip_value: float | None) -> Iterator[None]:
    """A block around one replay, with the tables locked: does the host's part of a step, and raises what it would."""
    for table in read:
        begin_replay(table, False, None)
    started = [(table, begin_replay(table, True, clip_value)) for table in trained]
    try:
        yield
    except BaseException as error:
        for table in trained:
            table.note_failure(error)  # some of its lines may be written
        raise
    for table, (step, hyper) in started:
        table.updated(step, hyper)


def replay_key(table: OpenTable) -> Hashable | None:
    """What a captured graph depends on: it may be replayed while this key is equal to that of its capture.

    None while a snapshot is saved in the background, when no graph may be replayed: a replay saves no before-images.
    """
    if table.observers.has_image:
        return None
    return table.optimizer and table.optimizer.rule, table.catch_up_rule, table.observers.changes


def begin_replay(table: OpenTable, trains: bool, clip_value: float | None) -> tuple[int, list[float]]:
    """Do the host's part of a step before its replay: of `pin` and `update` if it `trains`, else of `read`.

    Returns the step and the rule's numbers, for `OpenTable.updated`. Raises what these methods raise; then nothing has
    changed.
    """
    if trains:
        table.release()
        with table.announced(()):
            pass  # the captured ops make the batch, whatever was announced
    table.ready()
    table.check(wait=False)
    if not trains:
        table.set_numbers()
        return table.step, table.hyper
    optimizer, step = table.check_optimizer(), table.next_step()
    hyper = optimizer.hyper(step, clip_value, table.hyper)
    table.before_write(step)
    table.processor.set_numbers(optimizer.rule, hyper, step)
    return step, hyper
