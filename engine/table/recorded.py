"""A table in steps that a device records: what launches, apart from what the host does around each replay."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..spec.inputs import Gradients, Lookup
from .pinned import PinnedBatch
from .table import OpenTable


def replay_key(table: OpenTable) -> Hashable | None:
    """What the recording functions depend on: while it stays, what they launched may be run again.

    None while it may not: a snapshot is being saved in the background, and what changes has to be kept for it.
    """
    if table.watch.has_image:
        return None
    return table.optimizer and table.optimizer.rule, table.lagging, table.watch.changes


def record_pin(table: OpenTable, lookups: list[Lookup], dtype: torch.dtype, like: PinnedBatch | None) -> PinnedBatch:
    """Launch what `OpenTable.pin` launches. What else a step does is `begin_replay`'s."""
    batch = table.processor.batch(lookups, None if like is None else like.core)
    table.opened().pin(batch, table.room)
    table.settle(batch)
    return table.hold(batch, lookups, dtype)


def record_update(pinned: PinnedBatch, gradients: Gradients) -> None:
    """Launch what `OpenTable.update` launches."""
    table = pinned.table
    table.check_pinned(pinned)
    table.watch.before_batch(pinned.core)
    table.processor.update(pinned.core, gradients, table.rule)
    table.release()


def record_peek(table: OpenTable, lookup: Lookup) -> Any:
    """Launch what a lookup that only reads launches, up to what it is read for. Returns its batch."""
    batch = table.processor.batch([lookup])
    table.opened().peek(batch)
    table.settle(batch)
    return batch


def begin_replay(table: OpenTable, trains: bool, clip_value: float | None) -> tuple[int, list[float]]:
    """Before what was recorded runs: what the host does in `pin` and `update`, or in `read`, up to the launches.

    Returns step and numbers for `OpenTable.updated`. Raises what they do, and nothing has changed.
    """
    if trains:
        table.release()
        table.make_own_batch()
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
