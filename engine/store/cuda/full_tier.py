"""The full table as a GPU store, and its images. Rows are in device memory, or in host memory that kernels access."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import _core
from ...ops.cuda.batch import Batch, Faults, find_lines, make_row_batch, make_single_row_batch, recover_keys
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import initialise_lines, initialise_missing
from ...row_format import BUCKETS, Chunks, Keys, TableIds, row_dtype
from ..interfaces import CapacityLimit, HitCounts, HitMask, Lines, TopTier
from .changed_lines import ChangedLines
from .full_table import CudaFullTable

BeforeImages = tuple[NDArray[np.int64], NDArray[np.uint8]]  # positions [n], ascending, and lines [n, stored_bytes]
SCAN_ROWS = 1 << 16  # rows per chunk


@dataclass(frozen=True)
class SortedRows:
    """Written rows [n], sorted by bucket, then (table, key). `bounds`: where each bucket begins, and n at the end."""

    tables: TableIds
    keys: Keys
    lines: Tensor
    line_numbers: Tensor
    bounds: NDArray[np.int64]  # [BUCKETS + 1]


class CudaTableImage:
    """A `TableImage` (engine/store/interfaces.py) on a GPU, with before-images in host memory.

    Saving before-images waits for the device. The image reads unchanged rows from the table. Erasing a row saves its
    before-image. Only after that can another row use the erased row's line. A cache may be above the table. A step that
    writes rows in the cache saves their before-images. The cache writes these rows back later.
    """

    def __init__(self, table: CudaFullTable, layout: Layout, scan: Callable[[], SortedRows], faults: Tensor) -> None:
        """scan: a function that returns the table's current rows."""
        self._table, self._layout, self._faults = table, layout, faults
        device = self._layout.device.torch_device
        self._layout.device.wait()  # steps may run on another stream
        self._rows = scan()
        self._staging = Staging(self._layout)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # For each line number + 1: the row's position in `_rows`; -1 once the row was read or its before-image saved.
        self._positions = torch.full((self._table.num_lines + 1,), -1, dtype=torch.int64, device=device)
        self._positions[self._rows.line_numbers + 1] = torch.arange(len(self._rows.keys), device=device)
        self._before_images: list[list[BeforeImages]] = [[] for _ in range(BUCKETS)]
        self._bucket = self._position = 0
        self.before_image_bytes = 0
        self._layout.device.wait()

    def save_before_images(self, batch: Batch) -> None:
        with self._table.exclusive():
            numbers = self._table.find_line_numbers(batch) + 1
            numbers = torch.where(numbers < len(self._positions), numbers, 0)
            positions = self._positions[numbers]
            unsaved = (positions >= 0).nonzero()[:, 0]
            positions = positions[unsaved].sort().values
            if len(positions) == 0:
                return
            saved_lines = self._staging.read(self._rows.lines[positions])[:, : self._layout.stored_bytes]
            host_positions = positions.cpu().numpy()
            bounds = np.searchsorted(host_positions, self._rows.bounds)
            parts = [  # copies, so that each bucket's memory can be freed alone
                (bucket, (host_positions[begin:end].copy(), saved_lines[begin:end].copy()))
                for bucket, (begin, end) in enumerate(itertools.pairwise(bounds.tolist()))
                if begin < end
            ]
            self._positions[numbers[unsaved]] = -1
            for bucket, part in parts:
                self._before_images[bucket].append(part)
            self.before_image_bytes += host_positions.nbytes + saved_lines.nbytes

    def save_before_images_by_key(self, tables: TableIds, keys: Keys) -> None:
        self.save_before_images(make_row_batch(self._layout.device, tables, keys, self._faults))

    def open_bucket(self, bucket: int) -> None:
        self._bucket, self._position = bucket, int(self._rows.bounds[bucket])
        if len(parts := self._before_images[bucket]) > 1:
            positions, lines = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            order = np.argsort(positions)
            self._before_images[bucket] = [(positions[order], lines[order])]

    def sort_bucket(self) -> None:
        """Do nothing: `scan` returns sorted rows."""

    def read_next(self, rows: NDArray[np.uint8]) -> int:
        max_rows = len(rows) // row_dtype(self._layout.width).itemsize
        begin, end = self._position, min(self._position + max_rows, int(self._rows.bounds[self._bucket + 1]))
        if begin == end:
            parts, self._before_images[self._bucket] = self._before_images[self._bucket], []
            self.before_image_bytes -= sum(positions.nbytes + lines.nbytes for positions, lines in parts)
            return 0
        packed = rows.view(row_dtype(self._layout.width))[: end - begin]
        source, part = self._rows, slice(begin, end)
        # Run on the training thread's stream, after that thread's earlier launches and before its later ones.
        with torch.cuda.stream(self._stream):
            lines = self._staging.pack(source.tables[part], source.keys[part], source.lines[part], packed)
            self._positions[source.line_numbers[part] + 1] = -1
        for positions, saved_lines in self._before_images[self._bucket]:
            part = slice(*np.searchsorted(positions, (begin, end)))
            lines[positions[part] - begin] = saved_lines[part]
        self._position = end
        return end - begin


