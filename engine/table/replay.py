"""Steps that a device records and replays: the functions to record, and the host's part of each replay."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..options.inputs import Gradients, Lookup
from .pinned import PinnedBatch
from .table import OpenTable


def replay_key(table: OpenTable) -> Hashable | None:
    """What a recording depends on: it may be replayed while this key is equal to that of the recording.

    None where no recording may be replayed, since a snapshot is being saved in the background: a replay would not keep
    the rows that it changes.
    """
    if table.watch.has_image:
        return None
    return table.optimizer and table.optimizer.rule, table.lagging, table.watch.changes


def record_pin(table: OpenTable, lookups: list[Lookup], dtype: torch.dtype, like: PinnedBatch | None) -> PinnedBatch:
    """Launch the kernels of `OpenTable.pin`. `begin_replay` does the rest of `pin` before each replay."""
    batch = table.processor.batch(lookups, None if like is None else like.core)
    table.opened().pin(batch, table.room)
    table.settle(batch)
    return table.hold(batch, lookups, dtype)


def record_update(pinned: PinnedBatch, gradients: Gradients) -> None:
    """Launch the kernels of `OpenTable.update`, and end the pin."""
    table = pinned.table
    table.check_pinned(pinned)
    table.watch.before_batch(pinned.core)
    table.processor.update(pinned.core, gradients, table.rule)
    table.release()


def record_peek(table: OpenTable, lookup: Lookup) -> Any:
    """Launch the kernels that find the rows of a lookup that only reads. Returns the batch of the lookup."""
    batch = table.processor.batch([lookup])
    table.opened().peek(batch)
    table.settle(batch)
    return batch


def begin_replay(table: OpenTable, trains: bool, clip_value: float | None) -> tuple[int, list[float]]:
    """Do the host's part of a step before its replay: of `pin` and `update` where it `trains`, else of `read`.

    Returns the step and the rule's numbers, for `OpenTable.updated`. Raises what these methods raise; then nothing has
    changed.
    """
    if trains:
        table.release()
        with table.announced(()):
            pass  # the batch is made by what was recorded, whatever was announced
    table.use()
    table.check(wait=False)
    if not trains:
        table.set_numbers()
        return table.step, table.hyper
    optimizer, step = table.check_optimizer(), table.next_step()
    hyper = optimizer.hyper(step, clip_value)
    table.before_write(step)
    table.processor.set_numbers(optimizer.rule, hyper, step)
    return step, hyper
