"""Which shares and which snapshot are those of the last run of ranks, and what takes neither away."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.forged import change
from support.live_rows import alone, fails, left_open, opened, own_disks, own_rows, ran, step, together, trained
from support.ranks import answer, run_ranks, started
from support.shell import Cli
from tierbed import GroupError, StoreError
from tierbed.distributed import World
from tierbed.embedding.state_dict.model_snapshots import save_rows
from tierbed.embedding.tables.shared_folder import SharedFolder
from tierbed.engine._core import owners
from tierbed.snapshots.files.reader import Snapshot
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile
from tierbed.snapshots.store.recovery_rule import EMPTY, Entry

Capture = pytest.CaptureFixture[str]


def saves_some_and_loads_one(world: World | None, folder: Path, place: Path) -> None:
    with opened(world, folder, snapshot_path=place) as embedding:
        for number, (name, kind) in enumerate((("a", "full"), ("b", "incremental"), ("c", "full"), ("d", "full"))):
            step(embedding, number)
            embedding.save_snapshot(name, kind)
        embedding.load_snapshot("b")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shell_keeps_the_snapshots_that_live_rows_elsewhere_go_back_to(
    tmp_path: Path, capsys: Capture, ranks: int
) -> None:
    live, place = tmp_path / "live", tmp_path / "place"
    if ranks == 1:
        saves_some_and_loads_one(None, live, place)
    else:
        run_ranks(2, saves_some_and_loads_one, live, place)
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
def test_the_shell_loads_no_rows_beside_snapshots_of_another_store_folder(
    tmp_path: Path, capsys: Capture, ranks: int
) -> None:
    live, place = tmp_path / "live", tmp_path / "place"
    saved = alone(live, "host", 2, "base", snapshot_path=place)
    rows = ran(2, live, 1, snapshot_path=place).after if ranks == 2 else []
    said = Cli(place / "rows", capsys).fails("load", "base")
    assert f"give the store folder, {str(live / 'rows')!r}" in said
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
    run_ranks(2, opened_by_one, tmp_path)
    assert all(ran(2, tmp_path).before)


def saves_and_loses_the_snapshot(world: World, folder: Path) -> None:
    with opened(world, folder) as embedding:
        step(embedding, 0)
        embedding.save_snapshot("a")
        embedding.put([7], torch.full((1, 5), 2.0), 0)
        save_rows([embedding], [folder / "checkpoint" / "b"])
        embedding.table_handle().snapshots.discard_rows("b")  # as where the checkpoint fails after that


def test_rows_of_a_snapshot_that_was_removed_are_not_taken_for_those_before(tmp_path: Path) -> None:
    run_ranks(2, saves_and_loses_the_snapshot, tmp_path)
    with pytest.raises(StoreError, match="of step 1, and no snapshot of them"):
        opened(None, tmp_path).size()


def other_places(world: World, folder: Path) -> Any:
    """The hosts give ranks in another order than before."""
    return trained(world, folder / f"{world.size - 1 - world.rank}", "host", 1, snapshot_path=folder / "shared")


def test_older_shares_of_a_host_do_not_hide_those_of_the_last_run(tmp_path: Path) -> None:
    run_ranks(2, own_disks, tmp_path, 1)
    run_ranks(2, other_places, tmp_path)
    places = {rank: {"path": tmp_path / f"{rank}"} for rank in range(3)}
    for _, said in run_ranks(3, fails, tmp_path, {"snapshot_path": tmp_path / "shared"}, places):
        assert "has live rows of 2 ranks, of step 1, and no snapshot of them" in said


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


def test_ranks_go_back_to_no_snapshot_that_lacks_a_row(tmp_path: Path) -> None:
    saved = run_ranks(2, chain_of_two, tmp_path)
    base = tmp_path / "rows" / "snapshots" / "s1"
    change(base, lambda content: content.update(rows=content["rows"] + 1))
    for kind, said in run_ranks(2, fails, tmp_path, {"store": "ssd"}, {}):
        assert kind == "SnapshotError"
        assert "rows instead of" in said
    change(base, lambda content: content.update(rows=content["rows"] - 1))
    again = ran(2, tmp_path, 0, "ssd")
    assert again.before == saved
    assert again.said[0][0].endswith("steps 3 to 3, is lost")  # the live rows had not been replaced before the refusal


def test_one_process_does_not_take_the_place_of_ranks_whose_shares_are_elsewhere(
    tmp_path: Path, capsys: Capture
) -> None:
    place, live = tmp_path / "snapshots", tmp_path / "live"
    alone(live, "host", 2, "base", snapshot_path=place)
    rows = ran(2, live, 1, snapshot_path=place).after
    (live / "rows" / "ranks").rename(tmp_path / "of another host")
    with pytest.raises(StoreError, match=r"live rows of 2 ranks, and none of their shards is here: open it where"):
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


def test_a_table_that_the_shell_loads_in_place_of_ranks_goes_back_to_their_snapshot(
    tmp_path: Path, capsys: Capture
) -> None:
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


def test_a_start_from_nothing_forgets_ranks_and_their_snapshot_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, chain_of_two, tmp_path)
    seen = []
    write = StoreFolder.change

    def watched(folder: StoreFolder, **fields: Any) -> None:
        write(folder, **fields)
        file = GroupFile(FolderState(tmp_path / "rows"))  # as a kill here would leave it
        seen.append(file.target()[file.store])

    monkeypatch.setattr(StoreFolder, "change", watched)
    with opened(None, tmp_path, open="fresh") as embedding:
        assert embedding.size() == 0
    last = Snapshot.open(tmp_path / "rows" / "snapshots" / "s1").manifest.id
    began = seen.index(Entry(EMPTY))
    assert {*seen[:began]} <= {Entry(last)}
    assert {entry.snapshot for entry in seen[began:]} == {EMPTY}


def test_the_shell_says_which_rank_has_a_row(tmp_path: Path, capsys: Capture) -> None:
    ran(2, tmp_path, 1)
    shares = [Cli(tmp_path / "rows" / "ranks" / f"{rank}-of-2", capsys) for rank in range(2)]
    for key in range(3):
        arguments = ("store get", str(key), "--table", "0")
        owner = int(owners(np.zeros(1, np.uint32), np.array([key], np.uint64), 2)[0])
        assert shares[owner].json(*arguments)["key"] == key
        said = shares[1 - owner].fails(*arguments)
        assert f"rank {owner} of 2 owns that row: give its shard, '{tmp_path}" in said
