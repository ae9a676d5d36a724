"""The full table holds all rows in memory. A full table serves steps, or is the last tier below a cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import CapacityError
from ..row_format import BUCKETS, Chunks, Keys, row_dtype
from .interfaces import CapacityLimit, NativeTier, TopTier


def check_capacity(num_new: int, capacity_limit: CapacityLimit | None) -> None:
    """Raise CapacityError if the batch has more new rows than the embedding may still insert."""
    if num_new and capacity_limit is not None and num_new > (room := capacity_limit.count_free_rows()):
        raise CapacityError(
            f"capacity={capacity_limit.capacity} of embedding {capacity_limit.embedding!r}: the batch brings {num_new} "
            f"new rows and there is room for {room}; raise capacity, or leave unseen ids out. Nothing was changed"
        )


def compute_full_table_bytes(rows: int, line_bytes: int) -> int:
    """Return how much memory a full table of `rows` rows uses, in bytes. Mirrors how C++ `FullTable` grows."""
    mean_rows = rows / BUCKETS
    max_rows = mean_rows + 3 * math.sqrt(mean_rows)  # rows hash to buckets at random, so add three standard deviations
    index, lines, total, free_bytes = 0, 0, 0, 0
    for bucket in range(BUCKETS):  # a bucket doubles its slots at a load of 1/2 (first bucket) to 3/4 (last bucket)
        slots = 16
        while mean_rows * 4 * BUCKETS > slots * (2 * BUCKETS + bucket):
            slots *= 2
        index += slots * 16  # bytes per slot
    while lines < max_rows:  # each bucket's next segment of lines is twice as large as the last
        size = (lines + 16) * line_bytes
        for _ in range(BUCKETS):
            if size > free_bytes:
                free_bytes = math.ceil(max(size, min(64 << 20, total)) / 4096) * 4096
                total += free_bytes
            free_bytes -= size
        lines = 2 * lines + 16
    return total + index


class CpuFullTier(NativeTier, TopTier[_core.Batch]):
    """A full table that grows as rows arrive. `tier` is the table's name in metrics."""

    def __init__(self, layout: _core.Layout, tier: str) -> None:
        self._layout, self._tier = layout, tier
        self.native = _core.FullTable(layout)
        self._num_peeked = self._num_unknown = 0  # rows that `peek` looked up, and rows that `peek` did not find

    def pin(self, batch: _core.Batch, capacity_limit: CapacityLimit | None) -> None:
        missing = self.native.look_up_rows(batch)
        if capacity_limit is not None:
            # A failed step may have inserted rows without writing them. Such rows count as new.
            check_capacity(_core.count_new_rows(batch, self._layout), capacity_limit)
        if missing:
            self.native.insert_missing(batch, self._layout)

    def unpin(self, batch: _core.Batch, is_dirty: bool) -> None:
        """Do nothing: a full table never moves its lines."""

    def peek(self, batch: _core.Batch, is_training: bool = False) -> None:
        missing = self.native.look_up_rows(batch)
        if not is_training:
            self._num_peeked += batch.num_unique
            self._num_unknown += missing
        if missing:
            _core.initialise_missing(batch, self._layout)

    def gather_rows(self, keys: Keys, max_ids: Keys | None, out: NDArray[np.float32], is_training: bool) -> bool:
        """Copy the rows of `keys` in table 0 to `out`. Returns False if a row is missing. is_training: as in `peek`."""
        unique = self.native.gather_rows(keys, max_ids, out)
        self._num_peeked += 0 if is_training else unique
        return unique > 0

    def peek_counts(self) -> tuple[int, int, int]:
        return self._num_peeked - self._num_unknown, 0, self._num_unknown

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        location = self.native.locate(table, key)
        return [] if location is None else [{"tier": self._tier, **location}]

    def scan(self) -> Chunks:
        dtype, native = row_dtype(self._layout.width), self.native  # local, because the scan goes on after `close`
        for bucket in range(BUCKETS):
            rows = native.scan(bucket).view(dtype)
            if len(rows):
                yield bucket, rows

    def make_image(self, top_tier: Any) -> _core.TableImage:
        return _core.TableImage(self.native, self._layout, top_tier.native)

    def close(self) -> None:
        self.native = _core.FullTable(self._layout)

    def metrics(self) -> dict[str, dict[str, float]]:
        return {self._tier: self.native.metrics()}
