"""A cache in device memory above a tier of the host, such as RocksDB; lines are copied by page-locked memory."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...ops.cuda.batch import Batch, Faults, keys_of
from ...ops.cuda.device import launch
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import copy_rows, count_written, new_lines
from ...row_format import Keys, TableIds
from ...store.contract import CapacityLimit, Found, HitCounts, Tier
from ...store.cuda.changed_lines import WriteBackLog
from ...store.cuda.full import SCAN_ROWS
from ...store.full import check_capacity
from .cache import Admission, Cache, DeviceCache


class CudaCachedStore(DeviceCache):
    """A write-back cache in device memory above a tier of the host. Rows of announced batches are prefetched."""

    def __init__(self, layout: Layout, below: Tier, cache: Cache, faults: Faults) -> None:
        super().__init__(layout, below, cache, faults, Staging(layout))  # of rows that are written back
        self._run = partial(launch, layout.device, layout.program("cache/cuda/cache.cu"))
        self._fetch_staging = Staging(layout)
        self._overflows: tuple[Tensor, int] | None = None  # rows without a slot: flags [size], and how many
        self._reads: HitCounts = np.zeros((layout.tables, 2), np.int64)  # of `peek`
        self._peeked = (0, 0, 0)
        self._moved = {"bytes_in": 0, "bytes_out": 0}
        self._write_back_log: WriteBackLog | None = None

    def prefetch(self, batch: Batch) -> bool:
        return self._window.fetch(batch, lambda last_completed: self._fetch(batch, last_completed, None, ahead=True))

    def pin(self, batch: Batch, capacity_limit: CapacityLimit | None) -> None:
        """`TopTier.pin`. If rows are missing it waits for the device once, and raises its faults."""
        if not self._window.pin(
            batch, lambda last_completed: self._fetch(batch, last_completed, capacity_limit, ahead=False)
        ):
            return
        self._faults.post(batch)
        try:
            if capacity_limit is not None:
                new = batch.count - count_written(self._layout, batch, batch.lines).sum()
                check_capacity(int(new), capacity_limit)
        except BaseException:
            self._window.unpin(batch)
            raise

    def unpin(self, batch: Batch, dirty: bool) -> None:
        if self._overflows is None:
            self._window.unpin(batch)
            return
        with self._window.exclusive():
            self._window.unpin(batch)
            (flags, count), self._overflows = self._overflows, None
            if dirty:
                ranks = flags.cumsum(0, dtype=torch.int32)
                self._staging.reserve(count)  # `pin` waited for its last use
                self._staging.identify(batch.hashes, batch.tables, flags, ranks)
                self._staging.copy_lines(batch.lines, flags, ranks)
                ranks.cpu()  # waits
                self._write_below(count)

    def peek(self, batch: Batch, trains: bool = False) -> None:
        with self._window.exclusive():
            absent = self._cache.find(batch)
            ranks = absent.cumsum(0, dtype=torch.int32)
            while True:
                self._fetch_staging.identify(batch.hashes, batch.tables, absent, ranks)
                numbers = [absent.sum(), batch.count[0], self._faults.word[0]]
                missing, unique, fault = torch.stack([number.to(torch.int64) for number in numbers]).tolist()  # waits
                if not self._fetch_staging.reserve(missing):
                    break
            if error := self._faults.take(fault):
                raise error
            places = 2 * batch.tables[:unique].to(torch.int64) + absent[:unique]
            self._reads += torch.bincount(places, minlength=self._reads.size).view(-1, 2).cpu().numpy()
            copy_rows(batch, self._layout)
            found = self._read_below(missing, touch=False)
            if not trains:
                hits, misses, unknown = self._peeked
                below = int(found.sum())
                self._peeked = (hits + unique - missing, misses + below, unknown + missing - below)
            self._fetch_staging.fill(batch, absent, ranks, found)

    def peeked(self) -> tuple[int, int, int]:
        return self._peeked

    def erase(self, tables: TableIds, keys: Keys) -> None:
        with self._window.exclusive():
            self._erase(tables, keys)
            self._below.erase(tables, keys)

    def flush(self) -> None:
        self._below.native.forget_errors()  # everything is written here, which raises new errors
        self._write_back()
        self._below.flush()

    def change_source(self) -> WriteBackLog:
        self._write_back()  # rows that changed until now
        self._write_back_log = WriteBackLog(self._write_back)
        return self._write_back_log

    def metrics(self) -> dict[str, dict[str, float]]:
        with self._window.exclusive():
            return {"device": {**self._metrics(), **self._moved}, **self._below.metrics()}

    def hit_counts(self) -> HitCounts:
        with self._window.exclusive():
            return self._cache.hit_counters.total() + self._reads

    def _fetch(
        self, batch: Batch, last_completed: int, capacity_limit: CapacityLimit | None, ahead: bool
    ) -> Admission | None:
        """Fetch the rows of a batch. Waits for the device once. last_completed: as in `Cache.admit`.

        ahead: whether this is before the step of the batch. Then it returns None, and changes nothing, if a row does
        not fit its set or the batch has a fault. It also returns None while the pinned batch has rows without a slot,
        since these rows are in memory of that batch, and the tier below lacks them.
        """
        if ahead and self._overflows is not None:
            return None
        admission = self._cache.admit(batch, last_completed)
        victims, absent, overflows = (batch.empty(torch.int32) for _ in range(3))
        struct, n = admission.by_value(), np.uint64(batch.size)
        self._run("sort_out", batch.size, 1, struct, batch.count, n, victims, absent, overflows)
        victim_ranks, ranks = victims.cumsum(0, dtype=torch.int32), absent.cumsum(0, dtype=torch.int32)
        batch.lines.copy_(admission.lines)
        written = count_written(self._layout, batch, torch.where(admission.hit != 0, batch.lines, 0))
        while True:
            before = admission.before
            self._staging.identify(before.view(torch.int64)[:, 0], before[:, 2], victims, victim_ranks)
            self._staging.copy_lines(batch.lines, victims, victim_ranks)
            self._fetch_staging.identify(batch.hashes, batch.tables, absent, ranks)
            numbers = [victims.sum(), absent.sum(), overflows.sum(), batch.count[0], written.sum(), batch.faults[0]]
            down, up, over_count, rows, old, fault = torch.stack([part.to(torch.int64) for part in numbers]).tolist()
            if not self._staging.reserve(down) | self._fetch_staging.reserve(up):
                break
        if ahead and (over_count or fault):
            self._cache.cancel(admission, restore=True)
            return None
        is_written = False  # whether the tier below has the victims
        try:
            if error := self._faults.take(fault):
                raise error
            self._write_below(down)
            is_written = True
            if over_count:
                batch.lines.masked_scatter_(overflows != 0, new_lines(batch, self._layout, over_count))
            found = self._read_below(up, touch=True)
            check_capacity(rows - old - int(found.sum()), capacity_limit)
            self._fetch_staging.fill(batch, absent, ranks, found)
            self._cache.fetched(admission)
        except BaseException:
            self._cache.cancel(admission, restore=not is_written)
            raise
        self._overflows = (overflows, over_count) if over_count else None
        return admission

    def _write_back(self) -> None:
        with self._window.exclusive():
            for slots in self._cache.dirty().split(SCAN_ROWS):
                hashes, tables, lines = self._cache.rows(slots)
                self._staging.read(lines)
                self._staging.tables[: len(lines)] = tables
                self._staging.keys[: len(lines)] = keys_of(self._layout.device, hashes, tables)
                self._write_below(len(lines))
                self._cache.note_clean(slots)

    def _read_below(self, count: int, touch: bool) -> Found:
        found = self._below.read(*self._fetch_staging.rows(count), touch)
        self._moved["bytes_in"] += int(found.sum()) * self._layout.stored_bytes
        return found

    def _write_below(self, count: int) -> None:
        tables, keys, lines = self._staging.rows(count)
        self._below.write(tables, keys, lines)
        if self._write_back_log is not None:
            self._write_back_log.add(tables, keys)
        self._moved["bytes_out"] += count * self._layout.stored_bytes
