"""A cache in device memory above a host tier such as RocksDB. Lines are copied through page-locked memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ...ops.cuda.batch import Batch, Faults, recover_keys
from ...ops.cuda.device import launch
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import allocate_lines, copy_rows, count_written
from ...row_format import Keys, TableIds
from ...store.cuda.changed_lines import WriteBackLog
from ...store.cuda.full_tier import SCAN_ROWS
from ...store.full_tier import check_capacity
from ...store.interfaces import CapacityLimit, HitCounts, HitMask, Tier
from .cache import CacheSets, CudaCacheBase, Placement


class CudaCacheTier(CudaCacheBase):
    """A write-back cache in device memory above a host tier. Prefetches the rows of announced batches."""

    def __init__(self, layout: Layout, lower_tier: Tier, sets: CacheSets, faults: Faults) -> None:
        super().__init__(layout, lower_tier, sets, faults, Staging(layout))  # staging for write-back
        self._launch = partial(launch, layout.device, layout.program("cache/cuda/cache.cu"))
        self._fetch_staging = Staging(layout)
        self._overflow_rows: tuple[Tensor, int] | None = None  # the pinned batch's rows that got no slot: flags, count
        self._read_counts: HitCounts = np.zeros((layout.num_tables, 2), np.int64)  # hits and misses counted by `peek`
        self._peek_counts, self._byte_counts = (0, 0, 0), {"bytes_in": 0, "bytes_out": 0}
        self._find_write_back_log: Callable[[], WriteBackLog | None] = lambda: None

    def prefetch(self, batch: Batch) -> bool:
        return self._queue.fetch(batch, partial(self._fetch, batch, capacity_limit=None, is_prefetch=True))

    def pin(self, batch: Batch, capacity_limit: CapacityLimit | None) -> None:
        """Pin a batch (see `TopTier.pin`). If rows are missing, waits for the device and raises any fault's error."""
        if not self._queue.pin(batch, partial(self._fetch, batch, capacity_limit=capacity_limit, is_prefetch=False)):
            return
        self._faults.post(batch)
        try:
            if capacity_limit is not None:
                num_new = batch.count - count_written(self._layout, batch, batch.lines).sum()
                check_capacity(int(num_new), capacity_limit)
        except BaseException:
            self._queue.unpin(batch)
            raise

    def unpin(self, batch: Batch, is_dirty: bool) -> None:
        if self._overflow_rows is None:
            self._queue.unpin(batch)
            return
        with self._queue.exclusive():
            self._queue.unpin(batch)
            (flags, count), self._overflow_rows = self._overflow_rows, None
            if is_dirty:
                prefix_sums = flags.cumsum(0, dtype=torch.int32)
                self._staging.reserve(count)  # the staging memory is free, because `pin` waited for the device
                self._staging.copy_keys(batch.hashes, batch.tables, flags, prefix_sums)
                self._staging.copy_lines(batch.lines, flags, prefix_sums)
                prefix_sums.cpu()  # waits
                self._write_lower_tier(count)

    def peek(self, batch: Batch, is_training: bool = False) -> None:
        with self._queue.exclusive():
            absent = self._sets.find(batch)
            prefix_sums = absent.cumsum(0, dtype=torch.int32)
            while True:
                self._fetch_staging.copy_keys(batch.hashes, batch.tables, absent, prefix_sums)
                counts = [absent.sum(), batch.count[0], self._faults.word[0]]
                missing, unique, fault = torch.stack([count.to(torch.int64) for count in counts]).tolist()  # waits
                if not self._fetch_staging.reserve(missing):
                    break
            if error := self._faults.take_error(fault):
                raise error
            columns = 2 * batch.tables[:unique].to(torch.int64) + absent[:unique]
            self._read_counts += torch.bincount(columns, minlength=self._read_counts.size).view(-1, 2).cpu().numpy()
            copy_rows(batch, self._layout)
            is_hit = self._read_lower_tier(missing, should_touch=False)
            if not is_training:
                (hits, misses, unknown), lower_hits = self._peek_counts, int(is_hit.sum())
                self._peek_counts = (hits + unique - missing, misses + lower_hits, unknown + missing - lower_hits)
            self._fetch_staging.fill(batch, absent, prefix_sums, is_hit)

    def peek_counts(self) -> tuple[int, int, int]:
        return self._peek_counts

    def erase(self, tables: TableIds, keys: Keys) -> None:
        with self._queue.exclusive():
            self._erase(tables, keys)
            self._lower_tier.erase(tables, keys)

    def flush(self) -> None:
        self._lower_tier.native.forget_errors()  # drop earlier errors; a write that fails from now on raises again
        self._write_back()
        self._lower_tier.flush()

    def start_change_source(self) -> WriteBackLog:
        self._write_back()  # the log is for later changes only
        write_back_log = WriteBackLog(self._write_back)
        self._find_write_back_log = ref(write_back_log)  # ends when the caller no longer tracks changes
        return write_back_log

    def metrics(self) -> dict[str, dict[str, float]]:
        with self._queue.exclusive():
            return {"device": {**self._metrics(), **self._byte_counts}, **self._lower_tier.metrics()}

    def hit_counts(self) -> HitCounts:
        with self._queue.exclusive():
            return self._sets.hit_counters.read_total() + self._read_counts

    def _fetch(
        self, batch: Batch, last_completed: int, capacity_limit: CapacityLimit | None, is_prefetch: bool
    ) -> Placement | None:
        """Fetch a batch's rows. Waits for the device once. last_completed: as in `CacheSets.place_batch`.

        is_prefetch: True for a prefetch. If a row cannot be fetched, a prefetch changes nothing and returns None.
        """
        if is_prefetch and self._overflow_rows is not None:  # the pinned batch has rows that the lower tier lacks
            return None
        placement = self._sets.place_batch(batch, last_completed)
        victims, absent, overflows = (batch.empty(torch.int32) for _ in range(3))
        struct, n = placement.as_struct(), np.uint64(batch.num_positions)
        self._launch("flag_rows", batch.num_positions, 1, struct, batch.count, n, victims, absent, overflows)
        victim_sums, prefix_sums = victims.cumsum(0, dtype=torch.int32), absent.cumsum(0, dtype=torch.int32)
        batch.lines.copy_(placement.lines)
        written = count_written(self._layout, batch, torch.where(placement.is_hit != 0, batch.lines, 0))
        while True:
            previous = placement.victim_ways
            self._staging.copy_keys(previous.view(torch.int64)[:, 0], previous[:, 2], victims, victim_sums)
            self._staging.copy_lines(batch.lines, victims, victim_sums)
            self._fetch_staging.copy_keys(batch.hashes, batch.tables, absent, prefix_sums)
            sums = [victims.sum(), absent.sum(), overflows.sum(), batch.count[0], written.sum(), batch.faults[0]]
            counts = torch.stack([total.to(torch.int64) for total in sums]).tolist()
            num_victims, num_absent, num_overflows, rows, num_written, fault = counts
            if not self._staging.reserve(num_victims) | self._fetch_staging.reserve(num_absent):
                break
        if is_prefetch and (num_overflows or fault):
            self._sets.undo_placement(placement, restore=True)
            return None
        is_written = False  # True once the victims are in the lower tier
        try:
            if error := self._faults.take_error(fault):
                raise error
            self._write_lower_tier(num_victims)
            is_written = True
            if num_overflows:
                batch.lines.masked_scatter_(overflows != 0, allocate_lines(batch, self._layout, num_overflows))
            is_hit = self._read_lower_tier(num_absent, should_touch=True)
            check_capacity(rows - num_written - int(is_hit.sum()), capacity_limit)
            self._fetch_staging.fill(batch, absent, prefix_sums, is_hit)
            self._sets.mark_fetched(placement)
        except BaseException:
            self._sets.undo_placement(placement, restore=not is_written)
            raise
        self._overflow_rows = (overflows, num_overflows) if num_overflows else None
        return placement

    def _write_back(self) -> None:
        with self._queue.exclusive():
            for slots in self._sets.find_dirty_slots().split(SCAN_ROWS):
                hashes, tables, lines = self._sets.rows(slots)
                self._staging.read(lines)
                self._staging.tables[: len(lines)] = tables
                self._staging.keys[: len(lines)] = recover_keys(self._layout.device, hashes, tables)
                self._write_lower_tier(len(lines))
                self._sets.mark_clean(slots)

    def _read_lower_tier(self, count: int, should_touch: bool) -> HitMask:
        is_hit = self._lower_tier.read(*self._fetch_staging.rows(count), should_touch)
        self._byte_counts["bytes_in"] += int(is_hit.sum()) * self._layout.stored_bytes
        return is_hit

    def _write_lower_tier(self, count: int) -> None:
        tables, keys, lines = self._staging.rows(count)
        self._lower_tier.write(tables, keys, lines)
        if (write_back_log := self._find_write_back_log()) is not None:
            write_back_log.add_keys(tables, keys)
        self._byte_counts["bytes_out"] += count * self._layout.stored_bytes
