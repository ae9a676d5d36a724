"""A disk, a real one, that is full, read-only or answers with errors: the call says so, and no row is lost."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embeddings import DIM, contents, make, train
from support.forked import Disk, disk_path, in_own_process, in_process
from support.graphs import Rating
from support.killed import embedding_at
from support.shell import command
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, StoreError, TierbedError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.store.folder_state import find_holder

__all__ = ["disk_path"]

ON_DISK = ["ssd", "ssd_host"]
# RocksDB gathers 64 KiB before it writes a file, of which two may wait
SMALL = {"write_buffer_size": 1 << 16, "min_write_buffer_number_to_merge": 1, "max_write_buffer_number": 2}


class Twins:
    """An embedding on the disk, and one that nothing happens to, which takes the steps that the first one took."""

    def __init__(self, path: Path, store: str, life: dict[str, Any] | None = None) -> None:
        self.path, self.store, self.life = path, store, life or {}
        self.plain = make(options("device", **self.life), "adam", "plain", tables=1)
        self.tested = self.reopened()
        self.step = 0

    def reopened(self, **more: str) -> MultiTableEmbedding:
        small = {"rocksdb_options": SMALL} if self.store in ON_DISK else {}
        return make(options(self.store, self.path, **small, **self.life, **more), "adam", tables=1)

    def train(self) -> str | None:
        """One step of 400 rows; what the embedding said where it failed."""
        ids = (torch.arange(400) * 7 + 150 * self.step) % 20_000
        said = None
        try:
            train(self.tested, ids)
        except TierbedError as error:
            said = str(error)
        if said is None or self.tested.metrics()["table"]["step"] > self.step:
            self.step += 1
            train(self.plain, ids)
        return said

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.train() is None

    def recovers(self) -> None:
        for _ in range(20):
            self.train()
        self.steps(1)
        self.same()

    def train_until_it_fails(self, times: int) -> None:
        """Rows go down in the background, so the step that raises it is a later one."""
        failures = 0
        while failures < times:
            if said := self.train():
                self.names_path_and_remedy(said)
                failures += 1
            time.sleep(0.002)

    def names_path_and_remedy(self, said: str) -> None:
        assert str(self.path / "rows") in said, said
        assert re.search(r"space|room|disk", said), said

    def fails(self, call: Callable[[], object]) -> None:
        with pytest.raises(TierbedError) as error:
            call()
        self.names_path_and_remedy(str(error.value))

    def reads_as_before(self) -> None:
        some = torch.arange(0, 20_000, 37)
        assert torch.equal(self.tested.get(some), self.plain.get(some))

    def same(self) -> None:
        assert contents(self.tested).tobytes() == contents(self.plain).tobytes()

    def close_and_compare(self) -> None:
        self.tested.close()
        self.tested = self.reopened(open="error")
        assert self.tested.metrics()["table"]["step"] == self.step
        self.same()
        self.tested.close()


MB = 1 << 20
LIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eviction": {"eviction": "lru", "capacity": 3000},
    "ttl": {"ttl_steps": 8},
}
on_disk = pytest.mark.parametrize("store", ON_DISK)


@pytest.mark.parametrize("life", LIVES)
@on_disk
@pytest.mark.rotated("store")
@in_own_process
def test_a_disk_that_fills_while_training_fails_calls_and_loses_no_row(disk_path: Path, store: str, life: str) -> None:
    disk = Disk(disk_path, 24 * MB)
    twins = Twins(disk_path, store, LIVES[life])
    twins.steps(20)
    with disk.full():
        twins.train_until_it_fails(2)
        if life == "plain":
            twins.reads_as_before()
            twins.fails(lambda: twins.tested.save_snapshot("no-room"))
    twins.recovers()
    assert twins.tested.size() == twins.plain.size() == len(contents(twins.plain))
    twins.tested.save_snapshot("room")
    twins.close_and_compare()


@pytest.mark.parametrize("store", STORES)
@in_own_process
def test_a_save_or_a_close_on_a_full_disk_can_be_tried_again(disk_path: Path, store: str) -> None:
    disk = Disk(disk_path, 24 * MB)
    twins = Twins(disk_path, store)
    twins.steps(5)
    with disk.full():
        for call in (lambda: twins.tested.save_snapshot("s"), twins.tested.close):
            twins.fails(call)
            twins.reads_as_before()
        twins.steps(1)
    twins.tested.save_snapshot("s")
    twins.train()
    twins.close_and_compare()


@pytest.mark.parametrize("store", STORES)
@in_own_process
def test_no_store_is_made_on_a_full_disk_and_one_that_is_there_is_read(disk_path: Path, store: str) -> None:
    disk = Disk(disk_path, 24 * MB)
    twins = Twins(disk_path, store)
    with disk.full():
        twins.fails(lambda: train(twins.tested, range(9)))
    twins.steps(3)
    twins.close_and_compare()
    twins.tested = twins.reopened()
    twins.reads_as_before()
    with disk.full():
        said = twins.train()
        if said is not None:
            twins.names_path_and_remedy(said)
        twins.reads_as_before()
    twins.steps(1)
    twins.close_and_compare()


@pytest.mark.parametrize("store", STORES)
@in_own_process
def test_a_store_on_a_read_only_disk_is_refused_and_left_as_it_is(disk_path: Path, store: str) -> None:
    disk = Disk(disk_path, 24 * MB)
    with disk.read_only(), pytest.raises(StoreError) as new:
        Twins(disk_path, store).tested.put([1], torch.ones(1, DIM))
    twins = Twins(disk_path, store)
    twins.names_path_and_remedy(str(new.value))
    twins.steps(3)
    twins.tested.close()
    twins.tested = twins.reopened()
    with disk.read_only():
        twins.fails(twins.reads_as_before)
    twins.reads_as_before()
    twins.steps(1)
    twins.close_and_compare()


def disk_of_a_run_that_died(path: Path, store: str) -> Disk:
    """A full one, with a snapshot. A child died, so that nothing of it is closed."""
    disk = Disk(path, 2 * MB)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return disk
    twins = Twins(path, store)
    twins.steps(3)
    twins.tested.save_snapshot("s")
    while not twins.train():
        pass
    os._exit(0)


@pytest.mark.parametrize("mode", ["resume", "fresh"])
@on_disk
@pytest.mark.rotated("store")
@in_own_process
def test_a_run_that_filled_the_disk_and_died_can_be_followed_by_another(disk_path: Path, store: str, mode: str) -> None:
    disk = disk_of_a_run_that_died(disk_path, store)
    with disk.full(), embedding_at(disk_path, store, "adam", open=mode, rocksdb_options=SMALL) as embedding:
        assert embedding.metrics()["table"]["step"] == (3 if mode == "resume" else 0)
        train(embedding, range(100))
        embedding.load_snapshot("s")


@in_own_process
def test_a_store_that_has_no_room_to_open_says_so_and_opens_later(disk_path: Path) -> None:
    disk = disk_of_a_run_that_died(disk_path, "ssd")
    (disk_path / "rows" / "live").rename(disk_path / "elsewhere")  # removing it would make room
    with disk.full():
        with pytest.raises(StoreError, match=r"Free space on the disk and open .* snapshot prune` removes") as error:
            embedding_at(disk_path, "ssd", "adam", rocksdb_options=SMALL).size()
        assert "next call" not in str(error.value)
    shutil.rmtree(disk_path / "elsewhere")
    with embedding_at(disk_path, "ssd", "adam", rocksdb_options=SMALL) as embedding:
        assert embedding.metrics()["table"]["step"] == 3


def rating(name: str, store_options: Any) -> Rating:
    rows = make(store_options, None, name, tables=1)
    torch.manual_seed(1)
    layer = torch.nn.Linear(DIM, 1)
    return Rating(rows, layer, torch.optim.Adam([*rows.parameters(), *layer.parameters()], lr=0.01))


def next_raises(run: Iterator[Tensor]) -> bool:
    try:
        next(run)
    except StoreError:
        return True
    return False


@pytest.mark.parametrize("ahead", [0, 4])
@on_disk
@pytest.mark.rotated("store")
@in_own_process
def test_a_disk_that_fills_in_a_run_costs_no_batch(disk_path: Path, store: str, ahead: int) -> None:
    disk = Disk(disk_path, 24 * MB)
    batches = [(torch.arange(400) * 7 + 150 * step) % 20_000 for step in range(100)]
    plain, tested = rating("plain", options("device")), rating("rows", options(store, disk_path, rocksdb_options=SMALL))
    run, failures = tested.run(batches, ahead=ahead), 0
    for _ in range(20):
        next(run)
    with disk.full():
        while failures < 3:
            failures += next_raises(run)
            time.sleep(0.002)
    while next_raises(run):
        time.sleep(0.002)
    assert all(torch.isfinite(loss) for loss in run)
    for batch in batches:
        plain(batch)
    assert contents(tested.rows).tobytes() == contents(plain.rows).tobytes()
    assert torch.equal(tested.mlp.weight, plain.mlp.weight)


class FailingIo:
    """Reads, writes or syncs of files fail with an errno while the block runs, after the first `passes` calls."""

    def __init__(self, operation: str, number: int, ending: str = ".sst", passes: int = 0) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.io_failures.restype = ctypes.c_long
        self._ending, self._passes = ending.encode(), ctypes.c_long(passes)
        self._errors = [number * (operation == each) for each in ("read", "write", "sync")]

    def __enter__(self) -> None:
        self._before = self._shim.io_failures()
        self._shim.fail_io(self._ending, *self._errors, self._passes)

    def __exit__(self, *error: object) -> None:
        self._shim.fail_io(self._ending, 0, 0, 0, self._passes)
        assert self._shim.io_failures() > self._before, "nothing was asked of the disk"


def fail_while_training(path: Path, store: str, operation: str, number: int) -> None:
    twins = Twins(path, store)
    twins.steps(20)
    with FailingIo(operation, number):
        twins.train_until_it_fails(3)
        twins.fails(twins.tested.close)  # rows that are not marked clean must not be
        twins.reads_as_before()
    twins.recovers()
    twins.close_and_compare()


def fail_while_reading(path: Path, store: str) -> None:
    twins = Twins(path, store)
    twins.steps(20)
    twins.close_and_compare()
    twins.tested = twins.reopened()
    some = torch.arange(0, 20_000, 37)
    twins.steps(1)  # fetches rows, which stay resident
    here = (torch.arange(400) * 7 + 150 * (twins.step - 1))[-8:]
    expected = twins.plain.get(here)
    with FailingIo("read", errno.EIO):
        twins.fails(lambda: twins.tested.get(some))
        assert torch.equal(twins.tested.get(here), expected)
    twins.reads_as_before()
    twins.close_and_compare()


def fail_while_saving(path: Path, passes: int) -> None:
    """A save's rows are in a file, and RocksDB cannot note this file in its list of files, the MANIFEST."""
    twins = Twins(path, "ssd")
    twins.tested = make(options("ssd", path, 1, shards=1), "adam", tables=1)
    twins.steps(3)
    manifest = next(path.rglob("MANIFEST-*")).name
    with FailingIo("sync", errno.EIO, manifest, passes):
        twins.fails(lambda: twins.tested.save_snapshot("s", kind="checkpoint"))
    for step in range(3):
        twins.steps(1)
        twins.tested.save_snapshot(f"s{step}", kind="checkpoint")
    twins.same()
    twins.close_and_compare()


