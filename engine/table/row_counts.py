"""Counts the rows of an open table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lifecycle.lifecycle import Lifecycle
from ..processors.processor import Processor
from ..row_format import Chunks
from ..store.table_counts import Counts, count_chunk_rows
from .row_scan import check_rows


class RowCounts:
    """The number of rows in each table of an embedding: rows that were written and not removed since."""

    def __init__(self, num_tables: int, processor: Processor[Any], lifecycle: Lifecycle) -> None:
        self._num_tables, self._processor, self._lifecycle = num_tables, processor, lifecycle
        self.num_initial_rows = 0  # rows when the table was opened
        self.initial_counts: Counts | None = np.zeros(num_tables, np.int64)  # rows per table, or None if unknown
        self.erasing_counts: Counts | None = None  # rows being erased, for each table

    def set_initial_rows(self, num_rows: int) -> None:
        """Start with `num_rows` stored rows in all. `set_initial_counts` sets the number for each table."""
        self.num_initial_rows = num_rows - int(self._growth.sum())

    def set_initial_counts(self, counts: Counts | None) -> None:
        self.initial_counts = None if counts is None else counts - self._growth

    @property
    def num_rows(self) -> int:
        """The number of rows in all tables. This property may wait for the device."""
        return self.num_initial_rows + int(self._growth.sum())

    @property
    def known_table_counts(self) -> Counts | None:
        """The number of rows in each table; None if only a scan can tell."""
        return None if self.initial_counts is None else self.initial_counts + self._growth

    def read_table_counts(self, scan: Callable[[], Chunks]) -> Counts:
        """Returns the number of rows in each table. The first call may scan rows. Raises StoreError, SnapshotError."""
        if self.initial_counts is None:
            chunks = check_rows(scan(), self._num_tables)
            self.initial_counts = count_chunk_rows(chunks, self._num_tables) - self._growth
        return self.initial_counts + self._growth

    @property
    def _growth(self) -> Counts:
        """How many rows each table has gained since the table was opened."""
        erasing_counts = self.erasing_counts  # read once: without the lock, another thread may change the attribute
        changes = self._processor.written_counts - self._lifecycle.removed_counts
        return changes if erasing_counts is None else changes - erasing_counts
