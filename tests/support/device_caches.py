"""Caches of a device over a full table or a tier of the host, with the calls of `_core.CacheTier`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.caches import TABLE, Model, Row
from support.cuda_tables import DeviceTable, tensor
from tierbed.engine._core import WAY_BYTES, WAYS
from tierbed.engine.cache.cuda.cache import CacheSets
from tierbed.engine.cache.cuda.cache_tier import CudaCacheTier
from tierbed.engine.cache.cuda.table_cache import CudaTableCache
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch, Faults
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.store.cuda.full_tier import CudaFullTier
from tierbed.engine.store.full_tier import CpuFullTier


class DeviceCache:
    """below: "table", by kernels alone, or "tier", as over a disk. It is the `rows` of its model as well."""

    def __init__(self, device: Device, below: str, sets: int, policy: str = "lru", capacity: int | None = None) -> None:
        device = device if isinstance(device, Device) else device()
        self.device = device
        self.side = DeviceTable(device, TABLE)
        self.faults = Faults(device, "t", TABLE.tables, None)
        layout = self.side.layout
        self.cache = cache = CacheSets(layout, sets * WAYS * (layout.line_bytes + WAY_BYTES + 1), policy)
        self.store: CudaCacheTier | CudaTableCache
        if below == "table":
            full = CudaFullTier(layout, TABLE.layout, capacity, self.faults, "host")
            self.store = CudaTableCache(layout, full, cache, self.faults)
        else:
            self.store = CudaCacheTier(layout, CpuFullTier(TABLE.layout, "host"), cache, self.faults)
        self.prefetch, self.cancel_announced = self.store.prefetch, self.store.cancel_announced
        self.peek, self.flush, self.close = self.store.peek, self.store.flush, self.store.close
        self.model = Model(self)

    def batch(self, rows: Sequence[Row]) -> Batch:
        """As one that is made ahead, whose faults are its own."""
        self.side.faults = tensor(self.device, [0], np.uint32)
        return self.side.batch([([key for _, key in rows], [table for table, _ in rows], None)])

    def keys(self, keys: range) -> Batch:
        """Of table 0."""
        return self.batch([(0, key) for key in keys])

    def names(self, batch: Batch) -> list[Row]:
        return self.side.identities(batch)

    def read(self, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
        return self.side.read(batch.lines[: batch.num_unique])

    def add(self, batch: Batch) -> None:
        if not batch.num_positions:
            return
        values = self.read(batch)[0][:, : TABLE.dim] + np.float32(1)
        given = tensor(self.device, values, np.float32)[batch.inverse.to(torch.int64)]
        cuda.assign(batch, self.side.layout, given, 1, self.side.written, self.faults.word)

    def announce(self, *batches: Batch) -> None:
        for batch in batches:
            self.store.announce(batch)

    def pin(self, batch: Batch) -> None:
        self.store.pin(batch, None)

    def unpin(self, batch: Batch, is_dirty: bool = True) -> None:
        self.store.unpin(batch, is_dirty)

    def step(self, batch: Batch) -> None:
        self.pin(batch)
        self.model.check(batch)
        self.model.write(batch)
        self.unpin(batch)

    def erase(self, rows: Sequence[Row]) -> None:
        self.store.erase(
            np.array([table for table, _ in rows], np.uint32), np.array([key for _, key in rows], np.uint64)
        )
        for row in rows:
            self.model.updates.pop(row, None)

    def places(self, rows: Iterable[Row]) -> Any:
        return [self.store.locate(*row) for row in rows]

    def check_stored(self) -> None:
        """A scan, which flushes, has the rows; and tiers say the same of where they are."""
        self.faults.check()
        self.model.check_scan(self.store.scan())
        for row in [*self.model.updates, (0, 10**6)][:20:3]:
            places, updates = self.store.locate(*row), self.model.updates.get(row, 0)
            assert [place["updates"] for place in places] in ([], [updates], [updates, updates])
            assert bool(places) >= bool(updates)
            assert not any(place.get("dirty") or place.get("pinned") for place in places)

    def metrics(self) -> dict[str, Any]:
        return self.store.metrics()["device"]

    @property
    def misses(self) -> float:
        return self.metrics()["misses"]
