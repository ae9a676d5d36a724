"""Snapshots where a user may not write or read, behind symbolic links, and under names that lead elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.embeddings import contents, make, train
from support.forked import in_process
from support.shell import command
from support.stores import options
from tierbed import MultiTableEmbedding, SnapshotError, StoreError
from tierbed.snapshots import Snapshot, list_snapshots

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
        for number, kind in enumerate(["full", "incremental", "checkpoint"]):
            train(embedding, range(number, 100))
            embedding.save_snapshot(kind, kind)
        before = contents(embedding).tobytes()
        with mode(folder, 0o500):
            for kind in ["full", "incremental", "checkpoint"]:
                with pytest.raises(SnapshotError, match=r"snapshots.*Permission denied"):
                    embedding.save_snapshot("more", kind)
            with pytest.raises(SnapshotError, match=r"Permission denied"):
                embedding.prune_snapshots(keep_last=1)
        assert [s.name for s in list_snapshots(folder).snapshots] == ["full", "incremental", "checkpoint"]
        bucket = next((folder / "full").glob("bucket-*"))
        with mode(bucket, 0):
            for damaged in ["full", "incremental"]:
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
    assert [s.name for s in list_snapshots(folder).snapshots] == ["full", "incremental", "checkpoint", "more", "closed"]
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
        for kind in ["full", "incremental", "checkpoint"]:
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


def test_what_lies_in_the_way_of_a_save_is_named_and_a_link_there_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").write_bytes(b"")
    with open_embedding(tmp_path, "device") as embedding:
        train(embedding, range(20))
        embedding.save_snapshot("s")
        folder = tmp_path / "rows" / "snapshots"
        (folder / "dangling").symlink_to(tmp_path / "nothing")
        with pytest.raises(SnapshotError, match="exists"):
            embedding.save_snapshot("dangling")
        (folder / ".tmp-link").symlink_to(other)
        embedding.save_snapshot("link")
        embedding.save_snapshot("after")
        assert [s.name for s in list_snapshots(folder).snapshots] == ["s", "link", "after"]
        assert not (folder / ".tmp-link").is_symlink()
    assert [file.name for file in other.iterdir()] == ["kept"]
