"""How many rows a table has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lifecycle.lifecycle import Lifecycle
from ..processors.processor import Processor
from ..row_format import Chunks
from ..store.table_counts import Counts, counted_chunks
from .scanned import checked_rows


class RowCounts:
    """How many rows of each table were written and did not leave since.

    `stored_rows` were there when the table was opened; `stored` has them by table, or None where that is not known.
    `leaving`, by table, are being erased.
    """

    def __init__(self, num_tables: int, processor: Processor[Any], lifecycle: Lifecycle) -> None:
        self._num_tables, self._processor, self._lifecycle = num_tables, processor, lifecycle
        self.stored_rows = 0
        self.stored: Counts | None = np.zeros(num_tables, np.int64)
        self.leaving: Counts | None = None

    @property
    def rows(self) -> int:
        """How many rows there are, all tables together; may wait for the device."""
        return self.stored_rows + int(self._change.sum())

    @property
    def known_by_table(self) -> Counts | None:
        """How many rows each table has, where it is known without a scan."""
        return None if self.stored is None else self.stored + self._change

    def by_table(self, scan: Callable[[], Chunks]) -> Counts:
        """How many rows each table has; all are scanned once where that is not known. StoreError, SnapshotError."""
        if self.stored is None:
            chunks = checked_rows(scan(), self._num_tables)
            self.stored = counted_chunks(chunks, self._num_tables) - self._change
        return self.stored + self._change

    @property
    def _change(self) -> Counts:
        """How many rows of each table came since it was opened and did not leave."""
        leaving = self.leaving  # once: who asks for the status does not hold the lock
        change = self._processor.written - self._lifecycle.gone
        return change if leaving is None else change - leaving