def all_faults(path: Path) -> None:
    for passes in range(2):
        fail_while_saving(path / f"manifest-{passes}", passes)
    fail_while_reading(path / "read", "ssd_host")
    fail_while_training(path / "write", "ssd_host", "write", errno.EIO)
    fail_while_training(path / "read-only", "ssd", "write", errno.EROFS)
    fail_while_training(path / "sync", "ssd", "sync", errno.EIO)


def test_errors_of_the_disk_fail_calls_and_lose_no_row(tmp_path: Path) -> None:
    in_process(all_faults, tmp_path)


def saved(path: Path, store: str) -> bytes:
    """A store that was closed, with two snapshots; its rows."""
    with embedding_at(path, store) as embedding:
        for name in ("first", "second"):
            train(embedding, torch.arange(2000))
            embedding.save_snapshot(name)
        return contents(embedding).tobytes()


def holds(path: Path, store: str, rows: bytes) -> None:
    with embedding_at(path, store, open="error") as embedding:
        assert contents(embedding).tobytes() == rows


@pytest.mark.parametrize("store", STORES)
@in_own_process
def test_a_full_disk_lets_a_store_be_opened_to_read_and_to_prune(disk_path: Path, store: str) -> None:
    disk = Disk(disk_path, 24 * MB)
    rows = saved(disk_path, store)
    where = disk_path / "rows"
    with disk.full():
        for _ in range(2):
            embedding = embedding_at(disk_path, store, open="error")
            assert contents(embedding).tobytes() == rows
            assert find_holder(where) is not None
            with pytest.raises(StoreError, match="space"):
                train(embedding, range(9))
            assert contents(embedding).tobytes() == rows
            embedding.close()
            assert find_holder(where) is None
        for words in ("store get", "store stat", "snapshot verify", "snapshot inspect"):
            more = {"store get": ["7", "--json"], "snapshot inspect": ["first"]}.get(words, [])
            assert command(*words.split(), where, *more) == 0
        (where / "LOCK").write_bytes(b"")  # as if there never was room to write into it
    with disk.full():
        assert command("snapshot", "prune", where, "--keep-last", "1") == 0
        assert [entry.name for entry in (where / "snapshots").iterdir()] == ["second"]
    holds(disk_path, store, rows)
    with embedding_at(disk_path, store, open="error") as embedding:
        train(embedding, range(9))


