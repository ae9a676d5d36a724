"""Stores whose top tier is device memory: the full table, and the cache over a tier of the host.

As `engine/store/contract.py` says, for batches of the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import _core
from ...cache.cached import cache_metrics
from ...errors import StoreError
from ...store.contract import BUCKETS, Chunks, Keys, Lines, Room, Tables, Tier, row_dtype
from ...store.full import check_room
from .batch import Batch
from .cache import Admission, Cache
from .device import launch
from .faults import Faults
from .layout import Layout
from .program import Program
from .staging import Staging
from .step import count_new, initialise_missing
from .table import FullTable

SCAN_ROWS = 1 << 16  # rows a chunk


class DeviceStore:
    """Every row in device memory."""

    def __init__(self, layout: Layout, host_layout: _core.Layout, capacity: int | None, faults: Faults) -> None:
        self._layout, self._host_layout = layout, host_layout
        self._capacity, self._faults = capacity, faults
        self._table = FullTable(layout, capacity, faults.word)
        self._staging = Staging(layout)

    def pin(self, batch: Batch, room: Room | None) -> None:
        """With a capacity, rows that do not fit set a fault and are zeros: the table's memory is the bound, not `room`.

        Those of a step that failed take room as well.
        """
        ranks = self._table.find(batch)
        self._table.insert_missing(batch, ranks)
        self._table.count(batch, ranks)
        self._faults.post()

    def unpin(self, batch: Batch, dirty: bool) -> None:
        """Lines never move: there is nothing to end."""

    def peek(self, batch: Batch) -> None:
        ranks = self._table.find(batch)
        self._table.count(batch, ranks)
        initialise_missing(batch, self._layout, ranks)
        self._faults.post()

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        """Rows of host memory, each once. CapacityError."""
        device = self._layout.device.torch_device
        self._staging.reserve(len(keys))
        _core.copy_lines(self._host_layout, lines, self._staging.rows(len(keys))[2])
        owners = torch.from_numpy(tables.astype(np.int64)).to(device)
        ids = torch.from_numpy(keys.view(np.int64)).to(device)
        most = int(tables.max(initial=0)) + 1
        batch = Batch(self._layout.device, [(ids, owners, None)], most, None, self._faults.word)
        self._table.insert_missing(batch, self._table.find(batch))
        self._faults.check()
        all_of = torch.ones(batch.size, dtype=torch.int32, device=device)
        ranks = all_of.cumsum(0, dtype=torch.int32)  # rows are distinct, so they come in the order given
        self._staging.fill(batch, all_of, ranks, np.ones(batch.size, np.bool_))
        ranks.cpu()  # waits: the staging memory is used again

    def scan(self) -> Chunks:
        hashes, tables, lines, updates = self._table.rows()
        held = updates != 0
        hashes, tables, lines = hashes[held], tables[held], lines[held]
        keys = _keys(self._layout, hashes, tables).cpu().numpy().view(np.uint64)
        owners = tables.cpu().numpy().view(np.uint32)
        buckets = hashes.cpu().numpy().view(np.uint64) >> np.uint64(58)
        order = np.lexsort((keys, owners, buckets))
        bounds = np.searchsorted(buckets[order], np.arange(BUCKETS + 1))
        for bucket in range(BUCKETS):
            for begin in range(bounds[bucket], bounds[bucket + 1], SCAN_ROWS):
                rows = order[begin : min(begin + SCAN_ROWS, bounds[bucket + 1])]
                chosen = lines[torch.from_numpy(rows).to(lines.device)]
                yield bucket, self._packed(owners[rows], keys[rows], chosen)

    def flush(self) -> None:
        """Nothing lies below."""

    def close(self) -> None:
        self._table = FullTable(self._layout, None, self._faults.word)

    def metrics(self) -> dict[str, dict[str, int]]:
        return {"device": {**self._table.counts(), "bytes": self._table.bytes}}

    def _packed(self, tables: Tables, keys: Keys, lines: Tensor) -> NDArray[np.void]:
        self._staging.reserve(len(keys))
        all_of = torch.ones_like(lines, dtype=torch.int32)
        self._staging.bring(lines, all_of, all_of.cumsum(0, dtype=torch.int32))
        all_of.cpu()  # waits
        dtype = row_dtype(self._layout.width)
        rows = np.empty(len(keys), dtype)
        rows["table"], rows["key"] = tables, keys
        bytes_ = self._staging.lines.numpy().reshape(-1, self._layout.line_bytes)[: len(keys)]
        rows.view(np.uint8).reshape(len(keys), dtype.itemsize)[:, 12:] = bytes_[:, : dtype.itemsize - 12]
        return rows


class CachedStore:
    """A write-back cache in device memory in front of a tier of the host."""

    def __init__(self, layout: Layout, below: Tier, budget_bytes: int, faults: Faults) -> None:
        """ValueError where the budget has no room for one set."""
        self._layout, self._below, self._faults = layout, below, faults
        self._cache = Cache(layout, budget_bytes)
        self._program = layout.program("cache.cu")
        self._down, self._up = Staging(layout), Staging(layout)  # of victims, and of rows to fetch
        self._pinned: tuple[Batch, Admission, Tensor, int] | None = None
        self._reads = {"hits": 0, "misses": 0}  # that `peek` served

    def pin(self, batch: Batch, room: Room | None) -> None:
        """As `engine/cache/cached.py`; waits for the device once, and raises its faults at once."""
        if self._pinned is not None:
            raise StoreError("a batch is still pinned; one step at a time")
        admission = self._cache.admit(batch)
        victims, absent, overflows = (batch.empty(torch.int32) for _ in range(3))
        struct, n = admission.by_value(), np.uint64(batch.size)
        device = self._layout.device
        launch(device, self._program, "sort_out", batch.size, 1, struct, batch.count, n, victims, absent, overflows)
        victim_ranks, ranks = victims.cumsum(0, dtype=torch.int32), absent.cumsum(0, dtype=torch.int32)
        batch.lines.copy_(admission.lines)
        unwritten = count_new(self._layout, torch.where(admission.hit != 0, batch.lines, 0), batch.count)
        while True:
            room_down = np.uint64(self._down.room)
            launch(
                device, self._program, "list_victims", batch.size, 1, struct, victims, victim_ranks, n, room_down,
                self._down.tables, self._down.keys,
            )  # fmt: skip
            self._down.bring(batch.lines, victims, victim_ranks)
            self._up.identify(batch, absent, ranks)
            numbers = [victims.sum(), absent.sum(), overflows.sum(), unwritten[0], self._faults.word[0]]
            down, up, over, new, fault = torch.stack([number.to(torch.int64) for number in numbers]).tolist()  # waits
            if not self._down.reserve(down) | self._up.reserve(up):
                break
        try:
            if error := self._faults.take(fault):
                raise error
            self._below.write(*self._down.rows(down))
        except BaseException:
            self._cache.cancel(admission, restore=True)
            raise
        try:
            self._place(batch, overflows.cumsum(0, dtype=torch.int32), over)
            found = self._below.read(*self._up.rows(up))
            check_room(new - int(found.sum()), room)
            self._up.fill(batch, absent, ranks, found)
        except BaseException:
            self._cache.cancel(admission, restore=False)
            raise
        self._pinned = batch, admission, overflows, over

    def unpin(self, batch: Batch, dirty: bool) -> None:
        if self._pinned is None or self._pinned[0] is not batch:
            raise StoreError("unpin of a batch that is not pinned")
        _, admission, overflows, over = self._pinned
        self._pinned = None
        self._cache.release(admission, dirty)
        if dirty and over:
            ranks = overflows.cumsum(0, dtype=torch.int32)
            self._down.reserve(over)  # nothing is under way: `pin` waited after it was last filled
            self._down.identify(batch, overflows, ranks)
            self._down.bring(batch.lines, overflows, ranks)
            ranks.cpu()  # waits
            self._below.write(*self._down.rows(over))

    def peek(self, batch: Batch) -> None:
        absent = self._cache.find(batch)
        ranks = absent.cumsum(0, dtype=torch.int32)
        while True:
            self._up.identify(batch, absent, ranks)
            numbers = [absent.sum(), batch.count[0], self._faults.word[0]]
            missing, unique, fault = torch.stack([number.to(torch.int64) for number in numbers]).tolist()  # waits
            if not self._up.reserve(missing):
                break
        if error := self._faults.take(fault):
            raise error
        self._reads["hits"] += unique - missing
        self._reads["misses"] += missing
        self._place(batch, ranks, missing)
        self._up.fill(batch, absent, ranks, self._below.read(*self._up.rows(missing)))

    def scan(self) -> Chunks:
        self.flush()
        yield from self._below.scan()

    def flush(self) -> None:
        hashes, tables, lines = self._cache.dirty()
        keys = _keys(self._layout, hashes, tables)
        for begin in range(0, len(lines), SCAN_ROWS):
            part = lines[begin : begin + SCAN_ROWS]
            self._down.reserve(len(part))
            all_of = torch.ones_like(part, dtype=torch.int32)
            self._down.bring(part, all_of, all_of.cumsum(0, dtype=torch.int32))
            self._down.tables[: len(part)] = tables[begin : begin + SCAN_ROWS]
            self._down.keys[: len(part)] = keys[begin : begin + SCAN_ROWS]
            all_of.cpu()  # waits
            self._below.write(*self._down.rows(len(part)))
        self._cache.mark_clean()
        self._below.flush()

    def close(self) -> None:
        self._below.close()

    def metrics(self) -> dict[str, dict[str, int]]:
        return {"device": cache_metrics(self._cache, self._reads), **self._below.metrics()}

    def _place(self, batch: Batch, ranks: Tensor, count: int) -> None:
        """Give rows without a line one in memory of the batch."""
        if not count:
            return
        memory = torch.empty(count * self._layout.line_bytes, dtype=torch.uint8, device=ranks.device)
        address, program = np.uint64(batch.own(memory)), self._layout.program("lines.cu")
        launch(self._layout.device, program, "place_lines", batch.size, 1, ranks, batch.count, address, batch.lines)


def _keys(layout: Layout, hashes: Tensor, tables: Tensor) -> Tensor:
    keys = torch.empty_like(hashes)
    count = torch.full((1,), len(hashes), dtype=torch.int32, device=hashes.device)
    hashes, tables = hashes.contiguous(), tables.contiguous()
    launch(layout.device, Program("batch.cu"), "recover_keys", len(hashes), 1, hashes, tables, count, keys)
    return keys
