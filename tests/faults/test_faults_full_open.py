"""A disk, a real one, without a free byte: stores open to be read, pruned and loaded where that makes room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from support.embeddings import contents, train
from support.forked import Disk, disk_path, in_own_process
from support.killed import embedding_at
from support.shell import command
from support.stores import STORES
from tierbed import StoreError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.store.folder_state import holder

__all__ = ["disk_path"]

SIZE = 24 << 20


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
    disk = Disk(disk_path, SIZE)
    rows = saved(disk_path, store)
    where = disk_path / "rows"
    with disk.full():
        for _ in range(2):
            embedding = embedding_at(disk_path, store, open="error")
            assert contents(embedding).tobytes() == rows
            assert holder(where) is not None
            with pytest.raises(StoreError, match="space"):
                train(embedding, range(9))
            assert contents(embedding).tobytes() == rows
            embedding.close()
            assert holder(where) is None
        for words in ("store get", "store stat", "snapshot verify", "snapshot inspect"):
            more = {"store get": ["7", "--json"], "snapshot inspect": ["first"]}.get(words, [])
            assert command(*words.split(), where, *more) == 0
        (where / "LOCK").write_bytes(b"")  # as older versions left it: there never was room to write into it
    with disk.full():
        assert command("snapshot", "prune", where, "--keep-last", "1") == 0
        assert [entry.name for entry in (where / "snapshots").iterdir()] == ["second"]
    holds(disk_path, store, rows)
    with embedding_at(disk_path, store, open="error") as embedding:
        train(embedding, range(9))


@in_own_process
def test_what_was_opened_on_a_full_disk_is_trained_once_there_is_room(disk_path: Path) -> None:
    disk = Disk(disk_path, SIZE)
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
    disk = Disk(disk_path, SIZE)
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
    disk = Disk(disk_path, SIZE)
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
