"""Mistakes that only the device sees, tables that move, and what a machine may lack."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode

from support.cuda_emulation import EmulatedDevice
from support.cuda_tables import DeviceTable, on_devices, on_processors, tables_on, tensor
from support.embeddings import DIM, contents, make, train
from support.refusals import check_refusal
from support.rows import Table
from support.stores import options
from tierbed import CapacityError, InputError, MultiTableEmbedding, OptionError, StoreError
from tierbed.engine.ops.cuda.batch import Faults
from tierbed.engine.ops.cuda.device import Device, cuda_device
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.store.cuda.full_tier import CudaFullTier

CPU = torch.device("cpu")


def step(embedding: MultiTableEmbedding, ids: Any, tables: Any = 0, offsets: Any = None) -> Tensor:
    """A step of rows of `ids`, or of one sum of them by offsets."""
    place = embedding.shadow.device
    given = torch.as_tensor(ids, device=place)
    pooling = None if offsets is None else "sum"
    shape = given.shape if offsets is None else (len(offsets) - 1,)
    ends = None if offsets is None else torch.tensor(offsets, device=place)
    pinned = embedding.pin([Lookup(given, torch.as_tensor(tables, device=place).expand(shape), ends, pooling)])
    rows = pinned.gather(0)
    pinned.update([torch.ones_like(rows)])
    if place.type == "cuda":
        torch.cuda.synchronize(place)  # so that what it found has arrived
    return rows


def progress(embedding: MultiTableEmbedding) -> tuple[int, int]:
    """Rows that were written, and steps."""
    table = embedding.metrics()["table"]
    return table["rows"], table["step"]


@on_devices
@pytest.mark.parametrize("optimizer", ["adam", "catch-up"])
@pytest.mark.parametrize(
    ("store", "pooled"), [("device", False), ("device", True), ("host", False), ("cached_host", True)]
)
@pytest.mark.pairs
def test_rows_beyond_the_capacity_are_told_at_the_next_call(
    device: Device, store: str, pooled: bool, optimizer: str
) -> None:
    expected = make(options("device", capacity=4), optimizer, name="cpu")
    for ids in ([1, 2], [2], [1, 3, 4]):
        step(expected, ids)
    with tables_on(device) as place:
        embedding = make(options(store, capacity=4), optimizer).to(place)
        for ids in ([1, 2], [2]):
            step(embedding, ids)
        rows = step(embedding, [1, 7, 8, 9], offsets=[0, 1, 4] if pooled else None)
        assert rows[0].any()
        assert not rows[1:].any()
        with pytest.raises(CapacityError, match=r"'rows'.*capacity of 4 rows; raise capacity.*changed nothing"):
            step(embedding, [1])
        assert progress(embedding) == (2, 2)
        step(embedding, [1, 3, 4])
        assert contents(embedding).tobytes() == contents(expected).tobytes()
        with pytest.raises(CapacityError):  # a caller that waits for the outcome gets the error at once
            embedding.put([5], torch.zeros(1, DIM), 0)
        assert embedding.size() == 4
        assert embedding(torch.tensor([5, 6, 7], device=place)[:, None], 0).any()  # unknown rows can be read


@on_devices
def test_a_capacity_bounds_what_a_store_takes(device: Device) -> None:
    table = DeviceTable(device, Table([3], tables=1))
    store = CudaFullTier(table.layout, table.table.layout, 8, Faults(device, "users", 1, 8))
    tables, keys, (_, lines) = np.zeros(9, np.uint32), np.arange(9, dtype=np.uint64), table.table.lines(9)
    with pytest.raises(CapacityError, match="8"):
        store.write(tables, keys, lines)
    store.write(tables[:8], keys[:8], lines[:8])
    assert store.metrics()["device"]["resident_rows"] == 8


@on_devices
def test_a_capacity_bounds_a_cache_over_a_disk_as_on_the_cpu(tmp_path: Path, device: Device) -> None:
    with tables_on(device) as place:
        embedding = make(options("ssd", tmp_path, capacity=4), "adam").to(place)
        step(embedding, [1, 2, 3])
        with pytest.raises(CapacityError, match="brings 2 new rows and there is room for 1"):
            step(embedding, [2, 3, 4, 5])
        assert progress(embedding) == (3, 1)
        step(embedding, [3, 4])
        assert embedding.size() == 4


WRONG = [
    ([1, 2], [0, 3], None, r"table_ids of embedding 'rows': one is not from 0 to 2.*changed nothing"),
    ([1, 2], [0, -1], None, "table_ids"),
    ([1, 2], [0, 2**32], None, "table_ids"),
    ([1, 2, 3], 0, [0, 2, 1, 3], r"offsets of embedding 'rows': they do not ascend from 0 to the number of ids"),
    ([1, 2, 3], 0, [0, 2], "offsets"),
    ([1, 2, 3], 0, [-1, 3], "offsets"),
    ([1, 2, 3], 0, [0, 2**40, 3], "offsets"),
    ([1, 2, 3], [], [0], "offsets"),
]


@on_devices
@pytest.mark.parametrize("store", ["device", "host", "cached_host", "ssd"])
def test_table_ids_and_offsets_out_of_range(device: Device, tmp_path: Path, store: str) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path), "adagrad").to(place)
        step(embedding, [1, 2])
        for number, (ids, tables, offsets, message) in enumerate(WRONG):
            before = contents(embedding)
            if store != "ssd":
                step(embedding, ids, tables, offsets)
                ids, tables, offsets = [8], 0, None  # the next call raises; a store that waits for the device, at once
            with pytest.raises(InputError, match=message):
                step(embedding, ids, tables, offsets)
            assert contents(embedding).tobytes() == before.tobytes()
            assert progress(embedding) == (2 + number, 1 + number)
            step(embedding, [8 + number])
        with pytest.raises(InputError, match="table_ids"):
            embedding.get([1], 3)
        with pytest.raises(InputError, match="table_ids"):
            embedding.put([1], torch.ones(1, DIM), -1)
        assert embedding.size() == 2 + len(WRONG)


@on_devices
def test_a_mistake_in_the_last_step_costs_no_rows(tmp_path: Path, device: Device) -> None:
    with tables_on(device) as place:
        embedding = make(options("device", tmp_path), "adam").to(place)
        step(embedding, [1, 2])
        before = contents(embedding)
        for call in (embedding.size, lambda: embedding.save_snapshot("broken"), embedding.close):
            step(embedding, [1], 7)
            with pytest.raises(InputError, match="table_ids"):
                call()
        embedding.close()
        again = make(options("device", tmp_path, open="error"), "adam").to(place)
        assert contents(again).tobytes() == before.tobytes()
        assert progress(again) == (2, 1)
        again.close()


@on_processors
@pytest.mark.parametrize("store", ["device", "cached_host"])
def test_an_embedding_collected_inside_a_fake_kernel_loses_no_rows(
    tmp_path: Path, device: Device, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tables_on(device) as place:
        embedding = make(options(store, tmp_path), "adam").to(place)
        step(embedding, [1, 2])
        before = contents(embedding)
        keys = torch._C._dispatch_tls_local_exclude_set()
        mode = FakeTensorMode()
        with mode, in_kernel_invocation_manager(mode):  # as while a graph is traced
            del embedding
            gc.collect()
        for closing in threading.enumerate():
            if closing.name == "tierbed-close":
                closing.join()
        gc.collect()
        assert str(torch._C._dispatch_tls_local_exclude_set()) == str(keys)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        with make(options(store, tmp_path, open="error"), "adam").to(place) as again:
            assert contents(again).tobytes() == before.tobytes()


@on_devices
def test_faults_are_raised_once_and_name_the_remedy(device: Device) -> None:
    faults, table = Faults(device, "users", 4, 10), DeviceTable(device, Table([3]))
    table.faults = tensor(device, [0], np.uint32)
    ahead = table.batch([([1, 2], [0, 0], None)])  # with a word of its own
    table.faults = faults.word
    batch = table.batch([([1, 2], [0, 0], None)])
    for bit, error, named in [(1, CapacityError, "raise capacity"), (2, InputError, "0 to 3"), (4, InputError, "asc")]:
        for found, word in ((batch, faults.word), (ahead, ahead.faults)):
            word.fill_(bit)
            assert not faults.read(wait=False)  # has not arrived
            faults.post(found)
            check_refusal((faults.check, error, named))
            ahead.faults.zero_()
            faults.check()
            assert not faults.read(wait=False)


@on_devices
@pytest.mark.parametrize("store", ["device", "host", "cached_host"])
def test_an_open_table_follows_its_module(tmp_path: Path, device: Device, store: str) -> None:
    for path in (None, tmp_path):
        embedding, stays = make(options(store, path), "adam"), make(options("device"), "adam", name="cpu")
        for other in (embedding, stays):
            train(other, [1, 2, 3])
        with tables_on(device) as place:
            embedding.to(place)
            embedding.table_handle().move(place)  # as where the module has another device than the table
            train(embedding if place == CPU else embedding.cpu(), [2, 3, 4])
        train(stays, [2, 3, 4])
        assert contents(embedding).tobytes() == contents(stays).tobytes()
        assert progress(embedding) == progress(stays) == (4, 2)
        embedding.close()


class LittleMemory(EmulatedDevice):
    """Of a machine that has no room for a table."""

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        if size > 1 << 20:
            raise MemoryError(f"{size} bytes")
        return super().allocate_host_memory(size, dtype)


def test_a_move_that_fails_loses_no_rows(tmp_path: Path) -> None:
    for path in (None, tmp_path):
        embedding = make(options("host", path, capacity=100_000), "adam")
        train(embedding, [1, 2, 3])
        with (
            tables_on(LittleMemory()),
            pytest.raises(OptionError, match=r"capacity=100000.* the host has too little memory"),
        ):
            embedding.table_handle().move(CPU)
        if path is not None:  # it moved by way of its folder
            embedding = make(options("host", path, open="error"), "adam")
        assert embedding.size() == 3
        embedding.close()


LACKS: list[tuple[str, dict[str, Any], str]] = [
    ("device", {"eviction": "lru", "capacity": 9}, "eviction='lru'"),
    ("device", {"admission": 2}, "admission=2"),
    ("device", {"admission": 0.5}, "admission=0.5"),
    ("device", {"ttl_steps": 4}, "ttl_steps=4"),
    ("cached_host", {"budget_mb": 0.0001}, "cache_budget_mb=0.0001"),
]


@pytest.mark.parametrize(("store", "given", "named"), LACKS)
def test_what_a_table_on_a_gpu_lacks_is_refused(store: str, given: dict[str, Any], named: str) -> None:
    with tables_on(EmulatedDevice()):
        check_refusal((make(options(store, **given)).size, OptionError, named))


def test_ids_of_another_device_than_the_module_are_refused() -> None:
    embedding, ids = make(options("device"), tables=1).to("meta"), torch.zeros(2, 3, dtype=torch.int64)
    check_refusal((lambda: embedding(ids), InputError, "are on cpu, but the embedding is on meta", "ids.to('meta')"))
    check_refusal((embedding.size, InputError, "meta", "CPU or a CUDA device"))
    embedding.to_empty(device="cpu")
    pooled = partial(embedding, ids, pooling="sum", weights=torch.ones(2, 3, device="meta"))
    check_refusal((pooled, InputError, "weights of ", "on meta but the ids are on cpu", "weights.to(ids.device)"))


class Waits(TorchFunctionMode):
    """Counts what would wait for a device: values that Python reads from its memory."""

    READS = (Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__bool__, Tensor.cpu, Tensor.nonzero, torch.nonzero)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.host: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS and not any(args[0] is memory for memory in self.host):
            self.count += 1
        return func(*args, **(kwargs or {}))


class Watched(EmulatedDevice):
    """Tells a `Waits` which memory is the host's."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        self._waits.host.append(memory := super().allocate_host_memory(size, dtype))
        return memory


