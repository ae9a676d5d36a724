"""The full table: every row in memory. It is a store by itself, and the last tier under a cache."""

from __future__ import annotations

import numpy as np

from .. import _core
from ..errors import CapacityError
from .contract import BUCKETS, Chunks, Found, Keys, Lines, Room, Tables, row_dtype


def check_room(new: int, room: Room | None) -> None:
    """Raises CapacityError where a batch brings more new rows than there is room for."""
    if new and room is not None and new > (left := room()):
        raise CapacityError(
            f"capacity: the batch brings {new} new rows and there is room for {left}; raise capacity, or leave "
            "unseen ids out. Nothing was changed"
        )


class FullTable:
    """Grows as rows arrive; `tier` names the memory in metrics."""

    def __init__(self, layout: _core.Layout, tier: str) -> None:
        self._layout = layout
        self._tier = tier
        self._table = _core.FullTable(layout)
        self._counts = {"hits": 0, "misses": 0}

    def pin(self, batch: _core.Batch, room: Room | None) -> None:
        missing = self._table.find(batch)
        self._count(batch.unique, missing)
        if room is not None:
            # rows of a failed step are resident but were never written: they are new as well
            check_room(_core.count_new(batch, self._layout), room)
        if missing:
            self._table.insert_missing(batch, self._layout)

    def unpin(self, batch: _core.Batch, dirty: bool) -> None:
        """Lines never move: there is nothing to end."""

    def peek(self, batch: _core.Batch) -> None:
        missing = self._table.find(batch)
        self._count(batch.unique, missing)
        if missing:
            _core.initialise_missing(batch, self._layout)

    def read(self, tables: Tables, keys: Keys, lines: Lines) -> Found:
        found = self._table.read(tables, keys, lines)
        self._count(len(found), len(found) - int(found.sum()))
        return found

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        self._table.write(tables, keys, lines)

    def scan(self) -> Chunks:
        dtype = row_dtype(self._layout.width)
        for bucket in range(BUCKETS):
            rows = np.empty(self._table.held(bucket), dtype)
            if len(rows):
                self._table.scan(bucket, rows.view(np.uint8))
                yield bucket, rows

    def flush(self) -> None:
        """Nothing lies below."""

    def close(self) -> None:
        self._table = _core.FullTable(self._layout)

    def _count(self, asked: int, missing: int) -> None:
        self._counts["hits"] += asked - missing
        self._counts["misses"] += missing

    def metrics(self) -> dict[str, dict[str, int]]:
        return {self._tier: {**self._counts, "resident_rows": self._table.rows, "bytes": self._table.bytes}}
