"""The full table in device memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .device import Argument, launch
from .layout import Layout

SLOT_BYTES = 16
SMALLEST_BITS = 10  # lines of the first segment of a table that grows, as a power of two
MOST_ROWS = (1 << 32) * 3 // 4
PROBE_LANES, WARP = 8, 32  # as in table.cu

_LINES = np.dtype([("segments", "<u8"), ("room", "<u8"), ("base_bits", "<u4")], align=True)


class FullTable:
    """Every row in device memory.

    With a capacity it has all of its memory from the start and never waits for the device: rows that do not fit set a
    bit of `faults`, and the step that brought them changes nothing. Without, it grows, and waits only when its
    rows could exceed what it has room for.
    """

    def __init__(self, layout: Layout, capacity: int | None, faults: Tensor, load: float = 0.75) -> None:
        """`load`: the most rows for each slot of the index."""
        self._layout = layout
        self._device = layout.device
        self._program = layout.program("table.cu")
        self._faults = faults
        self._fixed = capacity is not None
        self._load = load
        self._base_bits = SMALLEST_BITS if capacity is None else max(capacity - 1, 1).bit_length()
        self._segments: list[Tensor] = []
        self._addresses = self._zeros(32, torch.int64)
        self._room = 0  # rows that there is memory for
        self._bound = 0  # the most rows that there can be, as far as is known without waiting
        self._nowhere = self._zeros(layout.line_bytes, torch.uint8)
        self._slots = self._zeros(16 * SLOT_BYTES, torch.uint8)
        self._counts = self._zeros(3, torch.int64)  # rows, hits, misses
        if capacity is not None:
            self._grow_index(capacity)
            self._add_segment(capacity)

    def find(self, batch: Batch) -> Tensor:
        """Set `batch.lines`, zero where a row is absent. Returns the running count of absent rows, [size]."""
        missing = batch.empty(torch.int32)
        self._run(
            "find_rows", batch.size, PROBE_LANES, *self._index(), self._lines(), batch.hashes, batch.tables,
            batch.count, np.uint64(batch.size), batch.lines, missing,
        )  # fmt: skip
        return missing.cumsum(0, dtype=torch.int32)

    def insert_missing(self, batch: Batch, ranks: Tensor) -> None:
        """Insert and initialise each row whose line is zero, given what `find` returned.

        Those that may not come have a line of zeros, so that the steps until the fault is raised can go on.
        """
        if not self._fixed:
            self._reserve(batch.size, ranks)
        n = np.uint64(batch.size)
        self._run(
            "insert_rows", batch.size, WARP, *self._index(), self._lines(), self._counts, batch.hashes, batch.tables,
            batch.count, ranks, n, batch.lines, self._layout.initial, self._nowhere, self._faults,
        )  # fmt: skip
        self._run("count_held", min(batch.size, 1), 1, ranks, n, self._counts, self._faults)

    def count(self, batch: Batch, ranks: Tensor) -> None:
        """Count the rows that `find` found and missed as hits and misses."""
        self._run("count_asked", min(batch.size, 1), 1, batch.count, ranks, np.uint64(batch.size), self._counts)

    def counts(self) -> dict[str, int]:
        """Waits for the device."""
        rows, hits, misses = self._counts.tolist()
        return {"resident_rows": rows, "hits": hits, "misses": misses}

    @property
    def bytes(self) -> int:
        return self._slots.nbytes + sum(segment.nbytes for segment in self._segments)

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every row: hashes, tables, lines, how often it was written. Waits for the device."""
        held = int(self._counts[0])
        hashes, lines = self._zeros(held, torch.int64), self._zeros(held, torch.int64)
        tables, updates = self._zeros(held, torch.int32), self._zeros(held, torch.int32)
        slots = self._slots.nbytes // SLOT_BYTES
        self._run("list_rows", slots, 1, self._slots, np.uint64(slots), self._lines(), hashes, tables, lines, updates)
        return hashes, tables, lines, updates

    def _reserve(self, more: int, ranks: Tensor) -> None:
        if self._bound + more > self._room and more:
            held, missing = torch.stack([self._counts[0], ranks[-1].to(torch.int64)]).tolist()  # waits
            self._bound, more = held, missing
        self._bound += more
        if self._bound > MOST_ROWS:
            raise MemoryError(f"{self._bound} rows; a table holds up to {MOST_ROWS}")
        self._grow_index(self._bound)
        while self._room < self._bound:
            self._add_segment(1 << (self._base_bits + len(self._segments)))

    def _grow_index(self, rows: int) -> None:
        """To a power of two of slots that `rows` fill to `load` at most."""
        size = slots = self._slots.nbytes // SLOT_BYTES
        while rows > size * self._load:
            size *= 2
        if size == slots:
            return
        larger = self._zeros(size * SLOT_BYTES, torch.uint8)
        self._run("move_rows", slots, 1, self._slots, np.uint64(slots), larger, np.uint32(size - 1))
        self._slots = larger

    def _add_segment(self, lines: int) -> None:
        segment = torch.empty(lines * self._layout.line_bytes, dtype=torch.uint8, device=self._device.torch_device)
        self._addresses[len(self._segments)] = segment.data_ptr()
        self._segments.append(segment)
        self._room += lines

    def _index(self) -> tuple[Tensor, np.uint32]:
        return self._slots, np.uint32(self._slots.nbytes // SLOT_BYTES - 1)

    def _lines(self) -> np.ndarray:
        lines = np.zeros((), _LINES)
        lines["segments"], lines["room"], lines["base_bits"] = self._addresses.data_ptr(), self._room, self._base_bits
        return lines

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device.torch_device)

    def _run(self, kernel: str, items: int, lanes: int, *arguments: Argument) -> None:
        launch(self._device, self._program, kernel, items, lanes, *arguments)
