from __future__ import annotations

import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from support.forked import with_pipe
from support.refusals import check_refusal
from support.small_snapshots import description
from tierbed.engine.durable import seal, unseal
from tierbed.engine.errors import StoreError
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState

MARK = description() | {"live": "rows"}


def test_a_new_folder_has_one_holder_who_may_release_it_twice(tmp_path: Path) -> None:
    path = tmp_path / "a" / "users"
    first = StoreFolder(path)
    assert not first.live.exists()
    first.release()
    with StoreFolder(path):
        first.release()
        for _ in range(2):  # being refused does not disturb the holder
            with pytest.raises(StoreError, match=f"users.*in use by process {os.getpid()}, this one, where a StoreF"):
                StoreFolder(path)
    StoreFolder(path).release()


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


def test_what_cannot_be_a_store_folder_is_refused_and_not_locked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "incoming").write_text("not a folder")
    for path in (file, file / "users", Path("/proc/tierbed"), tmp_path):
        check_refusal((lambda path=path: StoreFolder(path), StoreError, str(path), "persistent_path must be a folder"))
    assert file.read_text() == "mine"
    (tmp_path / "incoming").unlink()
    StoreFolder(tmp_path).release()


def test_mark_is_read_back_until_it_is_cleared_and_stays_where_another_cannot_be_stored(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        assert store.clean_marker is None
        store.clear_clean_marker()
        store.write_clean_marker(MARK)
        store.write_clean_marker(MARK | {"step": 13})
        for value in (object(), 2**64, {1: 2}):
            with pytest.raises(StoreError, match="cannot store the description"):
                store.write_clean_marker(MARK | {"seed": value})
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


def test_live_rows_and_their_mark_are_replaced_together_and_discarded_together(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        for step, (fields, expected) in enumerate((({"store": "one"}, "one"), ({}, "one"), ({"store": "two"}, "two"))):
            store.incoming.mkdir()
            (store.incoming / str(step)).touch()
            store.replace_live(store.incoming, MARK | {"step": step}, **fields)
            assert [file.name for file in store.live.iterdir()] == [str(step)]
            assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "MARK", store.live.name]
            assert (FolderState(tmp_path).mark.store, store.clean_marker) == (expected, MARK | {"step": step})
        store.discard_live()
        store.discard_live()
        assert not store.live.exists()
        assert store.clean_marker is None


def test_no_bit_of_a_sealed_record_can_flip_unnoticed() -> None:
    for value in ({}, MARK, {"longer": "x" * 70000}):
        whole = bytearray(seal(value))
        assert unseal(bytes(whole)) == value
        for position in range(0, 8 * len(whole), 1 if len(whole) < 1000 else 9973):
            whole[position // 8] ^= 1 << position % 8
            with pytest.raises(ValueError, match=r"."):
                unseal(bytes(whole))
            whole[position // 8] ^= 1 << position % 8


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_removed_under_its_holder_is_not_written(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "users"
    with StoreFolder(path) as store:
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
    assert path.exists() == replaced
    if other is not None:
        assert (path / "LOCK").read_text().split() == [str(os.getpid())]
        assert os.listdir(path) == ["LOCK"]
        other.release()
