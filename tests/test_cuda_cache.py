"""The cache on a device decides as that of the CPU core."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice
from cuda_tables import DeviceTable, array, on_devices
from rows import Table

from tierbed.engine import _core
from tierbed.engine.ops.cuda.cache import WAY_BYTES, WAYS, Cache
from tierbed.engine.ops.cuda.device import Device


class Both:
    def __init__(self, device: Device, sets: int) -> None:
        self.host = Table([3])
        self.there = DeviceTable(device, self.host)
        budget = sets * WAYS * (self.host.layout.line_bytes + WAY_BYTES)
        self.here, self.cache = _core.Cache(self.host.layout, budget), Cache(self.there.layout, budget)
        assert self.cache.capacity == self.here.capacity

    def admit(self, keys: list[int]):
        host = self.host.batch(keys, [0] * len(keys))
        batch = self.there.batch([(keys, [0] * len(keys), None)])
        here, there = self.here.admit(host.tables, host.keys), self.cache.admit(batch)
        identities = self.there.identities(batch)
        rows = list(zip(host.tables.tolist(), host.keys.tolist(), strict=True))
        assert sorted(identities) == sorted(rows)
        hit = dict(zip(rows, here.hit.tolist(), strict=True))
        assert [hit[row] for row in identities] == there.hit.bool().tolist()[: len(rows)]
        kept = {row for row, line in zip(rows, here.lines.tolist(), strict=True) if line}
        assert kept == {row for row, line in zip(identities, there.lines.tolist(), strict=False) if line}
        assert self.cache.counts == self.here.counts
        return here, there

    def check(self) -> None:
        assert self.cache.used == self.here.used
        tables, keys, _ = self.here.dirty()
        hashes, tables_there, lines = self.cache.dirty()
        assert len(set(lines.tolist())) == len(lines)
        assert array(tables_there, np.uint32).tolist() == tables.tolist()
        assert len(hashes) == len(keys)


@on_devices
@pytest.mark.parametrize("sets", [1, 3, 64, 130])
def test_random_batches(device: Device, sets: int) -> None:
    both = Both(device, sets)
    rng = np.random.default_rng(sets)
    for round in range(10):
        size = int(rng.integers(0, 8 * sets if round % 3 else 24 * sets))
        here, there = both.admit(rng.choice(30 * sets, min(size, 300), replace=True).tolist())
        how = round % 5
        if how < 3:
            both.here.release(here, how == 0)
            both.cache.release(there, how == 0)
        else:
            both.here.cancel(here, how == 3)
            both.cache.cancel(there, how == 3)
        both.check()
    both.here.mark_clean()
    both.cache.mark_clean()
    both.check()
    keys = list(range(30 * min(sets, 8)))
    host, batch = both.host.batch(keys, [0] * len(keys)), both.there.batch([(keys, [0] * len(keys), None)])
    lines = np.empty(host.unique, np.uint64)
    both.here.find(host.tables, host.keys, lines)
    missing = both.cache.find(batch)
    up = {key for key, line in zip(host.keys.tolist(), lines.tolist(), strict=True) if line}
    assert {
        key for (_, key), line in zip(both.there.identities(batch), batch.lines.tolist(), strict=True) if line
    } == up
    assert missing.tolist() == [int(line == 0) for line in batch.lines.tolist()]


@on_devices
def test_pinned_rows_stay(device: Device) -> None:
    both = Both(device, 1)
    pinned = both.admit(list(range(12)))
    both.admit(list(range(20, 30)))
    both.here.release(pinned[0], True)
    both.cache.release(pinned[1], True)
    both.admit(list(range(40, 52)))
    both.check()


def test_a_budget_below_one_set_is_refused() -> None:
    with pytest.raises(ValueError, match="one set takes"):
        Cache(DeviceTable(EmulatedDevice(), Table([3])).layout, 100)
