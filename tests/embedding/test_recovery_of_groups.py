"""Recovery of stores that are trained together after lost files, later loads, prunes, failed saves and failed loads."""

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
from support.killed import step
from support.ranks import fails
from support.stores import options
from support.together import Model, killed, played
from support.two_towers import stores
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.errors import SnapshotError, StoreError
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.control.client import request_save
from tierbed.snapshots.store.group import Group

TWO = ("host", "host")


def at(path: Path, mode: str = "resume") -> list[int]:
    model = Model(path, TWO, open=mode)
    found = model.at()
    model.steps(1)
    return found


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
    table = model.members[0].table_handle().snapshots
    table.load = lambda snapshot: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assign]
    model.load_snapshot("s3")


def test_a_load_that_was_killed_before_it_replaced_rows_is_finished(tmp_path: Path) -> None:
    in_process(alone, tmp_path)
    with pytest.raises(EOFError):
        killed(load_killed, tmp_path)
    assert killed(at, tmp_path) == [3, 3]


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_store_whose_mark_is_lost_is_no_store_by_itself(tmp_path: Path, damage: str) -> None:
    killed(played, tmp_path, TWO, APART)
    marker = tmp_path / "a" / "MARK"
    if damage == "missing":
        marker.unlink()
    else:
        marker.write_bytes(marker.read_bytes()[:-3] + b"xyz")
    assert killed(at, tmp_path) == [2, 2]


def test_a_folder_that_is_lost_is_an_error_until_that_is_accepted(tmp_path: Path) -> None:
    in_process(played, tmp_path, TWO, f"{APART}; close")
    (tmp_path / "b").rename(tmp_path / "aside")
    for _ in range(2):
        said = killed(at, tmp_path)
        assert "is missing, the folder of embedding 'b', which was trained together with 'a'" in said
        assert 'open="fresh"' in said
    (tmp_path / "aside").rename(tmp_path / "b")
    assert killed(at, tmp_path) == [5, 5]
    shutil.rmtree(tmp_path / "b")
    assert killed(at, tmp_path, "mixed")[1] == 0


def fresh(path: Path) -> list[int]:
    model = Model(path, TWO, open="fresh")
    found = model.at()
    model.steps(2)
    model.save_snapshot("again")
    model.steps(1)
    return found


def test_all_start_over_where_a_refused_open_has_left_an_empty_folder(tmp_path: Path) -> None:
    killed(played, tmp_path, TWO, APART)
    shutil.rmtree(tmp_path / "b")
    said = killed(moved, tmp_path, tmp_path, "ba")
    assert f"'{tmp_path}/b' is not in the group of 'a'" in said
    assert killed(fresh, tmp_path) == [0, 0]
    assert killed(at, tmp_path) == [2, 2]


def moved(path: Path, other: Path, order: str) -> list[int]:
    members = {
        n: make(options("host", p), "adagrad", name=n, tables=1, seed=0)
        for n, p in zip("ab", (path, other), strict=True)
    }
    train_together(members.values())
    return [int(members[name].metrics()["table"]["step"]) for name in order]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_copy_of_a_store_takes_its_place_when_that_is_gone(tmp_path: Path, order: str) -> None:
    killed(played, tmp_path / "one", TWO, APART)
    shutil.copytree(tmp_path / "one" / "b", tmp_path / "two" / "b", ignore=shutil.ignore_patterns("SOCKET"))
    said = killed(moved, tmp_path / "one", tmp_path / "two", order)
    assert f"'{tmp_path}/two/b' is a copy of '{tmp_path}/one/b'" in said
    shutil.rmtree(tmp_path / "one" / "b")
    assert killed(moved, tmp_path / "one", tmp_path / "two", order) == [2, 2]


def test_what_is_no_snapshot_and_damage_elsewhere_leave_ways_out(tmp_path: Path) -> None:
    killed(played, tmp_path, TWO, APART)
    (tmp_path / "a" / "snapshots" / "notes").mkdir()
    assert killed(at, tmp_path) == [2, 2]
    (tmp_path / "b" / "snapshots" / "s4" / "manifest.msgpack").write_bytes(b"xyz")  # which recovery does not need
    assert killed(at, tmp_path) == [2, 2]
    (tmp_path / "b" / "snapshots" / "two" / "manifest.msgpack").write_bytes(b"xyz")
    assert killed(at, tmp_path).startswith("SnapshotError")


