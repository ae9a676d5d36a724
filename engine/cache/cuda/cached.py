"""A cache in device memory above a tier of the host, such as RocksDB; lines are copied by page-locked memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.cuda.batch import SLOT_HASH, Batch, Faults, keys_of
from ...ops.cuda.counters import HitCounters
from ...ops.cuda.device import launch
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import copy_present, count_new, place_lines
from ...row_format import Keys, TableIds
from ...store.contract import CapacityLimit, Found, HitCounts, Lines, Tier
from ...store.cuda.changed_lines import WriteBackLog
from ...store.cuda.full import SCAN_ROWS
from ...store.full import check_capacity
from .cache import Admission, Cache, DeviceCache


class CudaCachedStore(DeviceCache):
    """A write-back cache in device memory above a tier of the host. Rows of announced batches are prefetched."""

    def __init__(self, layout: Layout, below: Tier, cache: Cache, faults: Faults) -> None:
        super().__init__(layout, below, cache, faults)
        self._run = partial(launch, layout.device, layout.program("cache/cuda/cache.cu"))
        self._write_back_staging, self._fetch_staging = Staging(layout), Staging(layout)
        self._overflows: tuple[Tensor, int] | None = None  # rows without a slot: flags [size], and how many
        self._reads = HitCounters(layout)  # of `peek`
        self._peeked = (0, 0, 0)
        self._moved = {"bytes_in": 0, "bytes_out": 0}
        self._write_back_log: WriteBackLog | None = None

    def prefetch(self, batch: Batch) -> bool:
        return self._window.fetch(batch, lambda last_completed: self._fetch(batch, last_completed, None, ahead=True))

    def cancel(self) -> None:
        self._window.cancel()

    def pin(self, batch: Batch, capacity_limit: CapacityLimit | None) -> None:
        """`TopTier.pin`. If rows are missing it waits for the device once, and raises its faults."""
        if not self._window.pin(
            batch, lambda last_completed: self._fetch(batch, last_completed, capacity_limit, ahead=False)
        ):
            return
        self._faults.post(batch)
        try:
            if capacity_limit is not None:
                check_capacity(int(count_new(self._layout, batch.lines, batch.count)), capacity_limit)
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
                self._write_back_staging.reserve(count)  # `pin` waited for its last use
                self._write_back_staging.identify(batch, flags, ranks)
                self._write_back_staging.copy_lines(batch.lines, flags, ranks)
                ranks.cpu()  # waits
                self._write_below(count)

    def peek(self, batch: Batch, trains: bool = False) -> None:
        with self._window.exclusive():
            absent = self._cache.find(batch)
            ranks = absent.cumsum(0, dtype=torch.int32)
            while True:
                self._fetch_staging.identify(batch, absent, ranks)
                numbers = [absent.sum(), batch.count[0], self._faults.word[0]]
                missing, unique, fault = torch.stack([number.to(torch.int64) for number in numbers]).tolist()  # waits
                if not self._fetch_staging.reserve(missing):
                    break
            if error := self._faults.take(fault):
                raise error
            places = 2 * batch.tables[:unique].to(torch.int64) + absent[:unique]
            self._reads.add(torch.bincount(places, minlength=2 * self._layout.tables).view(-1, 2))
            copy_present(batch, self._layout)
            place_lines(batch, self._layout, ranks, missing)
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

    def read(self, tables: TableIds, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        with self._window.exclusive():
            self._write_back()
            return self._below.read(tables, keys, lines, touch)

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        with self._window.exclusive():
            return self._locate(table, key, self._write_back_staging)

    def metrics(self) -> dict[str, dict[str, float]]:
        with self._window.exclusive():
            return {"device": {**self._metrics(), **self._moved}, **self._below.metrics()}

    def hit_counts(self) -> HitCounts:
        with self._window.exclusive():
            counts: HitCounts = (self._cache.hit_counters.total() + self._reads.total()).cpu().numpy()
            return counts

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
        unwritten = count_new(self._layout, torch.where(admission.hit != 0, batch.lines, 0), batch.count)
        while True:
            room_down = np.uint64(self._write_back_staging.room)
            self._run(
                "list_victims", batch.size, 1, struct, victims, victim_ranks, n, room_down,
                self._write_back_staging.tables, self._write_back_staging.keys, SLOT_HASH,
            )  # fmt: skip
            self._write_back_staging.copy_lines(batch.lines, victims, victim_ranks)
            self._fetch_staging.identify(batch, absent, ranks)
            numbers = [victims.sum(), absent.sum(), overflows.sum(), unwritten[0], batch.faults[0]]
            down, up, over_count, new, fault = torch.stack([number.to(torch.int64) for number in numbers]).tolist()
            if not self._write_back_staging.reserve(down) | self._fetch_staging.reserve(up):
                break
        try:
            if ahead and (over_count or fault):
                self._cache.cancel(admission, restore=True)
                return None
            if error := self._faults.take(fault):
                raise error
            self._write_below(down)
        except BaseException:
            self._cache.cancel(admission, restore=True)
            raise
        try:
            place_lines(batch, self._layout, overflows.cumsum(0, dtype=torch.int32), over_count)
            found = self._read_below(up, touch=True)
            check_capacity(new - int(found.sum()), capacity_limit)
            self._fetch_staging.fill(batch, absent, ranks, found)
            self._cache.fetched(admission)
        except BaseException:
            self._cache.cancel(admission, restore=False)
            raise
        self._overflows = (overflows, over_count) if over_count else None
        return admission

    def _write_back(self) -> None:
        with self._window.exclusive():
            for slots in self._cache.dirty().split(SCAN_ROWS):
                hashes, tables, lines = self._cache.rows(slots)
                self._write_back_staging.read(lines)
                self._write_back_staging.tables[: len(lines)] = tables
                self._write_back_staging.keys[: len(lines)] = keys_of(self._layout.device, hashes, tables)
                self._write_below(len(lines))
                self._cache.note_clean(slots)

    def _read_below(self, count: int, touch: bool) -> Found:
        found = self._below.read(*self._fetch_staging.rows(count), touch)
        self._moved["bytes_in"] += int(found.sum()) * self._layout.stored_bytes
        return found

    def _write_below(self, count: int) -> None:
        tables, keys, lines = self._write_back_staging.rows(count)
        self._below.write(tables, keys, lines)
        if self._write_back_log is not None:
            self._write_back_log.add(tables, keys)
        self._moved["bytes_out"] += count * self._layout.stored_bytes
