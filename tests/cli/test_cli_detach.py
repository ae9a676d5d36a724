"""`tierbed store detach`: a store leaves those that it was trained together with, and each keeps its rows."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from support.embeddings import make
from support.forked import with_pipe
from support.killed import holds, step
from support.ranks import run_ranks
from support.records import last_snapshot
from support.shell import Cli, command
from support.stores import options
from support.together import Model, keep_open, killed, killed_at, played
from tierbed import MultiTableEmbedding, StoreError
from tierbed.distributed import World

STORES = ("host", "host")
Store = Callable[[str], Cli]
CLOSED = "step 2; save two; step 1; close"


def alone(path: Path, name: str, world: World | None = None) -> MultiTableEmbedding:
    embedding = make(options("host", path), "adagrad", name=name, tables=1, seed=0, world=world)
    keep_open(embedding)
    return embedding


def at(path: Path, name: str, more: int = 0) -> int:
    """The step that a store opens at by itself. `more` steps follow."""
    embedding = alone(path, name)
    found = int(embedding.metrics()["table"]["step"])
    holds(embedding, found)
    for _ in range(more):
        step(embedding)
    return found


def at_all(path: Path) -> list[int]:
    return Model(path, STORES).at()


@pytest.fixture
def store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Store:
    return lambda name: Cli(tmp_path / name, capsys, "store")


def together(cli: Cli) -> list[str]:
    found = cli.json("stat")["together"]
    assert isinstance(found, list)
    return found


def test_a_closed_store_leaves_with_its_live_rows_is_recovered_alone_and_trains_together_again(
    tmp_path: Path, store: Store
) -> None:
    killed(played, tmp_path, STORES, CLOSED)
    assert store("a").says("detach") == "detached from b\n"
    assert (together(store("a")), together(store("b"))) == ([], [])
    assert "live rows of step 3; after a kill two of step 2" in store("b").says("stat")
    assert killed(at, tmp_path, "a", 2) == 3
    assert killed(at, tmp_path, "b", 1) == 3  # beside what was killed
    assert (killed(at, tmp_path, "a"), killed(at, tmp_path, "b")) == (2, 2)
    assert store("b").json("detach") == {"detached": False, "others": [], "problem": None}
    assert store("a").says("detach") == "nothing to detach: it is trained alone\n"
    killed(played, tmp_path, STORES, "step 1; save again; step 1")
    assert together(store("a")) == ["b"]
    assert killed(at_all, tmp_path) == [3, 3]


def test_of_a_killed_run_each_keeps_the_last_common_step(tmp_path: Path, store: Store) -> None:
    killed(played, tmp_path, STORES, "step 2; save two; step 1; b save three; step 1; b close")
    assert store("a").json("detach")["detached"]
    with pytest.raises(StoreError, match=r"was not closed by its last run|were not closed by their last run"):
        make(options("host", tmp_path, open="error"), "adagrad", name="b", tables=1).size()
    assert (killed(at, tmp_path, "a"), killed(at, tmp_path, "b")) == (2, 2)


def test_a_copy_becomes_a_store_of_its_own(tmp_path: Path, store: Store) -> None:
    killed(played, tmp_path, STORES, CLOSED)
    copy = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "a", copy / "a")
    with pytest.raises(StoreError, match=r"is a copy of .*`tierbed store detach`"):
        at(copy, "a")
    said = store("elsewhere/a").says("detach")
    assert "is a copy of" in said
    assert "store detach" not in said
    assert killed(at, copy, "a", 1) == 3
    assert killed(at, copy, "a") == 2
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
def test_stores_whose_record_is_lost_keep_live_rows_and_their_latest_snapshots(
    tmp_path: Path, store: Store, damage: Callable[[Path], None]
) -> None:
    killed(played, tmp_path, STORES, CLOSED)
    (record,) = (file for file in tmp_path.glob("GROUP-*") if file.suffix != ".LOCK")
    damage(record)
    for name in "ab":
        with pytest.raises(StoreError, match=r"missing or damaged.*`tierbed store detach`"):
            at(tmp_path, name)
    said = store("a").json("detach")
    assert said["detached"]
    assert "missing or damaged" in said["problem"]
    assert last_snapshot(tmp_path / "a") == "two"
    assert killed(at, tmp_path, "a", 1) == 3
    assert killed(at, tmp_path, "a") == 2
    assert command("store", "detach", tmp_path / "b") == 0
    assert killed(at_all, tmp_path) == [2, 3]


def test_a_store_leaves_another_that_is_lost(tmp_path: Path, store: Store) -> None:
    killed(played, tmp_path, STORES, "step 2; save two; step 1")
    (tmp_path / "b").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="is missing"):
        at(tmp_path, "a")
    assert store("a").says("detach") == "detached from b\n"
    assert killed(at, tmp_path, "a") == 2
    (tmp_path / "away").rename(tmp_path / "b")
    assert killed(at, tmp_path, "b") == 2


def trains_b(path: Path, pipe: Connection) -> None:
    embedding = alone(path, "b")
    step(embedding)
    pipe.send(True)
    pipe.recv()


def test_a_group_that_is_trained_is_left_as_it_is(tmp_path: Path, store: Store) -> None:
    killed(played, tmp_path, STORES, CLOSED)
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
    model = Model(path, STORES, world)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1)
    model.close()


def ranks_at(world: World, path: Path, name: str) -> int:
    embedding = alone(path, name, world)
    found = int(embedding.metrics()["table"]["step"])
    step(embedding)
    embedding.close()
    return found


def test_rows_that_ranks_share_leave_as_those_of_one_process(tmp_path: Path, store: Store) -> None:
    run_ranks(2, ranks_close, tmp_path)
    a, b = store("a").json("stat")["group"]
    assert (a["live"], a["step"], b["common"], b["common_step"]) == (True, 3, "two", 2)
    assert store("a").says("detach") == "detached from b\n"
    assert (together(store("a")), together(store("b"))) == ([], [])
    for expected in (3, 4):
        assert [run_ranks(2, ranks_at, tmp_path, name) for name in "ab"] == [[expected] * 2] * 2


def detached(path: Path, begin: Callable[[], None]) -> None:
    begin()
    assert command("store", "detach", path / "a") == 0


@pytest.mark.parametrize("plan", [CLOSED, pytest.param("step 2; save two; step 1", marks=pytest.mark.slow)])
def test_a_kill_at_any_write_leaves_it_in_the_group_or_out_of_it(tmp_path: Path, store: Store, plan: str) -> None:
    expected, seen = 3 if plan == CLOSED else 2, set()
    for number in range(1, 20):
        path = tmp_path / str(number)
        killed(played, path, STORES, plan)
        said = killed_at(path, "rename", number, detached, path)
        seen.add(len(together(store(f"{number}/a"))))
        assert [killed(at, path, name) for name in "ba"] == [expected] * 2
        assert killed(at_all, path) == [expected] * 2
        if said == "done":
            break
    assert number > 3
    assert seen == {0, 1}


def test_stat_prints_what_the_record_says_of_each(tmp_path: Path, store: Store) -> None:
    killed(played, tmp_path, STORES, "step 2; save two; step 1; b save three; a close")
    cli = store("a")
    a, b = cli.json("stat")["group"]
    assert (a["name"], a["live"], a["snapshot"], a["step"]) == ("a", True, None, 3)
    assert (b["name"], b["live"], b["snapshot"], b["step"]) == ("b", False, "three", 3)
    assert [(one["common"], one["common_step"]) for one in (a, b)] == [("two", 2)] * 2
    said = cli.says("stat")
    assert "record of a" in said
    assert "live rows of step 3; with the others two of step 2" in said
    assert "snapshot three of step 3; with the others two of step 2" in said
    killed(at, tmp_path, "a", 1)
    (a, b), restart = (cli.json("stat")[of] for of in ("group", "restart"))
    assert (a["live"], a["snapshot"], a["step"]) == (False, None, None)
    assert "rows that are not saved; with the others two of step 2" in cli.says("stat")
    assert (restart["snapshot"], restart["step"]) == ("two", 2)
    shutil.rmtree(tmp_path / "b/snapshots/two")
    said = cli.says("stat")
    assert re.search(r"snapshot three of step 3; with the others [0-9a-f]{32} \(missing\)", said)
    assert "'b' lacks snapshot 'two' (id " in said