BESIDE_FROZEN = {
    "prune": "step 1 b c; b save s0; b prune 1; step 1 b c; c save s1; c prune 1; step 1 b c",
    "overwrite": "step 1 b c; b overwrite four; step 1 b c; c overwrite four; step 1 b c",
}


def three_at(path: Path) -> list[int]:
    return Model(path, ("host", "host", "host")).at()


@pytest.mark.parametrize("way", BESIDE_FROZEN)
def test_what_is_in_common_with_a_frozen_store_that_was_never_saved_is_kept(tmp_path: Path, way: str) -> None:
    three = ("host", "host", "host")
    in_process(played, tmp_path, three, "step 5 a; close")
    killed(played, tmp_path, three, f"step 4 b c; b save four; c save four; {BESIDE_FROZEN[way]}")
    assert killed(three_at, tmp_path) == [5, 4, 4]


def test_a_load_of_a_later_snapshot_is_what_a_kill_comes_back_to(tmp_path: Path) -> None:
    plan = "step 1; save one; step 8; save nine; step 1; save ten; load one; step 1; load nine"
    killed(played, tmp_path, TWO, plan)
    assert killed(at, tmp_path) == [9, 9]


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


# saves of all at 2 and 4; one goes back to 2
LOADED_ALONE = "step 2; save two; step 2; save four; b load two"


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize(
    ("then", "found"), [("", [4, 2]), ("; b overwrite two", [4, 2]), ("; step 1", [4, 2]), ("; close", [4, 2])]
)
def test_a_load_of_one_counts_where_snapshots_have_the_rows_of_the_others(
    tmp_path: Path, store: str, then: str, found: list[int]
) -> None:
    assert killed(played, tmp_path, (store, store), LOADED_ALONE + then) is None
    assert at(tmp_path) == found


# each goes back to another branch than the one it is on, by itself; one of them is trained
LOADED_EACH = "step 1; save one; step 1; save two; load one; step 2; save three; a load two; b load two; step 2 a"


@pytest.mark.parametrize(("then", "found"), [("", [2, 2]), ("; a save a4", [4, 2])])
def test_loads_of_each_count_once_one_of_them_is_trained(tmp_path: Path, then: str, found: list[int]) -> None:
    assert killed(played, tmp_path, TWO, LOADED_EACH + then) is None
    assert at(tmp_path) == found


def test_a_failed_overwrite_is_in_the_way_of_none_and_copies_do_not_pile_up(tmp_path: Path) -> None:
    assert ["not written" in said for said in killed(failed_overwrite, tmp_path)] == [True, True]
    assert all(len(of_store) <= 3 for of_store in names(tmp_path))
    assert killed(at, tmp_path) == [5, 5]


def background_refused(path: Path) -> str:
    model = Model(path, TWO)
    model.steps(1)
    model.save_snapshot("one")
    saving = model.members[1].save_snapshot("alone", background=True)
    assert saving is not None
    said = fails(lambda: model.save_snapshot("all", background=True), StoreError)
    saving.wait()
    return said


def test_a_background_save_of_all_that_cannot_begin_for_one_leaves_none(tmp_path: Path) -> None:
    said = killed(background_refused, tmp_path)
    assert "one save at a time" in said or "saving" in said
    assert not any("all" in of_store for of_store in names(tmp_path))


def incremental_again(path: Path, first: bool) -> list[int]:
    model = Model(path, TWO)
    found = model.counts()
    if first:
        model.steps(1)
        model.save_snapshot("s1")
    for number in (2, 3):
        model.steps(1)
        model.members[0].save_snapshot(f"s{number}", "incremental")
    model.steps(1)
    return found


def test_a_run_after_a_recovery_saves_its_increments_by_the_same_names(tmp_path: Path) -> None:
    killed(incremental_again, tmp_path, True)
    for _ in range(2):
        assert killed(incremental_again, tmp_path, False) == [1, 1]


def checkpointed(path: Path) -> int:
    made = tbe.ours(tbe.TABLES, tbe.MAP, store_options=stores("host folder", path))
    for seed in range(3):
        torch.manual_seed(seed)
        batches = [tbe.batch(tbe.TABLES, tbe.MAP, [4] * len(tbe.MAP)) for _ in range(2)]
        losses = [checkpoint(lambda i, o: made(i, o).sum(), b.indices, b.offsets, use_reentrant=False) for b in batches]
        (losses[0] + losses[1]).backward()
    made.save_snapshot("three")
    return seed


def test_forwards_that_a_backward_pass_repeats_are_no_sign_of_a_failed_one(tmp_path: Path) -> None:
    assert killed(checkpointed, tmp_path) == 2


