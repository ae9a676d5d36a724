"""Counts the rows of an open table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lifecycle.lifecycle import Lifecycle
from ..processors.processor import Processor
from ..row_format import Chunks
from ..store.table_counts import Counts, count_chunk_rows
from .row_scan import checked_rows


class RowCounts:
    """The number of rows in each table of an embedding: rows that were written and not removed since."""

    def __init__(self, num_tables: int, processor: Processor[Any], lifecycle: Lifecycle) -> None:
        self._num_tables, self._processor, self._lifecycle = num_tables, processor, lifecycle
        self.stored_rows = 0  # rows when the table was opened
        self.stored: Counts | None = np.zeros(num_tables, np.int64)  # rows of each table at that time; None if unknown
        self.pending: Counts | None = None  # rows being erased, for each table

    def begin(self, rows: int) -> None:
        """Start with `rows` stored rows in all. `set_stored` sets the number for each table."""
        self.stored_rows = rows

    def set_stored(self, by_table: Counts | None) -> None:
        self.stored = by_table

    @property
    def rows(self) -> int:
        """The number of rows in all tables. This property may wait for the device."""
        return self.stored_rows + int(self._change.sum())

    @property
    def known_by_table(self) -> Counts | None:
        """The number of rows in each table; None if only a scan can tell."""
        return None if self.stored is None else self.stored + self._change

    def by_table(self, scan: Callable[[], Chunks]) -> Counts:
        """Returns the number of rows in each table. The first call may scan and raise StoreError, SnapshotError."""
        if self.stored is None:
            chunks = checked_rows(scan(), self._num_tables)
            self.stored = count_chunk_rows(chunks, self._num_tables) - self._change
        return self.stored + self._change

    @property
    def _change(self) -> Counts:
        """How many rows each table has gained since the table was opened."""
        pending = self.pending  # read once: `status` holds no lock, so another thread may change `self.pending`
        change = self._processor.written_counts - self._lifecycle.removed_counts
        return change if pending is None else change - pending
