"""Pruning: what stays, that what stays can be read, and that a kill between two removals costs nothing."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.embeddings import make, train
from support.records import note_snapshot
from support.refusals import check_refusal
from support.small_snapshots import description, flip_bit, make_rows
from support.stores import options
from tierbed.engine.errors import OptionError, SnapshotError
from tierbed.engine.row_format import KEY
from tierbed.snapshots import Snapshot, list_snapshots, write_incremental, write_snapshot
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.retention import plan_prune, prune


def fill(folder: Path, parents: list[int | None]) -> list[Snapshot]:
    """Snapshot s0, s1 .. of steps 0, 10 .., full or over an earlier one."""
    rows = make_rows(6, 3, bucket=0)
    for number, parent in enumerate(parents):
        place, described = folder / f"s{number}", description(step=10 * number)
        if parent is None:
            write_snapshot(place, described, [(0, rows)])
        else:
            over = Snapshot.open(folder / f"s{parent}")
            write_incremental(place, over, described, 3, [(0, rows[:1], rows[:0][["table", "key"]].astype(KEY))])
    return list_snapshots(folder).snapshots


def names(snapshots: list[Snapshot]) -> list[str]:
    return [snapshot.name for snapshot in snapshots]


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
    assert names(plan.kept) == [f"s{number}" for number in kept.split()]
    assert sorted(names(plan.kept) + names(plan.removed)) == names(snapshots)


@given(
    parents=st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=6),
    keep_last=st.integers(1, 7),
    keep_every=st.none() | st.integers(1, 70),
    base=st.integers(0, 5),
    after=st.integers(0, 6),
)
@example(parents=[None, 0, None], keep_last=1, keep_every=None, base=2, after=1)  # a chain of two
def test_whatever_is_left_at_any_instant_can_be_read(
    tmp_path_factory: pytest.TempPathFactory,
    parents: list[int | None],
    keep_last: int,
    keep_every: int | None,
    base: int,
    after: int,
) -> None:
    with StoreFolder(tmp_path_factory.mktemp("store")) as store:
        earlier = [parent if parent is not None and parent < n else None for n, parent in enumerate(parents)]
        snapshots = fill(store.snapshots, earlier)
        note_snapshot(store, f"s{base % len(parents)}")
        plan = plan_prune(snapshots, keep_last, keep_every, [f"s{base % len(parents)}"])
        rename = os.rename
        with pytest.MonkeyPatch.context() as patch:
            left = [after]

            def killed(self: Path, target: Path) -> Path:
                if self.parent == store.snapshots:
                    if left[0] == 0:
                        raise KeyboardInterrupt
                    left[0] -= 1
                rename(self, target)
                return target

            patch.setattr(Path, "rename", killed)
            if after < len(plan.removed):
                with pytest.raises(KeyboardInterrupt):
                    prune(store, keep_last, keep_every)
            else:
                prune(store, keep_last, keep_every)
        there = list_snapshots(store.snapshots).snapshots
        assert len(there) == len(snapshots) - min(after, len(plan.removed))
        assert set(names(plan.kept)) <= set(names(there))
        for snapshot in there:
            snapshot.verify()
        assert names(prune(store, keep_last, keep_every).kept) == names(plan.kept)
        assert names(list_snapshots(store.snapshots).snapshots) == names(plan.kept)


def test_nothing_is_removed_where_a_manifest_is_damaged_or_an_argument_is_wrong(tmp_path: Path) -> None:
    with StoreFolder(tmp_path) as store:
        fill(store.snapshots, PARENTS)
        for arguments, named in (((0, None), "keep_last=0"), ((1, 0), "keep_every=0")):
            check_refusal((partial(prune, store, *arguments), OptionError, named, "from 1"))
        flip_bit(store.snapshots / "s5" / "manifest.msgpack", 80)
        with pytest.raises(SnapshotError, match=r"nothing is pruned while a snapshot cannot be read: .*s5"):
            prune(store, 1)
        assert len(list(store.snapshots.iterdir())) == len(PARENTS)


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
