"""A cache on a device fetches rows of announced batches before their steps, and evicts no row that one needs."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from support.cuda_tables import DeviceTable, on_devices, on_one_device, tensor
from support.rows import Table
from tierbed import InputError, StoreError
from tierbed.engine.cache.cuda.cache import Cache
from tierbed.engine.cache.cuda.cached import CudaCachedStore
from tierbed.engine.cache.cuda.cached_table import CachedTable
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch, Faults
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.store.cuda.full import CudaFullStore
from tierbed.engine.store.full import CpuFullStore


class Cached:
    """A cache of a device over a full table of the host, by kernels alone ("table") or as over a disk ("tier")."""

    def __init__(self, device: Device, below: str, sets: int, capacity: int | None = None) -> None:
        self.host = Table([3])
        self.on_device = DeviceTable(device, self.host)
        self.faults = Faults(device, "t", self.host.tables, None)
        self.on_device.faults = self.faults.word
        layout, host_layout = self.on_device.layout, self.host.layout
        self.cache = cache = Cache(layout, sets * 64 * (layout.line_bytes + 33))
        self.store: CudaCachedStore | CachedTable
        if below == "table":
            full = CudaFullStore(layout, host_layout, capacity, self.faults, "host")
            self.store = CachedTable(layout, full, cache, self.faults)
        else:
            self.store = CudaCachedStore(layout, CpuFullStore(host_layout, "host"), cache, self.faults)

    def batch(self, keys: range, last_table: int = 0) -> Batch:
        """As one that is made ahead."""
        self.on_device.faults = tensor(self.on_device.device, [0], np.uint32)
        tables = [last_table if key == keys[-1] else 0 for key in keys]
        return self.on_device.batch([(list(keys), tables, None)])

    def step(self, batch: Batch, value: float) -> None:
        self.store.pin(batch, None)
        self.write(batch, value)
        self.store.unpin(batch, dirty=True)

    def write(self, batch: Batch, value: float) -> None:
        values = torch.full((batch.size, 3), value, device=batch.lines.device)
        cuda.assign(batch, self.on_device.layout, values, 1, self.on_device.written, self.faults.word)

    def pin_and_wait(self, batch: Batch) -> None:
        """What is wrong with it may be found after it."""
        self.store.pin(batch, None)
        self.faults.check()

    def read(self, batch: Batch) -> list[float]:
        """The first number of each row."""
        return self.on_device.read(batch.lines)[0][:, 0].tolist()

    @property
    def misses(self) -> float:
        return self.store.metrics()["device"]["misses"]


caches = pytest.mark.parametrize("below", ["table", "tier"])


@on_devices
@caches
def test_rows_come_up_once_and_ahead_of_their_step(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=4)
    first, second = cached.batch(range(40)), cached.batch(range(20, 60))
    for batch in (first, second):
        cached.store.announce(batch)
    assert cached.store.prefetch(first)
    assert cached.misses == 40
    assert cached.store.prefetch(second)
    assert cached.misses == 60
    cached.store.pin(first, None)
    cached.write(first, 7.0)
    cached.store.unpin(first, dirty=True)
    cached.store.pin(second, None)
    assert cached.misses == 60
    assert cached.read(second)[:20] == [7.0] * 20  # the values of the step before, not those of when it was fetched
    cached.store.unpin(second, dirty=False)


@on_devices
@caches
def test_rows_that_steps_need_do_not_give_way_to_those_of_later_ones(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    first, second, third = (cached.batch(range(at, at + 30)) for at in (0, 30, 60))
    for batch in (first, second, third):
        cached.store.announce(batch)
    assert cached.store.prefetch(first)
    assert cached.store.prefetch(second)
    assert not cached.store.prefetch(third)  # 90 rows for 64 ways
    cached.store.pin(first, None)
    cached.write(first, 1.0)
    assert not cached.store.prefetch(third)
    cached.store.unpin(first, dirty=True)
    cached.store.pin(second, None)
    assert cached.store.prefetch(third)  # in the place of the first, which is over
    cached.write(second, 2.0)
    cached.store.unpin(second, dirty=True)
    cached.store.pin(third, None)
    cached.store.unpin(third, dirty=False)
    again = cached.batch(range(90))
    cached.store.peek(again)
    assert cached.read(again)[:60] == [1.0] * 30 + [2.0] * 30


@on_devices
@caches
def test_no_batch_comes_up_before_an_earlier_one(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    first, second, third = cached.batch(range(10)), cached.batch(range(10, 40)), cached.batch(range(40, 70))
    for batch in (first, second, third):
        cached.store.announce(batch)
    assert not cached.store.prefetch(second)
    cached.store.pin(first, None)
    assert cached.store.prefetch(second)
    cached.write(first, 1.0)
    cached.store.unpin(first, dirty=True)
    assert not cached.store.prefetch(third)
    cached.step(second, 2.0)
    cached.step(third, 3.0)
    again = cached.batch(range(70))
    cached.store.peek(again)
    assert cached.read(again) == [1.0] * 10 + [2.0] * 30 + [3.0] * 30


@on_devices
@caches
def test_rows_that_are_erased_while_they_are_up_ahead_are_initial_and_written(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    before, coming = cached.batch(range(40)), cached.batch(range(40))
    cached.store.peek(before)
    initial = cached.read(before)
    cached.step(cached.batch(range(40)), 1.0)
    cached.store.announce(coming)
    assert cached.store.prefetch(coming)
    cached.store.erase(np.zeros(20, np.uint32), np.arange(20, dtype=np.uint64))
    cached.store.pin(coming, None)
    assert cached.read(coming) == initial[:20] + [1.0] * 20
    cached.write(coming, 2.0)
    cached.store.unpin(coming, dirty=True)
    assert sum(len(rows) for _, rows in cached.store.scan()) == 40


@on_one_device
def test_a_device_that_fails_in_a_turn_leaves_no_thread_waiting(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cached(device, "table", sets=1)
    coming, entered, go_on = cached.batch(range(9)), threading.Event(), threading.Event()
    cached.store.announce(coming)

    def fail(event: object) -> None:
        entered.set()
        go_on.wait()
        raise RuntimeError("CUDA error")

    def turn() -> None:
        with contextlib.suppress(RuntimeError):
            cached.store.flush()

    with monkeypatch.context() as patched:
        patched.setattr(device, "wait_event", fail)
        first, second = threading.Thread(target=turn), threading.Thread(target=turn)
        first.start()
        entered.wait()
        second.start()  # wants its turn
        beside = threading.Thread(target=lambda: cached.store.prefetch(coming), daemon=True)
        go_on.set()
        first.join()
        second.join()
    beside.start()
    beside.join()


@on_devices
@caches
def test_a_row_without_a_set_is_not_read_below_while_its_step_has_it(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    large, small = cached.batch(range(100)), cached.batch(range(64, 100))
    for batch in (large, small):
        cached.store.announce(batch)
    assert not cached.store.prefetch(large)
    cached.store.pin(large, None)
    assert not cached.store.prefetch(small)
    cached.write(large, 5.0)
    cached.store.unpin(large, dirty=True)
    cached.store.pin(small, None)
    assert cached.read(small) == [5.0] * 36


@on_devices
@caches
def test_a_mistake_in_a_batch_ahead_stops_no_step_before_it(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    cached.step(cached.batch(range(40)), 1.0)
    bad, good = cached.batch(range(41), last_table=99), cached.batch(range(30, 40))  # whose other rows are resident
    cached.store.announce(bad)
    assert cached.store.prefetch(bad) == (below == "table")  # a tier is not asked for rows of such a batch
    cached.faults.check()
    cached.store.cancel()
    cached.step(good, 2.0)
    assert cached.read(good) == [2.0] * 10
    cached.store.announce(bad)
    with pytest.raises(InputError, match="table_ids"):
        cached.pin_and_wait(bad)


@on_devices
@pytest.mark.parametrize("before", [0, 60])  # rows of a step that leave no room in the set
def test_lines_that_hints_took_are_given_back(device: Device, before: int) -> None:
    cached = Cached(device, "table", sets=1, capacity=before + 10)
    first, wrong = cached.batch(range(before)), cached.batch(range(100, 110))
    cached.store.pin(first, None)
    cached.store.announce(wrong)
    for _ in range(2):
        assert cached.store.prefetch(wrong) == (before == 0)
    cached.store.unpin(first, dirty=False)
    cached.store.cancel()
    cached.step(cached.batch(range(200, 210)), 1.0)
    cached.faults.check()


@on_devices
def test_a_batch_that_had_no_room_ahead_may_have_it_in_its_step(device: Device) -> None:
    cached = Cached(device, "table", sets=4, capacity=10)
    cached.step(cached.batch(range(10)), 1.0)
    coming = cached.batch(range(10, 15))
    cached.store.announce(coming)
    assert not cached.store.prefetch(coming)
    cached.store.cancel()
    cached.store.erase(np.zeros(5, np.uint32), np.arange(5, dtype=np.uint64))
    cached.store.announce(coming)
    assert cached.store.prefetch(coming)
    cached.step(coming, 2.0)
    cached.faults.check()
    assert cached.read(coming) == [2.0] * 5


@on_devices
@caches
def test_what_was_looked_up_stays_while_its_place_is_taken(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    cached.step(cached.batch(range(64)), 3.0)
    looked_up, coming = cached.batch(range(64)), cached.batch(range(100, 164))
    cached.store.peek(looked_up)
    cached.store.announce(coming)
    assert cached.store.prefetch(coming)
    assert cached.read(looked_up) == [3.0] * 64


@on_devices
@caches
def test_batches_have_their_steps_in_the_order_in_which_they_were_announced(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=1)
    first, second = cached.batch(range(5)), cached.batch(range(5, 10))
    for batch in (first, second):
        cached.store.announce(batch)
    with pytest.raises(StoreError, match="another batch was announced"):
        cached.store.pin(second, None)
    cached.store.cancel()
    cached.store.pin(second, None)
    with pytest.raises(StoreError, match="one step at a time"):
        cached.store.pin(first, None)
    assert cached.store.prefetch(first)  # nobody waits for it
    assert cached.misses == 5


def bytes_of_tensors(device: Device) -> int:
    """The memory on a device that tensors hold, whether anybody still reaches them or the collector has yet to come."""
    found = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    tensors = [one for one in found if one.layout == torch.strided and one.device == device.torch_device]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@on_devices
@caches
def test_a_closed_cache_gives_its_device_memory_back_at_once(device: Device, below: str) -> None:
    cached = Cached(device, below, sets=64)
    coming = cached.batch(range(40))
    cached.store.announce(coming)
    assert cached.store.prefetch(coming)
    size = cached.cache.metrics()["bytes"]
    assert size > 64 * 64 * 32
    gc.disable()
    try:
        memory = bytes_of_tensors(device)
        cached.store.close()
        assert memory - bytes_of_tensors(device) >= size
    finally:
        gc.enable()


@on_devices
@caches
def test_a_cache_that_its_own_thread_closes_while_rows_come_up_is_not_used_without_memory(
    device: Device, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cached(device, below, sets=4)
    coming = cached.batch(range(40))
    cached.store.announce(coming)
    admit = Cache.admit

    def collected(cache: Cache, *arguments: Any) -> Any:
        admitted = admit(cache, *arguments)
        cached.store.close()  # as where garbage is collected here, with the embedding in it
        return admitted

    monkeypatch.setattr(Cache, "admit", collected)
    cached.store.prefetch(coming)
    device.wait()
