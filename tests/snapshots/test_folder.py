"""A store's folder: its lock, its mark and its live rows; and what a prune leaves of its snapshots."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.embeddings import make, train
from support.forked import with_pipe
from support.records import note_snapshot
from support.refusals import check_refusal
from support.small_snapshots import description, flip_bit, make_rows
from support.stores import options
from tierbed.engine.durable import seal, unseal
from tierbed.engine.errors import OptionError, SnapshotError, StoreError
from tierbed.engine.row_format import extract_row_keys
from tierbed.snapshots import Snapshot, list_snapshots, write_incremental, write_snapshot
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.retention import plan_prune, prune

MARK = description() | {"live": "rows"}


def test_a_new_folder_has_one_holder_who_may_release_it_twice(tmp_path: Path) -> None:
    path = tmp_path / "a" / "users"
    first = StoreFolder(path)
    assert not first.live_path.exists()
    first.unlock()
    with StoreFolder(path):
        first.unlock()
        for _ in range(2):  # being refused does not disturb the holder
            with pytest.raises(StoreError, match=rf"users.*in use by process {os.getpid()} \(this process\)\. Close a"):
                StoreFolder(path)
    StoreFolder(path).unlock()


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
    StoreFolder(tmp_path).unlock()


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


def test_threads_change_different_fields_of_mark_at_once(tmp_path: Path) -> None:
    """A step clears the clean marker while a background save records its snapshot."""
    with StoreFolder(tmp_path / "users") as folder, ThreadPoolExecutor(2) as threads:
        marks = threads.submit(lambda: [folder.write_clean_marker(MARK | {"step": step}) for step in range(100)])
        ids = threads.submit(lambda: [folder.change(store_id=str(number)) for number in range(100)])
        marks.result(), ids.result()
        assert folder.mark.store_id == "99"
        assert FolderState(folder.path).clean_marker == MARK | {"step": 99}


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
        store.change(store_id="1")
        live = {"live_files": ""}  # of no snapshot
        for step in range(3):
            store.incoming.mkdir()
            (store.incoming / str(step)).touch()
            store.replace_live_rows(store.incoming, MARK | {"step": step})
            assert [file.name for file in store.live_path.iterdir()] == [str(step)]
            assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "MARK", store.live_path.name]
            assert (FolderState(tmp_path).mark.store_id, store.clean_marker) == ("1", MARK | live | {"step": step})
        store.discard_live_rows()
        store.discard_live_rows()
        assert not store.live_path.exists()
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
            store.discard_live_rows,
            lambda: store.change(store_id="id"),
            lambda: store.replace_live_rows(store.incoming, MARK),
        ]
        for act in acts:
            with pytest.raises(StoreError, match="users' was " + ("replaced by another" if replaced else "removed")):
                act()
    assert path.exists() == replaced
    if other is not None:
        assert (path / "LOCK").read_text().split() == [str(os.getpid())]
        assert os.listdir(path) == ["LOCK"]
        other.unlock()


def fill(folder: Path, parents: list[int | None]) -> list[Snapshot]:
    """Snapshot s0, s1 .. of steps 0, 10 .., full or over an earlier one."""
    rows = make_rows(6, 3, bucket=0)
    rows["step"] = 0
    for number, parent in enumerate(parents):
        place, described = folder / f"s{number}", description(step=10 * number)
        if parent is None:
            write_snapshot(place, described, [(0, rows)])
        else:
            over = Snapshot.open(folder / f"s{parent}")
            write_incremental(place, over, described, 3, [(0, rows[:1], extract_row_keys(rows[:0]))])
    return list_snapshots(folder).snapshots


def names(snapshots: list[Snapshot]) -> list[str]:
    return [snapshot.name for snapshot in snapshots]


Folders = pytest.TempPathFactory
PARENTS = [None, 0, 1, None, 3, None, 3, 6]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "base", "kept"),
    [
        (1, None, None, "3 6 7"),
        (3, None, None, "3 5 6 7"),
        (1, None, "s2", "0 1 2 3 6 7"),
        (1, 30, None, "0 3 6 7"),
        (1, 25, None, "0 3 5 6 7"),
        (100, None, None, "0 1 2 3 4 5 6 7"),
        (1, None, "not there", "3 6 7"),
    ],
)
def test_what_is_kept(tmp_path: Path, keep_last: int, keep_every: int | None, base: str | None, kept: str) -> None:
    snapshots = fill(tmp_path, PARENTS)
    plan = plan_prune(snapshots, keep_last, keep_every, [base])
    assert names(plan.retained) == [f"s{number}" for number in kept.split()]
    assert sorted(names(plan.retained) + names(plan.removed)) == names(snapshots)


@given(
    parents=st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=6),
    keep_last=st.integers(1, 7),
    keep_every=st.none() | st.integers(1, 70),
    base=st.integers(0, 5),
    after=st.integers(0, 6),
)
@example(parents=[None, 0, None], keep_last=1, keep_every=None, base=2, after=1)  # a chain of two
@example(parents=[None, None, 1, 2], keep_last=1, keep_every=None, base=0, after=5)  # a fold
@example(parents=[None, 0, 1, None, None, 2], keep_last=1, keep_every=None, base=4, after=2)  # a kill in a fold
def test_whatever_is_left_at_any_instant_can_be_read(
    tmp_path_factory: Folders, parents: list[int | None], keep_last: int, keep_every: int | None, base: int, after: int
) -> None:
    with StoreFolder(tmp_path_factory.mktemp("store")) as store:
        earlier = [parent if parent is not None and parent < n else None for n, parent in enumerate(parents)]
        snapshots = fill(store.snapshots_path, earlier)
        note_snapshot(store, f"s{base % len(parents)}")
        plan = plan_prune(snapshots, keep_last, keep_every, [f"s{base % len(parents)}"])
        rename = os.rename
        with pytest.MonkeyPatch.context() as patch:
            left = [after]

            def killed(self: Path, target: Path) -> Path:
                if self.parent == store.snapshots_path:
                    if left[0] == 0:
                        raise KeyboardInterrupt
                    left[0] -= 1
                rename(self, target)
                return target

            patch.setattr(Path, "rename", killed)
            gone = names(plan.removed) + names(plan.folded)
            if after < len(gone):
                with pytest.raises(KeyboardInterrupt):
                    prune(store, keep_last, keep_every)
            else:
                prune(store, keep_last, keep_every)
        there = list_snapshots(store.snapshots_path).snapshots
        assert len(there) == len(snapshots) - min(after, len(gone))
        left_over = [name for name in names(plan.retained) if name not in gone]
        assert set(left_over) <= set(names(there))
        for snapshot in there:
            snapshot.verify()
        prune(store, keep_last, keep_every)
        assert names(list_snapshots(store.snapshots_path).snapshots) == left_over


def test_nothing_is_removed_where_a_manifest_is_damaged_or_an_argument_is_wrong(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        fill(store.snapshots_path, PARENTS)
        for arguments, named in (((0, None), "keep_last=0"), ((1, 0), "keep_every=0")):
            check_refusal((partial(prune, store, *arguments), OptionError, named, "from 1"))
        flip_bit(store.snapshots_path / "s5" / "manifest.msgpack", 80)
        with pytest.raises(SnapshotError, match=r"nothing is pruned while a snapshot cannot be read: .*s5"):
            prune(store, 1)
        assert len(list(store.snapshots_path.iterdir())) == len(PARENTS)


def test_a_running_table_prunes_its_snapshots(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path), "adam") as embedding:
        for number in range(4):
            train(embedding, [number])
            embedding.save_snapshot(f"s{number}", "incremental" if number == 3 else "full")
        assert embedding.prune_snapshots(keep_last=1) == ["s0", "s1"]
        embedding.load_snapshot("s3")
        assert embedding.size() == 4
        assert embedding.prune_snapshots(1, keep_every=1) == []
    with make(options("host"), "adam") as embedding, pytest.raises(SnapshotError, match="has no persistent_path"):
        embedding.prune_snapshots(1)
