"""Records which rows change on a GPU, without making a step wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ... import _core
from ...ops.cuda.batch import Batch, recover_keys
from ...row_format import BUCKETS, Keys, TableIds
from .full_table import CudaFullTable


class ChangedLines:
    """Keeps one flag per line of a full table: True if the line changed. Batches must have lines in that table.

    If a row is erased, its line keeps the flag. So the line's next row counts as changed. This does no harm: a row that
    was never written has `updates` 0, and callers of `list_keys` treat such a row as missing.
    """

    def __init__(self, table: CudaFullTable) -> None:
        self._table = table
        self._flags = torch.zeros(1, dtype=torch.bool, device=table.zero_line.device)  # line i's flag is at i + 1

    def add_batch(self, batch: Batch) -> None:
        if len(self._flags) <= self._table.num_lines:
            larger = torch.zeros(self._table.num_lines + 1, dtype=torch.bool, device=self._flags.device)
            larger[: len(self._flags)] = self._flags
            self._flags = larger
        with self._table.exclusive():
            self._flags.index_fill_(0, self._table.find_line_numbers(batch) + 1, True)

    def list_keys(self) -> tuple[TableIds, Keys]:
        """Return the keys of the changed rows. Waits for the device."""
        with self._table.exclusive():
            if not self._flags[1:].any():
                return np.empty(0, np.uint32), np.empty(0, np.uint64)
            hashes, tables, lines, _ = self._table.list_rows()
            line_numbers = (self._flags[1 : len(lines) + 1] & (lines[: len(self._flags) - 1] != 0)).nonzero()[:, 0]
            hashes, tables = hashes[line_numbers], tables[line_numbers]
            keys = recover_keys(self._table.device, hashes, tables)
            return tables.cpu().numpy().view(np.uint32), keys.cpu().numpy().view(np.uint64)

    def forget(self) -> None:
        self._flags.zero_()

    @property
    def bytes(self) -> int:
        return 0  # the flags are in device memory


class WriteBackLog:
    """Collects the keys of rows that a GPU cache writes back to the tier below. `flush` writes back all dirty rows."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._rows = _core.ChangedRows()

    def add_batch(self, batch: Batch) -> None:
        """Do nothing: `add_keys` records a row when the cache writes it back."""

    def add_keys(self, tables: TableIds, keys: Keys) -> None:
        self._rows.add_keys(tables, keys)

    def list_keys(self) -> tuple[TableIds, Keys]:
        self._flush()
        tables, keys = zip(*(self._rows.list_keys(bucket) for bucket in range(BUCKETS)), strict=True)
        return np.concatenate(tables), np.concatenate(keys)

    def forget(self) -> None:
        self._rows = _core.ChangedRows()

    @property
    def bytes(self) -> int:
        return self._rows.bytes
