"""A cache in device memory above a full table whose lines are in host memory. Only kernels copy rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..._core import GROUP_WAYS
from ...ops.cuda.batch import FAULT_NO_ROOM, SLOT_HASH, Batch, Faults
from ...ops.cuda.device import launch
from ...ops.cuda.layout import HitCounters, Layout
from ...ops.cuda.step import copy_rows, initialise_lines
from ...row_format import Keys, TableIds
from ...store.cuda.changed_lines import ChangedLines
from ...store.cuda.full_tier import CudaFullTier
from ...store.interfaces import CapacityLimit, HitCounts
from .cache import CacheSets, CudaCacheBase, Placement


class CudaTableCache(CudaCacheBase):
    """A write-back cache above a full table. The host copies no rows.

    Pinning gives each row a line in the lower table, so every row can be written back. If a row's set is full, the step
    uses the row's line in the lower table. A step waits for the device only if the table grows.
    """

    def __init__(self, layout: Layout, lower_tier: CudaFullTier, sets: CacheSets, faults: Faults) -> None:
        super().__init__(layout, lower_tier, sets, faults, lower_tier.staging)
        lower_tier.table.exclusive = self._queue.exclusive
        self._launch = partial(launch, layout.device, layout.program("cache/cuda/table_cache.cu"))
        # Counters of table_cache.cu: hits and misses in the lower table, rows written back, hits in the cache.
        self._counts = torch.zeros(4, dtype=torch.int64, device=layout.device.torch_device)
        self._peek_counts = torch.zeros_like(self._counts)  # the same counters for `peek`
        self._hit_counters = HitCounters(layout)  # hits of read-only lookups, and all misses
        self._inserted_flags: dict[Batch, Tensor] = {}  # [positions], True for rows that the batch added to the table

    def prefetch(self, batch: Batch) -> bool:
        return self._queue.fetch(batch, partial(self._fetch, batch, is_prefetch=True))

    def cancel_announced(self) -> None:
        super().cancel_announced()
        while self._inserted_flags:
            batch, is_new = self._inserted_flags.popitem()
            with self._queue.exclusive():
                self._lower_tier.table.erase(batch, torch.where(is_new, batch.lines, 0))

    def pin(self, batch: Batch, capacity_limit: CapacityLimit | None) -> None:
        """Pin a batch, as in `TopTier.pin`. Rows that do not fit in the lower table set a fault."""
        self._queue.pin(batch, partial(self._fetch, batch, is_prefetch=False))
        self._inserted_flags.pop(batch, None)
        self._faults.post(batch)

    def unpin(self, batch: Batch, is_dirty: bool) -> None:
        self._queue.unpin(batch)

    def peek(self, batch: Batch, is_training: bool = False) -> None:
        with self._queue.exclusive():
            n, absent = batch.num_positions, batch.empty(torch.int32)
            self._launch(
                "look_up_rows", n, GROUP_WAYS, self._sets.as_struct(), self._lower_tier.table.make_index_struct(),
                batch.hashes, batch.tables, batch.count, np.uint64(n), batch.lines, absent,
                self._counts if is_training else self._peek_counts, self._hit_counters.struct,
            )  # fmt: skip
            copy_rows(batch, self._layout)
            initialise_lines(batch, self._layout, absent != 0)
            self._faults.post(batch)

    def peek_counts(self) -> tuple[int, int, int]:
        with self._queue.exclusive():
            lower_hits, lower_misses, _, cache_hits = self._peek_counts.tolist()
            return cache_hits, lower_hits, lower_misses

    def erase(self, tables: TableIds, keys: Keys) -> None:
        with self._queue.exclusive():
            batch, is_kept = self._erase(tables, keys)
            self._lower_tier.table.find(batch)
            initialise_lines(batch, self._layout, is_kept)  # resets `updates` in the lower table too
            self._lower_tier.table.erase(batch, torch.where(is_kept, 0, batch.lines))

    def flush(self) -> None:
        self._write_back()

    def _write_back(self) -> None:
        with self._queue.exclusive():
            sets, index = self._sets.as_struct(), self._lower_tier.table.make_index_struct()
            self._launch("flush_rows", self._sets.capacity, self._layout.copy_lanes, sets, index, self._counts)

    def start_change_source(self) -> ChangedLines:
        return self._lower_tier.start_change_source()

    def close(self) -> None:
        self._inserted_flags.clear()
        super().close()

    def metrics(self) -> dict[str, dict[str, float]]:
        with self._queue.exclusive():
            hits, misses, written, _ = (self._counts + self._peek_counts).tolist()
            row_bytes = self._layout.stored_bytes
            device = {**self._metrics(), "bytes_in": hits * row_bytes, "bytes_out": written * row_bytes}
            traffic = {"hits": hits, "misses": misses, "bytes_in": written * row_bytes, "bytes_out": hits * row_bytes}
            return {"device": device, "host": {**self._lower_tier.metrics()["host"], **traffic}}

    def hit_counts(self) -> HitCounts:
        with self._queue.exclusive():
            counts = self._hit_counters.read_total()
            counts[:, 0] += self._sets.hit_counters.read_total()[:, 0]
            return counts

    def _fetch(self, batch: Batch, last_completed: int, is_prefetch: bool) -> Placement | None:
        """Fetch a batch's rows. last_completed: as in `CacheSets.place_batch`.

        is_prefetch: True for a prefetch. A prefetch waits for the device, and returns None if a row does not fit.
        """
        table = self._lower_tier.table
        prefix_sums = table.find(batch)
        if is_prefetch:
            flags, is_new = self._inserted_flags, batch.lines == 0
            flags[batch] = flags[batch] | is_new if batch in flags else is_new
        table.insert_missing(batch, prefix_sums, record_only=True)
        placement = self._sets.place_batch(batch, last_completed)
        if is_prefetch and not placement.has_all_slots():
            self._sets.undo_placement(placement, restore=True)
            batch.faults &= ~FAULT_NO_ROOM  # at the batch's step, the lower table may have room for the rows
            return None
        n, sets, index = batch.num_positions, self._sets.as_struct(), table.make_index_struct()
        struct = placement.as_struct()
        self._launch("write_victims", n, self._layout.copy_lanes, index, struct, batch.count, self._counts)
        self._launch(
            "fetch", n, self._layout.copy_lanes, sets, struct, batch.hashes, batch.tables, batch.count, batch.lines,
            table.zero_line, self._layout.initial, SLOT_HASH, self._counts, self._hit_counters.struct,
        )  # fmt: skip
        return placement
