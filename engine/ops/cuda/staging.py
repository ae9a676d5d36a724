"""Staging memory on the host, for copying lines between the GPU and the tiers below it."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import SLOT_HASH, Batch
from .device import launch
from .layout import Layout

RowArrays = tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]  # tables, keys, line addresses

WARP, MIN_ROWS = 32, 1024


class Staging:
    """Page-locked arrays for the tables, keys and lines of `capacity` rows. The arrays grow on demand."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._launch = partial(launch, layout.device, layout.program("ops/cuda/staging.cu"))
        self.capacity = 0
        self.reserve(MIN_ROWS)

    def reserve(self, rows: int) -> bool:
        """Make room for `rows`. Returns True if it reallocates; the device must not be using the old memory then."""
        if rows <= self.capacity:
            return False
        allocate = self._layout.device.allocate_host_memory
        self.capacity = max(rows, 2 * self.capacity)
        self.tables, self.keys = allocate(self.capacity, torch.int32), allocate(self.capacity, torch.int64)
        self.lines = allocate(self.capacity * self._layout.line_bytes, torch.uint8)
        self.hit_flags = allocate(self.capacity, torch.uint8)
        return True

    def rows(self, count: int) -> RowArrays:
        """Return the first `count` rows as arguments of `Tier.read` and `Tier.write`."""
        addresses = self.lines.data_ptr() + self._layout.line_bytes * np.arange(count, dtype=np.uint64)
        tables, keys = self.tables[:count].numpy(), self.keys[:count].numpy()
        return tables.view(np.uint32), keys.view(np.uint64), addresses.astype(np.uint64)

    def copy_keys(self, hashes: Tensor, tables: Tensor, flags: Tensor, prefix_sums: Tensor) -> None:
        """Copy the flagged rows' tables and keys to the staging memory. prefix_sums: the running sum of flags [n]."""
        n, strides = len(flags), [np.uint64(tensor.stride(0)) for tensor in (hashes, tables)]
        self._launch(
            "copy_keys_to_host", n, 1, hashes, strides[0], tables, strides[1], flags, prefix_sums, np.uint64(n),
            np.uint64(self.capacity), self.tables, self.keys, SLOT_HASH,
        )  # fmt: skip

    def copy_lines(self, lines: Tensor, flags: Tensor, prefix_sums: Tensor) -> None:
        """Copy flagged lines [n] to the staging memory."""
        n, capacity = np.uint64(len(lines)), np.uint64(self.capacity)
        self._launch("copy_lines_to_host", len(lines), WARP, lines, flags, prefix_sums, n, capacity, self.lines)

    def read(self, lines: Tensor) -> NDArray[np.uint8]:
        """Wait for lines [n] and return their bytes [n, line_bytes], valid until the next `read` or `copy_lines`."""
        self.reserve(len(lines))
        flags = torch.ones_like(lines, dtype=torch.int32)
        self.copy_lines(lines, flags, flags.cumsum(0, dtype=torch.int32))
        flags.cpu()  # waits
        return self.lines.numpy().reshape(-1, self._layout.line_bytes)[: len(lines)]

    def pack(
        self, tables: NDArray[np.uint32], keys: NDArray[np.uint64], lines: Tensor, rows: NDArray[np.void]
    ) -> NDArray[np.uint8]:
        """Fill `rows` [n] of `row_dtype` from row keys and lines. Returns a view of `rows`: lines [n, stored_bytes]."""
        rows["table"], rows["key"] = tables, keys
        packed = rows.view(np.uint8).reshape(-1, rows.dtype.itemsize)[:, -self._layout.stored_bytes :]
        packed[:] = self.read(lines)[:, : self._layout.stored_bytes]
        return packed

    def read_counters(self, lines: Tensor) -> NDArray[np.uint32]:
        """Return each line's update count and last step as an [n, 2] array. Overwrites the staging memory."""
        end = self._layout.stored_bytes
        return self.read(lines)[:, end - 8 : end].copy().view(np.uint32)

    def describe(self, line: Tensor) -> dict[str, int]:
        """Return a line's update count and last step."""
        updates, step = self.read_counters(line)[0].tolist()
        return {"updates": updates, "last_step": step}

    def fill(self, batch: Batch, flags: Tensor, prefix_sums: Tensor, is_hit: NDArray[np.bool_]) -> None:
        """Fill a batch's flagged lines from the staging memory, or with initial values if `is_hit` is False."""
        self.hit_flags[: len(is_hit)].numpy()[:] = is_hit
        self._launch(
            "lines_from_host", len(flags), WARP, batch.lines, flags, prefix_sums, np.uint64(len(flags)), self.hit_flags,
            self.lines, batch.hashes, batch.tables, self._layout.initial, SLOT_HASH,
        )  # fmt: skip
