"""The set-associative cache in device memory, a table's fastest tier. It evicts the same rows as the CPU cache.

Kernels find rows and choose victims; `CacheSets` launches these kernels and copies no row itself. Look-ahead hides the
time to fetch missing rows. The caller announces the batches of future steps. A prefetch thread fetches the batches'
rows in step order, on its own stream. If a batch's rows are not resident yet, its step fetches them.

`BatchQueue` keeps the announced batches, and lets only one thread at a time use the cache and the staging memory. The
table's lock is not enough, because the prefetch thread fetches rows without holding that lock. The lines of resident
batches are pinned, so a step may use them while the next batch is fetched. CUDA events order the streams.
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

from ..._core import GROUP_WAYS, WAY_BYTES, WAYS
from ...errors import StoreError
from ...ops.cuda.batch import Batch, Faults, find_lines, make_row_batch, make_single_row_batch
from ...ops.cuda.device import Device, Event, launch, make_struct, make_struct_type
from ...ops.cuda.layout import HitCounters, Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import initialise_lines
from ...row_format import BUCKETS, Chunks, Keys, TableIds
from ...signals import defer_signals
from ...store.interfaces import HitMask, Lines, TopTier

POLICIES = ("lru", "lfu")
COUNT_NAMES = ("evictions_clean", "evictions_dirty", "overflows")
_SETS = make_struct_type("uint64 tags ways lines_start", "uint32 num_sets")


@dataclass(eq=False)
class _AnnouncedBatch:
    """An announced batch. The batch's rows are resident once `placement` is set."""

    batch: Batch
    event: Event = None
    placement: Placement | None = None


class BatchQueue:
    """The pinned batch, and the announced batches in step order."""

    def __init__(self, device: Device, sets: CacheSets) -> None:
        self._device, self._sets, self._condition = device, sets, Condition()
        self._pinned: Placement | None = None
        self._announced: deque[_AnnouncedBatch] = deque()
        self._num_waiting_steps = 0  # steps that wait for a prefetch to end
        self.is_fetching = False  # True while a thread is in `fetch`
        # (event after a step's launches, last batch completed by then). A prefetch waits for the event.
        self._step_end: tuple[Event, int] = (device.record_event(), sets.latest_number)
        self._prefetch_end = device.record_event()  # the event after the last prefetch's launches

    @property
    def last_completed(self) -> int:
        """The number of the last completed batch. Batches up to this number pin no rows."""
        first = self._pinned or (self._announced[0].placement if self._announced else None)
        return self._sets.latest_number if first is None else (first.batch_number - 1) % (1 << 32)

    @property
    def resident_batches(self) -> list[Batch]:
        resident = [announced.batch for announced in tuple(self._announced) if announced.placement is not None]
        return resident if self._pinned is None else [self._pinned.batch, *resident]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep prefetch from using the cache during a `with` block. Blocks may be nested."""
        with defer_signals():
            self._num_waiting_steps += 1
            with self._condition:
                self._num_waiting_steps -= 1
                try:
                    self._device.wait_event(self._prefetch_end)
                    try:
                        yield
                    finally:
                        self._step_end = self._device.record_event(), self.last_completed
                finally:
                    self._condition.notify_all()

    def announce(self, batch: Batch) -> None:
        self._announced.append(_AnnouncedBatch(batch))

    def fetch(self, batch: Batch, fetch_rows: Callable[[int], Placement | None]) -> bool:
        """Call `fetch_rows(last_completed)` to fetch an announced batch's rows before its step.

        Returns False if another batch must be fetched first, or if `fetch_rows` could not fetch and returned None.
        Returns True if the rows were fetched or the batch was cancelled.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._num_waiting_steps)
            waiting = [entry for entry in tuple(self._announced) if entry.placement is None]
            if not any(entry.batch is batch for entry in waiting):
                return True
            announced = waiting[0]
            if announced.batch is not batch:  # an earlier batch's step is about to fetch its rows
                return False
            event, last_completed = self._step_end
            self._device.wait_event(event)
            self.is_fetching = True
            try:
                placement = fetch_rows(last_completed)
            finally:
                self.is_fetching = False
                announced.event = self._prefetch_end = self._device.record_event()
            announced.placement = placement
            return placement is not None

    def pin(self, batch: Batch, fetch_rows: Callable[[int], Placement | None]) -> bool:
        """Pin a batch. Returns True if all rows were resident. If not, calls `fetch_rows(last_completed)`."""
        if self._pin_if_resident(batch):
            return True
        with self.exclusive():
            if self._pin_if_resident(batch):  # prefetched while this thread waited
                return True
            if self._announced:
                self._announced.popleft()
            batch.faults |= batch.input_faults
            self._pinned = fetch_rows(self.last_completed)
            return False

    def unpin(self, batch: Batch) -> None:
        if self._pinned is None or self._pinned.batch is not batch:
            raise StoreError("unpin of a batch that is not pinned")
        self._pinned = None

    def cancel_announced(self) -> None:
        """Forget the announced batches. Rows of forgotten batches stay resident but are no longer pinned."""
        if self._announced:
            with self.exclusive():
                self._announced.clear()

    def close(self) -> None:
        """Forget all batches, including the pinned one."""
        self._pinned = None
        self._announced.clear()

    def _pin_if_resident(self, batch: Batch) -> bool:
        """Pin a batch and return True if its rows are resident. Needs no `exclusive` block."""
        if self._pinned is not None:
            raise StoreError("a batch is still pinned; one step at a time")
        if not self._announced:
            return False
        first = self._announced[0]
        if first.batch is not batch:
            raise StoreError("another batch was announced; cancel it")
        if first.placement is None:
            return False
        self._announced.popleft()
        self._device.wait_event(first.event)
        self._pinned = first.placement
        self._step_end = self._device.record_event(), self.last_completed
        return True


