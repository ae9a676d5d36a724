"""A disk, a real one, that fills in the middle of a command: earlier snapshots stay, nothing half-written is left."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.embeddings import contents, make, train
from support.forked import Disk, disk_path, in_process
from support.shell import command
from support.small_snapshots import keys_of_few_files
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, SnapshotError, StoreError
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.exchange.export import export_snapshot

__all__ = ["disk_path"]

MB, KB = 1 << 20, 1 << 10
LEFT = [0, 8 * KB, 60 * KB, 160 * KB]  # of what a command that writes all rows needs
KEYS = keys_of_few_files(9000)
FEW_OR_ALL = pytest.mark.parametrize("sizes", [LEFT[::2], pytest.param(LEFT, marks=pytest.mark.slow)], ids=["2", "4"])


@contextlib.contextmanager
def room(disk: Disk, left: int) -> Iterator[None]:
    """No more than `left` bytes are free while the block runs."""
    kept = disk.path / "kept"
    kept.write_bytes(bytes(left))
    with disk.full():
        kept.unlink()
        yield


def contents_of(path: Path) -> dict[str, bytes]:
    """Every snapshot's rows; whole, and nothing beside them."""
    folder = path / "rows" / "snapshots"
    snapshots, damaged = list_snapshots(folder)
    assert not damaged
    assert {file.name for file in folder.iterdir()} == {s.name for s in snapshots}
    return {s.name: b"".join(rows.tobytes() for _, rows in s.chunks()) for s in snapshots}


def open_embedding(path: Path, store: str) -> MultiTableEmbedding:
    return make(options(store, path), "adam", tables=1)


def grow(embedding: MultiTableEmbedding) -> None:
    """A step of 3000 rows, with their state 200 KB."""
    begin = 1500 * int(embedding.metrics()["table"]["step"])
    train(embedding, KEYS[begin : begin + 3000])


def tried(disk: Disk, left: int, command: Callable[[], Any]) -> bool:
    """Whether a command found no room, and said so."""
    said = None
    with room(disk, left):
        try:
            command()
        except (SnapshotError, StoreError) as error:
            said = str(error)
    assert said is None or (str(disk.path) in said and "space" in said), said
    return said is not None


def save(path: Path, store: str, kind: str) -> None:
    disk = Disk(path, 24 * MB)
    with open_embedding(path, store) as embedding:
        grow(embedding)
        embedding.save_snapshot("first")
        grow(embedding)
        before, rows, failures = contents_of(path), contents(embedding).tobytes(), 0
        for number, left in enumerate(LEFT):
            name = f"s{number}"
            if tried(disk, left, lambda name=name: embedding.save_snapshot(name, kind)):  # type: ignore[misc]
                failures += 1
                assert contents_of(path) == before
                assert embedding.last_snapshot == list(before)[-1]
            else:
                before = contents_of(path)
                assert before[name] == rows
            assert contents(embedding).tobytes() == rows
        assert failures >= 2 or kind == "checkpoint"  # which links what is on the disk already
        embedding.save_snapshot("last", kind)
        assert contents_of(path) == before | {"last": rows}
        train(embedding, range(10))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", ["full", "incremental", "checkpoint"])
@pytest.mark.rotated("kind")
def test_a_save_that_finds_no_room_leaves_what_there_was(disk_path: Path, store: str, kind: str) -> None:
    if kind != "checkpoint" or store.startswith("ssd"):
        in_process(save, disk_path, store, kind)


def load(path: Path, store: str, sizes: list[int]) -> None:
    disk = Disk(path, 24 * MB)
    with open_embedding(path, store) as embedding:
        grow(embedding)
        embedding.save_snapshot("first")
        for _ in range(3):
            grow(embedding)
        embedding.save_snapshot("second")
        grow(embedding)
        before, rows, failures = contents_of(path), contents(embedding).tobytes(), 0
        for left in sizes:
            if tried(disk, left, lambda: embedding.load_snapshot("first")):
                failures += 1
                assert contents(embedding).tobytes() == rows
                assert embedding.last_snapshot == "second"
            else:
                assert contents(embedding).tobytes() == before["first"]
                break
            assert contents_of(path) == before
        assert failures  # rows in memory need no room, but that recovery loads another snapshot has to be written
        embedding.load_snapshot("first")
        assert contents(embedding).tobytes() == before["first"]
        grow(embedding)


@FEW_OR_ALL
@pytest.mark.parametrize("store", STORES)
def test_a_load_that_finds_no_room_keeps_the_rows(disk_path: Path, store: str, sizes: list[int]) -> None:
    in_process(load, disk_path, store, sizes)


def closed(path: Path, line: str, sizes: list[int]) -> None:
    disk = Disk(path, 24 * MB)
    with open_embedding(path, "ssd") as embedding:
        for kind in ["full", "incremental", "checkpoint", "incremental"]:
            grow(embedding)
            embedding.save_snapshot(f"{kind}-{embedding.metrics()['table']['step']:.0f}", kind)
        rows = contents(embedding).tobytes()
    before = contents_of(path)
    arguments = ["snapshot", *line.format(store=path / "rows", out=path / "out").split()]
    failures = 0
    for left in sizes:
        with room(disk, left):
            code = command(*arguments)
        assert code in (0, 1)
        if code == 0:
            break
        failures += 1
        assert contents_of(path) == before
        assert not list(path.glob("out*"))
    assert (failures == 0) == (arguments[1] == "prune")  # which needs no room
    if failures == len(sizes):
        assert command(*arguments) == 0
    assert {name: existing for name, existing in contents_of(path).items() if name in before}.items() <= before.items()
    with open_embedding(path, "ssd") as embedding:
        assert contents(embedding).tobytes() == (before["full-1"] if arguments[1] == "load" else rows)


COMMANDS = [
    "save {store} new",
    "save {store} new --kind incremental",
    "load {store} full-1",
    "merge {store} incremental-4 merged",
    "prune {store} --keep-last 1",
    "export {store} incremental-4 {out}.npz",
    "export {store} incremental-4 {out}.parquet",
    "export {store} incremental-4 {out}.safetensors",
]


@FEW_OR_ALL
@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=[pytest.mark.slow] * (number not in (0, 3, 6))) for number, line in enumerate(COMMANDS)],
)
def test_a_command_that_finds_no_room_fails_and_leaves_what_there_was(
    disk_path: Path, line: str, sizes: list[int]
) -> None:
    in_process(closed, disk_path, line, sizes)


@pytest.mark.parametrize("what", ["snapshot", "export"])
def test_what_is_there_and_may_not_outlive_a_power_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    synced = os.fsync

    def failing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(new.parent) and new.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced(descriptor)

    with open_embedding(tmp_path, "device") as embedding:
        train(embedding, range(9))
        embedding.save_snapshot("first")
        snapshots = tmp_path / "rows" / "snapshots"
        first, new = Snapshot.open(snapshots / "first"), snapshots / "second" if what == "snapshot" else tmp_path / "x"
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(SnapshotError, match=r"may not survive a power loss: .*Input/output"):
            embedding.save_snapshot("second") if what == "snapshot" else export_snapshot(first, new, "npz")
        monkeypatch.undo()
        assert new.exists()
        assert len(contents_of(tmp_path)) == (2 if what == "snapshot" else 1)
        train(embedding, range(5))
        embedding.save_snapshot("third", "incremental")
        state = contents(embedding).tobytes()
        embedding.load_snapshot("third")
        assert contents(embedding).tobytes() == state