def loaded_by_itself(path: Path, alone: bool) -> list[int]:
    """A load of rows that the first embedding had anyway, after the second was closed at a later step."""
    model = Model(path, TWO)
    model.save_snapshot("empty")
    model.steps(1, "b")
    model.close()
    model = Model(path, TWO)
    model.members[0].load_snapshot("empty")
    if not alone:
        model.members[1].load_snapshot("empty")
    return model.counts()


@pytest.mark.parametrize("alone", [True, False])
def test_a_kill_after_a_load_of_one_loses_no_step_that_the_other_was_closed_at(tmp_path: Path, alone: bool) -> None:
    expected = [0, int(alone)]
    assert killed(loaded_by_itself, tmp_path, alone) == expected
    assert killed(at, tmp_path) == expected


def shell_amid_load(path: Path) -> str:
    model = Model(path, TWO)
    model.counts()
    second = model.members[1].table_handle().snapshots
    load = second.load  # type: ignore[attr-defined]
    said = []

    def slow(*given: Any, **named: Any) -> Any:
        ask = lambda: request_save(path / "a", "shell", stores=[path / "a", path / "b"], timeout=0.2)  # noqa: E731
        said.append(fails(ask, StoreError))
        return load(*given, **named)

    second.load = slow  # type: ignore[attr-defined]
    model.load_snapshot("two")
    return said[0]


def test_another_process_gets_no_snapshot_of_a_half_done_load(tmp_path: Path) -> None:
    killed(played, tmp_path, TWO, APART)
    assert "did not finish its current step" in killed(shell_amid_load, tmp_path)
    assert not any("shell" in of_store for of_store in names(tmp_path))
    assert killed(at, tmp_path) == [2, 2]


def load_unrecorded(path: Path) -> list[int]:
    write = Group.write

    def full_once(self: Group, *_: object, **__: object) -> None:
        Group.write = write  # type: ignore[method-assign]
        raise StoreError("no space left")

    model = Model(path, TWO)
    found = model.at()
    Group.write = full_once  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="no space left"):
        model.load_snapshot("two")
    return found


def test_a_load_that_the_record_cannot_say_leaves_rows_and_record_as_they_were(tmp_path: Path) -> None:
    in_process(played, tmp_path, TWO, "step 2; save two; step 1; close")
    assert killed(load_unrecorded, tmp_path) == [3, 3]
    assert killed(at, tmp_path) == [3, 3]


def load_of_none(path: Path) -> list[str]:
    model = Model(path, TWO)
    said = [fails(partial(member.load_snapshot, "nope"), SnapshotError) for member in model.members]
    said += [fails(partial(member.get, [1]), StoreError) for member in model.members]
    model.close()
    return said


def test_a_load_that_fails_as_the_first_use_does_not_settle_what_the_steps_are(tmp_path: Path) -> None:
    killed(played, tmp_path, TWO, "step 2; a save s0; step 2; b save s1; step 1")
    for _ in range(2):
        said = in_process(load_of_none, tmp_path)
        assert all("they have no saved step in common" in one for one in said[2:])


def state_of_three(path: Path, part: str) -> list[int] | None:
    model = Model(path, TWO, state_dict_snapshots=True)
    if part == "train":
        model.steps(3)
        torch.save(model.state_dict(), path / "state")
        model.steps(3)
    elif part == "load":
        model.load_state_dict(torch.load(path / "state"))
        model.members[0].size()  # the second is not used yet
    else:
        return model.at()
    model.close()
    return None


def test_a_state_is_loaded_into_embeddings_that_are_not_used_yet(tmp_path: Path) -> None:
    for part in ("train", "load"):
        in_process(state_of_three, tmp_path, part)
    assert in_process(state_of_three, tmp_path, "at") == [3, 3]


def state_of_linked(path: Path, part: str) -> list[int] | None:
    """The rows of b in the state are those of an earlier save, at which a was at another step."""
    model = Model(path, TWO, state_dict_snapshots=True)
    if part == "train":
        model.steps(2)
        model.save_snapshot("two")
        model.steps(1, "a")
        torch.save(model.state_dict(), path / "state")
        model.steps(3)
    elif part == "load":
        model.load_state_dict(torch.load(path / "state"))
        model.at()
    else:
        return model.at()
    model.close()
    return None


def test_a_state_whose_rows_were_saved_before_is_loaded_as_it_was(tmp_path: Path) -> None:
    for part in ("train", "load"):
        in_process(state_of_linked, tmp_path, part)
    assert in_process(state_of_linked, tmp_path, "at") == [3, 2]


