"""The set-associative cache in device memory, as the top of a stack. It makes the same decisions as the CPU's cache.

A thread fetches the rows of announced batches ahead of their steps, on its own stream. The lock of a table lets one
call at a time use the cache. The thread does not hold that lock: it uses sets and staging memory between those calls.
The lines of a batch whose rows are resident are pinned, so a step may work on them meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._core import GROUP, WAY_BYTES, WAYS
from ...errors import StoreError
from ...ops.cuda.batch import Batch, Faults, lines_among, one_row, rows_of
from ...ops.cuda.device import Device, Event, launch, struct_of, struct_type
from ...ops.cuda.layout import HitCounters, Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import initialise_lines
from ...row_format import BUCKETS, Chunks, Keys, TableIds
from ...signals import uninterrupted
from ...store.contract import Found, Lines, TopTier

POLICIES = ("lru", "lfu")
COUNTS = ("evictions_clean", "evictions_dirty", "overflows")
_CACHE = struct_type("uint64 tags ways memory", "uint32 sets")


@dataclass(eq=False)
class _AnnouncedBatch:
    """An announced batch, and whether its rows are resident."""

    batch: Batch
    event: Event = None
    admission: Admission | None = None  # None until the rows of the batch are resident


class CudaWindow:
    """The pinned batch, and the announced batches in the order of their steps."""

    def __init__(self, device: Device, cache: Cache) -> None:
        self._device, self._cache = device, cache
        self._pinned: Admission | None = None
        self._announced: deque[_AnnouncedBatch] = deque()
        self._changed = Condition()
        self._waiting_steps = 0  # how many steps wait
        self.is_fetching = False  # whether the rows of an announced batch are being fetched
        # before prefetch: an event after the launches of steps, and the batch that was completed last by then
        self._steps_done: tuple[Event, int] = (device.record_event(), cache.now)
        self._prefetch_done = device.record_event()  # an event after the launches of prefetch

    @property
    def last_completed(self) -> int:
        """The number of the batch that was completed last: it pins no row any more."""
        first = self._pinned or (self._announced[0].admission if self._announced else None)
        return self._cache.now if first is None else (first.number - 1) % (1 << 32)

    @property
    def resident_batches(self) -> list[Batch]:
        """The batches whose rows are resident."""
        ahead = [announced.batch for announced in tuple(self._announced) if announced.admission is not None]
        return ahead if self._pinned is None else [self._pinned.batch, *ahead]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """A block in which no prefetch uses the cache. Blocks may be nested."""
        with uninterrupted():
            self._waiting_steps += 1
            with self._changed:
                self._waiting_steps -= 1
                try:
                    self._device.wait_event(self._prefetch_done)
                    try:
                        yield
                    finally:
                        self._steps_done = self._device.record_event(), self.last_completed
                finally:
                    self._changed.notify_all()

    def announce(self, batch: Batch) -> None:
        self._announced.append(_AnnouncedBatch(batch))

    def fetch(self, batch: Batch, admit: Callable[[int], Admission | None]) -> bool:
        """Let `admit(last_completed)` fetch the rows of an announced batch before its step.

        Returns False if `admit` returned None because it could not, or if the batch is not the next to fetch. Returns
        True otherwise, also if the batch was forgotten meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_steps)
            waiting = [one for one in tuple(self._announced) if one.admission is None]
            if not any(one.batch is batch for one in waiting):
                return True
            announced = waiting[0]
            if announced.batch is not batch:  # the step of the batch has begun, and fetches its rows
                return False
            event, last_completed = self._steps_done
            self._device.wait_event(event)
            self.is_fetching = True
            try:
                admission = admit(last_completed)
            finally:
                self.is_fetching = False
                announced.event = self._prefetch_done = self._device.record_event()
            announced.admission = admission
            return admission is not None

    def pin(self, batch: Batch, admit: Callable[[int], Admission | None]) -> bool:
        """Pin a batch. Returns whether its rows were resident; if not, `admit(last_completed)` fetches them."""
        if self._take(batch):
            return True
        with self.exclusive():
            if self._take(batch):  # the rows were fetched while this thread waited
                return True
            if self._announced:
                self._announced.popleft()
            batch.faults |= batch.wrong
            self._pinned = admit(self.last_completed)
            return False

    def unpin(self, batch: Batch) -> None:
        if self._pinned is None or self._pinned.batch is not batch:
            raise StoreError("unpin of a batch that is not pinned")
        self._pinned = None

    def cancel(self) -> None:
        """Forget the announced batches. Their rows stay resident, and are no longer pinned."""
        if self._announced:
            with self.exclusive():
                self._announced.clear()

    def close(self) -> None:
        """Forget every batch, the pinned one included."""
        self._pinned = None
        self._announced.clear()

    def _take(self, batch: Batch) -> bool:
        """Pin a batch if its rows are resident, and return whether they were. Needs no `exclusive` block."""
        if self._pinned is not None:
            raise StoreError("a batch is still pinned; one step at a time")
        if not self._announced:
            return False
        first = self._announced[0]
        if first.batch is not batch:
            raise StoreError("another batch was announced; cancel it")
        if first.admission is None:
            return False
        self._announced.popleft()
        self._device.wait_event(first.event)
        self._pinned = first.admission
        self._steps_done = self._device.record_event(), self.last_completed
        return True


