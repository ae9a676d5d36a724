"""Recovery of stores trained together after lost files, loads, states, prunes, failed saves and failed loads."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support import tbe
from support.embeddings import make
from support.forked import in_process
from support.killed import copy_as_killed, step
from support.ranks import fails
from support.stores import options
from support.together import Model, at, killed, played
from support.two_towers import stores
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.errors import SnapshotError, StoreError
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.control.client import request_save
from tierbed.snapshots.store.group import StoreGroup

TWO = ("host", "host")
WITH_STATES = {"state_dict_snapshots": True}
# saves of all at 2 and 4; one goes back to 2
ALONE = "step 2; save two; step 2; save four; b load two"
# each goes back to another branch than the one it is on, by itself; one of them is trained
EACH = "step 1; save one; step 1; save two; load one; step 2; save three; a load two; b load two; step 2 a"
NINE = "step 1; save one; step 8; save nine; step 1; save ten; load one; step 1; load nine"
MORE = "step 1; a save s2 incremental; step 1; a save s3 incremental; step 1"
B_HAS = "step 2; save two; step 1; state; step 1 a; load-state 0"
OF_A = "step 2; save two; step 1 b; state; step 1 a; load-state 0"  # it names an older snapshot, whose rows a has
OF_B = "step 2; save two; step 1 a; state; step 1 b; load-state 0"
INTO_A = "step 2; save two; step 1; save three; state; load two; a load-state 0"
BEFORE_B = "step 2; save two; step 1 b; b save three; state; load two; step 2 a; save four; a load-state 0"
SAVED_B = "step 2; save two; step 1 a; state; step 3; close"  # its rows of b are those of the save
MIXED = "step 1; save one; step 1; save two; step 1; save three; a load two; state; load one; a load-state 0"
HISTORIES = {  # plans with kills between them; and the steps that "at" finds
    "a later snapshot is loaded": f"{NINE} | at 9 9",
    "one is loaded": f"{ALONE} | at 4 2",
    "one is loaded and saved": f"{ALONE}; b overwrite two | at 4 2",
    "one is loaded, all are trained": f"{ALONE}; step 1 | at 4 2",
    "one is loaded, all are closed": f"{ALONE}; close | at 4 2",
    "each is loaded, one is trained": f"{EACH} | at 2 2",
    "each is loaded, one is trained and saved": f"{EACH}; a save a4 | at 4 2",
    "each was saved alone": "step 3; a save s3; step 1; b save s4 | b load s4; a load s3; step 2; at 5 6 | at 3 4",
    "increments have the names of before": f"step 1; save s1; {MORE} | at 1 1; {MORE} | at 1 1",
    "a loads the rows that it has": "save none; step 1 b; close; open; a load none; at 0 1 | at 0 1",
    "and b loads them as well": "save none; step 1 b; close; open; a load none; b load none; at 0 0 | at 0 0",
    "one is frozen": "step 2; close | step 1 b; b save s1; step 1 b; b save s2; step 1 b; b save s3; step 1 b | at 2 5",
    "a state of rows that b has": f"{B_HAS}; at 3 3 | at 3 3",
    "a state of rows that b has, and a save": f"{B_HAS}; step 2 b; save later; at 3 5 | at 3 5",
    "a state of older rows of a": f"{OF_A}; at 2 3 | at 2 3",
    "a state of older rows of a, and a save": f"{OF_A}; step 1 b; save later; at 2 4 | at 2 4",
    "a state of older rows of b, and a save": f"{OF_B}; step 1 a; save later; at 4 2 | at 4 2",
    "a state is loaded into a alone": f"{INTO_A}; at 3 2 | at 3 2",
    "a state of before b's last step is": f"{BEFORE_B}; at 2 2 | at 2 2",
    "a state that no snapshot notes is": f"{MIXED}; at 2 1 | at 2 1",
    "a state is made of one": "step 2; state; step 1; a state_dict; step 1 | at 2 2",
    "a state is loaded before b is used": "step 3; state; step 3; close | load-state 0; a size; close | at 3 3",
    "a state of a save before": f"{SAVED_B} | load-state 0; at 3 2; close | at 3 2",
    "a save after states of before": f"save none; {'step 1; state_dict; ' * 4}close | step 3; save s; at 7 7 | at 7 7",
}


CELLS = [
    pytest.param(name, marks=[pytest.mark.slow] * name.endswith((", and a save", "and saved"))) for name in HISTORIES
]


@pytest.mark.parametrize("history", CELLS)
def test_each_run_goes_on_from_what_the_last_one_left(tmp_path, history) -> None:
    *plans, last = HISTORIES[history].split(" | ")
    for plan in (*plans, last):
        steps = [int(n) for part in plan.split("; ") if part.startswith("at ") for n in part.split()[1:]]
        found = (played if plan is last else partial(killed, played))(tmp_path, TWO, plan, WITH_STATES)
        assert found == (steps or None)


def test_rows_go_on_in_other_stores_and_with_other_members(tmp_path) -> None:
    three, disk = ("host", "host", "host"), ("ssd", "ssd")
    frozen = "step 4 b c; b save four; c save four; step 1 b c"
    for folder, kinds, plan, found in (
        ("loads", disk, f"{ALONE}; close", None),
        ("loads", TWO, "at", [4, 2]),
        ("memory", TWO, f"{BEFORE_B}; at", [2, 2]),
        ("memory", TWO, "at", [2, 2]),
        ("kinds", TWO, "step 2 b; close", None),
        ("kinds", ("ssd", "host"), "at", [0, 2]),
        ("kinds", ("host", "ssd"), "at; step 1 b", [0, 2]),
        ("members", TWO, "step 2; save two; step 1", None),
        ("members", three, "at; step 1; save of-three; step 1", [2, 2, 0]),
        ("members", TWO, "at; step 1", [3, 3]),
        ("members", three, "at; step 1", [3, 3, 1]),
        # what is in common with a frozen store that was never saved is kept
        ("prunes", three, "step 5 a; close", None),
        ("prunes", three, f"{frozen}; b save s0; b prune 1; step 1 b c; c save s1; c prune 1; step 1 b c", None),
        ("prunes", three, "at", [5, 4, 4]),
        ("overwrites", three, "step 5 a; close", None),
        ("overwrites", three, f"{frozen}; b overwrite four; step 1 b c; c overwrite four; step 1 b c", None),
        ("overwrites", three, "at", [5, 4, 4]),
    ):
        run = played if plan.endswith("close") else partial(killed, played)
        assert run(tmp_path / folder, kinds, plan) == found


def test_a_state_whose_snapshot_was_removed_is_passed_over(tmp_path) -> None:
    killed(played, tmp_path, ("host",), "step 1; save one; step 1; state; step 1", WITH_STATES)
    for place in (tmp_path / "a/snapshots").glob("state_dict-*"):
        shutil.rmtree(place)
    assert at(tmp_path, ("host",)) == [1]


def names(path: Path) -> list[set[str]]:
    return [{one.name for one in list_snapshots(path / name / "snapshots").snapshots} for name in "ab"]


# saves of all at 2, of each alone at 3 and 4; then step 5
APART = "step 2; save two; step 1; a save s3; step 1; b save s4; step 1"


def alone(path: Path) -> None:
    """Two stores that are not trained together, saved at 3 and 5, closed at 9."""
    for name in "ab":
        member = make(options("host", path), "adagrad", name=name, tables=1, seed=0)
        for number in range(1, 10):
            step(member)
            if number in (3, 5):
                member.save_snapshot(f"s{number}")
        member.close()


def load_killed(path: Path) -> None:
    """Killed in a load of all, once the record says it: the rows of neither are replaced."""
    model = Model(path, TWO)
    model.counts()
    table = model.members[0].table_handle().snapshot_manager
    table.load = lambda snapshot: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assign]
    model.load_snapshot("s3")


def test_a_load_that_was_killed_before_it_replaced_rows_is_finished(tmp_path) -> None:
    in_process(alone, tmp_path)
    with pytest.raises(EOFError):
        killed(load_killed, tmp_path)
    assert at(tmp_path, TWO) == [3, 3]


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_store_whose_mark_is_lost_is_no_store_by_itself(tmp_path, damage) -> None:
    killed(played, tmp_path, TWO, APART)
    marker = tmp_path / "a" / "MARK"
    if damage == "missing":
        marker.unlink()
    else:
        marker.write_bytes(marker.read_bytes()[:-3] + b"xyz")
    assert at(tmp_path, TWO) == [2, 2]


def test_a_folder_that_is_lost_is_an_error_until_that_is_accepted(tmp_path) -> None:
    in_process(played, tmp_path, TWO, f"{APART}; close")
    (tmp_path / "b").rename(tmp_path / "aside")
    for _ in range(2):
        said = killed(at, tmp_path, TWO)
        assert "is missing. Its embedding 'b' was trained together with 'a'" in said
        assert 'open="fresh"' in said
    (tmp_path / "aside").rename(tmp_path / "b")
    assert killed(at, tmp_path, TWO) == [5, 5]
    shutil.rmtree(tmp_path / "b")
    assert at(tmp_path, TWO, "mixed")[1] == 0


def test_all_start_over_where_a_refused_open_has_left_an_empty_folder(tmp_path) -> None:
    killed(played, tmp_path, TWO, APART)
    shutil.rmtree(tmp_path / "b")
    assert f"'{tmp_path}/b' is not in the group of 'a'" in killed(moved, tmp_path, tmp_path, "ba")
    assert killed(played, tmp_path, TWO, "at; step 2; save again; step 1", {"open": "fresh"}) == [0, 0]
    assert at(tmp_path, TWO) == [2, 2]


def moved(path: Path, other: Path, order: str) -> list[int]:
    members = {
        n: make(options("host", p), "adagrad", name=n, tables=1, seed=0)
        for n, p in zip("ab", (path, other), strict=True)
    }
    train_together(members.values())
    return [int(members[name].metrics()["table"]["step"]) for name in order]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_copy_of_a_store_takes_its_place_when_that_is_gone(tmp_path, order) -> None:
    killed(played, tmp_path / "one", TWO, APART)
    copy_as_killed(tmp_path / "one" / "b", tmp_path / "two" / "b")
    said = killed(moved, tmp_path / "one", tmp_path / "two", order)
    assert f"'{tmp_path}/two/b' is a copy of '{tmp_path}/one/b'" in said
    shutil.rmtree(tmp_path / "one" / "b")
    assert moved(tmp_path / "one", tmp_path / "two", order) == [2, 2]


def test_what_is_no_snapshot_and_damage_elsewhere_leave_ways_out(tmp_path) -> None:
    killed(played, tmp_path, TWO, APART)
    (tmp_path / "a" / "snapshots" / "notes").mkdir()
    assert killed(at, tmp_path, TWO) == [2, 2]
    (tmp_path / "b" / "snapshots" / "s4" / "manifest.msgpack").write_bytes(b"xyz")  # which recovery does not need
    assert killed(at, tmp_path, TWO) == [2, 2]
    (tmp_path / "b" / "snapshots" / "two" / "manifest.msgpack").write_bytes(b"xyz")
    assert killed(at, tmp_path, TWO).startswith("SnapshotError")


def failed_overwrite(path: Path) -> list[str]:
    model = Model(path, TWO)
    model.steps(1)
    model.save_snapshot("latest")
    model.steps(1)
    said = []
    for _ in range(2):
        (path / "a" / "snapshots" / ".tmp-latest").write_text("in the way of the new folder")
        said.append(fails(lambda: model.members[0].save_snapshot("latest", overwrite=True), SnapshotError))
        (path / "a" / "snapshots" / ".tmp-latest").unlink()
    for _ in range(4):
        model.save_snapshot("latest", overwrite=True, background=True).wait()  # type: ignore[union-attr]
        model.steps(1)
    return said


def test_a_failed_overwrite_is_in_the_way_of_none_and_copies_do_not_pile_up(tmp_path) -> None:
    assert ["not written" in said for said in killed(failed_overwrite, tmp_path)] == [True, True]
    assert all(len(of_store) <= 3 for of_store in names(tmp_path))
    assert at(tmp_path, TWO) == [5, 5]


def background_refused(path: Path) -> str:
    model = Model(path, TWO)
    model.steps(1)
    model.save_snapshot("one")
    saving = model.members[1].save_snapshot("alone", background=True)
    assert saving is not None
    said = fails(lambda: model.save_snapshot("all", background=True), StoreError)
    saving.wait()
    return said


def test_a_background_save_of_all_that_cannot_begin_for_one_leaves_none(tmp_path) -> None:
    assert "only one save can run at a time" in killed(background_refused, tmp_path)
    assert not any("all" in of_store for of_store in names(tmp_path))


def checkpointed(path: Path) -> int:
    made = tbe.ours(tbe.TABLES, tbe.MAP, store_options=stores("host folder", path))
    for seed in range(3):
        torch.manual_seed(seed)
        batches = [tbe.batch(tbe.TABLES, tbe.MAP, [4] * len(tbe.MAP)) for _ in range(2)]
        losses = [checkpoint(lambda i, o: made(i, o).sum(), b.indices, b.offsets, use_reentrant=False) for b in batches]
        (losses[0] + losses[1]).backward()
    made.save_snapshot("three")
    return seed


def test_forwards_that_a_backward_pass_repeats_are_no_sign_of_a_failed_one(tmp_path) -> None:
    assert killed(checkpointed, tmp_path) == 2


def shell_amid_load(path: Path) -> str:
    model = Model(path, TWO)
    model.counts()
    second = model.members[1].table_handle().snapshot_manager
    load = second.load  # type: ignore[attr-defined]
    said = []

    def slow(*given: Any, **named: Any) -> Any:
        ask = lambda: request_save(path / "a", "shell", stores=[path / "a", path / "b"], timeout=0.2)  # noqa: E731
        said.append(fails(ask, StoreError))
        return load(*given, **named)

    second.load = slow  # type: ignore[attr-defined]
    model.load_snapshot("two")
    return said[0]


def test_another_process_gets_no_snapshot_of_a_half_done_load(tmp_path) -> None:
    killed(played, tmp_path, TWO, APART)
    assert "did not finish its current step" in killed(shell_amid_load, tmp_path)
    assert len({"shell" in of_store for of_store in names(tmp_path)}) == 1  # the load may end before the process does
    assert at(tmp_path, TWO) == [2, 2]


def load_unrecorded(path: Path) -> list[int]:
    write = StoreGroup.write

    def full_once(self: StoreGroup, *_: object, **__: object) -> None:
        StoreGroup.write = write  # type: ignore[method-assign]
        raise StoreError("no space left")

    model = Model(path, TWO)
    found = model.at()
    StoreGroup.write = full_once  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="no space left"):
        model.load_snapshot("two")
    return found


def test_a_load_that_the_record_cannot_say_leaves_rows_and_record_as_they_were(tmp_path) -> None:
    in_process(played, tmp_path, TWO, "step 2; save two; step 1; close")
    assert killed(load_unrecorded, tmp_path) == [3, 3]
    assert at(tmp_path, TWO) == [3, 3]


def load_of_none(path: Path) -> list[str]:
    model = Model(path, TWO)
    said = [fails(partial(member.load_snapshot, "nope"), SnapshotError) for member in model.members]
    said += [fails(partial(member.get, [1]), StoreError) for member in model.members]
    model.close()
    return said


def test_a_load_that_fails_as_the_first_use_does_not_settle_what_the_steps_are(tmp_path) -> None:
    killed(played, tmp_path, TWO, "step 2; a save s0; step 2; b save s1; step 1")
    for _ in range(2):
        said = in_process(load_of_none, tmp_path)
        assert all("they have no saved step in common" in one for one in said[2:])


def test_a_warning_says_when_saves_of_one_alone_count_no_more(tmp_path, caplog) -> None:
    in_process(played, tmp_path, TWO, "step 2; save two; step 1; close")
    in_process(played, tmp_path, TWO, "step 1 a; a save s4; close")
    with caplog.at_level(logging.WARNING, "tierbed"):
        assert played(tmp_path, TWO, "at; step 1; step 1; close") == [4, 3]
    (said,) = [record.getMessage() for record in caplog.records if "undoes" in record.getMessage()]
    assert said.startswith("the rows of embedding 'b' are about to change")
    assert "saves and loads of only 'a'" in said


def test_rows_that_join_and_are_in_no_snapshot_are_warned_of(tmp_path, caplog) -> None:
    in_process(alone, tmp_path)
    with caplog.at_level(logging.WARNING, "tierbed"):
        played(tmp_path, TWO, "step 1; close")
    assert sum("no snapshot has its rows" in record.getMessage() for record in caplog.records) == 2


GROUPS = [("host",), ("ssd",), ("host", "ssd")]
PLANS = {
    "a state": ("step 3; state; step 1", 3),
    "the last of two": ("step 1; state; step 2; state; step 1", 3),
    "after a save": ("step 1; save one; step 2; state; step 1", 3),
    "before a save": ("step 1; state; step 2; save three; step 1", 3),
    "of the same rows as a save": ("step 3; save three; state; step 1", 3),
    "before a load": ("step 2; save two; step 2; state; load two; step 1", 2),
    "after a load": ("step 2; save two; step 2; state; load two; step 1; state; step 1", 3),
    "that was loaded": ("step 2; state; step 2; state; load-state 0; step 1", 2),
    "before a close": ("step 2; state; step 2; close; open; at; step 1", 2),
    "of what was closed": ("step 2; close; open; at; state; step 1", 2),
    "and a prune": ("step 1; save one; step 1; state; prune 1; step 1", 2),
    "replaced": ("step 1; save one; step 1; state; step 1; overwrite one; step 1", 3),
}


@pytest.mark.parametrize(
    ("stores", "plan"),
    [
        pytest.param(stores, plan, marks=[] if number % 3 == turn % 3 else pytest.mark.slow)
        for number, plan in enumerate(PLANS)
        for turn, stores in enumerate(GROUPS)
    ],
)
def test_a_kill_goes_back_to_the_last_state_save_or_load(tmp_path, stores, plan) -> None:
    steps, expected = PLANS[plan]
    killed(played, tmp_path, stores, steps, WITH_STATES)
    assert killed(at, tmp_path, stores) == [expected] * len(stores)
    assert at(tmp_path, stores) == [expected] * len(stores)  # as what it went back to is the recovery snapshot


def test_a_state_is_no_parent_and_no_last_snapshot(tmp_path) -> None:
    one = ("host",)
    assert killed(played, tmp_path, one, "step 1; state; step 1; last", WITH_STATES) == [None]
    shutil.rmtree(tmp_path / "a")
    plan = "step 1; save one; step 1; state; prune 1; step 1; save two incremental; last"
    assert killed(played, tmp_path, one, plan, WITH_STATES) == ["two"]
    chains = {one.name: [link.name for link in one.chain] for one in list_snapshots(tmp_path / "a/snapshots").snapshots}
    assert chains["two"] == ["one", "two"]
    assert at(tmp_path, one) == [3]


def test_no_save_takes_the_name_of_a_skipped_snapshot_that_a_later_one_needs(tmp_path) -> None:
    killed(played, tmp_path, TWO, f"step 1; save s1; {MORE}")
    model = Model(tmp_path, TWO)
    member = model.members[0]
    member.load_snapshot("s3")
    member.save_snapshot("s4", "incremental")
    with pytest.raises(SnapshotError, match="s2' exists"):
        member.save_snapshot("s2")
    assert names(tmp_path)[0] == {"s1", "s2", "s3", "s4"}
    model.close()
