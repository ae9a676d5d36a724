"""Ranks go on from live rows that are from the same step; where these are not, all recover from one snapshot."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from support.forged import change
from support.live_rows import (
    STORES,
    alone,
    fails,
    left_open,
    opened,
    own_disks,
    own_rows,
    ran,
    remarks_of,
    step,
    together,
    trained,
)
from support.ranks import answer, end_kept, on_ranks, run_kept, started
from support.ranks import fails as error_of
from support.shell import Cli
from tierbed import ClosedError, GroupError, StoreError
from tierbed.distributed import World
from tierbed.embedding.state_dict.model_snapshots import save_rows
from tierbed.embedding.tables.shared_folder import SharedFolder
from tierbed.engine._core import find_owners
from tierbed.snapshots.files.reader import Snapshot
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState, read_clean_markers
from tierbed.snapshots.store.group_file import GroupFile
from tierbed.snapshots.store.recovery_rule import EMPTY_ID, Entry

Capture = pytest.CaptureFixture[str]


def slowly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


in_memory_or_slowly_on_disk = pytest.mark.parametrize("store", ["host", slowly("ssd")])


@pytest.mark.parametrize(("ranks", "store"), [slowly(2, "host"), (2, "ssd"), slowly(3, "ssd"), slowly(3, "host")])
def test_ranks_go_on_from_the_rows_that_they_closed(tmp_path: Path, ranks: int, store: str) -> None:
    first = ran(ranks, tmp_path, 2, store)
    assert first.before == [b""] * ranks
    end_kept()  # others go on
    second = ran(ranks, tmp_path, 2, store)
    assert second.before == first.after
    assert not any("lost" in line or "not closed" in line for lines in first.said + second.said for line in lines)
    assert ran(ranks, tmp_path / "whole", 4, store).after == second.after
    assert all(second.after)


@pytest.mark.parametrize(("killed", "store"), [(0, "ssd"), slowly(1, "host"), slowly(0, "host"), slowly(1, "ssd")])
def test_all_ranks_go_back_where_one_did_not_close(tmp_path: Path, killed: int, store: str) -> None:
    saved = alone(tmp_path, store, 2, "base")
    first = ran(2, tmp_path, 2, store)
    assert together(first.before, saved)
    assert ran(2, tmp_path, 3, store, killed=killed).before == first.after
    third = ran(2, tmp_path, 1, store)
    assert together(third.before, saved)
    (said,), of_others = third.said
    assert f"was not closed by rank {killed} (of 2); all ranks: restored snapshot 'base', of step 2" in said
    assert said.endswith("are lost (steps 3 to 7)")
    assert not of_others
    assert ran(2, tmp_path, 0, store).before == third.after
    assert ran(2, tmp_path, 0, store, open="fresh").before == [b"", b""]


@in_memory_or_slowly_on_disk
def test_ranks_without_a_snapshot_start_empty_after_a_kill_or_if_told(tmp_path: Path, store: str) -> None:
    ran(2, tmp_path, 2, store, killed=1)
    for kind, said in run_kept(2, fails, tmp_path, {"store": store, "open": "error"}, {}):
        assert kind == "StoreError"
        assert "was not closed by its last run" in said
    found = ran(2, tmp_path, 1, store)
    assert found.before == [b"", b""]
    assert "was not closed by rank 1 (of 2); all ranks: started empty, because it has" in found.said[0][0]
    assert ran(2, tmp_path, 0, store, open="error").before == found.after
    found = ran(2, tmp_path, 1, store, open="fresh")
    assert found.before == [b"", b""]
    assert ran(2, tmp_path, 0, store).before == found.after


def test_a_share_of_an_earlier_run_or_of_another_rank_is_not_used_with_those_of_the_last(tmp_path: Path) -> None:
    shares, kept = tmp_path / "rows" / "ranks", tmp_path / "kept"
    share = shares / "1-of-2"
    ran(2, tmp_path, 2)
    shutil.copytree(share, kept)
    ran(2, tmp_path, 1)
    for why in (
        "was closed by its ranks at different steps; all ranks: started empty",
        "was not closed by rank 1 (of 2)",  # as many writes as those of rank 0, in another run
    ):
        shutil.rmtree(share)
        shutil.copytree(kept, share)
        found = ran(2, tmp_path, 2)
        assert found.before == [b"", b""]
        assert why in found.said[0][0]
    for name, other in (("0-of-2", "aside"), ("1-of-2", "0-of-2"), ("aside", "1-of-2")):
        (shares / name).rename(shares / other)
    found = ran(2, tmp_path)
    assert found.before == [b"", b""]
    assert "was not closed by ranks 0, 1 (of 2)" in found.said[0][0]


@pytest.mark.parametrize("store", [slowly("host"), "ssd"])
@pytest.mark.parametrize(("before", "now"), [slowly(1, 2), (2, 3), slowly(3, 2), (2, 1)])
def test_another_number_of_ranks_begins_with_the_snapshot_of_the_live_step(
    tmp_path: Path, store: str, before: int, now: int
) -> None:
    saved = alone(tmp_path, store, 2, "base")
    if before > 1:
        ran(before, tmp_path, 0, store)
    found = ran(now, tmp_path, 2, store)
    assert together(found.before, saved)
    whose = "one process" if before == 1 else f"{before} ranks"
    assert f"has rows of {whose}; restored snapshot 'base', of step 2" in found.said[0][0]
    assert ran(now, tmp_path, 0, store).before == found.after
    if now > 1:
        assert sorted(os.listdir(tmp_path / "rows" / "ranks")) == [f"{rank}-of-{now}" for rank in range(now)]


@in_memory_or_slowly_on_disk
@pytest.mark.parametrize(("before", "now"), [slowly(1, 2), (2, 3), slowly(2, 1)])
def test_rows_that_no_snapshot_has_are_not_lost_to_another_number_of_ranks_unless_these_did_not_close(
    tmp_path: Path, store: str, before: int, now: int
) -> None:
    saved = alone(tmp_path, store, 2, "base")
    last = ran(before, tmp_path, 1, store).after
    whose = "one process" if before == 1 else "2 ranks"
    given: Any = tmp_path, {"store": store}, {}
    for kind, said in [fails(None, *given)] if now == 1 else run_kept(now, fails, *given):
        assert kind == "StoreError"
        assert "has live rows from step 3, and no snapshot of these rows: the last is 'base', from step 2" in said
        assert f"Only a run with {whose} can open the live rows" in said
    again = ran(before, tmp_path, 1, store, killed=0)
    assert again.before == last
    if before > 1:  # the rows are lost
        found = ran(now, tmp_path, 0, store)
        assert together(found.before, saved)
        assert "was not closed by rank 0 (of 2); restored snapshot 'base', of step 2" in found.said[0][0]


def test_snapshots_may_be_on_another_disk_than_the_shares_which_know_where(tmp_path: Path) -> None:
    place, live = tmp_path / "snapshots", tmp_path / "live"
    saved = alone(live, "host", 2, "base", snapshot_path=place)
    assert together(ran(2, live, 1, snapshot_path=place, killed=0).before, saved)
    assert together(ran(2, live).before, saved)
    shutil.rmtree(live)
    found = ran(3, live, 1, snapshot_path=place)
    assert together(found.before, saved)
    assert ran(3, live, snapshot_path=place).before == found.after


def test_snapshots_that_only_one_rank_sees_and_arguments_that_differ_are_refused_on_all(tmp_path: Path) -> None:
    for kind, said in run_kept(2, fails, tmp_path / "0", {}, {1: {"path": tmp_path / "1"}}):
        assert kind == "StoreError"
        assert said.startswith("rank 1: ")
        assert "is another folder here than on rank 0" in said
        assert "Set snapshot_path" in said
    assert not [name for name in os.listdir(tmp_path / "0" / "rows") if name.startswith(".token")]
    for kind, said in run_kept(2, fails, tmp_path, {}, {1: {"seed": 7, "capacity": 9}}):
        assert kind == "GroupError"
        assert "rank 0: seed=0, capacity=None; rank 1: seed=7, capacity=9; pass the same values on all" in said
    assert all(rows for _, rows, _ in run_kept(2, mixed_stores, tmp_path))


def mixed_stores(world: World, folder: Path) -> Any:
    return trained(world, folder, STORES[world.rank], 1)


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
    rows = run_kept(2, closes_alone, tmp_path)
    assert ran(2, tmp_path).before == rows


@on_ranks(2, run_kept)
def test_a_second_embedding_of_a_process_waits_until_the_first_is_closed(world: World, tmp_path: Path) -> None:
    first = opened(world, tmp_path)
    step(first, 0)
    rows, second = own_rows(first), opened(world, tmp_path)
    assert "call its close()" in error_of(second.size, StoreError)
    said = error_of(lambda: opened(None, tmp_path).size(), StoreError)
    assert "another embedding with this name in this process has" in said
    world.all_gather_object("tried on all", lambda: b"")
    first.close()
    assert own_rows(second) == rows
    second.close()
    world.all_gather_object("closed on all", lambda: b"")
    assert read_clean_markers(tmp_path / "rows", 2).keys() == {0, 1}


def test_the_shell_saves_what_ranks_closed_for_any_number_of_ranks(tmp_path: Path, capsys: Capture) -> None:
    last = ran(3, tmp_path, 3)
    cli = Cli(tmp_path / "rows", capsys)
    saved = cli.json("save", "last")
    stat = cli.json("store stat")
    assert (stat["state"], stat["live"], stat["ranks"]) == ("closed", "ranks", 3)
    assert (stat["rows"], stat["step"], stat["base"]) == (saved["rows"], 3, "last")
    assert stat["restart"]["from"] == "live"
    assert together(ran(2, tmp_path, 1, "ssd").before, b"".join(last.after))
    again = Cli(tmp_path / "rows" / "ranks" / "0-of-2", capsys)
    assert "has only one rank's shard: give the store folder" in again.fails("save", "half")
    cli.json("load", "last")
    assert together(ran(2, tmp_path).before, b"".join(last.after))


def test_the_shell_tells_where_ranks_did_not_all_close(tmp_path: Path, capsys: Capture) -> None:
    alone(tmp_path, "host", 2, "base")
    ran(2, tmp_path, 3, killed=1)
    cli = Cli(tmp_path / "rows", capsys)
    stat = cli.json("store stat")
    assert (stat["state"], stat["ranks"], stat["rows"], stat["step"]) == ("unclean", 2, None, 5)
    restart = stat["restart"]
    assert (restart["from"], restart["snapshot"], restart["lost_steps"]) == ("snapshot", "base", 3)
    assert "some shards were not closed" in cli.fails("save", "more")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@on_ranks(2, run_kept)
def test_a_load_that_fails_on_one_rank_amid_its_changes_closes_the_rows_of_all(world: World, tmp_path: Path) -> None:
    """Rank 1 fails while the loaded rows take the place of those before."""
    said = remarks_of()
    embedding = opened(world, tmp_path, "ssd")
    step(embedding, 0)
    embedding.save_snapshot("base")
    saved = own_rows(embedding)
    step(embedding, 1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(StoreFolder, "replace_live_rows", full_disk)
        with pytest.raises(Exception, match="No space left"):
            embedding.load_snapshot("base")
    with pytest.raises(ClosedError, match="create it again"):
        embedding.get([1], 0)
    with opened(world, tmp_path, "ssd") as again:
        assert own_rows(again) == saved
    assert any("create it again, it recovers from snapshot 'base'" in line for line in said)


def saves_some_and_loads_one(world: World | None, folder: Path, place: Path) -> None:
    with opened(world, folder, snapshot_path=place) as embedding:
        for number, (name, kind) in enumerate((("a", "full"), ("b", "incremental"), ("c", "full"), ("d", "full"))):
            step(embedding, number)
            embedding.save_snapshot(name, kind)
        embedding.load_snapshot("b")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shell_keeps_snapshots_that_live_rows_elsewhere_need(tmp_path: Path, capsys: Capture, ranks: int) -> None:
    live, place = tmp_path / "live", tmp_path / "place"
    if ranks == 1:
        saves_some_and_loads_one(None, live, place)
    else:
        run_kept(2, saves_some_and_loads_one, live, place)
    store, snapshots = Cli(live / "rows", capsys), Cli(place / "rows", capsys)
    why = ": recovery needs it\n"
    for cli in (store, snapshots):
        would = cli.json("prune", "--keep-last", "1", "--dry-run")
        assert (would["removed"], would["kept_for_live_rows"]) == (["c"], ["a", "b"])
        said = cli.says("prune", "--keep-last", "1", "--dry-run")
        assert said.startswith(f"would remove c\nwould keep a{why}would keep b{why}1 of 4 snapshots")
    assert snapshots.says("prune", "--keep-last", "1").startswith(f"removed c\nkept a{why}kept b{why}1 of 4 snapshots")
    for cli in (store, snapshots):
        assert cli.json("prune", "--keep-last", "1")["kept"] == ["a", "b", "d"]
        assert "it is the recovery snapshot of live rows" in cli.fails("merge", "d", "b", "--overwrite")
    if ranks == 1:  # a store folder that is gone keeps no snapshot
        shutil.rmtree(live)
        assert snapshots.json("prune", "--keep-last", "1")["removed"] == ["a", "b"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shell_loads_no_rows_beside_snapshots_of_another_store(tmp_path: Path, capsys: Capture, ranks: int) -> None:
    live, place = tmp_path / "live", tmp_path / "place"
    saved = alone(live, "host", 2, "base", snapshot_path=place)
    rows = ran(2, live, 1, snapshot_path=place).after if ranks == 2 else []
    said = Cli(place / "rows", capsys).fails("load", "base")
    assert f"live rows: {str(live / 'rows')!r}" in said
    assert not (place / "rows" / "live").exists()
    if ranks == 2:
        assert ran(2, live, snapshot_path=place).before == rows
    Cli(live / "rows", capsys).json("load", "base")
    assert alone(live, "host", 0, None, snapshot_path=place) == saved


def opened_by_one(world: World, folder: Path) -> None:
    """Rank 0 has closed its share, and rank 1 has not."""
    embedding = opened(world, folder)
    step(embedding, 0)
    if world.rank == 0:
        embedding.close()
        for way in ("resume", "fresh"):
            with pytest.raises(StoreError, match="the shard of rank 1 of 2, is in use by process"):
                opened(None, folder, open=way).size()
    world.all_gather_object("tried", lambda: b"")
    embedding.close()


def test_a_share_that_a_process_has_open_yet_is_not_given_up(tmp_path: Path) -> None:
    run_kept(2, opened_by_one, tmp_path)
    assert all(ran(2, tmp_path).before)


def saves_and_loses_the_snapshot(world: World, folder: Path) -> None:
    with opened(world, folder) as embedding:
        step(embedding, 0)
        embedding.save_snapshot("a")
        embedding.put([7], torch.full((1, 5), 2.0), 0)
        save_rows([embedding], [folder / "checkpoint" / "b"])
        embedding.table_handle().snapshot_manager.remove_failed_snapshot("b")  # as if the checkpoint then failed


def test_rows_of_a_snapshot_that_was_removed_are_not_taken_for_those_before(tmp_path: Path) -> None:
    run_kept(2, saves_and_loses_the_snapshot, tmp_path)
    with pytest.raises(StoreError, match="from step 1, and no snapshot of these rows"):
        opened(None, tmp_path).size()


def other_places(world: World, folder: Path) -> Any:
    """The hosts give ranks in another order than before."""
    return trained(world, folder / f"{world.size - 1 - world.rank}", "host", 1, snapshot_path=folder / "shared")


def test_older_shares_of_a_host_do_not_hide_those_of_the_last_run(tmp_path: Path) -> None:
    run_kept(2, own_disks, tmp_path, 1)
    run_kept(2, other_places, tmp_path)
    places = {rank: {"path": tmp_path / f"{rank}"} for rank in range(3)}
    for _, said in run_kept(3, fails, tmp_path, {"snapshot_path": tmp_path / "shared"}, places):
        assert "has live rows from step 1, and no snapshot of these rows" in said
        assert "Only a run with 2 ranks" in said


def chain_of_two(world: World, folder: Path) -> bytes:
    embedding = opened(world, folder, "ssd")
    for number, kind in enumerate(("full", "incremental")):
        step(embedding, number)
        embedding.save_snapshot(f"s{number}", kind)
    rows = own_rows(embedding)
    step(embedding, 2)
    left_open(embedding)
    embedding.close()
    return rows


def test_ranks_go_back_to_no_snapshot_that_lacks_a_row_or_a_file(tmp_path: Path) -> None:
    saved = run_kept(2, chain_of_two, tmp_path)
    base = tmp_path / "rows" / "snapshots" / "s1"
    change(base, lambda content: content.update(rows=content["rows"] + 1))
    for kind, said in run_kept(2, fails, tmp_path, {"store": "ssd"}, {}):
        assert kind == "SnapshotError"
        assert "rows instead of" in said
    change(base, lambda content: content.update(rows=content["rows"] - 1))
    lacking = sorted(base.with_name("s0").rglob("bucket-*-*.npy"))[3]
    aside = lacking.rename(tmp_path / "aside")
    one, other = run_kept(2, fails, tmp_path, {"store": "ssd"}, {})
    assert one == other
    assert one[0] == "SnapshotError"
    assert "damaged: No such file" in one[1]
    aside.rename(lacking)
    again = ran(2, tmp_path, 0, "ssd")
    assert again.before == saved
    assert again.said[0][0].endswith("are lost (steps 3 to 3)")  # the live rows were not replaced before the refusal


def test_one_process_takes_no_rows_of_ranks_whose_shares_are_elsewhere(tmp_path: Path, capsys: Capture) -> None:
    place, live = tmp_path / "snapshots", tmp_path / "live"
    alone(live, "host", 2, "base", snapshot_path=place)
    rows = ran(2, live, 1, snapshot_path=place).after
    (live / "rows" / "ranks").rename(tmp_path / "of another host")
    with pytest.raises(StoreError, match=r"live rows of 2 ranks, and none of their shards is here\. Open the store"):
        opened(None, live, snapshot_path=place).size()
    for folder in (live, place):
        cli = Cli(folder / "rows", capsys, "store")
        found = cli.json("stat")
        assert (found["state"], found["restart"]["from"]) == ("elsewhere", "elsewhere")
        assert "on other hosts; a single process must load a snapshot first" in cli.says("stat")
    (tmp_path / "of another host").rename(live / "rows" / "ranks")
    assert Cli(live / "rows", capsys, "store").json("stat")["restart"]["from"] == "live"
    assert ran(2, live, snapshot_path=place).before == rows


def killed_before_the_note(world: World, folder: Path) -> None:
    """Ranks open the rows of another number of ranks, and rank 0 is killed before it notes that they are theirs."""
    if world.rank == 0:
        SharedFolder.begin = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with pytest.raises(GroupError):
        opened(world, folder).size()


def test_a_kill_as_other_ranks_take_rows_over_leaves_what_one_process_goes_on_from(tmp_path: Path) -> None:
    rows = alone(tmp_path, "host", 2, "base")
    ran(2, tmp_path, 1, killed=1)
    with started(3, killed_before_the_note, tmp_path) as group:
        group[0][0].wait()
        for _, pipe in group[1:]:
            answer(pipe)
    assert ran(1, tmp_path).before == [rows]


def test_a_table_that_the_shell_loads_goes_back_to_the_snapshot_of_ranks(tmp_path: Path, capsys: Capture) -> None:
    place, live = tmp_path / "snapshots", tmp_path / "live"
    alone(live, "host", 2, "base", snapshot_path=place)
    rows = ran(2, live, 1, snapshot_path=place).after
    cli = Cli(live / "rows", capsys)
    cli.json("save", "later")
    cli.json("load", "base", "--table", "0")
    embedding = opened(None, live, snapshot_path=place)
    step(embedding, 5)
    left_open(embedding)
    embedding.close()
    assert together(rows, ran(1, live, snapshot_path=place).before[0])


def test_a_fresh_open_forgets_ranks_and_their_snapshot_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_kept(2, chain_of_two, tmp_path)
    seen = []
    write = StoreFolder.change

    def watched(folder: StoreFolder, **fields: Any) -> None:
        write(folder, **fields)
        file = GroupFile(FolderState(tmp_path / "rows"))  # as a kill here would leave it
        seen.append(file.choose_entries()[file.store_id])

    monkeypatch.setattr(StoreFolder, "change", watched)
    with opened(None, tmp_path, open="fresh") as embedding:
        assert embedding.size() == 0
    last = Snapshot.open(tmp_path / "rows" / "snapshots" / "s1").manifest.id
    began = seen.index(Entry(EMPTY_ID))
    assert {*seen[:began]} <= {Entry(last)}
    assert {entry.snapshot for entry in seen[began:]} == {EMPTY_ID}


def test_the_shell_says_which_rank_has_a_row(tmp_path: Path, capsys: Capture) -> None:
    ran(2, tmp_path, 1)
    shares = [Cli(tmp_path / "rows" / "ranks" / f"{rank}-of-2", capsys) for rank in range(2)]
    for key in range(3):
        arguments = ("store get", str(key), "--table", "0")
        owner = int(find_owners(np.zeros(1, np.uint32), np.array([key], np.uint64), 2)[0])
        assert shares[owner].json(*arguments)["key"] == key
        said = shares[1 - owner].fails(*arguments)
        assert f"rank {owner} of 2 owns this row: give that rank's shard, '{tmp_path}" in said