_ADMISSION = struct_type("uint64 slots lines hit evicted before")


@dataclass(frozen=True)
class Admission:
    """The decisions of `Cache.admit` for the rows of a batch, and the work to do before their lines are used."""

    batch: Batch
    slots: Tensor  # [size], the slot of each row, -1 if it does not fit its set
    lines: Tensor  # [size], the address of each row's line, 0 if it does not fit its set
    hit: Tensor  # [size], whether the row was resident
    evicted: Tensor  # [size], what the slot held before, an enumerator of admission.h
    before: Tensor  # [size, WAY_BYTES / 4] int32, the way of the row that the slot held before
    number: int  # of the batch

    def fits(self) -> bool:
        """Whether every row has a slot; waits for the device."""
        rows = torch.arange(self.batch.size, device=self.slots.device) < self.batch.count
        return not ((self.slots == -1) & rows).any()

    def by_value(self) -> np.ndarray:
        """The Admission of admission.h, a struct by value."""
        return struct_of(_ADMISSION, **{name: getattr(self, name) for name in _ADMISSION.names or ()})


class Cache:
    """Lines of `budget_bytes` in all, their metadata included. The cache makes decisions; it copies no row.

    Batches are numbered in the order in which they are admitted. A row is pinned until the last batch that needs it is
    completed. A row is dirty while its `updates` differ from those of the tier below.
    """

    def __init__(self, layout: Layout, budget_bytes: int, policy: str = "lru") -> None:
        """policy: one of POLICIES. Raises ValueError if the budget is too small for one set."""
        set_bytes = WAYS * (layout.line_bytes + WAY_BYTES + 1)
        sets = min(budget_bytes // set_bytes, (1 << 32) // WAYS - 1)
        if sets == 0:
            raise ValueError(f"one set takes {set_bytes} bytes")
        if sets > BUCKETS:
            sets = sets // BUCKETS * BUCKETS
        device = layout.device.torch_device
        self._layout = layout
        self._run = partial(launch, layout.device, layout.program("cache/cuda/cache.cu"))
        self._sets = sets
        self._policy = POLICIES.index(policy)
        self._tags = torch.zeros(sets * WAYS, dtype=torch.uint8, device=device)
        self._ways = torch.zeros(sets * WAYS, WAY_BYTES // 4, dtype=torch.int32, device=device)
        self._memory = torch.empty(sets * WAYS * layout.line_bytes, dtype=torch.uint8, device=device)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.hit_counters = HitCounters(layout)  # of `admit`
        self.now = 0  # the number of the latest batch

    def admit(self, batch: Batch, last_completed: int) -> Admission:
        """Give slots to the batch's rows. last_completed: the number of the batch that was completed last.

        After a fault of the batch only resident rows are pinned.
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
            self._ways.new_empty(batch.size, WAY_BYTES // 4),
            self.now,
        )
        self._run(
            "admit_rows", batch.size, GROUP, self.by_value(), np.uint32(self.now), np.uint32(last_completed),
            np.uint32(self._policy), batch.hashes, batch.tables, ordered, order, n, admission.by_value(), self._counts,
            self.hit_counters.struct, batch.faults,
        )  # fmt: skip
        return admission

    def fetched(self, admission: Admission) -> None:
        """Note that the lines of an admission were filled from the tier below, so that they are clean."""
        batch = admission.batch
        self._run("note_fetched", batch.size, 1, self.by_value(), admission.by_value(), batch.count)

    def cancel(self, admission: Admission, restore: bool) -> None:
        """Undo the latest admission. restore: whether to restore its victims, since they were not written back."""
        batch, cache = admission.batch, self.by_value()
        self._run("cancel_rows", batch.size, 1, cache, admission.by_value(), batch.count, np.uint32(restore))

    def find(self, batch: Batch) -> Tensor:
        """Set `batch.lines`, 0 for a miss. Returns flags [size] int32 of the misses."""
        missing = batch.empty(torch.int32)
        self._run(
            "find_cached", batch.size, GROUP, self.by_value(), batch.hashes, batch.tables, batch.count,
            np.uint64(batch.size), batch.lines, missing,
        )  # fmt: skip
        return missing

    def erase(self, batch: Batch, kept: Tensor) -> None:
        """Erase rows. Rows flagged in `kept` [size] bool stay, and count as absent from the tier below."""
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

    def describe(self, line: int, updates: int, last_completed: int) -> dict[str, Any]:
        """The state of the row with this line, for `TierBase.locate`. last_completed: as in `admit`."""
        slot = (line - self._memory.data_ptr()) // self._layout.line_bytes
        last, stored = self._ways[slot, [3, 6]].tolist()
        pinned = 0 < (last - last_completed) % (1 << 32) < 1 << 31
        return {"slot": slot, "overflow": False, "pinned": pinned, "dirty": updates != stored % (1 << 32)}

    def note_clean(self, slots: Tensor) -> None:
        """Note that the rows in slots [n] are clean."""
        self._run("note_written", len(slots), 1, self.by_value(), slots, np.uint64(len(slots)))

    def close(self) -> None:
        """Release the memory of the sets, which no kernel may be using. The cache cannot be used afterwards."""
        self._tags, self._ways, self._memory = (part.new_empty(0) for part in (self._tags, self._ways, self._memory))

    def by_value(self) -> np.ndarray:
        """The Cache of admission.h, a struct by value."""
        return struct_of(_CACHE, tags=self._tags, ways=self._ways, memory=self._memory, sets=self._sets)

    @property
    def capacity(self) -> int:
        return len(self._ways)

    def metrics(self) -> dict[str, float]:
        """Counters and sizes; waits for the device."""
        hits, misses = self.hit_counters.total().sum(0).tolist()
        counts = dict(zip(COUNTS, self._counts.tolist(), strict=True))
        used = int((self._tags != 0).sum())
        return {
            "hits": hits,
            "misses": misses,
            **counts,
            "insertions": misses - counts["overflows"],
            "capacity": self.capacity,
            "resident_rows": used,
            "fill": used / self.capacity,
            "bytes": self._tags.nbytes + self._ways.nbytes + self._memory.nbytes,
        }


class DeviceCache(TopTier[Batch]):
    """The sets of a cache above a tier, and the window of the batches that use them: what both kinds of caches share.

    `_erase` and `_metrics` are called in an `exclusive` block of the window.
    """

    def __init__(self, layout: Layout, below: Any, cache: Cache, faults: Faults, staging: Staging) -> None:
        self._layout, self._below, self._cache, self._faults, self._staging = layout, below, cache, faults, staging
        self._window = CudaWindow(layout.device, cache)

    def announce(self, batch: Batch) -> None:
        self._window.announce(batch)

    def cancel(self) -> None:
        self._window.cancel()

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        with self._window.exclusive():
            below = self._below.locate(table, key)
            batch = one_row(self._layout.device, table, key, self._faults.word)
            self._cache.find(batch)
            if not (line := int(batch.lines)):
                return below
            record = self._staging.describe(batch.lines)
            state = self._cache.describe(line, record["updates"], self._window.last_completed)
            return [{"tier": "device", **record, **state}, *below]

    def read(self, tables: TableIds, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        with self._window.exclusive():
            self._write_back()
            found: Found = self._below.read(tables, keys, lines, touch)
            return found

    def scan(self) -> Chunks:
        self.flush()
        yield from self._below.scan()

    def close(self) -> None:
        """Release the device memory of the sets, once both streams are done with it, and close the tier below."""
        try:
            with self._window.exclusive():
                self._window.close()
                self._faults.seen(wait=True)
                if not self._window.is_fetching:  # garbage collection while this thread fetches may close the table
                    self._cache.close()
        finally:
            self._below.close()

    def _write_back(self) -> None:
        """Write dirty rows to the tier below. They stay in the cache."""
        raise NotImplementedError

    def _erase(self, tables: TableIds, keys: Keys) -> tuple[Batch, Tensor]:
        """Erase rows from the sets. A pinned row stays, with its initial value.

        Returns the rows as a batch, and flags [size] bool of those that stay.
        """
        batch = rows_of(self._layout.device, tables, keys, self._faults.word)
        batch.lines = lines_among(self._window.resident_batches, batch, self._faults.word)
        kept = batch.lines != 0
        initialise_lines(batch, self._layout, kept)
        self._cache.erase(batch, kept)
        return batch, kept

    def _metrics(self) -> dict[str, float]:
        """Counters and sizes of the cache, with the hits and misses of the whole store."""
        hits, misses = self.hit_counts().sum(0).tolist()
        return {**self._cache.metrics(), "hits": hits, "misses": misses}