@pytest.mark.all_stores
@pytest.mark.parametrize(
    ("store", "more", "waits"),
    [
        ("device", {"capacity": 500}, 0),
        ("host", {"capacity": 500}, 0),
        ("cached_host", {"capacity": 500}, 0),
        ("cached_host", {}, 0),  # as long as the table need not grow
        ("ssd", {"budget_mb": 1.0}, 1),
        ("ssd", {"budget_mb": 1.0, "capacity": 500}, 2),  # the row count as well
        ("ssd", {}, 2),  # rows that found no place go down
    ],
)
def test_how_often_a_step_waits_for_its_device(tmp_path: Path, store: str, more: dict[str, Any], waits: int) -> None:
    mode = Waits()
    with tables_on(Watched(mode)):
        embedding = make(options(store, tmp_path, **more), "adam")
        step(embedding, torch.arange(100), 1)
        for ids in (torch.arange(50, 150), torch.arange(120, 220)):
            grads, tables = torch.ones(100, DIM), torch.ones(100, dtype=torch.int64)
            before = mode.count
            with mode:
                pinned = embedding.pin([Lookup(ids, tables)])
                pinned.gather(0)
                pinned.update([grads])
            assert mode.count - before == waits
        assert embedding.size() == 220


def test_the_error_without_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StoreError, match=r"pip install 'tierbed\[cuda1[23]\]'"):
        cuda_device(99)
