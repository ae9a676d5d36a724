"""The set-associative cache in device memory: it decides as `_core.Cache` does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .device import Argument, launch
from .layout import Layout

WAYS, WAY_BYTES, BUCKETS = 16, 24, 64
CLEAN, DIRTY = 1, 2
COUNTS = ("hits", "misses", "evictions_clean", "evictions_dirty", "overflows")

_ADMISSION = np.dtype([("slots", "<u8"), ("lines", "<u8"), ("hit", "<u8"), ("before", "<u8")])


@dataclass(frozen=True)
class Admission:
    """What `Cache.admit` decided for the rows of a batch, and what must happen before their lines are used."""

    batch: Batch
    slots: Tensor  # [size], -1 where a set had no room
    lines: Tensor  # [size], where each row is or shall be, 0 where its set had no room
    hit: Tensor  # [size], whether the line holds the row already
    before: Tensor  # [size, WAY_BYTES], what the slot held

    def by_value(self) -> np.ndarray:
        """cache.cu's Admission."""
        struct = np.zeros((), _ADMISSION)
        for name in ("slots", "lines", "hit", "before"):
            struct[name] = getattr(self, name).data_ptr()
        return struct


class Cache:
    """An LRU cache of lines of `budget_bytes`, their metadata included. It decides and remembers; it moves nothing."""

    def __init__(self, layout: Layout, budget_bytes: int) -> None:
        """ValueError where the budget has no room for one set."""
        set_bytes = WAYS * (layout.line_bytes + WAY_BYTES)
        sets = min(budget_bytes // set_bytes, (1 << 32) // WAYS - 1)
        if sets == 0:
            raise ValueError(f"one set takes {set_bytes} bytes")
        if sets > BUCKETS:
            sets = sets // BUCKETS * BUCKETS
        device = layout.device.torch_device
        self._layout = layout
        self._program = layout.program("cache.cu")
        self._sets = sets
        self._ways = torch.zeros(sets * WAYS, WAY_BYTES // 4, dtype=torch.int32, device=device)
        self._memory = torch.empty(sets * WAYS * layout.line_bytes, dtype=torch.uint8, device=device)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self._tick = 0

    def admit(self, batch: Batch) -> Admission:
        """Make room for the batch's rows and pin them."""
        self._tick = (self._tick + 1) % (1 << 32)
        n = np.uint64(batch.size)
        places = batch.empty(torch.int32)
        self._run("place_rows", batch.size, 1, batch.hashes, batch.count, n, np.uint32(self._sets), places)
        ordered, order = torch.sort(places, stable=True)
        before = torch.empty(batch.size * WAY_BYTES, dtype=torch.uint8, device=places.device)
        slots, lines, hit = batch.empty(torch.int32), batch.empty(torch.int64), batch.empty(torch.uint8)
        admission = Admission(batch, slots, lines, hit, before)
        self._run(
            "admit_rows", batch.size, WAYS, *self._places(), np.uint32(self._tick), batch.hashes, batch.tables, ordered,
            order, n, admission.by_value(), self._counts,
        )  # fmt: skip
        return admission

    def release(self, admission: Admission, dirty: bool) -> None:
        """End the pins of an admission whose lines were filled."""
        batch = admission.batch
        self._run("release_rows", batch.size, 1, self._ways, admission.slots, batch.count, np.uint32(dirty))

    def cancel(self, admission: Admission, restore: bool) -> None:
        """Undo an admission: `restore` where its victims were not written down."""
        batch = admission.batch
        self._run("cancel_rows", batch.size, 1, self._ways, admission.by_value(), batch.count, np.uint32(restore))

    def find(self, batch: Batch) -> Tensor:
        """Set `batch.lines`, 0 where a row is not up; changes nothing else. Returns flags [size] int32 of those."""
        missing = batch.empty(torch.int32)
        self._run(
            "find_cached", batch.size, WAYS, *self._places(), batch.hashes, batch.tables, batch.count,
            np.uint64(batch.size), batch.lines, missing,
        )  # fmt: skip
        return missing

    def dirty(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hashes, tables and lines of the dirty rows; waits for the device."""
        slots = (self._ways[:, 5] == DIRTY).nonzero().flatten()
        hashes = self._ways.view(torch.int64)[slots, 0]
        return hashes, self._ways[slots, 2], self._memory.data_ptr() + slots * self._layout.line_bytes

    def mark_clean(self) -> None:
        states = self._ways[:, 5]
        states[states == DIRTY] = CLEAN

    @property
    def capacity(self) -> int:
        return len(self._ways)

    @property
    def used(self) -> int:
        """Waits for the device."""
        return int((self._ways[:, 5] != 0).sum())

    @property
    def bytes(self) -> int:
        return self._ways.nbytes + self._memory.nbytes

    @property
    def counts(self) -> dict[str, int]:
        """Waits for the device."""
        return dict(zip(COUNTS, self._counts.tolist(), strict=True))

    def _places(self) -> tuple[Tensor, np.uint32, Tensor]:
        return self._ways, np.uint32(self._sets), self._memory

    def _run(self, kernel: str, items: int, lanes: int, *arguments: Argument) -> None:
        launch(self._layout.device, self._program, kernel, items, lanes, *arguments)
