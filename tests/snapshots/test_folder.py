from __future__ import annotations

import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from support.forked import with_pipe
from support.small_snapshots import description
from tierbed.engine.durable import seal, unseal
from tierbed.engine.errors import StoreError
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState

MARK = description() | {"live": "rows"}


def test_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    with StoreFolder(tmp_path / "a" / "b" / "users") as store:
        assert store.path.is_dir()
        assert (store.live, store.snapshots) == (store.path / "live", store.path / "snapshots")
        assert not store.live.exists()


def test_second_holder_in_the_same_process_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    refusal = f"{tmp_path.name}.*in use by process {os.getpid()}, this one, where a StoreF"
    with StoreFolder(tmp_path):
        for _ in range(3):  # being refused does not disturb the first
            with pytest.raises(StoreError, match=refusal):
                StoreFolder(tmp_path)
    StoreFolder(tmp_path).release()


def hold(path: Path, pipe: Connection) -> None:
    store = StoreFolder(path)
    store.incoming.mkdir()
    (store.incoming / "x").touch()
    pipe.send("held")
    pipe.recv()


def test_lock_of_a_killed_process_is_free_and_its_preparations_are_removed(tmp_path: Path) -> None:
    child, pipe = with_pipe(hold, tmp_path)
    with child, pipe:
        assert pipe.recv() == "held"
        with pytest.raises(StoreError, match=f"in use by process {child.pid}"):
            StoreFolder(tmp_path)
        assert (tmp_path / "incoming" / "x").exists()
        child.kill()
    with StoreFolder(tmp_path) as store:
        assert not store.incoming.exists()


def test_release_twice_does_not_free_the_next_holder(tmp_path: Path) -> None:
    first = StoreFolder(tmp_path)
    first.release()
    with StoreFolder(tmp_path):
        first.release()
        with pytest.raises(StoreError):
            StoreFolder(tmp_path)


def test_path_or_parent_that_is_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "users"):
        with pytest.raises(StoreError, match=r"cannot open store folder.*persistent_path must be a folder"):
            StoreFolder(path)
    assert file.read_text() == "mine"


def test_unwritable_path_is_a_store_error() -> None:
    with pytest.raises(StoreError, match="can write"):
        StoreFolder(Path("/proc/tierbed"))


def test_failed_preparation_frees_the_lock(tmp_path: Path) -> None:
    (tmp_path / "incoming").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot prepare"):
        StoreFolder(tmp_path)
    (tmp_path / "incoming").unlink()
    StoreFolder(tmp_path).release()


def test_mark_is_read_back_until_it_is_cleared(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        assert store.clean_marker is None
        store.clear_clean_marker()
        store.write_clean_marker(MARK)
        store.write_clean_marker(MARK | {"step": 13})
    with StoreFolder(tmp_path) as store:
        assert store.clean_marker == MARK | {"step": 13}
        store.clear_clean_marker()
        assert store.clean_marker is None


def test_damaged_or_truncated_mark_is_no_mark(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        store.write_clean_marker(MARK)
        file = tmp_path / "MARK"
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert FolderState(tmp_path).clean_marker is None
        for content in (whole + b"\0", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], seal(["a list"])):
            file.write_bytes(content)
            assert FolderState(tmp_path).clean_marker is None


def test_mark_that_cannot_be_stored_leaves_the_old_one(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        store.write_clean_marker(MARK)
        for value in (object(), 2**64, {1: 2}):
            with pytest.raises(StoreError, match="cannot store the description"):
                store.write_clean_marker(MARK | {"seed": value})
        assert store.clean_marker == MARK


def test_live_rows_and_their_mark_are_replaced_together_and_discarded_together(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        for step, content in enumerate(("old", "new", "newer")):
            store.incoming.mkdir()
            (store.incoming / content).touch()
            store.replace_live(store.incoming, MARK | {"step": step})
            assert [file.name for file in store.live.iterdir()] == [content]
            assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "MARK", store.live.name]
            assert store.clean_marker == MARK | {"step": step}
        store.discard_live()
        store.discard_live()
        assert not store.live.exists()
        assert store.clean_marker is None


def test_live_rows_are_replaced_together_with_what_else_the_mark_says(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        for fields, expected in (({"store": "one"}, "one"), ({}, "one"), ({"store": "two"}, "two")):
            store.incoming.mkdir()
            store.replace_live(store.incoming, MARK, **fields)
            assert (FolderState(tmp_path).mark.store, store.clean_marker) == (expected, MARK)


def test_no_bit_of_a_sealed_record_can_flip_unnoticed() -> None:
    for value in ({}, MARK, {"long": "x" * 300}, {"longer": "x" * 70000}):
        whole = bytearray(seal(value))
        assert unseal(bytes(whole)) == value
        for position in range(0, 8 * len(whole), 1 if len(whole) < 1000 else 997):
            whole[position // 8] ^= 1 << position % 8
            with pytest.raises(ValueError, match=r"."):
                unseal(bytes(whole))
            whole[position // 8] ^= 1 << position % 8


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_removed_under_its_holder_is_not_written(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "users"
    with StoreFolder(path) as store:
        store.live.mkdir()
        store.write_clean_marker(MARK)
        shutil.rmtree(path)
        other = StoreFolder(path) if replaced else None
        acts = [
            lambda: store.write_clean_marker(MARK),
            store.clear_clean_marker,
            store.discard_live,
            lambda: store.change(store="id"),
            lambda: store.replace_live(store.incoming, MARK),
        ]
        for act in acts:
            with pytest.raises(StoreError, match="users' was " + ("replaced by another" if replaced else "removed")):
                act()
    if other is None:
        assert not path.exists()
    else:
        assert (path / "LOCK").read_text().split() == [str(os.getpid())]
        assert os.listdir(path) == ["LOCK"]
        other.release()
