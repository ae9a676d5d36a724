"""The command line on the folder of a model: all stores at the same step, closed or in use, and one that leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from support.embeddings import make
from support.forked import with_pipe
from support.killed import copy_as_killed, holds, step
from support.ranks import run_ranks
from support.records import last_snapshot
from support.shell import Cli, command
from support.stores import options
from support.together import Model, keep_open, killed, killed_at, played
from tierbed import MultiTableEmbedding, StoreError
from tierbed.distributed import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.control.client import request_status
from tierbed.snapshots.files.format import read_snapshot_id
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile

STORES = ("host", "ssd")
HOSTS = ("host", "host")
CLOSED = "step 2; save two; step 1; close"
Shell = Callable[..., Cli]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    """`tierbed snapshot` on the folder of a name, by default that of the model."""
    return lambda name="": Cli(tmp_path / name, capsys)


@pytest.fixture
def store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return lambda name: Cli(tmp_path / name, capsys, "store")


def alone(path: Path, name: str, world: World | None = None) -> MultiTableEmbedding:
    embedding = make(options("host", path), "adagrad", name=name, tables=1, seed=0, world=world)
    keep_open(embedding)
    return embedding


def at(*paths: Path) -> list[int]:
    found = []
    for path in paths:
        model = Model(path, STORES)
        found += model.at()
        model.steps(1)
    return found


def steps_of(path: Path) -> dict[str, list[tuple[str, int]]]:
    found = {name: list_snapshots(path / name / "snapshots").snapshots for name in "ab"}
    return {name: [(one.name, one.description["step"]) for one in of] for name, of in found.items()}


def test_closed_stores_are_saved_listed_verified_pruned_and_loaded_together(tmp_path: Path, shell: Shell) -> None:
    killed(played, tmp_path, STORES, CLOSED)
    cli = shell()
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
    for pruned in cli.json("prune", "--keep-last", "1")["stores"].values():
        assert (pruned["kept"], pruned["kept_for_live_rows"]) == (["two", "three"], ["two"])
    assert "three of a: " in cli.says("load", "three")
    assert "exists" in cli.fails("save", "three")


def in_shell(words: list[str | Path], begin: Callable[[], None]) -> None:
    begin()
    assert command(*words) == 0


def test_a_load_that_is_killed_between_two_stores_is_finished(tmp_path: Path, shell: Shell) -> None:
    killed(played, tmp_path / "made", STORES, CLOSED)
    for number in range(1, 60):
        path = tmp_path / str(number)
        copy_as_killed(tmp_path / "made", path)
        if killed_at(path, "rename", number, in_shell, ["snapshot", "load", path, "two"]) == "done":
            break
    assert number > 4
    steps = killed(at, *(tmp_path / str(one) for one in range(1, number + 1)))
    assert {*zip(steps[::2], steps[1::2], strict=True)} <= {(3, 3), (2, 2)}
    shell("made/a").json("load", "two")  # of this store alone
    assert killed(at, tmp_path / "made") == [2, 3]
    assert killed(at, tmp_path / "made") == [2, 2]  # of step 3 b has no snapshot


def trains(path: Path, pipe: Connection) -> None:
    """Steps and a save of all at 4; then as many steps as are requested, until it is killed."""
    model = Model(path, STORES)
    model.steps(4)
    model.save_snapshot("four")
    pipe.send(model.at())
    while count := pipe.recv():
        model.steps(count)
        pipe.send(model.counts())
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_live_trainer_saves_prunes_and_reads_for_others(tmp_path: Path, shell: Shell, store: Shell) -> None:
    def after(steps: int) -> list[int]:
        pipe.send(steps)
        counts: list[int] = pipe.recv()
        return counts

    child, pipe = with_pipe(trains, tmp_path)
    with child, pipe:
        assert pipe.recv() == [4, 4]
        for step_count, name in ((5, "a"), (6, "b")):
            assert after(1) == [step_count] * 2
            shell(name).json("save", f"alone-{name}")
        for name in "ab":
            assert shell(name).json("prune", "--keep-last", "1")["kept_for_live_rows"] == ["four"]
        row = store("a").json("get", "5")
        assert (row["key"], len(row["embedding"]), row["updates"] > 0) == (5, 5, True)
        store("a").fails("get", "12345678", code=4)
        assert steps_of(tmp_path) == {"a": [("four", 4), ("alone-a", 5)], "b": [("four", 4), ("alone-b", 6)]}
        copy_as_killed(tmp_path, tmp_path / "killed")
        assert after(1) == [7, 7]
        assert set(shell().json("save", "seven", "--kind", "incremental")["stores"]) == {"a", "b"}
        assert after(2) == [9, 9]
        pipe.send(0)
        child.wait()
    assert killed(at, tmp_path / "killed") == [4, 4]
    assert killed(at, tmp_path) == [7, 7]


def test_stores_that_train_apart_are_found_saved_and_loaded(tmp_path: Path, shell: Shell, store: Shell) -> None:
    for name in "ab":
        with alone(tmp_path, name) as embedding:
            step(embedding)
    for folder in ("pipeline/incoming/data", "pipeline/snapshots", "database"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "database" / "LOCK").touch()
    cli = shell()
    assert set(cli.json("save", "one")["stores"]) == {"a", "b"}
    assert (tmp_path / "pipeline" / "incoming" / "data").exists()
    assert steps_of(tmp_path) == {name: [("one", 1)] for name in "ab"}
    with alone(tmp_path, "a") as embedding:
        step(embedding)
    fresh = options("host", tmp_path, open="fresh")
    with make(fresh, "adagrad", name="b", tables=1, dtype=torch.bfloat16) as embedding:
        step(embedding)
    assert "has rows of dtype float32" in cli.fails("load", "one")  # of b, before a has changed
    assert store("a").json("stat")["step"] == 2


def pair(path: Path, names: str) -> list[MultiTableEmbedding]:
    members = [alone(path, name) for name in names]
    train_together(members)
    return members


def two_models(path: Path) -> None:
    for names, saves in (("ab", 1), ("cd", 4)):
        members = pair(path, names)
        for number in range(saves + 1):
            for member in members:
                step(member)
            if number < saves:
                save_together(World.single(), [m.table_handle().snapshot_manager for m in members], f"s{number}")
        for member in members:
            member.close()


def test_two_models_of_one_folder_are_loaded_each_with_its_own_instant(tmp_path: Path, shell: Shell) -> None:
    killed(two_models, tmp_path)
    files = {name: GroupFile(FolderState(tmp_path / name)).path for name in "abcd"}
    assert files["a"] == files["b"] != files["c"] == files["d"]
    shell().json("load", "s0")
    for name, file in files.items():
        after = GroupFile(FolderState(tmp_path / name))
        assert (after.path, after.last_snapshot) == (file, "s0")
    assert [member.metrics()["table"]["step"] for names in ("ab", "cd") for member in pair(tmp_path, names)] == [1] * 4


def test_a_store_that_another_process_has_keeps_all_as_they_were(tmp_path: Path, shell: Shell) -> None:
    killed(played, tmp_path, STORES, CLOSED)
    cli = shell()
    cli.json("save", "three")
    before = {name: read_snapshot_id(tmp_path / name / "snapshots" / "two") for name in "ab"}
    with StoreFolder(tmp_path / "b"):  # as a command has it, which answers nobody
        for command, *more in (["save", "two", "--overwrite"], ["load", "two"], ["prune", "--keep-last", "1"]):
            assert f"b' is in use by process {os.getpid()}" in cli.fails(command, *more, code=3)
    assert {name: read_snapshot_id(tmp_path / name / "snapshots" / "two") for name in "ab"} == before
    (tmp_path / "b" / "snapshots" / ".tmp-.two").touch()  # nothing can be renamed to it
    said = cli.fails("prune", "--keep-last", "1")
    assert "two' cannot be removed" in said
    assert "Removed before that: a/two" in said


def trains_in_steps(path: Path, pipe: Connection) -> None:
    """Stays in a step of a until a signal; then opens c in the middle of a step that another process waits for."""
    model = Model(path, STORES)
    model.steps(4)
    model.save_snapshot("all")
    model.steps(1)
    first = model.members[0]
    ids = torch.arange(3)
    for _ in pipe.recv():
        pinned = first.pin([Lookup(ids, torch.zeros_like(ids))])
        pipe.send("in a step")
        if pipe.recv() == "open c":
            assert first.group is not None
            while not first.group.gate.has_reader:
                sleep(0.001)
            opened = alone(path, "c")
            step(opened)
        pinned.update([torch.ones_like(pinned.gather(0))])
    pipe.send("done")
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_closed_store_beside_a_live_trainer(tmp_path: Path, shell: Shell) -> None:
    child, pipe = with_pipe(trains_in_steps, tmp_path)
    cli = shell()
    with child, pipe:
        with alone(tmp_path, "c") as here:
            step(here)
            here.save_snapshot("all")
            pipe.send(["a step", "and one"])
            assert pipe.recv() == "in a step"
            said = cli.fails("save", "new", code=3)
            assert f"a' in process {child.pid}, " in said
            assert f"c' in process {os.getpid()}; save each" in said
        kept = read_snapshot_id(tmp_path / "c" / "snapshots" / "all")
        assert "did not finish its current step" in cli.fails("save", "all", "--overwrite", "--timeout", "0.3")
        assert read_snapshot_id(tmp_path / "c" / "snapshots" / "all") == kept
        assert f"in use by process {child.pid}" in cli.fails("load", "all", code=3)
        while request_status(tmp_path / "a")["saving"] is not None:  # type: ignore[index]
            pass
        pipe.send("go on")
        assert pipe.recv() == "in a step"
        pipe.send("open c")
        said = cli.fails("save", "new")
        assert f"'new' was saved for a, b, but not for c: store folder '{tmp_path}/c' is in use by process" in said
        assert pipe.recv() == "done"
        assert set(cli.json("save", "newer")["stores"]) == set("abc")
        for name, pruned in cli.json("prune", "--keep-last", "1")["stores"].items():
            assert pruned["removed"] == (["all"] if name == "c" else ["all", "new"])
            assert pruned["kept_for_live_rows"] == []  # the record names "newer" since
        pipe.send("end")
        child.wait()


def alone_at(path: Path, name: str, more: int = 0) -> int:
    """The step that a store opens at by itself. `more` steps follow."""
    embedding = alone(path, name)
    found = int(embedding.metrics()["table"]["step"])
    holds(embedding, found)
    for _ in range(more):
        step(embedding)
    return found


def at_all(path: Path) -> list[int]:
    return Model(path, HOSTS).at()


def together(cli: Cli) -> Any:
    return cli.json("stat")["together"]


def test_a_closed_store_leaves_with_its_live_rows_and_may_come_back(tmp_path: Path, store: Shell) -> None:
    killed(played, tmp_path, HOSTS, CLOSED)
    assert store("a").says("detach") == "detached from b\n"
    assert (together(store("a")), together(store("b"))) == ([], [])
    assert "live rows of step 3; after a kill, it restarts from two of step 2" in store("b").says("stat")
    assert killed(alone_at, tmp_path, "a", 2) == 3
    assert killed(alone_at, tmp_path, "b", 1) == 3  # beside what was killed
    assert (killed(alone_at, tmp_path, "a"), killed(alone_at, tmp_path, "b")) == (2, 2)
    assert store("b").json("detach") == {"detached": False, "others": [], "problem": None}
    assert store("a").says("detach") == "nothing to detach: this store is not in a training group\n"
    killed(played, tmp_path, HOSTS, "step 1; save again; step 1")
    assert together(store("a")) == ["b"]
    assert killed(at_all, tmp_path) == [3, 3]


def test_of_a_killed_run_each_keeps_the_last_common_step(tmp_path: Path, store: Shell) -> None:
    killed(played, tmp_path, HOSTS, "step 2; save two; step 1; b save three; step 1; b close")
    assert store("a").json("detach")["detached"]
    with pytest.raises(StoreError, match=r"was not closed by its last run|were not closed by their last run"):
        make(options("host", tmp_path, open="error"), "adagrad", name="b", tables=1).size()
    assert (killed(alone_at, tmp_path, "a"), killed(alone_at, tmp_path, "b")) == (2, 2)


def test_a_copy_becomes_a_store_of_its_own(tmp_path: Path, store: Shell) -> None:
    killed(played, tmp_path, HOSTS, CLOSED)
    copy = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "a", copy / "a")
    with pytest.raises(StoreError, match=r"is a copy of .*`tierbed store detach`"):
        alone_at(copy, "a")
    said = store("elsewhere/a").says("detach")
    assert "is a copy of" in said
    assert "store detach" not in said
    assert killed(alone_at, copy, "a", 1) == 3
    assert killed(alone_at, copy, "a") == 2
    assert (together(store("elsewhere/a")), together(store("a"))) == ([], ["b"])
    assert killed(at_all, tmp_path) == [3, 3]
    assert killed(together_with_the_copy, tmp_path, copy) == [3, 2]
    assert killed(at_all, tmp_path) == [3, 3]


def together_with_the_copy(path: Path, copy: Path) -> list[int]:
    """Rows of the copy, and of what it is a copy of, are stores of one group that nobody takes for each other."""
    model = Model([path, None, copy], ("host", "device", "host"))
    model.members[2] = alone(copy, "a")
    return [int(one.metrics()["table"]["step"]) for one in (model.members[0], model.members[2])]


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 20)])
def test_stores_whose_record_is_lost_keep_rows_and_snapshots(tmp_path: Path, store: Shell, damage: Any) -> None:
    killed(played, tmp_path, HOSTS, CLOSED)
    (record,) = (file for file in tmp_path.glob("GROUP-*") if file.suffix != ".LOCK")
    damage(record)
    for name in "ab":
        with pytest.raises(StoreError, match=r"missing or damaged.*`tierbed store detach`"):
            alone_at(tmp_path, name)
    said = store("a").json("detach")
    assert said["detached"]
    assert "missing or damaged" in said["problem"]
    assert last_snapshot(tmp_path / "a") == "two"
    assert killed(alone_at, tmp_path, "a", 1) == 3
    assert killed(alone_at, tmp_path, "a") == 2
    assert command("store", "detach", tmp_path / "b") == 0
    assert killed(at_all, tmp_path) == [2, 3]


def test_a_store_leaves_another_that_is_lost(tmp_path: Path, store: Shell) -> None:
    killed(played, tmp_path, HOSTS, "step 2; save two; step 1")
    (tmp_path / "b").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="is missing"):
        alone_at(tmp_path, "a")
    assert store("a").says("detach") == "detached from b\n"
    assert killed(alone_at, tmp_path, "a") == 2
    (tmp_path / "away").rename(tmp_path / "b")
    assert killed(alone_at, tmp_path, "b") == 2


def trains_b(path: Path, pipe: Connection) -> None:
    embedding = alone(path, "b")
    step(embedding)
    pipe.send(True)
    pipe.recv()


def test_a_group_that_is_trained_is_left_as_it_is(tmp_path: Path, store: Shell) -> None:
    killed(played, tmp_path, HOSTS, CLOSED)
    child, pipe = with_pipe(trains_b, tmp_path)
    with child, pipe:
        assert pipe.recv()
        said = store("a").fails("detach")
        assert f"process {child.pid} trains embeddings of the group 'a', 'b'" in said
        assert f"in use by process {child.pid}" in store("b").fails("detach", code=3)
        pipe.send(True)
        child.wait()
    assert together(store("a")) == ["b"]


def ranks_close(world: World, path: Path) -> None:
    model = Model(path, HOSTS, world)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1)
    model.close()


def ranks_at(world: World, path: Path) -> list[int]:
    found = []
    for name in "ab":
        with alone(path, name, world) as embedding:
            found.append(step(embedding) - 1)
    return found


def test_rows_that_ranks_share_leave_as_those_of_one_process(tmp_path: Path, store: Shell) -> None:
    run_ranks(2, ranks_close, tmp_path)
    a, b = store("a").json("stat")["group"]
    assert (a["live"], a["step"], b["common"], b["common_step"]) == (True, 3, "two", 2)
    assert store("a").says("detach") == "detached from b\n"
    assert (together(store("a")), together(store("b"))) == ([], [])
    for expected in (3, 4):
        assert run_ranks(2, ranks_at, tmp_path) == [[expected] * 2] * 2


@pytest.mark.parametrize("plan", [CLOSED, pytest.param("step 2; save two; step 1", marks=pytest.mark.slow)])
def test_a_kill_at_any_write_leaves_it_in_the_group_or_out_of_it(tmp_path: Path, store: Shell, plan: str) -> None:
    expected, seen = 3 if plan == CLOSED else 2, set()
    killed(played, tmp_path / "made", HOSTS, plan)
    for number in range(1, 20):
        path = tmp_path / str(number)
        copy_as_killed(tmp_path / "made", path)
        said = killed_at(path, "rename", number, in_shell, ["store", "detach", path / "a"])
        seen.add(len(together(store(f"{number}/a"))))
        assert [killed(alone_at, path, name) for name in "ba"] == [expected] * 2
        assert killed(at_all, path) == [expected] * 2
        if said == "done":
            break
    assert number > 3
    assert seen == {0, 1}


def test_stat_prints_what_the_record_says_of_each(tmp_path: Path, store: Shell) -> None:
    killed(played, tmp_path, HOSTS, "step 2; save two; step 1; b save three; a close")
    cli = store("a")
    a, b = cli.json("stat")["group"]
    assert (a["name"], a["live"], a["snapshot"], a["step"]) == ("a", True, None, 3)
    assert (b["name"], b["live"], b["snapshot"], b["step"]) == ("b", False, "three", 3)
    assert [(one["common"], one["common_step"]) for one in (a, b)] == [("two", 2)] * 2
    said = cli.says("stat")
    assert "record of a" in said
    assert "live rows of step 3; after a kill, it restarts from two of step 2" in said
    assert "snapshot three of step 3; after a kill, it restarts from two of step 2" in said
    killed(alone_at, tmp_path, "a", 1)
    (a, b), restart = (cli.json("stat")[of] for of in ("group", "restart"))
    assert (a["live"], a["snapshot"], a["step"]) == (False, None, None)
    assert "rows that are not saved; after a kill, it restarts from two of step 2" in cli.says("stat")
    assert (restart["snapshot"], restart["step"]) == ("two", 2)
    shutil.rmtree(tmp_path / "b/snapshots/two")
    said = cli.says("stat")
    assert re.search(r"snapshot three of step 3; after a kill, it restarts from [0-9a-f]{32} \(missing\)", said)
    assert "'b' lacks snapshot 'two' (id " in said