@in_own_process
def test_what_was_opened_on_a_full_disk_is_trained_once_there_is_room(disk_path: Path) -> None:
    disk = Disk(disk_path, 24 * MB)
    rows = saved(disk_path, "ssd")
    embedding = embedding_at(disk_path, "ssd", open="error")
    with disk.full():
        assert contents(embedding).tobytes() == rows
        scan = embedding.table_handle().table.scan()
        first = next(scan)
        with pytest.raises(StoreError, match="space"):
            embedding.put([1], torch.ones(1, 5), 0)
    train(embedding, range(2000, 4000))  # there is room: opened for reading, it is written all the same
    assert next(scan)[0] >= first[0]
    scan.close()
    grown = contents(embedding).tobytes()
    assert len(grown) > len(rows)
    embedding.save_snapshot("third", "checkpoint")
    embedding.compact()
    embedding.close()
    holds(disk_path, "ssd", grown)


CALLS = {
    "delete": lambda embedding: embedding.delete([1], 0),
    "step": lambda embedding: train(embedding, range(3000, 3100)),  # old rows have to leave before
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("store", ["host", "ssd"])
@in_own_process
def test_rows_are_read_after_a_call_that_had_no_room_to_take_some_out(disk_path: Path, store: str, call: str) -> None:
    disk = Disk(disk_path, 24 * MB)
    limits = {"capacity": 2000, "eviction": "lru"}
    with embedding_at(disk_path, store, **limits) as embedding:
        train(embedding, torch.arange(2000))
        rows = contents(embedding).tobytes()
    embedding = embedding_at(disk_path, store, open="error", **limits)
    with disk.full():
        with pytest.raises(StoreError, match="space"):
            CALLS[call](embedding)
        assert contents(embedding).tobytes() == rows
        assert embedding.metrics()["table"]["rows"] == 2000
    assert contents(embedding).tobytes() == rows  # nor does it happen later
    CALLS[call](embedding)
    grown = contents(embedding).tobytes()
    assert grown != rows
    embedding.close()
    holds(disk_path, store, grown)


@in_own_process
def test_a_load_on_a_full_disk_takes_the_room_of_rows_that_no_run_uses(disk_path: Path) -> None:
    disk = Disk(disk_path, 24 * MB)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:  # it dies with many rows, so that the live ones have no clean marker
        saved(disk_path, "ssd")
        embedding = embedding_at(disk_path, "ssd")
        train(embedding, range(20_000))
        embedding.table_handle().table.flush()
        os._exit(0)
    with disk.full():
        assert command("snapshot", "load", disk_path / "rows", "second") == 0
    rows = b"".join(part.tobytes() for _, part in Snapshot.open(disk_path / "rows" / "snapshots" / "second").chunks())
    holds(disk_path, "ssd", rows)
    with disk.full():  # to merge files, RocksDB writes new ones first
        assert command("store", "compact", disk_path / "rows") == 1
        holds(disk_path, "ssd", rows)
    assert command("store", "compact", disk_path / "rows") == 0
