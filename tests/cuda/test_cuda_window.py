"""A cache on a device fetches rows of announced batches before their steps, and evicts no row that one needs."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch

from support.cuda_tables import on_devices, on_one_device
from support.device_caches import DeviceCache
from tierbed import InputError, StoreError
from tierbed.engine.cache.cuda.cache import CacheSets
from tierbed.engine.ops.cuda.device import Device

caches = pytest.mark.parametrize("below", ["table", "tier"])


@on_devices
@caches
def test_rows_come_up_once_and_ahead_of_their_step(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=4)
    first, second = cache.keys(range(40)), cache.keys(range(20, 60))
    cache.announce(first, second)
    for batch, misses in ((first, 40), (second, 60)):
        assert cache.prefetch(batch)
        assert cache.misses == misses
    for batch in (first, second):
        cache.step(batch)  # the second has the values of the step before, not those of when it was fetched
    assert cache.misses == 60
    cache.pin(again := cache.keys(range(60)))
    assert cache.store.locate(0, 1)[0]["pinned"]
    assert cache.store.locate(0, 1)[0]["dirty"]
    cache.unpin(again)


@on_devices
@caches
def test_rows_that_steps_need_do_not_give_way_to_those_of_later_ones(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=1)
    first, second, third = (cache.keys(range(at, at + 30)) for at in (0, 30, 60))
    cache.announce(first, second, third)
    assert cache.prefetch(first)
    assert cache.prefetch(second)
    assert not cache.prefetch(third)  # 90 rows for 64 ways
    cache.pin(first)
    cache.model.write(first)
    assert not cache.prefetch(third)
    cache.unpin(first)
    cache.pin(second)
    assert cache.prefetch(third)  # in the place of the first, which is over
    cache.model.write(second)
    cache.unpin(second)
    cache.step(third)
    cache.peek(again := cache.keys(range(90)))
    cache.model.check(again)


@on_devices
@caches
def test_no_batch_comes_up_before_an_earlier_one(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=1)
    first, second, third = cache.keys(range(10)), cache.keys(range(10, 40)), cache.keys(range(40, 70))
    cache.announce(first, second, third)
    assert not cache.prefetch(second)
    cache.pin(first)
    assert cache.prefetch(second)
    cache.model.write(first)
    cache.unpin(first)
    assert not cache.prefetch(third)
    cache.step(second)
    cache.step(third)
    cache.peek(again := cache.keys(range(70)))
    cache.model.check(again)


@on_one_device
def test_a_device_that_fails_in_a_turn_leaves_no_thread_waiting(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DeviceCache(device, "table", sets=1)
    coming, entered, go_on = cache.keys(range(9)), threading.Event(), threading.Event()
    cache.announce(coming)

    def fail(event: object) -> None:
        entered.set()
        go_on.wait()
        raise RuntimeError("CUDA error")

    def turn() -> None:
        with contextlib.suppress(RuntimeError):
            cache.flush()

    with monkeypatch.context() as patched:
        patched.setattr(device, "wait_event", fail)
        first, second = threading.Thread(target=turn), threading.Thread(target=turn)
        first.start()
        entered.wait()
        second.start()  # wants its turn
        beside = threading.Thread(target=lambda: cache.prefetch(coming), daemon=True)
        go_on.set()
        first.join()
        second.join()
    beside.start()
    beside.join()


@on_devices
@caches
def test_a_row_without_a_set_is_not_read_below_while_its_step_has_it(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=1)
    large, small = cache.keys(range(100)), cache.keys(range(64, 100))
    cache.announce(large, small)
    assert not cache.prefetch(large)
    cache.pin(large)
    assert not cache.prefetch(small)
    cache.model.write(large)
    cache.unpin(large)
    cache.step(small)


@on_devices
@caches
def test_a_mistake_in_a_batch_ahead_stops_no_step_before_it(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=1)
    cache.step(cache.keys(range(40)))
    bad, good = cache.batch([*((0, key) for key in range(40)), (99, 40)]), cache.keys(range(30, 40))
    cache.announce(bad)  # whose other rows are resident
    assert cache.prefetch(bad) == (below == "table")  # a tier is not asked for rows of such a batch
    cache.faults.check()
    cache.cancel_announced()
    cache.step(good)
    cache.announce(bad)
    with pytest.raises(InputError, match="table_ids"):  # at once, or when it is waited for
        cache.pin(bad), cache.faults.check()


@on_devices
@pytest.mark.parametrize("before", [0, 60])  # rows of a step that leave no room in the set
def test_lines_that_hints_took_are_given_back(device: Device, before: int) -> None:
    cache = DeviceCache(device, "table", sets=1, capacity=before + 10)
    first, wrong = cache.keys(range(before)), cache.keys(range(100, 110))
    cache.pin(first)
    cache.announce(wrong)
    for _ in range(2):
        assert cache.prefetch(wrong) == (before == 0)
    cache.unpin(first, is_dirty=False)
    cache.cancel_announced()
    cache.step(cache.keys(range(200, 210)))
    cache.faults.check()


@on_devices
def test_a_batch_that_had_no_room_ahead_may_have_it_in_its_step(device: Device) -> None:
    cache = DeviceCache(device, "table", sets=4, capacity=10)
    cache.step(cache.keys(range(10)))
    coming = cache.keys(range(10, 15))
    cache.announce(coming)
    assert not cache.prefetch(coming)
    cache.cancel_announced()
    cache.erase([(0, key) for key in range(5)])
    cache.announce(coming)
    assert cache.prefetch(coming)
    cache.step(coming)
    cache.faults.check()


@on_devices
@caches
def test_what_was_looked_up_stays_while_its_place_is_taken(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=1)
    cache.step(cache.keys(range(64)))
    looked_up, coming = cache.keys(range(64)), cache.keys(range(100, 164))
    cache.peek(looked_up)
    cache.announce(coming)
    assert cache.prefetch(coming)
    cache.model.check(looked_up)


@on_devices
@caches
def test_batches_have_their_steps_in_the_order_in_which_they_were_announced(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=1)
    first, second = cache.keys(range(5)), cache.keys(range(5, 10))
    cache.announce(first, second)
    with pytest.raises(StoreError, match="another batch was announced"):
        cache.pin(second)
    cache.cancel_announced()
    cache.pin(second)
    with pytest.raises(StoreError, match="one step at a time"):
        cache.pin(first)
    assert cache.prefetch(first)  # nobody waits for it
    assert cache.misses == 5


def bytes_of_tensors(device: Device) -> int:
    """The memory on a device that tensors hold, whether anybody still reaches them or the collector has yet to come."""
    found = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    tensors = [one for one in found if one.layout == torch.strided and one.device == device.torch_device]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@on_devices
@caches
def test_a_closed_cache_gives_its_device_memory_back_at_once(device: Device, below: str) -> None:
    cache = DeviceCache(device, below, sets=64)
    cache.announce(coming := cache.keys(range(40)))
    assert cache.prefetch(coming)
    size = cache.cache.metrics()["bytes"]
    assert size > 64 * 64 * 32
    gc.disable()
    try:
        memory = bytes_of_tensors(device)
        cache.close()
        assert memory - bytes_of_tensors(device) >= size
    finally:
        gc.enable()


@on_devices
@caches
def test_a_cache_that_its_own_thread_closes_while_rows_come_up_is_not_used_without_memory(
    device: Device, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, place_batch = DeviceCache(device, below, sets=4), CacheSets.place_batch
    cache.announce(coming := cache.keys(range(40)))

    def collected(placing: CacheSets, *arguments: Any) -> Any:
        placement = place_batch(placing, *arguments)
        cache.close()  # as where garbage is collected here, with the embedding in it
        return placement

    monkeypatch.setattr(CacheSets, "place_batch", collected)
    cache.prefetch(coming)
    device.wait()
