"""A cache in device memory above a full table whose lines are in host memory. Only kernels copy rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..._core import GROUP_WAYS
from ...ops.cuda.batch import NO_ROOM, SLOT_HASH, Batch, Faults
from ...ops.cuda.device import launch
from ...ops.cuda.layout import HitCounters, Layout
from ...ops.cuda.step import copy_rows, initialise_lines
from ...row_format import Keys, TableIds
from ...store.contract import CapacityLimit, HitCounts
from ...store.cuda.changed_lines import ChangedLines
from ...store.cuda.full import CudaFullTier
from .cache import Admission, Cache, DeviceCache


class CachedTable(DeviceCache):
    """A write-back cache above a full table. The host copies no rows.

    Pinning gives each row a line in the table below, so every row can be written back. If a row's set is full, the step
    uses the row's line in the table below. A step waits for the device only if the table grows.
    """

    def __init__(self, layout: Layout, below: CudaFullTier, cache: Cache, faults: Faults) -> None:
        super().__init__(layout, below, cache, faults, below.staging)
        below.table.exclusive = self._window.exclusive
        self._run = partial(launch, layout.device, layout.program("cache/cuda/cached_table.cu"))
        # Counters of cached_table.cu: hits and misses in the table below, rows written back, hits in the cache.
        self._counts = torch.zeros(4, dtype=torch.int64, device=layout.device.torch_device)
        self._peek_counts = torch.zeros_like(self._counts)  # the same counters for `peek`
        self._hit_counters = HitCounters(layout)  # hits of read-only lookups, and all misses
        self._inserted_flags: dict[Batch, Tensor] = {}  # [size], True for rows that the batch added to the table

    def prefetch(self, batch: Batch) -> bool:
        return self._window.fetch(batch, partial(self._fetch, batch, is_ahead=True))

    def cancel(self) -> None:
        super().cancel()
        while self._inserted_flags:
            batch, new = self._inserted_flags.popitem()
            with self._window.exclusive():
                self._below.table.erase(batch, torch.where(new, batch.lines, 0))

    def pin(self, batch: Batch, capacity_limit: CapacityLimit | None) -> None:
        """Pin a batch, as in `TopTier.pin`. Rows that do not fit in the table below set a fault."""
        self._window.pin(batch, partial(self._fetch, batch, is_ahead=False))
        self._inserted_flags.pop(batch, None)
        self._faults.post(batch)

    def unpin(self, batch: Batch, dirty: bool) -> None:
        self._window.unpin(batch)

    def peek(self, batch: Batch, trains: bool = False) -> None:
        with self._window.exclusive():
            absent = batch.empty(torch.int32)
            self._run(
                "locate_rows", batch.size, GROUP_WAYS, self._cache.as_struct(), self._below.table.make_index_struct(),
                batch.hashes, batch.tables, batch.count, np.uint64(batch.size), batch.lines, absent,
                self._counts if trains else self._peek_counts, self._hit_counters.struct,
            )  # fmt: skip
            copy_rows(batch, self._layout)
            initialise_lines(batch, self._layout, absent != 0)
            self._faults.post(batch)

    def peek_counts(self) -> tuple[int, int, int]:
        with self._window.exclusive():
            hits_below, misses_below, _, served = self._peek_counts.tolist()
            return served, hits_below, misses_below

    def erase(self, tables: TableIds, keys: Keys) -> None:
        with self._window.exclusive():
            batch, is_kept = self._erase(tables, keys)
            self._below.table.find(batch)
            initialise_lines(batch, self._layout, is_kept)  # resets `updates` in the table below too
            self._below.table.erase(batch, torch.where(is_kept, 0, batch.lines))

    def flush(self) -> None:
        self._write_back()

    def _write_back(self) -> None:
        with self._window.exclusive():
            cache, index = self._cache.as_struct(), self._below.table.make_index_struct()
            self._run("flush_rows", self._cache.capacity, self._layout.copy_lanes, cache, index, self._counts)

    def start_change_source(self) -> ChangedLines:
        return self._below.start_change_source()

    def close(self) -> None:
        self._inserted_flags.clear()
        super().close()

    def metrics(self) -> dict[str, dict[str, float]]:
        with self._window.exclusive():
            hits, misses, written, _ = (self._counts + self._peek_counts).tolist()
            line = self._layout.stored_bytes
            device = {**self._metrics(), "bytes_in": hits * line, "bytes_out": written * line}
            traffic = {"hits": hits, "misses": misses, "bytes_in": written * line, "bytes_out": hits * line}
            return {"device": device, "host": {**self._below.metrics()["host"], **traffic}}

    def hit_counts(self) -> HitCounts:
        with self._window.exclusive():
            counts = self._hit_counters.total()
            counts[:, 0] += self._cache.hit_counters.total()[:, 0]
            return counts

    def _fetch(self, batch: Batch, last_completed: int, is_ahead: bool) -> Admission | None:
        """Fetch a batch's rows. last_completed: as in `Cache.admit`.

        is_ahead: True for a prefetch. A prefetch waits for the device, and returns None if a row does not fit.
        """
        table = self._below.table
        ranks = table.find(batch)
        if is_ahead:
            new = batch.lines == 0
            self._inserted_flags[batch] = self._inserted_flags[batch] | new if batch in self._inserted_flags else new
        table.insert_missing(batch, ranks, record_only=True)
        admission = self._cache.admit(batch, last_completed)
        if is_ahead and not admission.has_all_slots():
            self._cache.cancel(admission, restore=True)
            batch.faults &= ~NO_ROOM  # at the batch's step, the table below may have room for the rows
            return None
        cache, index, struct = self._cache.as_struct(), table.make_index_struct(), admission.as_struct()
        self._run("write_back", batch.size, self._layout.copy_lanes, index, struct, batch.count, self._counts)
        self._run(
            "fetch", batch.size, self._layout.copy_lanes, cache, struct, batch.hashes, batch.tables, batch.count,
            batch.lines, table.zero_line, self._layout.initial, SLOT_HASH, self._counts, self._hit_counters.struct,
        )  # fmt: skip
        return admission
