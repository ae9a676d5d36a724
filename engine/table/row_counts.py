"""The number of rows of an open table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lifecycle.lifecycle import Lifecycle
from ..processors.processor import Processor
from ..row_format import Chunks
from ..store.table_counts import Counts, counted_chunks
from .row_scan import checked_rows


class RowCounts:
    """The number of rows in each table of an embedding: rows that were written and not removed since.

    `stored_rows` is the number at opening. `stored` is the same by table, or None if it is not known by table.
    `pending` is the number by table of rows that are being erased, or None.
    """

    def __init__(self, num_tables: int, processor: Processor[Any], lifecycle: Lifecycle) -> None:
        self._num_tables, self._processor, self._lifecycle = num_tables, processor, lifecycle
        self.stored_rows = 0
        self.stored: Counts | None = np.zeros(num_tables, np.int64)
        self.pending: Counts | None = None

    def begin(self, rows: int) -> None:
        """Open with that many rows, of which `note_stored` says how many each table has."""
        self.stored_rows = rows

    def note_stored(self, by_table: Counts | None) -> None:
        self.stored = by_table

    @property
    def rows(self) -> int:
        """How many rows there are, all tables together; may wait for the device."""
        return self.stored_rows + int(self._change.sum())

    @property
    def known_by_table(self) -> Counts | None:
        """How many rows each table has; None if that takes a scan."""
        return None if self.stored is None else self.stored + self._change

    def by_table(self, scan: Callable[[], Chunks]) -> Counts:
        """How many rows each table has; the first call may scan all rows. StoreError, SnapshotError."""
        if self.stored is None:
            chunks = checked_rows(scan(), self._num_tables)
            self.stored = counted_chunks(chunks, self._num_tables) - self._change
        return self.stored + self._change

    @property
    def _change(self) -> Counts:
        """By how many rows each table has grown since it was opened."""
        pending = self.pending  # read once: another thread may change it, since `status` holds no lock
        change = self._processor.written - self._lifecycle.removed_counts
        return change if pending is None else change - pending
