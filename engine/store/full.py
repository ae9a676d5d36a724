"""The full table: every row in memory. It is a store by itself, or the last tier under a cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import CapacityError
from ..row_format import BUCKETS, Chunks, Keys, row_dtype
from .contract import CapacityLimit, NativeTier, TopTier


def check_capacity(new: int, capacity_limit: CapacityLimit | None) -> None:
    """Raises CapacityError if a batch has more new rows than may still be inserted."""
    if new and capacity_limit is not None and new > (left := capacity_limit.left()):
        raise CapacityError(
            f"capacity={capacity_limit.capacity} of embedding {capacity_limit.embedding!r}: the batch brings {new} new "
            f"rows and there is room for {left}; raise capacity, or leave unseen ids out. Nothing was changed"
        )


def full_table_bytes(rows: int, line_bytes: int) -> int:
    """The memory of a full table that grew to this number of rows, index included, as `FullTable` allocates it."""
    average = rows / BUCKETS
    fullest = average + 3 * math.sqrt(average)  # of its buckets, as rows fall on them at random
    index, lines, total, left = 0, 0, 0, 0
    for bucket in range(BUCKETS):  # slots double at a load of 1/2 in the first bucket, up to 3/4 in the last
        slots = 16
        while average * 4 * BUCKETS > slots * (2 * BUCKETS + bucket):
            slots *= 2
        index += slots * 16  # bytes of a slot
    while lines < fullest:  # a segment of lines for each bucket, twice as large as the one before
        size = (lines + 16) * line_bytes
        for _ in range(BUCKETS):
            if size > left:
                left = math.ceil(max(size, min(64 << 20, total)) / 4096) * 4096
                total += left
            left -= size
        lines = 2 * lines + 16
    return total + index


class CpuFullStore(NativeTier, TopTier[_core.Batch]):
    """A full table that grows as rows arrive. `tier` names its memory in metrics."""

    def __init__(self, layout: _core.Layout, tier: str) -> None:
        self._layout = layout
        self._tier = tier
        self.native = _core.FullTable(layout)
        self._peeked = self._unknown = 0  # rows of `peek`

    def pin(self, batch: _core.Batch, capacity_limit: CapacityLimit | None) -> None:
        missing = self.native.find(batch)
        if capacity_limit is not None:
            # rows of a failed step are resident but were never written, so they count as new
            check_capacity(_core.count_new(batch, self._layout), capacity_limit)
        if missing:
            self.native.insert_missing(batch, self._layout)

    def unpin(self, batch: _core.Batch, dirty: bool) -> None:
        """Does nothing: lines of a full table never move."""

    def peek(self, batch: _core.Batch, trains: bool = False) -> None:
        missing = self.native.find(batch)
        if not trains:
            self._peeked += batch.unique
            self._unknown += missing
        if missing:
            _core.initialise_missing(batch, self._layout)

    def gather_few(self, keys: Keys, last_ids: Keys | None, out: NDArray[np.float32], trains: bool) -> bool:
        """Whether `out` now has the rows of keys of table 0. trains: as of `peek`."""
        unique = self.native.gather_few(keys, last_ids, out)
        self._peeked += 0 if trains else unique
        return unique > 0

    def peeked(self) -> tuple[int, int, int]:
        return self._peeked - self._unknown, 0, self._unknown

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        location = self.native.locate(table, key)
        return [] if location is None else [{"tier": self._tier, **location}]

    def scan(self) -> Chunks:
        dtype, native = row_dtype(self._layout.width), self.native  # which outlives `close`
        for bucket in range(BUCKETS):
            rows = native.scan(bucket).view(dtype)
            if len(rows):
                yield bucket, rows

    def image(self, top: Any) -> _core.TableImage:
        return _core.TableImage(self.native, self._layout, top.native)

    def close(self) -> None:
        self.native = _core.FullTable(self._layout)

    def metrics(self) -> dict[str, dict[str, float]]:
        return {self._tier: self.native.metrics()}