def there_already(path: Path, trains_on: bool) -> list[int]:
    model = Model(path, TWO, state_dict_snapshots=True)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1)
    state = model.state_dict()
    model.steps(1, "a")
    model.load_state_dict(state)
    if trains_on:
        model.steps(2, "b")
        model.save_snapshot("later")
    return model.at()


@pytest.mark.parametrize(("trains_on", "found"), [(False, [3, 3]), (True, [3, 5])])
def test_a_loaded_state_has_come_to_those_that_had_its_rows(tmp_path: Path, trains_on: bool, found: list[int]) -> None:
    assert killed(there_already, tmp_path, trains_on) == found
    assert at(tmp_path) == found


def older_snapshot(path: Path, first: str, trains_on: bool) -> list[int]:
    """The state names the rows of one by a snapshot of before the other's last step, which that one still has."""
    model = Model(path, TWO, state_dict_snapshots=True)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1, *("ab".replace(first, "")))
    state = model.state_dict()
    model.steps(1, first)
    model.load_state_dict(state)
    if trains_on:
        model.steps(1, *("ab".replace(first, "")))
        model.save_snapshot("later")
    return model.at()


@pytest.mark.parametrize(
    ("first", "trains_on", "found"), [("a", False, [2, 3]), ("a", True, [2, 4]), ("b", True, [4, 2])]
)
def test_a_state_that_names_an_older_snapshot_has_come_to_all(
    tmp_path: Path, first: str, trains_on: bool, found: list[int]
) -> None:
    assert killed(older_snapshot, tmp_path, first, trains_on) == found
    assert at(tmp_path) == found


def half_of_state(path: Path, snapshots: bool, older: bool) -> list[int]:
    """A state is loaded into a alone, after a load of all. older: it names rows of a saved before b's last step."""
    model = Model(path, TWO, state_dict_snapshots=snapshots)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1, *("b" if older else "ab"))
    (model.members[1] if older else model).save_snapshot("three")
    state = model.state_dict()
    model.load_snapshot("two")
    if older:
        model.steps(2, "a")
        model.save_snapshot("four")
    model.members[0].load_state_dict({name[2:]: value for name, value in state.items() if name.startswith("a.")})
    return model.at()


@pytest.mark.parametrize(("snapshots", "older"), [(True, True), (True, False), (False, True)])
def test_a_state_that_was_loaded_into_one_alone_stays(tmp_path: Path, snapshots: bool, older: bool) -> None:
    assert killed(half_of_state, tmp_path, snapshots, older) == ([2, 2] if older else [3, 2])
    assert at(tmp_path) == ([2, 2] if older else [3, 2])  # b has a snapshot of its rows as well


def half_of_mixed_state(path: Path) -> list[int]:
    """A state of a moment that the user mixed is loaded into a alone: no snapshot notes that moment."""
    model = Model(path, TWO, state_dict_snapshots=True)
    for name in ("one", "two", "three"):
        model.steps(1)
        model.save_snapshot(name)
    model.members[0].load_snapshot("two")
    state = model.state_dict()
    model.load_snapshot("one")
    model.members[0].load_state_dict({name[2:]: value for name, value in state.items() if name.startswith("a.")})
    return model.at()


def test_a_state_of_rows_that_were_mixed_stays_in_the_one_it_was_loaded_into(tmp_path: Path) -> None:
    assert killed(half_of_mixed_state, tmp_path) == [2, 1]
    assert at(tmp_path) == [2, 1]


def test_a_warning_says_when_saves_of_one_alone_count_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_process(played, tmp_path, TWO, "step 2; save two; step 1; close")
    in_process(played, tmp_path, TWO, "step 1 a; a save s4; close")
    with caplog.at_level(logging.WARNING, "tierbed"):
        model = Model(tmp_path, TWO)
        assert model.at() == [4, 3]
        model.steps(1)
        model.steps(1)
    (said,) = [record.getMessage() for record in caplog.records if "undoes" in record.getMessage()]
    assert said.startswith("embedding 'b' is trained from now on")
    assert "saved or loaded of 'a' alone" in said
    model.close()


def test_rows_that_join_and_are_in_no_snapshot_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_process(alone, tmp_path)
    with caplog.at_level(logging.WARNING, "tierbed"):
        model = Model(tmp_path, TWO)
        model.steps(1)
    assert sum("no snapshot has its rows" in record.getMessage() for record in caplog.records) == 2
    model.close()
