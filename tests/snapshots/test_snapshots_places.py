"""Snapshots where a user may not write or read, behind links, under names that lead elsewhere, and on a full disk.

It is a real disk, which fills in the middle of a command: what there was stays, nothing half-written is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.embeddings import contents, make, train
from support.forged import KINDS
from support.forked import Disk, disk_path, in_process
from support.shell import command
from support.small_snapshots import keys_of_few_files
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, SnapshotError, StoreError
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.exchange.export import export_snapshot

__all__ = ["disk_path"]

NAMES = ["", ".", "..", "../../x", "/tmp/x", "a/../../x", "a/b", ".hidden", "x\n", "x\0", ".tmp-x", "\\x", 201 * "x"]
CAPABILITIES = 0x20080522  # version 3 of the interface
OVERRIDE = 1 << 1 | 1 << 2  # to read and write whatever the permissions say


def obey_permissions() -> None:
    """From here on this process may do what the permissions say, though it be root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for word in range(3):
        sets[word] &= ~OVERRIDE
    assert libc.capset(header, sets) == 0


@contextlib.contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


def open_embedding(path: Path, store: str = "ssd_host") -> MultiTableEmbedding:
    return make(options(store, path), "adagrad", tables=1)


def without_permission(path: Path) -> None:
    obey_permissions()
    store, folder = path / "rows", path / "rows" / "snapshots"
    with open_embedding(path) as embedding:
        for number, kind in enumerate(KINDS):
            train(embedding, range(number, 100))
            embedding.save_snapshot(kind, kind)
        before = contents(embedding).tobytes()
        with mode(folder, 0o500):
            for kind in KINDS:
                with pytest.raises(SnapshotError, match=r"snapshots.*Permission denied"):
                    embedding.save_snapshot("more", kind)
            with pytest.raises(SnapshotError, match=r"Permission denied"):
                embedding.prune_snapshots(keep_last=1)
        assert [s.name for s in list_snapshots(folder).snapshots] == KINDS
        bucket = next((folder / "full").glob("bucket-*"))
        with mode(bucket, 0):
            for damaged in KINDS[:2]:
                with pytest.raises(SnapshotError, match=rf"{bucket.name}.*Permission denied"):
                    embedding.load_snapshot(damaged)
                assert command("snapshot", "verify", store, damaged) == 1
            assert contents(embedding).tobytes() == before
        with mode(folder / "full", 0):
            assert set(list_snapshots(folder).damaged) == {"full"}
            assert command("snapshot", "list", store) == 1
        table = next((folder / "checkpoint").rglob("*.sst"))
        with mode(table, 0), pytest.raises(SnapshotError, match=rf"{table.name}.*Permission denied"):
            embedding.load_snapshot("checkpoint")
        with mode(folder, 0), pytest.raises(SnapshotError, match=r"Permission denied"):
            list_snapshots(folder)
        assert contents(embedding).tobytes() == before
        embedding.save_snapshot("more", "incremental")
        embedding.load_snapshot("full")
    with mode(store, 0o500):
        assert command("snapshot", "save", store, "closed") == 1
        assert command("snapshot", "load", store, "full") == 1
    assert command("snapshot", "save", store, "closed") == 0
    assert [s.name for s in list_snapshots(folder).snapshots] == [*KINDS, "more", "closed"]
    Snapshot.open(folder / "more").verify()


def test_what_may_not_be_read_or_written_is_named_and_everything_stays(tmp_path: Path) -> None:
    in_process(without_permission, tmp_path)


def test_a_name_that_leads_elsewhere_is_refused_by_every_call(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with open_embedding(tmp_path, "device") as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("s")
        for name in NAMES:
            for call in (embedding.save_snapshot, embedding.load_snapshot):
                with pytest.raises(SnapshotError, match="name"):
                    call(name)
    store = tmp_path / "rows"
    for name in filter(str.isprintable, NAMES[:8]):  # as an argument may be
        assert command("snapshot", "inspect", store, "--", name) == 1
    for word in ("save", "load", "verify"):
        assert command("snapshot", word, store, "--", "../x") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows", "x"]
    assert [file.name for file in (store / "snapshots").iterdir()] == ["s"]


def test_the_folder_of_a_store_and_that_of_its_snapshots_may_be_links(tmp_path: Path) -> None:
    for name in ("other", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows").symlink_to(tmp_path / "disk")
    (tmp_path / "rows" / "snapshots").symlink_to(tmp_path / "other")
    with open_embedding(tmp_path) as embedding:
        for kind in KINDS:
            train(embedding, range(20))
            embedding.save_snapshot(kind, kind)
        before = contents(embedding).tobytes()
        train(embedding, range(20))
        embedding.load_snapshot("checkpoint")
        assert contents(embedding).tobytes() == before
        assert embedding.prune_snapshots(keep_last=1) == ["full", "incremental"]
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["checkpoint"]
    with open_embedding(tmp_path) as embedding:
        assert contents(embedding).tobytes() == before
    (tmp_path / "disk").rename(tmp_path / "gone")
    with pytest.raises(StoreError, match="rows"):
        open_embedding(tmp_path).size()


def test_a_linked_snapshot_is_read_and_a_prune_removes_the_link_alone(tmp_path: Path) -> None:
    with open_embedding(tmp_path / "first") as embedding:
        train(embedding, range(20))
        embedding.save_snapshot("s")
        before = contents(embedding).tobytes()
    elsewhere = tmp_path / "first" / "rows" / "snapshots" / "s"
    with open_embedding(tmp_path) as embedding:
        train(embedding, range(30))
        folder = tmp_path / "rows" / "snapshots"
        embedding.save_snapshot("own")
        (folder / "linked").symlink_to(elsewhere)
        embedding.load_snapshot("linked")
        assert contents(embedding).tobytes() == before
        embedding.save_snapshot("later")
        assert sorted(embedding.prune_snapshots(keep_last=1)) == ["linked", "own"]
        embedding.save_snapshot("last")
        assert sorted(file.name for file in folder.iterdir()) == ["last", "later"]
    Snapshot.open(elsewhere).verify()


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


def trained(path: Path, store: str, kind: str, sizes: list[int]) -> None:
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
            if tried(disk, left, lambda: embedding.save_snapshot("new", kind)):
                failures += 1
                assert (contents_of(path), embedding.last_snapshot) == (before, "second")
            else:
                assert contents_of(path) == before | {"new": rows}
                break
            assert contents(embedding).tobytes() == rows
        assert failures or kind == "checkpoint"  # which links what is on the disk already
        embedding.save_snapshot("latest", kind)
        before, failures = contents_of(path), 0
        assert before["latest"] == rows
        for left in sizes:
            if tried(disk, left, lambda: embedding.load_snapshot("first")):
                failures += 1
                assert (contents(embedding).tobytes(), embedding.last_snapshot) == (rows, "latest")
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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotated("kind")
def test_a_save_or_load_without_room_changes_nothing(disk_path: Path, store: str, kind: str, sizes: list[int]) -> None:
    in_process(trained, disk_path, store, "full" if kind == "checkpoint" and "ssd" not in store else kind, sizes)


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
def test_a_command_without_room_fails_and_changes_nothing(disk_path: Path, line: str, sizes: list[int]) -> None:
    in_process(closed, disk_path, line, sizes)


@pytest.mark.parametrize("what", ["snapshot", "export"])
def test_what_may_not_outlive_a_power_loss_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
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
