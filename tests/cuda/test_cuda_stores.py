"""Rows are the same in a store of a device as in one of the CPU, whatever is cached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.cuda_tables import DeviceTable, contents_on_host, on_devices, tensor
from support.rows import Table
from tierbed.engine import _core
from tierbed.engine.cache.cuda.cache import Cache
from tierbed.engine.cache.cuda.cached import CudaCachedStore
from tierbed.engine.cache.cuda.cached_table import CachedTable
from tierbed.engine.errors import CapacityError, InputError
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Faults
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.row_format import Chunks
from tierbed.engine.store.cuda.full import CudaFullStore
from tierbed.engine.store.full import CpuFullStore

HYPER = [0.1, 0.01, 0.0, 1e-3, 0.0, 0.0]


def scanned(chunks: Chunks) -> list[tuple[int, bytes]]:
    buckets: dict[int, bytes] = {}
    for bucket, rows in chunks:
        buckets[bucket] = buckets.get(bucket, b"") + rows.tobytes()
    return list(buckets.items())


class Trained:
    """The same random steps on a store of the CPU and on one of a device.

    kind: "device" or "host", where all rows are; or what is below a cache of `budget` bytes, "table" or "tier".
    """

    def __init__(self, device: Device, kind: str, budget: int = 0) -> None:
        self.host = Table([5], [0.1])
        self.on_device = DeviceTable(device, self.host)
        self.faults = Faults(device, "t", self.host.tables, None)
        self.on_device.faults = self.faults.word
        self.here = CpuFullStore(self.host.layout, "device")
        layout, host_layout = self.on_device.layout, self.host.layout
        self.store: CudaFullStore | CachedTable | CudaCachedStore
        if kind in ("device", "host"):
            self.store = CudaFullStore(layout, host_layout, None, self.faults, kind)
        elif kind == "table":
            below = CudaFullStore(layout, host_layout, None, self.faults, "host")
            self.store = CachedTable(layout, below, Cache(layout, budget), self.faults)
        else:
            self.store = CudaCachedStore(layout, CpuFullStore(host_layout, "host"), Cache(layout, budget), self.faults)

    def pin(self, batch) -> None:
        self.store.pin(batch, None)

    def step(self, rng: np.random.Generator, number: int, size: int = 200, erased: list[int] | None = None) -> None:
        """erased: keys of table 1 that go in the middle of the step."""
        keys, tables = rng.integers(0, 300, size, np.uint64), rng.integers(0, 5, size, np.uint32)
        grads = rng.standard_normal((size, 5), np.float32)
        host = self.host.batch(keys, tables, padding=3)
        self.here.pin(host, None)
        batch = self.on_device.batch([(keys.tolist(), tables.tolist(), None)], padding=3)
        self.pin(batch)
        if erased:
            self.erase(erased, 1, host)
        self.host.update(host, grads, "adagrad", HYPER, number)
        there = [tensor(self.on_device.device, grads, np.float32)]
        rule, numbers = (self.on_device.layout, "adagrad"), self.on_device.numbers
        cuda.write_hyper(*rule, HYPER, number, 1.0, numbers)
        cuda.update(*rule, batch, (there, [False], [None]), numbers, self.on_device.written, self.faults.word)
        self.store.unpin(batch, dirty=True)
        self.faults.check()

    def erase(self, keys: list[int], table: int, pinned: Any = None) -> None:
        """The CPU's table takes no row of a pinned batch out: here they get initial values by the test."""
        owners, ids = np.full(len(keys), table, np.uint32), np.array(keys, np.uint64)
        self.store.erase(owners, ids)
        if pinned is not None:
            up = (pinned.tables == table) & np.isin(pinned.keys, ids)
            fresh = _core.Batch([(pinned.keys, pinned.tables, None)], self.host.tables, None)
            _core.initialise_missing(fresh, self.host.layout)
            _core.copy_lines(self.host.layout, fresh.lines[up], pinned.lines[up])
            owners, ids = owners[: (~np.isin(ids, pinned.keys[up])).sum()], ids[~np.isin(ids, pinned.keys[up])]
        self.here.erase(owners, ids)


STORES = [("device", 0), ("host", 0)] + [
    (below, size) for below in ("table", "tier") for size in (6000, 20_000, 200_000)
]


@on_devices
@pytest.mark.parametrize(("kind", "budget"), STORES)
def test_rows_do_not_depend_on_the_store(device: Device, kind: str, budget: int) -> None:
    both = Trained(device, kind, budget)
    rng = np.random.default_rng(0)
    for number in range(1, 9):
        both.step(rng, number, size=1500 if number == 4 else 200)
    expected = scanned(both.here.scan())
    assert len(expected) == 64
    assert scanned(both.store.scan()) == expected
    keys, tables = list(range(400)), [0] * 400
    host = both.host.batch(keys, tables)
    both.here.peek(host)
    wanted = np.empty((400, 5), np.float32)
    _core.gather(host, both.host.layout, 0, wanted)
    batch = both.on_device.batch([(keys, tables, None)])
    both.store.peek(batch)
    *had, unknown = both.store.peek_counts()
    assert (sum(had), unknown) == (both.here.peek_counts()[0], both.here.peek_counts()[2])
    assert (had[1] > 0) == (budget in (6000, 20_000))
    out = tensor(device, np.full((400, 5), np.nan), np.float32)
    cuda.gather(batch, both.on_device.layout, 0, out)
    assert out.cpu().numpy().tobytes() == wanted.tobytes()
    assert scanned(both.store.scan()) == expected
    both.step(rng, 9)
    assert scanned(both.store.scan()) == scanned(both.here.scan())
    metrics = both.store.metrics()["host" if kind == "host" else "device"]
    assert metrics["hits"] > 0
    assert metrics["misses"] > 0
    if budget in (6000, 20_000):
        assert metrics["evictions_dirty"] > 0
        assert metrics["overflows"] > 0
    both.store.close()


