"""Embeddings that are trained together go from ranks to one process and back, whatever disks they are on."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.live_rows import opened, own_rows
from support.live_rows import step as train
from support.ranks import alike, fails, on_ranks, run_ranks, started
from support.together import Model, killed_at
from support.warm import SHIMMED
from tierbed import GroupError, StoreError
from tierbed.distributed import World
from tierbed.embedding.tables.shared_folder import SharedFolder
from tierbed.snapshots.store.folder import StoreFolder

STORES = ("ssd", "host")


def trained(
    world: World | None, live: Path, steps: int = 1, save: str | None = None, own: bool = False, **more: Any
) -> list[int]:
    """What a model has as it opens; it is trained and closed after that. own: whether the disks of ranks differ."""
    path = live / str(world.rank) if own and world is not None else live
    model = Model(path, STORES, world, snapshot_path=live.parent / "snapshots", **more)
    found = model.counts()
    model.steps(steps)
    if save is not None:
        model.save_snapshot(save)
    model.close()
    return found


def of_one(path: Path) -> list[int]:
    return trained(None, path, 0)


def test_ranks_with_own_disks_go_on_with_all_that_they_closed(tmp_path: Path) -> None:
    live = tmp_path / "live"
    assert alike(2, trained, live, 2, "two", True) == [0, 0]
    assert alike(2, trained, live, 1, None, True) == [2, 2]
    assert alike(2, trained, live, 0, None, True) == [3, 3]
    shutil.rmtree(live / "1" / "b")
    assert alike(2, trained, live, 0, None, True) == [2, 2]


def test_one_process_does_not_lose_what_ranks_have_on_other_hosts(tmp_path: Path) -> None:
    live, away = tmp_path / "live", tmp_path / "away"
    run_ranks(2, trained, live, 1, "one")
    run_ranks(2, trained, live, 1)
    (live / "b" / "ranks" / "1-of-2").rename(away)
    said = fails(lambda: of_one(live), StoreError)
    assert "live rows of 2 ranks, and the shards of rank 1 are not here" in said
    away.rename(live / "b" / "ranks" / "1-of-2")
    assert "live rows of 2 ranks, of step 2, and no snapshot of them" in fails(lambda: of_one(live), StoreError)
    assert alike(2, trained, live, 0, "two") == [2, 2]
    assert of_one(live) == [2, 2]
    assert alike(3, trained, live, 1, "three") == [2, 2]
    assert of_one(live) == [3, 3]


def takes_over(path: Path, begin: Callable[[], None]) -> None:
    begin()
    trained(None, path, 1)


def copied(live: Path, to: Path) -> Path:
    """A copy of a model and of its snapshots."""
    shutil.copytree(live.parent, to, symlinks=True, ignore=shutil.ignore_patterns("SOCKET"))
    for name in "ab":
        (to / "live" / name / "snapshots").unlink()
        (to / "live" / name / "snapshots").symlink_to(to / "snapshots" / name / "snapshots")
    return to / "live"


few_or_slowly_all = pytest.mark.parametrize(
    "numbers", [range(2, 60, 13), pytest.param(range(1, 200), marks=pytest.mark.slow)], ids=["few", "all"]
)


@few_or_slowly_all
def test_a_kill_as_one_process_takes_over_from_ranks_leaves_all_that_they_saved(tmp_path: Path, numbers: range) -> None:
    live = tmp_path / "before" / "live"
    run_ranks(2, trained, live, 1, "one")
    for number in numbers:
        path = copied(live, tmp_path / str(number))
        said = killed_at(path.parent, "rename", number, takes_over, path)
        assert of_one(path) in ([1, 1], [2, 2])
        if said == "done":
            break


def killed_as_they_take_over(world: World, path: Path, number: int) -> None:
    if world.rank == 0:
        shim = ctypes.CDLL(None)
        shim.watch_calls(os.fsencode(path.parent), os.fsencode(path.with_name("aside")), -1)
        shim.die_at(b"rename", ctypes.c_long(number), 0)
    with suppress(GroupError):
        trained(world, path, 1)
        path.with_name("done").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@few_or_slowly_all
def test_a_kill_as_ranks_take_over_from_one_process_leaves_all_that_it_saved(tmp_path: Path, numbers: range) -> None:
    live = tmp_path / "before" / "live"
    trained(None, live, 1, "one")
    for number in numbers:
        path = copied(live, tmp_path / str(number))
        with started(2, killed_as_they_take_over, path, number, server=SHIMMED) as group:
            assert [child.wait() for child, _ in group] == [-signal.SIGKILL] * 2
        again = copied(path, tmp_path / f"{number} again")
        assert of_one(path) in ([1, 1], [2, 2])
        assert run_ranks(2, trained, again, 0)[0] in ([1, 1], [2, 2])
        if path.with_name("done").exists():
            break


def full(*_: Any, **fields: Any) -> None:
    raise StoreError("No space left")


def refuse(call: Callable[[], Any]) -> None:
    assert "No space left" in fails(call, StoreError)


@on_ranks(2)
def test_a_mark_that_one_rank_cannot_write_fails_the_call_on_all_and_changes_nothing(
    world: World, tmp_path: Path
) -> None:
    """MARK of the store, on rank 0, and of the shard of rank 1 cannot be written, each for a while."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(SharedFolder, "begin", full)
        refuse(lambda: opened(world, tmp_path).size())
    with opened(world, tmp_path) as rows:
        train(rows, 0)
        rows.save_snapshot("a")
        train(rows, 1)
    with opened(world, tmp_path) as rows, pytest.MonkeyPatch.context() as patch:
        before = own_rows(rows)
        if world.rank == 1:
            patch.setattr(StoreFolder, "clear_clean_marker", full)
        refuse(lambda: rows.load_snapshot("a"))
        assert own_rows(rows) == before
    with opened(world, tmp_path) as rows:
        assert own_rows(rows) == before
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(StoreFolder, "change", full)
            refuse(lambda: rows.load_snapshot("a"))
            refuse(lambda: rows.load_snapshot("a", tables=[0]))
            refuse(lambda: rows.save_snapshot("b"))
        assert own_rows(rows) == before
        rows.load_snapshot("a")
        train(rows, 5)
        rows.save_snapshot("b", "incremental")
        rows.load_snapshot("b", tables=[0])
        before = own_rows(rows)
    with opened(world, tmp_path) as rows:
        assert own_rows(rows) == before
