"""The full table on a GPU. Its index is in device memory. Its lines are in device or page-locked host memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...ops.cuda.batch import SLOT_HASH, Batch
from ...ops.cuda.device import launch, make_struct, make_struct_type
from ...ops.cuda.layout import HitCounters, Layout

SLOT_BYTES = 16
MIN_BITS = 10  # log2 of the lines in the first segment of a growing table
MAX_ROWS = (1 << 32) * 3 // 4
PROBE_LANES, WARP = 8, 32  # as in full_table.cu

_INDEX = make_struct_type("uint64 slots", "uint32 mask", "uint64 addresses num_lines", "uint32 base_bits")


class CudaFullTable:
    """All rows, with their lines in device memory or in host memory that kernels access.

    With a capacity, the table allocates all its memory up front and never waits for the device. If a batch's rows do
    not fit, the table sets a fault, and the step changes nothing. Without a capacity, the table grows, and waits for
    the device only if a batch might exceed the memory.
    """

    def __init__(self, layout: Layout, capacity: int | None, max_load: float = 0.75, on_host: bool = False) -> None:
        """max_load: the maximum rows per slot of the index. on_host: True to keep lines in host memory."""
        self._layout, self.device = layout, layout.device
        self._launch = partial(launch, layout.device, layout.program("store/cuda/full_table.cu"))
        self._has_capacity, self._max_load, self._is_on_host = capacity is not None, max_load, on_host
        self._base_bits = MIN_BITS if capacity is None else max(capacity - 1, 1).bit_length()
        self._segments: list[Tensor] = []
        self._addresses = self._zeros(32, torch.int64)
        self.num_lines = 0  # how many lines are allocated
        self._max_rows = 0  # upper bound of the row count, known without waiting
        self.zero_line = self._zeros(layout.line_bytes, torch.uint8)  # the line of zeros for rows that do not fit
        self._slots = self._zeros(16 * SLOT_BYTES, torch.uint8)
        self._counts = self._zeros(3, torch.int64)  # as in full_table.cu
        self.hit_counters = HitCounters(layout)
        # A cache with a prefetch thread sets this context. Inside the context, that thread does not change the table.
        self.exclusive: Callable[[], AbstractContextManager[None]] = nullcontext
        self._free_lines = self._zeros(1, torch.int32)  # free lines, each as number + 1; then unused entries
        # With a capacity, only `_free_lines` is reallocated. Captured kernels stay valid: they read its address here.
        self._free_lines_ptr = self._zeros(1, torch.int64).fill_(self._free_lines.data_ptr())
        if capacity is not None:
            self._grow_index(capacity)
            self._add_segment(capacity)

    def find(self, batch: Batch) -> Tensor:
        """Set `batch.lines`, 0 for absent rows. Returns the running count of absent rows, int32 [positions]."""
        return self._find(batch, batch.lines, None).cumsum(0, dtype=torch.int32)

    def find_line_numbers(self, batch: Batch) -> Tensor:
        """Return each row's line number, int64 [positions]; -1 for absent rows. Does not change `batch.lines`."""
        numbers = torch.empty_like(batch.lines)
        self._find(batch, torch.empty_like(batch.lines), numbers)
        return numbers

    def insert_missing(self, batch: Batch, prefix_sums: Tensor, record_only: bool = False) -> None:
        """Insert and initialise each row whose line is 0. `prefix_sums` is the result of `find`.

        With `record_only`, writes only the line's counters, to mark the row as never written. If the rows do not fit,
        all these rows get a line of zeros, so that kernels can run until the fault is raised.
        """
        if not self._has_capacity:
            self._reserve(batch.num_positions, prefix_sums)
        n = np.uint64(batch.num_positions)
        self._launch(
            "insert_rows", batch.num_positions, WARP, self.make_index_struct(), self._counts, self._free_lines_ptr,
            batch.hashes, batch.tables, batch.count, prefix_sums, n, batch.lines, self._layout.initial, SLOT_HASH,
            np.uint32(record_only), self.zero_line, batch.faults,
        )  # fmt: skip
        self._launch("count_inserted", min(batch.num_positions, 1), 1, prefix_sums, n, self._counts, batch.faults)

    def erase(self, batch: Batch, lines: Tensor) -> None:
        """Erase the rows whose line in `lines` [positions] is not 0; `find` sets `lines`. Waits for the device."""
        if (size := batch.num_positions) == 0:
            return
        n, clusters, index = np.uint64(size), batch.empty(torch.int64), self.make_index_struct()
        self._launch("find_clusters", size, 1, index, batch.hashes, lines, batch.count, n, clusters)
        clusters, order = torch.sort(clusters, stable=True)
        erased = batch.empty(torch.int32)
        self._launch("erase_rows", size, 1, index, batch.hashes, batch.tables, clusters, order, n, erased)
        free = int(self._counts[1])
        self.device.record_stream(self._free_lines)
        self._free_lines = torch.cat([self._free_lines[:free], erased[erased != 0], self._zeros(1, torch.int32)])
        self._free_lines_ptr.fill_(self._free_lines.data_ptr())
        self._counts[1] = len(self._free_lines) - 1

    def count_lookups(self, batch: Batch, prefix_sums: Tensor) -> None:
        """Count the batch's hits and misses. `prefix_sums` is the result of `find`."""
        n, counters = batch.num_positions, self.hit_counters.struct
        self._launch("count_lookups", n, 1, batch.tables, batch.count, prefix_sums, counters)

    def read_counts(self) -> dict[str, int]:
        """Return the counters of `metrics`. Waits for the device."""
        used, erased, insertions = self._counts.tolist()
        hits, misses = self.hit_counters.read_total().sum(0).tolist()
        return {"resident_rows": used - erased, "hits": hits, "misses": misses, "insertions": insertions}

    @property
    def index_bytes(self) -> int:
        return self._slots.nbytes + self._free_lines.nbytes

    @property
    def bytes(self) -> int:
        return self.index_bytes + sum(segment.nbytes for segment in self._segments)

    def list_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return hashes, tables, lines and update counts by line number; 0 for erased rows. Waits for the device."""
        used = int(self._counts[0])
        hashes, lines = self._zeros(used, torch.int64), self._zeros(used, torch.int64)
        tables, updates = self._zeros(used, torch.int32), self._zeros(used, torch.int32)
        num_slots = self._slots.nbytes // SLOT_BYTES
        self._launch("list_rows", num_slots, 1, self.make_index_struct(), hashes, tables, lines, updates)
        return hashes, tables, lines, updates

    def make_index_struct(self) -> np.ndarray:
        """The LineIndex struct of segments.h, passed by value."""
        mask, memory = self._slots.nbytes // SLOT_BYTES - 1, {"addresses": self._addresses, "num_lines": self.num_lines}
        return make_struct(_INDEX, slots=self._slots, mask=mask, **memory, base_bits=self._base_bits)

    def _find(self, batch: Batch, lines: Tensor, numbers: Tensor | None) -> Tensor:
        """Set `lines` [positions]. Returns a flag for each row, int32 [positions]: 1 if absent."""
        missing = batch.empty(torch.int32)
        self._launch(
            "find_rows", batch.num_positions, PROBE_LANES, self.make_index_struct(), batch.hashes, batch.tables,
            batch.count, np.uint64(batch.num_positions), lines, missing, numbers,
        )  # fmt: skip
        return missing

    def _reserve(self, new_rows: int, prefix_sums: Tensor) -> None:
        if self._max_rows + new_rows > self.num_lines and new_rows:
            used, erased, missing = torch.stack([*self._counts[:2], prefix_sums[-1].to(torch.int64)]).tolist()  # waits
            self._max_rows, new_rows = used, max(missing - erased, 0)
        self._max_rows += new_rows
        if self._max_rows > MAX_ROWS:
            raise MemoryError(f"{self._max_rows} rows are too many: a table holds up to {MAX_ROWS}")
        self._grow_index(self._max_rows)
        while self.num_lines < self._max_rows:
            self._add_segment(1 << (self._base_bits + len(self._segments)))

    def _grow_index(self, num_rows: int) -> None:
        """Double the index until `num_rows` rows take at most `max_load` of its slots."""
        size = slots = self._slots.nbytes // SLOT_BYTES
        while num_rows > size * self._max_load:
            size *= 2
        if size == slots:
            return
        larger = self._zeros(size * SLOT_BYTES, torch.uint8)
        self._launch("move_rows", slots, 1, self._slots, np.uint64(slots), larger, np.uint32(size - 1))
        self.device.record_stream(self._slots)
        self._slots = larger

    def _add_segment(self, lines: int) -> None:
        size = lines * self._layout.line_bytes
        if self._is_on_host:
            segment = self.device.allocate_host_memory(size, torch.uint8)
        else:
            segment = torch.empty(size, dtype=torch.uint8, device=self.device.torch_device)
        self._addresses[len(self._segments)] = segment.data_ptr()
        self._segments.append(segment)
        self.num_lines += lines

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device.torch_device)
