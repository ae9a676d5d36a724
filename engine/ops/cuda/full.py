"""The full table as a store: every row in device memory, or in memory of the host that kernels reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import _core
from ...store.contract import BUCKETS, Chunks, Keys, Lines, Room, Tables, WithoutAnnouncements, row_dtype
from .batch import Batch, keys_of, lines_among, one_row, rows_of
from .faults import Faults
from .layout import Layout
from .staging import Staging
from .step import initialise_lines, initialise_missing
from .table import FullTable

SCAN_ROWS = 1 << 16  # rows a chunk


class FullStore(WithoutAnnouncements[Batch]):
    """As `engine/store/contract.py`. `tier`: "device" or "host", where lines are; the index is on the device."""

    def __init__(
        self, layout: Layout, host_layout: _core.Layout, capacity: int | None, faults: Faults, tier: str = "device"
    ) -> None:
        self._layout, self._host_layout = layout, host_layout
        self._capacity, self._faults, self._tier = capacity, faults, tier
        self.table = FullTable(layout, capacity, faults.word, on_host=tier == "host")
        self.staging = Staging(layout)
        self._pinned: Batch | None = None

    def pin(self, batch: Batch, room: Room | None) -> None:
        """With a capacity, rows that do not fit set a fault and are zeros: the table's memory is the bound, not `room`.

        Those of a step that failed take room as well.
        """
        ranks = self.table.find(batch)
        self.table.insert_missing(batch, ranks)
        self.table.count(batch, ranks)
        self._faults.post()
        self._pinned = batch

    def unpin(self, batch: Batch, dirty: bool) -> None:
        """Lines never move: there is nothing to end."""
        self._pinned = None

    def peek(self, batch: Batch) -> None:
        ranks = self.table.find(batch)
        self.table.count(batch, ranks)
        initialise_missing(batch, self._layout, ranks)
        self._faults.post()

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        """Rows of host memory, each once. CapacityError."""
        self.staging.reserve(len(keys))
        _core.copy_lines(self._host_layout, lines, self.staging.rows(len(keys))[2])
        batch = rows_of(self._layout.device, tables, keys, self._faults.word)
        self.table.insert_missing(batch, self.table.find(batch))
        self._faults.check()
        all_of = torch.ones(batch.size, dtype=torch.int32, device=batch.lines.device)
        ranks = all_of.cumsum(0, dtype=torch.int32)
        self.staging.fill(batch, all_of, ranks, np.ones(batch.size, np.bool_))
        ranks.cpu()  # waits: the staging memory is used again

    def erase(self, tables: Tables, keys: Keys) -> None:
        batch = rows_of(self._layout.device, tables, keys, self._faults.word)
        self.table.find(batch)
        kept = lines_among(self._pinned, batch, self._faults.word) != 0
        initialise_lines(batch, self._layout, kept)
        self.table.erase(batch, torch.where(kept, 0, batch.lines))

    def scan(self) -> Chunks:
        hashes, tables, lines, updates = self.table.rows()
        held = updates != 0
        hashes, tables, lines = hashes[held], tables[held], lines[held]
        keys = keys_of(self._layout.device, hashes, tables).cpu().numpy().view(np.uint64)
        owners = tables.cpu().numpy().view(np.uint32)
        buckets = hashes.cpu().numpy().view(np.uint64) >> np.uint64(58)
        order = np.lexsort((keys, owners, buckets))
        bounds = np.searchsorted(buckets[order], np.arange(BUCKETS + 1))
        for bucket in range(BUCKETS):
            for begin in range(bounds[bucket], bounds[bucket + 1], SCAN_ROWS):
                rows = order[begin : min(begin + SCAN_ROWS, bounds[bucket + 1])]
                chosen = lines[torch.from_numpy(rows).to(lines.device)]
                yield bucket, self._packed(owners[rows], keys[rows], chosen)

    def flush(self) -> None:
        """Nothing lies below."""

    def close(self) -> None:
        self._faults.seen(wait=True)  # kernels may be at work on memory of the host
        self.table = FullTable(self._layout, None, self._faults.word)

    def where(self, table: int, key: int) -> list[dict[str, Any]]:
        batch = one_row(self._layout.device, table, key, self._faults.word)
        self.table.find(batch)
        if not (line := int(batch.lines)):
            return []
        return [{"tier": self._tier, **self.staging.describe(batch.lines), "line": self.table.number_of(line)}]

    def metrics(self) -> dict[str, dict[str, float]]:
        counts, room = self.table.counts(), self.table.room
        sizes = {"capacity": room, "fill": counts["resident_rows"] / max(room, 1), "bytes": self.table.bytes}
        moved = {"bytes_in": 0, "bytes_out": 0}  # no tier is above
        return {self._tier: {**counts, **moved, **sizes, "index_bytes": self.table.index_bytes}}

    def _packed(self, tables: Tables, keys: Keys, lines: Tensor) -> NDArray[np.void]:
        rows = np.empty(len(keys), row_dtype(self._layout.width))
        rows["table"], rows["key"] = tables, keys
        rows.view(np.uint8).reshape(len(keys), -1)[:, 12:] = self.staging.read(lines)[:, : self._layout.stored_bytes]
        return rows