@on_devices
@pytest.mark.parametrize(("kind", "budget"), STORES)
def test_erased_rows_begin_anew(device: Device, kind: str, budget: int) -> None:
    both = Trained(device, kind, budget)
    rng = np.random.default_rng(2)
    for number in range(1, 9):
        both.step(rng, number, erased=rng.permutation(330)[:150].tolist() if number % 2 == 0 else None)
        both.erase(rng.permutation(330)[: 40 * (number % 3)].tolist(), number % 5)
        assert scanned(both.store.scan()) == scanned(both.here.scan())
    keys = list(range(330))
    both.erase(keys, 1)
    host, batch = both.host.batch(keys, [1] * 330), both.on_device.batch([(keys, [1] * 330, None)])
    both.here.peek(host)
    both.store.peek(batch)
    assert both.on_device.contents(batch) == contents_on_host(both.host, host)
    both.store.close()


@on_devices
def test_a_scan_is_loaded_into_another_store(device: Device) -> None:
    both = Trained(device, "device")
    rng = np.random.default_rng(1)
    for number in (1, 2):
        both.step(rng, number)
    other = CudaFullStore(both.on_device.layout, both.host.layout, None, both.faults)
    for _, rows in both.here.scan():
        memory, lines = both.host.lines(len(rows))
        packed = rows.view(np.uint8).reshape(len(rows), -1)[:, 12:]
        memory[:, : packed.shape[1]] = packed
        other.write(rows["table"].copy(), rows["key"].copy(), lines)
    assert scanned(other.scan()) == scanned(both.here.scan())


@on_devices
def test_faults_are_raised_once_and_name_the_remedy(device: Device) -> None:
    faults, table = Faults(device, "users", 4, 10), DeviceTable(device, Table([3]))
    table.faults = tensor(device, [0], np.uint32)
    ahead = table.batch([([1, 2], [0, 0], None)])  # with a word of its own
    table.faults = faults.word
    batch = table.batch([([1, 2], [0, 0], None)])
    for bit, error, message in [
        (1, CapacityError, "raise capacity"),
        (2, InputError, "0 to 3"),
        (4, InputError, "asc"),
    ]:
        for found, word in ((batch, faults.word), (ahead, ahead.faults)):
            word.fill_(bit)
            assert not faults.seen(wait=False)  # has not arrived
            faults.post(found)
            with pytest.raises(error, match=message):
                faults.check()
            ahead.faults.zero_()
            faults.check()
            assert not faults.seen(wait=False)


@on_devices
def test_a_capacity_bounds_what_a_store_takes(device: Device) -> None:
    table = DeviceTable(device, Table([3], tables=1))
    faults = Faults(device, "users", 1, 8)
    store = CudaFullStore(table.layout, table.table.layout, 8, faults)
    keys = np.arange(9, dtype=np.uint64)
    _, lines = table.table.lines(9)
    with pytest.raises(CapacityError, match="8"):
        store.write(np.zeros(9, np.uint32), keys, lines)
    store.write(np.zeros(8, np.uint32), keys[:8], lines[:8])
    assert store.metrics()["device"]["resident_rows"] == 8


@on_devices
@pytest.mark.parametrize(("kind", "budget"), STORES)
def test_where_rows_are(device: Device, kind: str, budget: int) -> None:
    both = Trained(device, kind, budget)
    rng = np.random.default_rng(4)
    for number in range(1, 4):
        both.step(rng, number)
        if number == 2:
            both.store.flush()
    tiers = dict.fromkeys(both.store.metrics(), 0)
    lines: set[int] = set()
    for key in range(0, 300, 7):
        [expected] = both.here.locate(1, key) or [None]
        places = both.store.locate(1, key)
        assert bool(places) == (expected is not None)
        if expected is None:
            continue
        assert {name: places[0][name] for name in ("updates", "last_step")} == {
            name: expected[name] for name in ("updates", "last_step")
        }
        for place in places:
            tiers[place["tier"]] += 1
            lines.add(place["line"] if "line" in place else -1 - place["slot"])
            assert not place.get("pinned", False)
        assert len(places) == 1 or places[0]["dirty"] == (places[0]["updates"] != places[1]["updates"])
    assert all(tiers.values())
    assert kind == "tier" or len(lines) == sum(tiers.values())
    assert both.store.locate(1, 1000) == []
