"""A disk, a real one, without a free byte: stores open to be read, pruned and loaded where that makes room."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.forked import Disk, disk_path, in_process
from support.shell import command
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, StoreError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.store.folder_state import holder

__all__ = ["disk_path"]

MB = 1 << 20


def open_store(path: Path, store: str, **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), "adam", tables=1)


def saved(path: Path, store: str) -> bytes:
    """A store that was closed, with two snapshots; its rows."""
    with open_store(path, store) as embedding:
        for name in ("first", "second"):
            train(embedding, torch.arange(2000))
            embedding.save_snapshot(name)
        return contents(embedding).tobytes()


def read_and_prune(path: Path, store: str) -> None:
    disk = Disk(path, 24 * MB)
    rows = saved(path, store)
    lock = path / "rows" / "LOCK"
    with disk.full():
        for _ in range(2):
            embedding = open_store(path, store, open="error")
            assert contents(embedding).tobytes() == rows
            assert torch.equal(embedding.get([5], 0), embedding.get([5], 0))
            assert holder(path / "rows") is not None
            with pytest.raises(StoreError, match="space"):
                train(embedding, range(9))
            assert contents(embedding).tobytes() == rows
            embedding.close()
            assert holder(path / "rows") is None
        for words in (
            ["store", "get", str(path / "rows"), "7", "--json"],
            ["store", "stat", str(path / "rows")],
            ["snapshot", "verify", str(path / "rows")],
            ["snapshot", "inspect", str(path / "rows"), "first"],
        ):
            assert command(*words) == 0
        lock.write_bytes(b"")  # as older versions left it: there never was room to write into it
    with disk.full():
        assert command("snapshot", "prune", path / "rows", "--keep-last", "1") == 0
        assert [entry.name for entry in (path / "rows" / "snapshots").iterdir()] == ["second"]
    with open_store(path, store, open="error") as embedding:
        assert contents(embedding).tobytes() == rows
        train(embedding, range(9))


@pytest.mark.parametrize("store", STORES)
def test_a_full_disk_lets_a_store_be_opened_to_read_and_to_prune(disk_path: Path, store: str) -> None:
    in_process(read_and_prune, disk_path, store)


def go_on(path: Path) -> None:
    disk = Disk(path, 24 * MB)
    rows = saved(path, "ssd")
    embedding = open_store(path, "ssd", open="error")
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
    with open_store(path, "ssd", open="error") as again:
        assert contents(again).tobytes() == grown


def test_what_was_opened_on_a_full_disk_is_trained_once_there_is_room(disk_path: Path) -> None:
    in_process(go_on, disk_path)


CALLS = {
    "delete": lambda embedding: embedding.delete([1], 0),
    "step": lambda embedding: train(embedding, range(3000, 3100)),  # old rows have to leave before
}


def read_after(path: Path, store: str, call: str) -> None:
    disk = Disk(path, 24 * MB)
    limits = {"capacity": 2000, "eviction": "lru"}
    with open_store(path, store, **limits) as embedding:
        train(embedding, torch.arange(2000))
        rows = contents(embedding).tobytes()
    embedding = open_store(path, store, open="error", **limits)
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
    with open_store(path, store, open="error", **limits) as again:
        assert contents(again).tobytes() == grown


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("store", ["host", "ssd"])
def test_rows_are_read_after_a_call_that_had_no_room_to_take_some_out(disk_path: Path, store: str, call: str) -> None:
    in_process(read_after, disk_path, store, call)


def die_with_many_rows(path: Path) -> None:
    """A child dies, so that nothing is closed and the live rows have no clean marker."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    saved(path, "ssd")
    embedding = open_store(path, "ssd")
    train(embedding, range(20_000))
    embedding.table_handle().table.flush()
    os._exit(0)


def load_and_compact(path: Path) -> None:
    disk = Disk(path, 24 * MB)
    die_with_many_rows(path)
    with disk.full():
        assert command("snapshot", "load", path / "rows", "second") == 0
    snapshot = Snapshot.open(path / "rows" / "snapshots" / "second")
    rows = b"".join(part.tobytes() for _, part in snapshot.chunks())
    with open_store(path, "ssd", open="error") as embedding:
        assert contents(embedding).tobytes() == rows
    with disk.full():  # to merge files, RocksDB writes new ones first
        assert command("store", "compact", path / "rows") == 1
        with open_store(path, "ssd", open="error") as embedding:
            assert contents(embedding).tobytes() == rows
    assert command("store", "compact", path / "rows") == 0


def test_a_load_on_a_full_disk_takes_the_room_of_rows_that_no_run_uses(disk_path: Path) -> None:
    in_process(load_and_compact, disk_path)
