"""Batches that are prefetched on a device, on a separate stream, change when work is done and never a row."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.cuda_emulation.ordering import OrderedDevice
from support.cuda_tables import on_one_device, tables_on
from support.device_steps import started
from support.embeddings import contents, make, train
from support.stores import STORES, options
from tierbed import CapacityError, InputError, MultiTableEmbedding
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots.files.reader import Snapshot

STEPS = 10
BATCHES = [torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
MANY_SETS_MB = 0.1


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
@pytest.mark.rotated("ahead")
def test_rows_are_those_of_the_plain_run(
    tmp_path: Path, device: Device, plain: bytes, store: str, ahead: int, budget_mb: float
) -> None:
    before = set(threading.enumerate())  # of other tests
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path, budget_mb), "adagrad").to(place)
        batches = list(on(place))
        for ids in batches[:ahead]:
            hint(embedding, ids)
        for i, ids in enumerate(batches):
            train(embedding, ids)
            for later in batches[i + ahead : i + ahead + 1]:
                hint(embedding, later)
            embedding(batches[-1], torch.zeros_like(ids))  # reads while rows are fetched
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain
        embedding.close()
    assert not [t for t in threading.enumerate() if t.name == "tierbed-prefetch" and t not in before]


@on_one_device
@pytest.mark.parametrize("store", STORES)
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        embedding.table_handle().table.announce([Lookup(batches[1], bad)])  # the embedding checks what is on the CPU
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
        tables, first, ids = (
            torch.zeros_like(BATCHES[0], device=place),
            BATCHES[0].to(place),
            BATCHES[1].clone().to(place),
        )
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
    expected = []
    for number, batch in enumerate(here.batches(0, STEPS)):
        expected.append(here.graph(*batch))
        if number == 4:
            here.graph.rows.save_snapshot("fifth")
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
    files = [chunks(tmp_path / name / "rows" / "snapshots" / "fifth") for name in ("there", "here")]
    assert files[0] == files[1]


def chunks(folder: Path) -> list[tuple[int, bytes]]:
    return [(bucket, rows.tobytes()) for bucket, rows in Snapshot.open(folder).chunks()]


@pytest.mark.rotated("store")
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
@pytest.mark.parametrize(("budget_mb", "reads"), [(0.01, True), (MANY_SETS_MB, True), (MANY_SETS_MB, False)])
def test_streams_wait_for_each_other_where_they_use_the_same_memory(
    tmp_path: Path, plain: bytes, store: str, budget_mb: float, reads: bool
) -> None:
    device = OrderedDevice(seed=1)
    capacity = {} if store == "ssd" else {"capacity": 1000}  # a table that grows gives memory from thread to thread
    with tables_on(device) as place, device.watch():
        embedding = make(options(store, tmp_path, budget_mb, **capacity), "adagrad").to(place)
        device.opened(embedding.table_handle().table.processor._layout._memory)
        for ids in BATCHES:
            hint(embedding, ids)
        for ids in BATCHES:
            train(embedding, ids)
            if reads:
                embedding(BATCHES[-1], torch.zeros_like(ids))
            else:
                time.sleep(0.05)  # the rows of the next step are fetched, most likely
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain
        embedding.close()
    assert not device.races
    assert not device.unkept()