_PLACEMENT = make_struct_type("uint64 slots lines is_hit evictions victim_ways")


@dataclass(frozen=True)
class Placement:
    """The decisions of `CacheSets.place_batch` for a batch. The caller must then copy the rows to their lines."""

    batch: Batch
    slots: Tensor  # [positions], each row's slot; -1 if its set is full
    lines: Tensor  # [positions], each row's line address; 0 if its set is full
    is_hit: Tensor  # [positions], 1 if the row was resident
    evictions: Tensor  # [positions], what the slot held before: an `Eviction` of placement.h
    victim_ways: Tensor  # [positions, WAY_BYTES / 4] int32, the evicted row's `Way` of cache_set.h
    batch_number: int

    def has_all_slots(self) -> bool:
        """True if every row has a slot. Waits for the device."""
        rows = torch.arange(self.batch.num_positions, device=self.slots.device) < self.batch.count
        return not ((self.slots == -1) & rows).any()

    def as_struct(self) -> np.ndarray:
        """The Placement struct of placement.h, passed by value."""
        return make_struct(_PLACEMENT, **{name: getattr(self, name) for name in _PLACEMENT.names or ()})


class CacheSets:
    """The sets of a cache, with `budget_bytes` for lines and metadata. Makes decisions but copies no row.

    Batches are numbered in the order of placement. A row is pinned until the last batch that needs it has completed. A
    row is dirty while its `updates` differ from its `updates` in the lower tier.
    """

    def __init__(self, layout: Layout, budget_bytes: int, policy: str = "lru") -> None:
        """policy: a name in POLICIES. Raises ValueError if the budget is too small for one set."""
        set_bytes = WAYS * (layout.line_bytes + WAY_BYTES + 1)
        num_sets = min(budget_bytes // set_bytes, (1 << 32) // WAYS - 1)
        if num_sets == 0:
            raise ValueError(f"one set takes {set_bytes} bytes")
        if num_sets > BUCKETS:
            num_sets = num_sets // BUCKETS * BUCKETS
        device = layout.device.torch_device
        self._layout, self._num_sets, self._policy = layout, num_sets, POLICIES.index(policy)
        self._launch = partial(launch, layout.device, layout.program("cache/cuda/cache.cu"))
        self._tags = torch.zeros(num_sets * WAYS, dtype=torch.uint8, device=device)
        self._ways = torch.zeros(num_sets * WAYS, WAY_BYTES // 4, dtype=torch.int32, device=device)
        self._lines = torch.empty(num_sets * WAYS * layout.line_bytes, dtype=torch.uint8, device=device)
        self._counts = torch.zeros(len(COUNT_NAMES), dtype=torch.int64, device=device)
        self.hit_counters = HitCounters(layout)  # hits and misses of the rows in `place_batch`
        self.latest_number = 0  # number of the latest batch

    def place_batch(self, batch: Batch, last_completed: int) -> Placement:
        """Choose a slot for each row; after a fault, only for resident rows. last_completed: see `BatchQueue`."""
        self.latest_number = (self.latest_number + 1) % (1 << 32)
        n, num_sets, set_keys = np.uint64(batch.num_positions), np.uint32(self._num_sets), batch.empty(torch.int32)
        self._launch("compute_set_keys", batch.num_positions, 1, batch.hashes, batch.count, n, num_sets, set_keys)
        sorted_keys, order = torch.sort(set_keys, stable=True)
        slots, lines = batch.empty(torch.int32), batch.empty(torch.int64)
        is_hit, evictions = batch.empty(torch.uint8), batch.empty(torch.uint8)
        victim_ways = self._ways.new_empty(batch.num_positions, WAY_BYTES // 4)
        placement = Placement(batch, slots, lines, is_hit, evictions, victim_ways, self.latest_number)
        self._launch(
            "place_rows", batch.num_positions, GROUP_WAYS, self.as_struct(), np.uint32(self.latest_number),
            np.uint32(last_completed), np.uint32(self._policy), batch.hashes, batch.tables, sorted_keys, order, n,
            placement.as_struct(), self._counts, self.hit_counters.struct, batch.faults,
        )  # fmt: skip
        return placement

    def mark_fetched(self, placement: Placement) -> None:
        """Mark a placement's lines as clean, after they were filled from the lower tier."""
        batch = placement.batch
        self._launch("mark_fetched", batch.num_positions, 1, self.as_struct(), placement.as_struct(), batch.count)

    def undo_placement(self, placement: Placement, restore: bool) -> None:
        """Undo the latest placement. restore: True to put back victims that were not written back."""
        batch, structs = placement.batch, (self.as_struct(), placement.as_struct())
        self._launch("undo_placement", batch.num_positions, 1, *structs, batch.count, np.uint32(restore))

    def find(self, batch: Batch) -> Tensor:
        """Set each row's line in `batch.lines`, 0 for a miss. Returns flags, int32 [positions]: 1 for a miss."""
        missing = batch.empty(torch.int32)
        self._launch(
            "find_cached_rows", batch.num_positions, GROUP_WAYS, self.as_struct(), batch.hashes, batch.tables,
            batch.count, np.uint64(batch.num_positions), batch.lines, missing,
        )  # fmt: skip
        return missing

    def erase(self, batch: Batch, is_kept: Tensor) -> None:
        """Erase rows. is_kept [positions]: if True, the row stays, but counts as absent from the lower tier."""
        rows = batch.hashes, batch.tables, batch.count
        self._launch("erase_cached_rows", batch.num_positions, GROUP_WAYS, self.as_struct(), *rows, is_kept)

    def find_dirty_slots(self) -> Tensor:
        """Return the slots of dirty rows, ascending. Waits for the device."""
        flags = torch.empty_like(self._tags)
        self._launch("find_dirty_slots", self.capacity, 1, self.as_struct(), flags)
        return flags.nonzero().flatten()

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return hashes, tables and lines of the rows in slots [n]."""
        lines = self._lines.data_ptr() + slots * self._layout.line_bytes
        return self._ways.view(torch.int64)[slots, 0], self._ways[slots, 2], lines

    def describe(self, line: int, updates: int, last_completed: int) -> dict[str, Any]:
        """Return the state of the row with this line, for `TierBase.locate`. last_completed: as in `place_batch`."""
        slot = (line - self._lines.data_ptr()) // self._layout.line_bytes
        last, stored = self._ways[slot, [3, 6]].tolist()
        is_pinned = 0 < (last - last_completed) % (1 << 32) < 1 << 31
        return {"slot": slot, "overflow": False, "pinned": is_pinned, "dirty": updates != stored % (1 << 32)}

    def mark_clean(self, slots: Tensor) -> None:
        """Mark the rows in slots [n] as clean."""
        self._launch("mark_clean", len(slots), 1, self.as_struct(), slots, np.uint64(len(slots)))

    def close(self) -> None:
        """Release the sets' memory. No kernel may be using the memory; the cache is unusable afterwards."""
        self._tags, self._ways, self._lines = (part.new_empty(0) for part in (self._tags, self._ways, self._lines))

    def as_struct(self) -> np.ndarray:
        """The CacheSets struct of placement.h, passed by value."""
        return make_struct(_SETS, tags=self._tags, ways=self._ways, lines_start=self._lines, num_sets=self._num_sets)

    @property
    def capacity(self) -> int:
        return len(self._ways)

    def metrics(self) -> dict[str, float]:
        """Return counters and sizes. Waits for the device."""
        hits, misses = self.hit_counters.read_total().sum(0).tolist()
        counts = dict(zip(COUNT_NAMES, self._counts.tolist(), strict=True))
        used = int((self._tags != 0).sum())
        return {
            "hits": hits,
            "misses": misses,
            **counts,
            "insertions": misses - counts["overflows"],
            "capacity": self.capacity,
            "resident_rows": used,
            "fill": used / self.capacity,
            "bytes": self._tags.nbytes + self._ways.nbytes + self._lines.nbytes,
        }


class CudaCacheBase(TopTier[Batch]):
    """Base class of both GPU caches: the sets, the lower tier, and the queue of batches that use the sets."""

    def __init__(self, layout: Layout, lower_tier: Any, sets: CacheSets, faults: Faults, staging: Staging) -> None:
        self._layout, self._lower_tier, self._sets = layout, lower_tier, sets
        self._faults, self._staging, self._queue = faults, staging, BatchQueue(layout.device, sets)

    def announce(self, batch: Batch) -> None:
        self._queue.announce(batch)

    def cancel_announced(self) -> None:
        self._queue.cancel_announced()

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        with self._queue.exclusive():
            lower_records = self._lower_tier.locate(table, key)
            batch = make_single_row_batch(self._layout.device, table, key, self._faults.word)
            self._sets.find(batch)
            if not (line := int(batch.lines)):
                return lower_records
            row_state = self._staging.describe(batch.lines)
            state = self._sets.describe(line, row_state["updates"], self._queue.last_completed)
            return [{"tier": "device", **row_state, **state}, *lower_records]

    def read(self, tables: TableIds, keys: Keys, lines: Lines, should_touch: bool = True) -> HitMask:
        with self._queue.exclusive():
            self._write_back()
            return self._lower_tier.read(tables, keys, lines, should_touch)

    def scan(self) -> Chunks:
        self.flush()
        yield from self._lower_tier.scan()

    def close(self) -> None:
        """Wait for both streams, release the sets' memory, and close the lower tier."""
        try:
            with self._queue.exclusive():
                self._queue.close()
                self._faults.read(wait=True)
                if not self._queue.is_fetching:  # garbage collection may close the table in the middle of a fetch
                    self._sets.close()
        finally:
            self._lower_tier.close()

    def _write_back(self) -> None:
        """Write dirty rows to the lower tier, and keep them in the cache."""
        raise NotImplementedError

    def _erase(self, tables: TableIds, keys: Keys) -> tuple[Batch, Tensor]:
        """Erase rows from the sets, in an `exclusive` block. A pinned row keeps its slot and gets its initial value.

        Returns the rows as a batch, and a bool flag for each row [positions]: True if the row stays.
        """
        batch = make_row_batch(self._layout.device, tables, keys, self._faults.word)
        batch.lines = find_lines(self._queue.resident_batches, batch, self._faults.word)
        is_kept = batch.lines != 0
        initialise_lines(batch, self._layout, is_kept)
        self._sets.erase(batch, is_kept)
        return batch, is_kept

    def _metrics(self) -> dict[str, float]:
        """Return the cache's counters and sizes, and the store's hits and misses. Needs an `exclusive` block."""
        hits, misses = self.hit_counts().sum(0).tolist()
        return {**self._sets.metrics(), "hits": hits, "misses": misses}
