"""Ranks go on from live rows that are from the same step; where these are not, all recover from one snapshot."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from support.live_rows import (
    STORES,
    alone,
    fails,
    left_open,
    opened,
    own_disks,
    own_rows,
    remarks_of,
    run,
    step,
    together,
    trained,
)
from support.ranks import fails as error_of
from support.ranks import run_ranks
from support.shell import Cli
from tierbed import ClosedError, SnapshotError, StoreError
from tierbed.distributed import World
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import clean_markers

IN_MEMORY, ON_DISK = pytest.param("host", marks=pytest.mark.slow), pytest.param("ssd", marks=pytest.mark.slow)
SLOWLY_FROM_ONE, SLOWLY_FROM_THREE = (pytest.param(ranks, 2, marks=pytest.mark.slow) for ranks in (1, 3))
in_memory_or_slowly_on_disk = pytest.mark.parametrize("store", ["host", ON_DISK])
on_disk_or_slowly_in_memory = pytest.mark.parametrize("store", [IN_MEMORY, "ssd"])


@pytest.mark.parametrize(
    ("ranks", "store"),
    [(2, "host"), (3, "ssd"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, "ssd"), (3, "host")))],
)
def test_ranks_go_on_from_the_rows_that_they_closed(tmp_path: Path, ranks: int, store: str) -> None:
    after = [b""] * ranks
    for _ in range(2):
        found = run(ranks, tmp_path, store, 2)
        assert [before for before, _, _ in found] == after
        assert not any("lost" in line or "not closed" in line for *_, lines in found for line in lines)
        after = [rows for _, rows, _ in found]
    whole = run(ranks, tmp_path / "whole", store, 4)
    assert [rows for _, rows, _ in whole] == after
    assert all(after)


@pytest.mark.parametrize(
    ("killed", "store"),
    [(0, "ssd"), (1, "host"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, "host"), (1, "ssd")))],
)
def test_all_ranks_go_back_where_one_did_not_close(tmp_path: Path, killed: int, store: str) -> None:
    saved = alone(tmp_path, store, 2, "base")
    first = run(2, tmp_path, store, 2)
    assert together([before for before, _, _ in first], saved)
    second = run(2, tmp_path, store, 3, killed=killed)
    assert [before for before, _, _ in second] == [rows for _, rows, _ in first]
    third = run(2, tmp_path, store, 1)
    assert together([before for before, _, _ in third], saved)
    (said,) = third[0][2]
    assert f"was not closed by rank {killed} of its 2; all ranks: restored snapshot 'base', of step 2" in said
    assert said.endswith("steps 3 to 7, is lost")
    assert not third[1][2]
    fourth = run(2, tmp_path, store, 0)
    assert [before for before, _, _ in fourth] == [rows for _, rows, _ in third]


@in_memory_or_slowly_on_disk
def test_ranks_without_a_snapshot_start_empty_after_a_kill(tmp_path: Path, store: str) -> None:
    run(2, tmp_path, store, 2, killed=1)
    found = run(2, tmp_path, store, 0)
    assert [before for before, _, _ in found] == [b"", b""]
    assert "was not closed by rank 1 of its 2; all ranks: started empty: it has no snapshot" in found[0][2][0]


def test_a_share_of_an_earlier_run_is_not_used_with_those_of_a_later_one(tmp_path: Path) -> None:
    share, kept = tmp_path / "rows" / "ranks" / "1-of-2", tmp_path / "kept"
    run(2, tmp_path, "host", 2)
    shutil.copytree(share, kept)
    run(2, tmp_path, "host", 1)
    shutil.rmtree(share)
    shutil.copytree(kept, share)
    found = run(2, tmp_path, "host", 2)
    assert [before for before, _, _ in found] == [b"", b""]
    assert "was closed by its ranks at different steps; all ranks: started empty" in found[0][2][0]
    shutil.rmtree(share)
    shutil.copytree(kept, share)  # as many writes as those of rank 0, in another run
    found = run(2, tmp_path, "host", 0)
    assert [before for before, _, _ in found] == [b"", b""]
    assert "was not closed by rank 1 of its 2" in found[0][2][0]


@on_disk_or_slowly_in_memory
@pytest.mark.parametrize(("before", "now"), [SLOWLY_FROM_ONE, (2, 3), SLOWLY_FROM_THREE, (2, 1)])
def test_another_number_of_ranks_begins_with_the_snapshot_of_the_live_step(
    tmp_path: Path, store: str, before: int, now: int
) -> None:
    saved = alone(tmp_path, store, 2, "base")
    if before > 1:
        run(before, tmp_path, store, 0)
    found = [trained(None, tmp_path, store, 2)] if now == 1 else run(now, tmp_path, store, 2)
    assert together([rows for rows, _, _ in found], saved)
    whose = "one process" if before == 1 else f"{before} ranks"
    assert f"has rows of {whose}; restored snapshot 'base', of step 2" in found[0][2][0]
    again = [trained(None, tmp_path, store, 0)] if now == 1 else run(now, tmp_path, store, 0)
    assert [rows for rows, _, _ in again] == [rows for _, rows, _ in found]
    shares = sorted(os.listdir(tmp_path / "rows" / "ranks")) if now > 1 else []
    assert shares == [f"{rank}-of-{now}" for rank in range(now)][: len(shares)]


@in_memory_or_slowly_on_disk
@pytest.mark.parametrize(("before", "now"), [SLOWLY_FROM_ONE, (2, 3), (2, 1)])
def test_rows_that_no_snapshot_has_are_not_lost_to_another_number_of_ranks(
    tmp_path: Path, store: str, before: int, now: int
) -> None:
    alone(tmp_path, store, 2, "base")
    last = alone(tmp_path, store, 1, None) if before == 1 else b"".join(r for _, r, _ in run(2, tmp_path, store, 1))
    whose = "one process" if before == 1 else "2 ranks"
    reports = f"has live rows of {whose}, of step 3, and no snapshot of them"
    if now == 1:
        with pytest.raises(StoreError, match=reports):
            opened(None, tmp_path, store).size()
    else:
        for kind, said in run_ranks(now, fails, tmp_path, {"store": store}, {}):
            assert kind == "StoreError"
            assert reports in said
            assert "(its last, 'base', is of step 2): open it with" in said
    again = [trained(None, tmp_path, store, 0)] if before == 1 else run(2, tmp_path, store, 0)
    assert together([rows for rows, _, _ in again], last)


@pytest.mark.parametrize("now", [1, 3])
def test_another_number_of_ranks_goes_back_where_the_rows_are_lost(tmp_path: Path, now: int) -> None:
    saved = alone(tmp_path, "host", 2, "base")
    run(2, tmp_path, "host", 3, killed=0)
    found = [trained(None, tmp_path, "host", 0)] if now == 1 else run(now, tmp_path, "host", 0)
    assert together([rows for rows, _, _ in found], saved)
    assert "was not closed by rank 0 of its 2; restored snapshot 'base', of step 2" in found[0][2][0]


def test_an_open_that_may_not_go_back_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run(2, tmp_path, "host", 3, killed=1)
    for kind, said in run_ranks(2, fails, tmp_path, {"open": "error"}, {}):
        assert kind == "StoreError"
        assert "was not closed by its last run" in said
    run(2, tmp_path, "host", 1)
    run(2, tmp_path, "host", 1, open="error")


@in_memory_or_slowly_on_disk
def test_a_fresh_open_starts_empty_on_all_ranks(tmp_path: Path, store: str) -> None:
    alone(tmp_path, store, 2, "base")
    run(2, tmp_path, store, 2)
    found = run(2, tmp_path, store, 1, open="fresh")
    assert [before for before, _, _ in found] == [b"", b""]
    again = run(2, tmp_path, store, 0)
    assert [before for before, _, _ in again] == [rows for _, rows, _ in found]


def test_a_snapshot_loaded_by_the_shell_is_what_ranks_go_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = alone(tmp_path, "host", 2, "base")
    run(2, tmp_path, "host", 3)
    Cli(tmp_path / "rows", capsys).json("load", "base")
    found = run(2, tmp_path, "host", 1)
    assert together([before for before, _, _ in found], saved)


def test_snapshots_may_be_on_another_disk_than_the_shares(tmp_path: Path) -> None:
    place = tmp_path / "snapshots"
    saved = alone(tmp_path / "live", "host", 2, "base", snapshot_path=place)
    found = run(2, tmp_path / "live", "host", 1, snapshot_path=place, killed=0)
    assert together([before for before, _, _ in found], saved)
    shutil.rmtree(tmp_path / "live")
    found = run(3, tmp_path / "live", "host", 1, snapshot_path=place)
    assert together([before for before, _, _ in found], saved)
    again = run(3, tmp_path / "live", "host", 1, snapshot_path=place)
    assert [before for before, _, _ in again] == [rows for _, rows, _ in found]


def test_each_rank_may_have_a_disk_of_its_own(tmp_path: Path) -> None:
    first = run_ranks(2, own_disks, tmp_path, 2)
    second = run_ranks(2, own_disks, tmp_path, 2)
    assert [before for before, _, _ in second] == [rows for _, rows, _ in first]
    assert (tmp_path / "1" / "rows" / "ranks" / "1-of-2" / "MARK").exists()
    assert not (tmp_path / "1" / "rows" / "LOCK").exists()


def test_snapshots_that_only_one_rank_sees_are_refused_on_all(tmp_path: Path) -> None:
    for kind, said in run_ranks(2, fails, tmp_path / "0", {}, {1: {"path": tmp_path / "1"}}):
        assert kind == "StoreError"
        assert said.startswith("rank 1: ")
        assert "is another folder here than on rank 0" in said
        assert "give snapshot_path" in said
    assert not [name for name in os.listdir(tmp_path / "0" / "rows") if name.startswith(".token")]


def test_ranks_that_differ_are_told_what_differs(tmp_path: Path) -> None:
    for kind, said in run_ranks(2, fails, tmp_path, {}, {1: {"seed": 7, "capacity": 9}}):
        assert kind == "GroupError"
        assert said.endswith(
            "rank 0: seed=0, capacity=None; rank 1: seed=7, capacity=9; pass the same values on all ranks"
        )
    found = run_ranks(2, mixed_stores, tmp_path)
    assert all(rows for _, rows, _ in found)


def mixed_stores(world: World, folder: Path) -> Any:
    return trained(world, folder, STORES[world.rank], 1)


def in_use(world: World, folder: Path) -> str:
    """An embedding without a world cannot take what ranks hold; what they hold is compared after a close."""
    embedding = opened(world, folder)
    embedding.size()
    world.all_gather_object("open on all", lambda: b"")
    said = error_of(lambda: opened(None, folder).size(), StoreError)
    world.all_gather_object("tried on all", lambda: b"")
    embedding.close()
    return said


def test_an_embedding_without_a_world_cannot_open_what_ranks_have_open(tmp_path: Path) -> None:
    for said in run_ranks(2, in_use, tmp_path):
        assert "another embedding of that name in this process has" in said
    assert clean_markers(tmp_path / "rows", 2).keys() == {0, 1}


def closes_alone(world: World, folder: Path) -> bytes:
    """Rank 1 closes, and is done with all, before rank 0 does."""
    embedding = opened(world, folder)
    step(embedding, 0)
    if world.rank == 0:
        while not (folder / "rows" / "ranks" / "1-of-2" / "MARK").exists():
            sleep(0.01)
    rows = own_rows(embedding)
    embedding.close()
    return rows


def test_closing_waits_for_no_other_rank(tmp_path: Path) -> None:
    rows = run_ranks(2, closes_alone, tmp_path)
    found = run(2, tmp_path, "host", 0)
    assert [before for before, _, _ in found] == rows


def opened_twice(world: World, folder: Path) -> bool:
    first = opened(world, folder)
    step(first, 0)
    rows = own_rows(first)
    second = opened(world, folder)
    with pytest.raises(StoreError, match=r"call its close\(\)"):
        second.size()
    first.close()
    return own_rows(second) == rows


def test_a_second_embedding_of_a_process_waits_until_the_first_is_closed(tmp_path: Path) -> None:
    assert run_ranks(2, opened_twice, tmp_path) == [True, True]


def test_the_shell_saves_what_ranks_closed_for_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run(3, tmp_path, "host", 3)
    cli = Cli(tmp_path / "rows", capsys)
    saved = cli.json("save", "last")
    stat = cli.json("store stat")
    assert (stat["state"], stat["live"], stat["ranks"]) == ("closed", "ranks", 3)
    assert (stat["rows"], stat["step"], stat["base"]) == (saved["rows"], 3, "last")
    assert stat["restart"]["from"] == "live"
    found = run(2, tmp_path, "ssd", 1)
    assert together([before for before, _, _ in found], b"".join(rows for _, rows, _ in last))
    again = Cli(tmp_path / "rows" / "ranks" / "0-of-2", capsys)
    assert "has only the shard of one rank: give the store folder" in again.fails("save", "half")


def test_the_shell_tells_where_ranks_did_not_all_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone(tmp_path, "host", 2, "base")
    run(2, tmp_path, "host", 3, killed=1)
    cli = Cli(tmp_path / "rows", capsys)
    stat = cli.json("store stat")
    assert (stat["state"], stat["ranks"], stat["rows"], stat["step"]) == ("unclean", 2, None, 5)
    assert (stat["restart"]["from"], stat["restart"]["snapshot"], stat["restart"]["lost_steps"]) == (
        "snapshot",
        "base",
        3,
    )
    assert "which were not all closed" in cli.fails("save", "more")


def loads_but_for_one(world: World, folder: Path) -> tuple[str, str, bytes, bytes, list[str]]:
    """Rank 1 fails while the loaded rows take the place of those before."""

    said = remarks_of()
    embedding = opened(world, folder, "ssd")
    step(embedding, 0)
    embedding.save_snapshot("base")
    saved = own_rows(embedding)
    step(embedding, 1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(StoreFolder, "replace_live", full_disk)
        with pytest.raises(Exception, match="No space left") as caught:
            embedding.load_snapshot("base")
    with pytest.raises(ClosedError) as closed:
        embedding.get([1], 0)
    with opened(world, folder, "ssd") as again:
        return str(caught.value), str(closed.value), saved, own_rows(again), said


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_load_that_fails_on_one_rank_amid_its_changes_closes_the_rows_of_all(tmp_path: Path) -> None:
    for error, closed, saved, after, said in run_ranks(2, loads_but_for_one, tmp_path):
        assert "No space left" in error
        assert "create it again" in closed
        assert after == saved
        assert any("create it again, and it recovers from snapshot 'base'" in line for line in said)


def opens_without_a_file(world: World, folder: Path) -> str:
    return error_of(lambda: opened(world, folder, "ssd").size(), SnapshotError)


@pytest.mark.slow
def test_a_snapshot_that_lacks_a_file_is_refused_by_ranks_that_go_back_to_it(tmp_path: Path) -> None:
    run(2, tmp_path, "ssd", 2)
    alone_saved = run_ranks(2, saves_and_ends, tmp_path)
    assert alone_saved == [None, None]
    lost = sorted((tmp_path / "rows" / "snapshots" / "base").rglob("bucket-*-*.npy"))[3]
    lost.unlink()
    one, other = run_ranks(2, opens_without_a_file, tmp_path)
    assert one == other
    assert "damaged: No such file" in one


def saves_and_ends(world: World, folder: Path) -> None:
    """Leave the rows as a killed rank does."""
    embedding = opened(world, folder, "ssd")
    step(embedding, 7)
    embedding.save_snapshot("base")
    step(embedding, 8)
    left_open(embedding)
