"""The set-associative cache in device memory, as the top of a stack. It decides as the CPU's cache does.

A thread fetches the rows of announced batches ahead of their steps, on its own stream. The lock of a table lets one
call at a time use the cache. The thread does not hold that lock: it uses sets and staging memory between those calls,
in turns. The lines of a batch whose rows are resident are pinned, so a step may work on them meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._core import GROUP, WAY_BYTES, WAYS
from ...errors import StoreError
from ...ops.cuda.batch import Batch, Faults, lines_among, one_row, rows_of
from ...ops.cuda.device import Argument, Device, Event, launch
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import initialise_lines
from ...row_format import BUCKETS, Keys, TableIds
from ...signals import uninterrupted
from ...store.contract import HitCounts

POLICIES = ("lru", "lfu")
COUNTS = ("evictions_clean", "evictions_dirty", "overflows")
_CACHE = np.dtype([("tags", "<u8"), ("ways", "<u8"), ("memory", "<u8"), ("sets", "<u4")], align=True)


class _AnnouncedBatch:
    """An announced batch, and whether its rows are up."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.event: Event = None
        self.admission: Admission | None = None  # None until the rows of the batch are up


class CudaWindow:
    """The pinned batch, and the announced batches in the order of their steps."""

    def __init__(self, device: Device, cache: Cache) -> None:
        self._device, self._cache = device, cache
        self._pinned: Admission | None = None
        self._coming: deque[_AnnouncedBatch] = deque()
        self._changed = Condition()
        self._wanted = 0  # how many steps wait for their turn
        self.brings_up = False  # whether rows of an announced batch are on their way up
        # what work ahead must come after: an event after the launches of steps, and the last batch that is over by then
        self._of_steps: tuple[Event, int] = (device.record_event(), cache.now)
        self._ahead = device.record_event()  # an event after what was launched ahead of steps

    @property
    def over(self) -> int:
        """The number of the last batch that is over: it pins no row any more."""
        first = self._pinned or (self._coming[0].admission if self._coming else None)
        return self._cache.now if first is None else (first.number - 1) % (1 << 32)

    @property
    def up(self) -> list[Batch]:
        """The batches whose rows are up."""
        ahead = [coming.batch for coming in tuple(self._coming) if coming.admission is not None]
        return ahead if self._pinned is None else [self._pinned.batch, *ahead]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which this thread alone uses the cache, for all but work ahead of steps. Blocks may be nested."""
        with uninterrupted():
            self._wanted += 1
            with self._changed:
                self._wanted -= 1
                try:
                    self._device.wait_event(self._ahead)
                    try:
                        yield
                    finally:
                        self._of_steps = self._device.record_event(), self.over
                finally:
                    self._changed.notify_all()

    def announce(self, batch: Batch) -> None:
        self._coming.append(_AnnouncedBatch(batch))

    def bring_up(self, batch: Batch, admit: Callable[[int], Admission | None]) -> bool:
        """Let `admit(over)` bring the rows of an announced batch up, ahead of its step.

        Returns False where `admit` returned None because it could not, or where the batch is not the next to come up.
        Returns True otherwise, also where nobody waits for the batch any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted)
            waiting = [one for one in tuple(self._coming) if one.admission is None]
            if not any(one.batch is batch for one in waiting):
                return True
            coming = waiting[0]
            if coming.batch is not batch:  # the step of the batch has begun, and brings its rows up
                return False
            event, over = self._of_steps
            self._device.wait_event(event)
            self.brings_up = True
            try:
                admission = admit(over)
            finally:
                self.brings_up = False
                coming.event = self._ahead = self._device.record_event()
            coming.admission = admission
            return admission is not None

    def pin(self, batch: Batch, admit: Callable[[int], Admission | None]) -> bool:
        """Pin a batch. Returns whether its rows were up; if not, `admit(over)` has brought them up, or raises."""
        if self._take(batch):
            return True
        with self.turn():
            if self._take(batch):  # the rows came up while this thread waited
                return True
            if self._coming:
                self._coming.popleft()
            batch.faults |= batch.wrong
            self._pinned = admit(self.over)
            return False

    def unpin(self, batch: Batch) -> None:
        if self._pinned is None or self._pinned.batch is not batch:
            raise StoreError("unpin of a batch that is not pinned")
        self._pinned = None

    def cancel(self) -> None:
        """Forget the announced batches. Rows that are up for them stay, like any row that no batch pins."""
        if self._coming:
            with self.turn():
                self._coming.clear()

    def close(self) -> None:
        """Forget every batch, the pinned one included."""
        self._pinned = None
        self._coming.clear()

    def _take(self, batch: Batch) -> bool:
        """Pin a batch if its rows are up. Returns whether they were. Needs no turn."""
        if self._pinned is not None:
            raise StoreError("a batch is still pinned; one step at a time")
        if not self._coming:
            return False
        first = self._coming[0]
        if first.batch is not batch:
            raise StoreError("another batch was announced; cancel it")
        if first.admission is None:
            return False
        self._coming.popleft()
        self._device.wait_event(first.event)
        self._pinned = first.admission
        self._of_steps = self._device.record_event(), self.over
        return True


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
        self.hit_counts = torch.zeros(
            (layout.tables, 2), dtype=torch.int64, device=device
        )  # hits and misses of `admit`
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
            self.hit_counts, batch.faults,
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

    def locate(self, table: int, key: int, staging: Staging, faults: Tensor, over: int) -> list[dict[str, Any]]:
        """`TierBase.locate` of this tier alone. Batches up to number `over` are over."""
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
        hits, misses = self.hit_counts.sum(0).tolist()
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


class CacheTop:
    """The sets of a cache and the window of the batches that use them.

    `erase`, `locate` and `metrics` are called in a turn of the window.
    """

    def __init__(self, layout: Layout, cache: Cache, faults: Faults) -> None:
        self._layout, self._faults = layout, faults
        self.cache = cache
        self.window = CudaWindow(layout.device, cache)

    def erase(self, tables: TableIds, keys: Keys) -> tuple[Batch, Tensor]:
        """Take rows out of the sets. A row of a batch that is up stays, with its initial value.

        Returns the rows as a batch, and flags [size] bool of those that stay.
        """
        batch = rows_of(self._layout.device, tables, keys, self._faults.word)
        batch.lines = lines_among(self.window.up, batch, self._faults.word)
        kept = batch.lines != 0
        initialise_lines(batch, self._layout, kept)
        self.cache.erase(batch, kept)
        return batch, kept

    def locate(self, table: int, key: int, staging: Staging) -> list[dict[str, Any]]:
        """`TierBase.locate` of the cache alone. staging: memory that the row's record passes."""
        return self.cache.locate(table, key, staging, self._faults.word, self.window.over)

    def metrics(self, asked: HitCounts) -> dict[str, float]:
        """Counters and sizes of the cache, with the hits and misses `hit_counts` of the whole store."""
        hits, misses = asked.sum(0).tolist()
        return {**self.cache.metrics(), "hits": hits, "misses": misses}

    def close(self) -> None:
        """Release the device memory of the sets, once both streams are done with it."""
        with self.window.turn():
            self.window.close()
            self._faults.seen(wait=True)
            if not self.window.brings_up:  # garbage collected while this thread brings rows up may close the table
                self.cache.close()
