"""The set-associative cache in device memory. Its decisions are those of the CPU's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._core import GROUP, WAY_BYTES, WAYS
from ...ops.cuda.batch import Batch, one_row
from ...ops.cuda.device import Argument, launch
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...row_format import BUCKETS

POLICIES = ("lru", "lfu")
COUNTS = ("evictions_clean", "evictions_dirty", "overflows")

_CACHE = np.dtype([("tags", "<u8"), ("ways", "<u8"), ("memory", "<u8"), ("sets", "<u4")], align=True)
_ADMISSION = np.dtype([(name, "<u8") for name in ("slots", "lines", "hit", "gone", "before")])


@dataclass(frozen=True)
class Admission:
    """What `Cache.admit` decided for the rows of a batch, and what must happen before their lines are used."""

    batch: Batch
    slots: Tensor  # [size], the slot of each row, -1 where its set had no room
    lines: Tensor  # [size], the address of each row's line, 0 where its set had no room
    hit: Tensor  # [size], whether the line held the row already
    gone: Tensor  # [size], what the slot held before: `Gone` of admission.h
    before: Tensor  # [size, WAY_BYTES], the way of the row that the slot held before
    number: int  # of the batch

    def fits(self) -> bool:
        """Whether every row has a slot; waits for the device."""
        rows = torch.arange(self.batch.size, device=self.slots.device) < self.batch.count
        return not ((self.slots == -1) & rows).any()

    def by_value(self) -> np.ndarray:
        """The Admission of admission.h, a struct by value."""
        struct = np.zeros((), _ADMISSION)
        for name in _ADMISSION.names or ():
            struct[name] = getattr(self, name).data_ptr()
        return struct


class Cache:
    """Lines of `budget_bytes` in all, their metadata included. The cache decides and remembers; it moves no row.

    Batches have numbers, in the order in which they are admitted. A row is pinned while the last batch that needs it is
    not over. A row is dirty while its `updates` differ from those that the tier below has.
    """

    def __init__(self, layout: Layout, budget_bytes: int, policy: str = "lru") -> None:
        """policy: one of POLICIES. Raises ValueError where the budget has no room for one set."""
        set_bytes = WAYS * (layout.line_bytes + WAY_BYTES + 1)
        sets = min(budget_bytes // set_bytes, (1 << 32) // WAYS - 1)
        if sets == 0:
            raise ValueError(f"one set takes {set_bytes} bytes")
        if sets > BUCKETS:
            sets = sets // BUCKETS * BUCKETS
        device = layout.device.torch_device
        self._layout = layout
        self._program = layout.program("cache/cuda/cache.cu")
        self._sets = sets
        self._policy = POLICIES.index(policy)
        self._tags = torch.zeros(sets * WAYS, dtype=torch.uint8, device=device)
        self._ways = torch.zeros(sets * WAYS, WAY_BYTES // 4, dtype=torch.int32, device=device)
        self._memory = torch.empty(sets * WAYS * layout.line_bytes, dtype=torch.uint8, device=device)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.asked = torch.zeros((layout.tables, 2), dtype=torch.int64, device=device)  # hits and misses of `admit`
        self.now = 0  # the number of the latest batch

    def admit(self, batch: Batch, over: int) -> Admission:
        """Make room for the batch's rows. Batches up to number `over` are over.

        After a fault of the batch only rows that are up already are pinned.
        """
        self.now = (self.now + 1) % (1 << 32)
        n = np.uint64(batch.size)
        places = batch.empty(torch.int32)
        self._run("place_rows", batch.size, 1, batch.hashes, batch.count, n, np.uint32(self._sets), places)
        ordered, order = torch.sort(places, stable=True)
        admission = Admission(
            batch,
            batch.empty(torch.int32),
            batch.empty(torch.int64),
            batch.empty(torch.uint8),
            batch.empty(torch.uint8),
            torch.empty(batch.size * WAY_BYTES, dtype=torch.uint8, device=places.device),
            self.now,
        )
        self._run(
            "admit_rows", batch.size, GROUP, self.by_value(), np.uint32(self.now), np.uint32(over),
            np.uint32(self._policy), batch.hashes, batch.tables, ordered, order, n, admission.by_value(), self._counts,
            self.asked, batch.faults,
        )  # fmt: skip
        return admission

    def fetched(self, admission: Admission) -> None:
        """Note that the lines of an admission were filled from the tier below, so that they are clean."""
        batch = admission.batch
        self._run("note_fetched", batch.size, 1, self.by_value(), admission.by_value(), batch.count)

    def cancel(self, admission: Admission, restore: bool) -> None:
        """Undo the latest admission. restore: whether its victims come back, as they were not written down."""
        batch, cache = admission.batch, self.by_value()
        self._run("cancel_rows", batch.size, 1, cache, admission.by_value(), batch.count, np.uint32(restore))

    def find(self, batch: Batch) -> Tensor:
        """Set `batch.lines`, 0 where a row is not up. Returns flags [size] int32 of the rows that are not up."""
        missing = batch.empty(torch.int32)
        self._run(
            "find_cached", batch.size, GROUP, self.by_value(), batch.hashes, batch.tables, batch.count,
            np.uint64(batch.size), batch.lines, missing,
        )  # fmt: skip
        return missing

    def erase(self, batch: Batch, kept: Tensor) -> None:
        """Take rows out. Rows flagged in `kept` [size] bool stay, and count as absent from the tier below."""
        self._run("erase_cached", batch.size, GROUP, self.by_value(), batch.hashes, batch.tables, batch.count, kept)

    def dirty(self) -> Tensor:
        """Slots of the dirty rows, ascending; waits for the device."""
        flags = torch.empty_like(self._tags)
        self._run("find_dirty", self.capacity, 1, self.by_value(), flags)
        return flags.nonzero().flatten()

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hashes, tables and lines of the rows in slots [n]."""
        lines = self._memory.data_ptr() + slots * self._layout.line_bytes
        return self._ways.view(torch.int64)[slots, 0], self._ways[slots, 2], lines

    def where(self, table: int, key: int, staging: Staging, faults: Tensor, over: int) -> list[dict[str, Any]]:
        """`Level.where` of this tier alone. Batches up to number `over` are over."""
        batch = one_row(self._layout.device, table, key, faults)
        self.find(batch)
        if not (line := int(batch.lines)):
            return []
        slot = (line - self._memory.data_ptr()) // self._layout.line_bytes
        last, stored = self._ways[slot, [3, 6]].tolist()
        record = staging.describe(batch.lines)
        up = {"slot": slot, "overflow": False, "pinned": 0 < (last - over) % (1 << 32) < 1 << 31}
        return [{"tier": "device", **record, **up, "dirty": record["updates"] != stored % (1 << 32)}]

    def written(self, slots: Tensor) -> None:
        """Note that the tier below has the rows in slots [n] as they are."""
        self._run("note_written", len(slots), 1, self.by_value(), slots, np.uint64(len(slots)))

    def close(self) -> None:
        """Release the memory of the sets, which no kernel may be at work on. The cache is of no use after it."""
        self._tags, self._ways, self._memory = (part.new_empty(0) for part in (self._tags, self._ways, self._memory))

    def by_value(self) -> np.ndarray:
        """The Cache of admission.h, a struct by value."""
        struct = np.zeros((), _CACHE)
        struct["tags"], struct["ways"] = self._tags.data_ptr(), self._ways.data_ptr()
        struct["memory"], struct["sets"] = self._memory.data_ptr(), self._sets
        return struct

    @property
    def capacity(self) -> int:
        return len(self._ways)

    @property
    def used(self) -> int:
        """How many rows the cache holds; waits for the device."""
        return int((self._tags != 0).sum())

    @property
    def bytes(self) -> int:
        return self._tags.nbytes + self._ways.nbytes + self._memory.nbytes

    @property
    def counts(self) -> dict[str, int]:
        """Hits, misses and COUNTS; waits for the device."""
        hits, misses = self.asked.sum(0).tolist()
        return {"hits": hits, "misses": misses, **dict(zip(COUNTS, self._counts.tolist(), strict=True))}

    def metrics(self) -> dict[str, float]:
        """Counters and sizes; waits for the device."""
        counts, used = self.counts, self.used
        return {
            **counts,
            "insertions": counts["misses"] - counts["overflows"],
            "capacity": self.capacity,
            "resident_rows": used,
            "fill": used / self.capacity,
            "bytes": self.bytes,
        }

    def _run(self, kernel: str, items: int, lanes: int, *arguments: Argument) -> None:
        launch(self._layout.device, self._program, kernel, items, lanes, *arguments)
