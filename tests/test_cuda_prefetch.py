"""Batches that are made ready ahead on a device, on a stream of its own, change when work is done and never a row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_emulation.ordering import OrderedDevice
from cuda_tables import DeviceTable, on_devices, on_one_device, tables_on, tensor
from embeddings import STORES, contents, make, options, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import Table
from test_cuda_embedding import started
from torch import Tensor

from tierbed.engine import CapacityError, InputError, MultiTableEmbedding, StoreError
from tierbed.engine.inputs import Lookup
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch
from tierbed.engine.ops.cuda.cache import Cache
from tierbed.engine.ops.cuda.cached import CachedStore
from tierbed.engine.ops.cuda.cached_table import CachedTable
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.ops.cuda.faults import Faults
from tierbed.engine.ops.cuda.full import FullStore
from tierbed.engine.store.full import FullTable
from tierbed.snapshots.reader import Snapshot

STEPS = 10
BATCHES = [torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
MANY_SETS_MB = 0.1


class Cached:
    """A cache of a device over a full table of the host, by kernels alone ("table") or as over a disk ("tier")."""

    def __init__(self, device: Device, below: str, sets: int, capacity: int | None = None) -> None:
        self.host = Table([3])
        self.there = DeviceTable(device, self.host)
        self.faults = Faults(device, "t", self.host.tables, None)
        self.there.faults = self.faults.word
        layout, host_layout = self.there.layout, self.host.layout
        cache = Cache(layout, sets * 64 * (layout.line_bytes + 33))
        self.store: CachedStore | CachedTable
        if below == "table":
            full = FullStore(layout, host_layout, capacity, self.faults, "host")
            self.store = CachedTable(layout, full, cache, self.faults)
        else:
            self.store = CachedStore(layout, FullTable(host_layout, "host"), cache, self.faults)

    def batch(self, keys: range, last_table: int = 0) -> Batch:
        """As one that is made ahead."""
        self.there.faults = tensor(self.there.device, [0], np.uint32)
        tables = [last_table if key == keys[-1] else 0 for key in keys]
        return self.there.batch([(list(keys), tables, None)])

    def step(self, batch: Batch, value: float) -> None:
        self.store.pin(batch, None)
        self.write(batch, value)
        self.store.unpin(batch, dirty=True)

    def write(self, batch: Batch, value: float) -> None:
        values = torch.full((batch.size, 3), value, device=batch.lines.device)
        cuda.assign(batch, self.there.layout, values, 1, self.there.written, self.faults.word)

    def pin_and_wait(self, batch: Batch) -> None:
        """What is wrong with it may be found after it."""
        self.store.pin(batch, None)
        self.faults.check()

    def read(self, batch: Batch) -> list[float]:
        """The first number of each row."""
        return self.there.read(batch.lines)[0][:, 0].tolist()

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
    assert cached.read(second)[:20] == [7.0] * 20  # the values of the step before, not those of when it came up
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

    def fail(mark: object) -> None:
        entered.set()
        go_on.wait()
        raise RuntimeError("CUDA error")

    def turn() -> None:
        with contextlib.suppress(RuntimeError):
            cached.store.flush()

    with monkeypatch.context() as patched:
        patched.setattr(device, "follow", fail)
        first, second = threading.Thread(target=turn), threading.Thread(target=turn)
        first.start()
        entered.wait()
        second.start()  # wants its turn
        beside = threading.Thread(target=lambda: cached.store.prefetch(coming), daemon=True)
        go_on.set()
        first.join()
        second.join()
    beside.start()
    beside.join(30)
    assert not beside.is_alive()


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
    bad, good = cached.batch(range(41), last_table=99), cached.batch(range(30, 40))  # whose other rows are up
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


def hint(embedding: MultiTableEmbedding, ids: Tensor) -> None:
    embedding.prefetch(ids, torch.zeros_like(ids))


def on(place: torch.device) -> Iterator[Tensor]:
    return (ids.to(place) for ids in BATCHES)


@pytest.fixture(scope="module")
def plain() -> bytes:
    with make(options("device"), "adagrad") as embedding:
        for ids in BATCHES:
            train(embedding, ids)
        return contents(embedding).tobytes()


@on_one_device
@pytest.mark.parametrize("budget_mb", [0.01, MANY_SETS_MB])
@pytest.mark.parametrize("ahead", [1, 4, 40])
@pytest.mark.parametrize("store", STORES)
def test_rows_are_those_of_the_plain_run(
    tmp_path: Path, device: Device, plain: bytes, store: str, ahead: int, budget_mb: float
) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path, budget_mb), "adagrad").to(place)
        batches = list(on(place))
        for ids in batches[:ahead]:
            hint(embedding, ids)
        for i, ids in enumerate(batches):
            train(embedding, ids)
            for later in batches[i + ahead : i + ahead + 1]:
                hint(embedding, later)
            embedding(batches[-1], torch.zeros_like(ids))  # reads beside what comes up
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain
        embedding.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tierbed-prefetch"]


@on_one_device
@pytest.mark.parametrize("store", STORES)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hints_that_are_wrong_late_or_skipped_change_no_row(
    tmp_path_factory: pytest.TempPathFactory, device: Device, plain: bytes, store: str, data: st.DataObject
) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path_factory.mktemp("wrong")), "adagrad").to(place)
        batches, saved = list(on(place)), False
        for i, ids in enumerate(batches):
            for hinted in data.draw(st.lists(st.integers(-2, 4), max_size=3)):
                hint(embedding, batches[(i + hinted) % STEPS])
            action = data.draw(st.sampled_from(["none", "read", "put", "delete", "release", "scan", "save"]))
            if action == "read":
                embedding(batches[-1], torch.zeros_like(ids))
            elif action == "put":
                embedding.put([1000], torch.ones(1, 5), 0)
            elif action == "delete":
                embedding.delete([1000], 0)
            elif action == "release":
                embedding.pin([Lookup(ids, torch.zeros_like(ids))])
                embedding.release()
            elif action == "scan":
                contents(embedding)
            elif action == "save" and embedding.store_options.persistent_path:
                embedding.save_snapshot(f"step-{i}", kind="incremental" if saved else "full")
                saved = True
            train(embedding, ids)
        rows = contents(embedding)
        assert rows[rows["key"] != 1000].tobytes() == plain
        embedding.close()


def step_and_wait(embedding: MultiTableEmbedding, ids: Tensor, tables: Tensor | int = 0) -> None:
    """What a step does wrong may be found after it."""
    train(embedding, ids, tables)
    embedding.metrics()


@on_one_device
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_a_mistake_in_a_batch_ahead_is_that_of_its_step(tmp_path: Path, device: Device, store: str) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path), "adagrad").to(place)
        batches = list(on(place))
        bad = torch.full_like(batches[0], 99)
        hint(embedding, batches[0])
        embedding.opened().table.announce([Lookup(batches[1], bad)])  # the embedding checks what is on the CPU
        hint(embedding, batches[2])
        train(embedding, batches[0])
        before = contents(embedding).tobytes()
        with pytest.raises(InputError, match="table_ids"):
            step_and_wait(embedding, batches[1], bad)
        assert contents(embedding).tobytes() == before
        train(embedding, batches[2])
        with make(options("device"), "adagrad", name="cpu") as expected:
            for ids in (BATCHES[0], BATCHES[2]):
                train(expected, ids)
            assert contents(embedding).tobytes() == contents(expected).tobytes()
        embedding.close()


@on_one_device
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_tensors_may_be_filled_anew_after_the_hint(tmp_path: Path, device: Device, plain: bytes, store: str) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path), "adagrad").to(place)
        buffer, tables = torch.empty_like(BATCHES[0], device=place), torch.zeros_like(BATCHES[0], device=place)
        for ids in BATCHES:
            embedding.prefetch(buffer.copy_(ids), tables)
        for ids in BATCHES:
            train(embedding, buffer.copy_(ids), tables)
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain
        embedding.close()


@on_one_device
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_ids_that_change_unseen_after_the_hint_are_told(tmp_path: Path, device: Device, store: str) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path), "adagrad").to(place)
        tables, first, ids = torch.zeros_like(BATCHES[0], device=place), *list(on(place))[:2]
        embedding.prefetch(first, tables)
        embedding.prefetch(ids, tables)
        train(embedding, first, tables)
        before = contents(embedding).tobytes()
        ids.data[3] += 1
        with pytest.raises(InputError, match=r"ids of embedding 'rows'.*ahead=0"):
            step_and_wait(embedding, ids, tables)
        assert contents(embedding).tobytes() == before
        train(embedding, ids, tables)
        assert contents(embedding).tobytes() != before
        embedding.close()


@on_one_device
@pytest.mark.parametrize("store", ["device", "host", "cached_host"])
def test_hints_take_no_room_of_a_capacity(device: Device, store: str) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, capacity=10), "adagrad").to(place)
        ids = [torch.arange(at, at + 5, device=place) for at in range(0, 100, 5)]
        for wrong in ids[2:]:
            hint(embedding, wrong)
        for wanted in ids[:2]:
            train(embedding, wanted)
        assert embedding.metrics()["table"]["rows"] == 10
        hint(embedding, ids[3])
        hint(embedding, ids[0])
        with pytest.raises(CapacityError, match="capacity"):
            step_and_wait(embedding, ids[3])
        train(embedding, ids[0])
        assert embedding.metrics()["table"]["rows"] == 10
        assert embedding.delete(ids[1].cpu(), 0) == 5
        train(embedding, ids[3])
        assert embedding.metrics()["table"]["rows"] == 10
        embedding.close()


@on_one_device
@pytest.mark.parametrize("store", STORES)
def test_a_run_over_a_loader_is_the_plain_loop(tmp_path: Path, device: Device, store: str) -> None:
    here = started(store, "adam", tmp_path / "here", torch.device("cpu"), "sum")
    expected = [here.graph(*batch) for batch in here.batches(0, STEPS)]
    with tables_on(device) as place:
        there = started(store, "adam", tmp_path / "there", place, "sum")
        seen = []
        for number, out in enumerate(there.graph.run(there.batches(0, STEPS), ahead=3)):
            seen.append([part.cpu() for part in out])
            if number == 4:
                saved = there.graph.rows.save_snapshot("fifth", background=True)
        for a, b in zip(seen, expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert there.graph.rows.metrics()["table"]["prefetch_hits"] == STEPS
        saved.wait()
        assert contents(there.graph.rows).tobytes() == contents(here.graph.rows).tobytes()
        there.graph.rows.close()
    again = started(store, "adam", tmp_path / "again", torch.device("cpu"), "sum")
    for batch in again.batches(0, 5):
        again.graph(*batch)
    again.graph.rows.save_snapshot("fifth")
    files = [chunks(tmp_path / name / "rows" / "snapshots" / "fifth") for name in ("there", "again")]
    assert files[0] == files[1]


def chunks(folder: Path) -> list[tuple[int, bytes]]:
    return [(bucket, rows.tobytes()) for bucket, rows in Snapshot.open(folder).chunks()]


@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
@pytest.mark.parametrize(("budget_mb", "reads"), [(0.01, True), (MANY_SETS_MB, True), (MANY_SETS_MB, False)])
def test_streams_wait_for_each_other_where_they_use_the_same_memory(
    tmp_path: Path, plain: bytes, store: str, budget_mb: float, reads: bool
) -> None:
    device = OrderedDevice(seed=1)
    capacity = {} if store == "ssd" else {"capacity": 1000}  # a table that grows gives memory from thread to thread
    with tables_on(device) as place, device.watch():
        embedding = make(options(store, tmp_path, budget_mb, **capacity), "adagrad").to(place)
        device.opened(embedding.opened().table.processor._layout._memory)
        for ids in BATCHES:
            hint(embedding, ids)
        for ids in BATCHES:
            train(embedding, ids)
            if reads:
                embedding(BATCHES[-1], torch.zeros_like(ids))
            else:
                time.sleep(0.05)  # the rows of the next step come up, most likely
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain
        embedding.close()
    assert not device.races
    assert not device.unkept()