class CudaFullTier(TopTier[Batch]):
    """A `FullTier` on a GPU. `tier` says where the lines are: "device" or "host". The index is on the device."""

    def __init__(
        self, layout: Layout, host_layout: _core.Layout, capacity: int | None, faults: Faults, tier: str = "device"
    ) -> None:
        self.layout, self._host_layout = layout, host_layout
        self._capacity, self._faults, self._tier = capacity, faults, tier
        self.table = CudaFullTable(layout, capacity, on_host=tier == "host")
        self.staging = Staging(layout)
        self._pinned: Batch | None = None
        self._peek_counts = torch.zeros(2, dtype=torch.int64, device=layout.device.torch_device)  # rows, unknown rows

    def pin(self, batch: Batch, capacity_limit: CapacityLimit | None) -> None:
        """Pin a batch, as in `TopTier.pin`. With a capacity, rows that do not fit set a fault and read as zeros.

        The table's memory is the limit, not `capacity_limit`. Rows that a failed step inserted use memory too.
        """
        prefix_sums = self.table.find(batch)
        self.table.insert_missing(batch, prefix_sums)
        self.table.count_lookups(batch, prefix_sums)
        self._faults.post(batch)
        self._pinned = batch

    def unpin(self, batch: Batch, is_dirty: bool) -> None:
        """Forget the pinned batch. A full table never moves its lines."""
        self._pinned = None

    def peek(self, batch: Batch, is_training: bool = False) -> None:
        prefix_sums = self.table.find(batch)
        self.table.count_lookups(batch, prefix_sums)
        if batch.num_positions and not is_training:
            self._peek_counts += torch.stack([batch.count[0], prefix_sums[-1]])
        initialise_missing(batch, self.layout)
        self._faults.post(batch)

    def peek_counts(self) -> tuple[int, int, int]:
        rows, unknown = self._peek_counts.tolist()
        return rows - unknown, 0, unknown

    def write(self, tables: TableIds, keys: Keys, lines: Lines) -> None:
        """Write distinct rows from host memory. Raises CapacityError."""
        self.staging.reserve(len(keys))
        _core.copy_lines(self._host_layout, lines, self.staging.rows(len(keys))[2])
        batch = make_row_batch(self.layout.device, tables, keys, self._faults.word)
        self.table.insert_missing(batch, self.table.find(batch))
        self._faults.check()
        all_rows = torch.ones(batch.num_positions, dtype=torch.int32, device=batch.lines.device)
        prefix_sums = all_rows.cumsum(0, dtype=torch.int32)
        self.staging.fill(batch, all_rows, prefix_sums, np.ones(batch.num_positions, np.bool_))
        prefix_sums.cpu()  # waits, because the staging memory will be reused

    def erase(self, tables: TableIds, keys: Keys) -> None:
        batch = make_row_batch(self.layout.device, tables, keys, self._faults.word)
        self.table.find(batch)
        pinned = find_lines([] if self._pinned is None else [self._pinned], batch, self._faults.word) != 0
        initialise_lines(batch, self.layout, pinned)
        self.table.erase(batch, torch.where(pinned, 0, batch.lines))

    def scan(self) -> Chunks:
        source = self.sort_rows()
        for bucket in range(BUCKETS):
            for begin in range(source.bounds[bucket], source.bounds[bucket + 1], SCAN_ROWS):
                part = slice(begin, min(begin + SCAN_ROWS, source.bounds[bucket + 1]))
                tables, keys = source.tables[part], source.keys[part]
                rows = np.empty(len(keys), row_dtype(self.layout.width))
                with self.table.exclusive():
                    self.staging.pack(tables, keys, source.lines[part], rows)
                yield bucket, rows

    def sort_rows(self) -> SortedRows:
        with self.table.exclusive():
            hashes, tables, lines, updates = self.table.list_rows()
            numbers = updates.nonzero()[:, 0]
            hashes, tables = hashes[numbers], tables[numbers]
            keys = recover_keys(self.layout.device, hashes, tables)
            buckets = (hashes >> 58) & (BUCKETS - 1)
            order = (keys ^ torch.iinfo(torch.int64).min).argsort()  # flips the sign bits, to order int64 as unsigned
            for sort_key in (tables, buckets):
                order = order[sort_key[order].argsort(stable=True)]
            bounds = torch.searchsorted(buckets[order], torch.arange(BUCKETS + 1, device=order.device))
            host_tables, host_keys = (column[order].cpu().numpy() for column in (tables, keys))
            rows, numbers = (host_tables.view(np.uint32), host_keys.view(np.uint64)), numbers[order]
            return SortedRows(*rows, lines[numbers], numbers, bounds.cpu().numpy())

    def make_image(self, top_tier: Any) -> CudaTableImage:
        return CudaTableImage(self.table, self.layout, self.sort_rows, self._faults.word)

    def start_change_source(self) -> ChangedLines:
        return ChangedLines(self.table)

    def read(self, tables: TableIds, keys: Keys, lines: Lines, should_touch: bool = True) -> HitMask:
        """Copy rows to their lines in host memory, except rows that the table lacks."""
        batch = make_row_batch(self.layout.device, tables, keys, self._faults.word)
        self.table.find(batch)
        resident = (batch.lines != 0).nonzero()[:, 0]
        records = self.staging.read_counters(batch.lines[resident])
        rows = resident.cpu().numpy()
        is_hit = np.zeros(len(keys), np.bool_)
        is_hit[rows] = records[:, 0] != 0
        staged_lines = self.staging.rows(len(rows))[2]
        _core.copy_lines(self._host_layout, staged_lines[is_hit[rows]], lines[is_hit])
        return is_hit

    def close(self) -> None:
        self._faults.read(wait=True)  # waits until no kernel accesses host memory
        self.table = CudaFullTable(self.layout, None)

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        batch = make_single_row_batch(self.layout.device, table, key, self._faults.word)
        self.table.find(batch)
        line = int(self.table.find_line_numbers(batch))
        return [] if line < 0 else [{"tier": self._tier, **self.staging.describe(batch.lines), "line": line}]

    def metrics(self) -> dict[str, dict[str, float]]:
        counts, capacity = self.table.read_counts(), self.table.num_lines
        sizes = {"capacity": capacity, "fill": counts["resident_rows"] / max(capacity, 1), "bytes": self.table.bytes}
        traffic = {"bytes_in": 0, "bytes_out": 0}  # no tier above moves rows
        return {self._tier: {**counts, **traffic, **sizes, "index_bytes": self.table.index_bytes}}

    def hit_counts(self) -> HitCounts:
        return self.table.hit_counters.read_total()
