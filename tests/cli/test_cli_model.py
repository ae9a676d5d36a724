"""The command line on the folder of a model: all stores at one instant, closed or in use."""

from __future__ import annotations

import os
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from support.forked import in_process, with_pipe
from support.shell import Cli
from support.together import Model, killed, killed_at
from tierbed.cli import main
from tierbed.snapshots import list_snapshots

STORES = ("host", "ssd")


def closed(path: Path) -> None:
    model = Model(path, STORES)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1)
    model.close()


def at(path: Path) -> list[int]:
    model = Model(path, STORES)
    found = model.at()
    model.steps(1)
    return found


def steps_of(path: Path) -> dict[str, list[tuple[str, int]]]:
    found = {name: list_snapshots(path / name / "snapshots").snapshots for name in "ab"}
    return {name: [(one.name, one.description["step"]) for one in of] for name, of in found.items()}


def test_closed_stores_are_saved_listed_verified_pruned_and_loaded_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(closed, tmp_path)
    cli = Cli(tmp_path, capsys)
    assert set(cli.json("save", "three")["stores"]) == {"a", "b"}
    assert steps_of(tmp_path) == {name: [("two", 2), ("three", 3)] for name in "ab"}
    listed = cli.json("list")["stores"]
    assert [one["name"] for one in listed["a"]] == [one["name"] for one in listed["b"]] == ["two", "three"]
    assert cli.json("verify")["sound"] == ["a/two", "a/three", "b/two", "b/three"]
    assert killed(at, tmp_path) == [3, 3]
    assert killed(at, tmp_path) == [3, 3]  # to the snapshots that the shell saved
    cli.json("load", "two")
    assert killed(at, tmp_path) == [2, 2]
    assert killed(at, tmp_path) == [2, 2]
    pruned = cli.json("prune", "--keep-last", "1")["stores"]
    assert pruned == {name: {**pruned[name], "kept": ["two", "three"], "kept_for_live_rows": ["two"]} for name in "ab"}
    assert "three of a: " in cli.says("load", "three")
    assert "exists" in cli.fails("save", "three")


def test_a_command_of_one_store_names_those_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(closed, tmp_path)
    for group, command, *more in (("store", "stat"), ("snapshot", "inspect", "two"), ("store", "get", "1")):
        said = Cli(tmp_path, capsys, group).fails(command, *more)
        assert f"give the path of one of its stores, '{tmp_path}/a', '{tmp_path}/b'" in said


def test_a_load_of_one_store_by_itself_is_where_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(closed, tmp_path)
    Cli(tmp_path / "a", capsys).json("load", "two")
    assert killed(at, tmp_path) == [2, 3]
    assert killed(at, tmp_path) == [2, 2]  # of step 3 b has no snapshot


def load_in_shell(path: Path, begin: object) -> None:
    begin()  # type: ignore[operator]
    with pytest.raises(SystemExit):
        main(["snapshot", "load", str(path), "two"])


def test_a_load_that_is_killed_between_two_stores_is_finished(tmp_path: Path) -> None:
    in_process(kills_of_a_load, tmp_path)


def kills_of_a_load(folder: Path) -> None:
    killed(closed, folder / "made")
    for number in range(1, 60):
        path = folder / str(number)
        shutil.copytree(folder / "made", path, ignore=shutil.ignore_patterns("SOCKET"))
        said = killed_at(path, "rename", number, load_in_shell, path)
        assert killed(at, path) in ([3, 3], [2, 2])
        if said == "done":
            break
    assert number > 4


def trains(path: Path, pipe: Connection) -> None:
    """Steps and a save of all at 4; then as many steps as it is told, until it is killed."""
    model = Model(path, STORES)
    model.steps(4)
    model.save_snapshot("four")
    pipe.send(model.at())
    while count := pipe.recv():
        model.steps(count)
        pipe.send([int(member.metrics()["table"]["step"]) for member in model.members])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_live_trainer_saves_prunes_and_reads_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child, pipe = with_pipe(trains, tmp_path)
    with child, pipe:
        assert pipe.recv() == [4, 4]
        for number, name in enumerate("ab"):
            pipe.send(1)
            assert pipe.recv() == [5 + number] * 2
            Cli(tmp_path / name, capsys).json("save", f"alone-{name}")
        for name in "ab":
            assert Cli(tmp_path / name, capsys).json("prune", "--keep-last", "1")["kept_for_live_rows"] == ["four"]
        row = Cli(tmp_path / "a", capsys, "store").json("get", "5")
        assert (row["key"], len(row["embedding"]), row["updates"] > 0) == (5, 5, True)
        Cli(tmp_path / "a", capsys, "store").fails("get", "12345678", code=4)
        pipe.send(0)
        child.wait()
    assert steps_of(tmp_path) == {"a": [("four", 4), ("alone-a", 5)], "b": [("four", 4), ("alone-b", 6)]}
    assert killed(at, tmp_path) == [4, 4]


def test_a_live_trainer_saves_all_at_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child, pipe = with_pipe(trains, tmp_path)
    with child, pipe:
        assert pipe.recv() == [4, 4]
        pipe.send(3)
        assert pipe.recv() == [7, 7]
        assert set(Cli(tmp_path, capsys).json("save", "seven", "--kind", "incremental")["stores"]) == {"a", "b"}
        pipe.send(2)
        assert pipe.recv() == [9, 9]
        pipe.send(0)
        child.wait()
    assert killed(at, tmp_path) == [7, 7]


def test_stat_tells_what_all_would_go_back_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(closed_and_saved, tmp_path)
    for name, other in ("ab", "ba"):
        cli = Cli(tmp_path / name, capsys, "store")
        found = cli.json("stat")
        assert found["together"] == [other]
        restart = found["restart"]
        assert (restart["from"], restart["snapshot"], restart["step"]) == ("snapshot", "two", 2)
        assert "two, of step 2" in cli.says("stat").replace("'", "")
    assert killed(at, tmp_path) == [2, 2]


def closed_and_saved(path: Path) -> None:
    model = Model(path, STORES)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1)
    model.members[1].save_snapshot("three")
    model.steps(1)
    model.members[0].save_snapshot("four")
