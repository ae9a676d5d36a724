"""Embeddings that are trained together go back to one instant, after kills anywhere, or say that there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.embeddings import make
from support.forked import in_process
from support.killed import copy_as_killed, remarks
from support.killed import steps as steps_of
from support.stores import options
from support.together import Model, at, killed, killed_at, played, played_from
from tierbed.engine.errors import SnapshotError, StoreError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile

SLOW = pytest.mark.slow
TWO = ("host", "host")
of_two_stores = pytest.mark.parametrize(
    "stores", [("ssd", "host"), pytest.param(TWO, marks=SLOW), pytest.param(("ssd", "ssd"), marks=SLOW)]
)
APART = "step 10; a save ten; step 10; b save twenty; step 3"
ALL_THEN_EACH = (
    "step 4; save all; step 1; a save s5; step 1; b save s6; step 2; prune 1; "
    "a overwrite latest; step 1; b overwrite latest; step 1"
)


@of_two_stores
def test_snapshots_of_two_steps_are_no_recovery_until_it_is_asked_for(tmp_path, stores) -> None:
    killed(played, tmp_path, stores, APART)
    for _ in range(2):
        said = killed(at, tmp_path, stores)
        assert said.startswith("StoreError")
        for part in ("'a' has snapshot 'ten', at step 10", "'b' has snapshot 'twenty', at step 20", 'open="mixed"'):
            assert part in said
    assert killed(at, tmp_path, stores, "error").startswith("StoreError")
    assert killed(at, tmp_path, stores, "mixed") == [10, 20]
    assert at(tmp_path, stores) == [10, 20]  # it was accepted


@of_two_stores
def test_later_saves_of_one_do_not_move_what_all_go_back_to(tmp_path, stores, caplog) -> None:
    killed(played, tmp_path, stores, ALL_THEN_EACH)
    model = Model(tmp_path, stores)
    assert model.at() == [4, 4]
    said = remarks(caplog)
    assert len(said) == 2
    for one in said:
        assert "restored snapshot 'all', of step 4; all writes after the snapshot are lost (steps 5 to " in one
        assert "the later snapshot 'latest' (step " in one
    assert [member.last_snapshot for member in model.members] == ["all", "all"]
    model.steps(2)
    for _ in range(3):  # over the name that the last run gave: at every instant both have rows of one step
        for member in model.members:
            member.save_snapshot("latest", overwrite=True)
    model.close()


@of_two_stores
def test_one_name_for_each_save_never_loses_the_last_step_of_all(tmp_path, stores) -> None:
    each, more = "step 1; a overwrite latest; b overwrite latest; ", "step 1; a overwrite latest"
    killed(played, tmp_path, stores, 2 * each + more)
    assert killed(at, tmp_path, stores) == [2, 2]
    killed(played, tmp_path, stores, each + more)
    assert at(tmp_path, stores) == [3, 3]


def copied(made: Path, path: Path) -> Path:
    return copy_as_killed(made, path)


@pytest.mark.parametrize("stores", [TWO, pytest.param(("ssd", "host"), marks=SLOW)])
def test_a_load_of_all_is_finished_from_its_first_mark_on_wherever_it_and_the_recovery_are_killed(
    tmp_path, stores
) -> None:
    in_process(kills_of_a_load, tmp_path, stores)


def kills_of_a_load(folder: Path, stores: tuple[str, ...]) -> None:
    killed(played, folder / "made", stores, "step 1; save first; step 2; save final; close; open; load first")
    expected = [1, 1]
    for number in range(1, 60):
        path = copied(folder / "made", folder / f"{number}" / "store")
        plan = "counts; begin; load final; step 1"
        said = killed_at(path, "rename", number, played_from, path, stores, plan)
        if all(says(path / name, "final") for name in "ab") and expected == [1, 1]:
            expected = [3, 3]
            for second in range(1, 60):
                again = copied(path, folder / f"{number}-{second}" / "store")
                use_one = f"begin; {'ab'[second % 2]} size"
                late = killed_at(again, "rename", second, played_from, again, stores, use_one)
                assert killed(played, again, stores, "a size; b size; at") == expected
                if late == "done":
                    break
        first, second_used = ("ab", "ba")[number % 2]
        assert killed(played, path, stores, f"{first} size; {second_used} size; at") == expected
        if said == "done":
            break
    assert expected == [3, 3]


def test_a_model_goes_by_its_own_folders_and_one_that_is_opened_alone_rolls_nothing_back(tmp_path) -> None:
    killed(played, tmp_path / "one", TWO, ALL_THEN_EACH)
    copies = [copied(tmp_path / "one", tmp_path / name) for name in ("copy", "alone", "fresh")]
    assert Model(copies[0], ("host", "ssd")).at() == [4, 4]
    for path, mode, expected in ((copies[1], "resume", [7, 4]), (copies[2], "fresh", [3, 4])):
        with make(options("host", path, open=mode), "adagrad", name="a", tables=1, seed=0) as one:
            assert one.metrics()["table"]["step"] == expected[0] - 3
            steps_of(one, 3)
        assert Model(path, TWO).at() == expected
    shutil.rmtree(tmp_path / "one" / "b")
    assert killed(at, tmp_path / "one", TWO).startswith("StoreError")
    assert at(tmp_path / "one", TWO, "mixed")[1] == 0


def says(store: Path, name: str) -> bool:
    """Whether the record says that a store has the rows of a snapshot."""
    file = GroupFile(FolderState(store))
    return file.record.entries[file.store_id].snapshot == Snapshot.open(store / "snapshots" / name).manifest.id


def test_names_saved_at_two_instants_are_not_loaded_as_one(tmp_path) -> None:
    model = Model(tmp_path, TWO)
    for member in model.members:
        model.steps(1)
        member.save_snapshot("same name")
    with pytest.raises(SnapshotError, match=r"not saved together.*'a' at step 1, 'b' at step 2"):
        model.load_snapshot("same name")
    with pytest.raises(SnapshotError, match="'absent'"):
        model.load_snapshot("absent")
    model.save_snapshot("both")
    model.steps(2)
    assert [report.rows for report in model.load_snapshot("both")] == [member.size() for member in model.members]
    assert model.at() == [2, 2]
    with pytest.raises(SnapshotError, match=r"embedding 'a'.*exists"):
        model.save_snapshot("both")
    model.close()


def test_a_load_of_all_waits_for_the_snapshots_that_replace_those_it_loads(tmp_path) -> None:
    model = Model(tmp_path, TWO)
    model.steps(3)
    model.save_snapshot("one")
    model.steps(2)
    model.members[0].save_snapshot("one", background=True, overwrite=True)
    with pytest.raises(SnapshotError, match=r"not saved together.*'a' at step 5, 'b' at step 3"):
        model.load_snapshot("one")
    model.save_snapshot("one", background=True, overwrite=True)
    model.steps(1)
    model.load_snapshot("one")
    assert model.at() == [5, 5]
    model.close()


def test_a_snapshot_that_is_replaced_while_all_are_loaded_is_not_loaded(tmp_path) -> None:
    model = Model(tmp_path, TWO)
    model.steps(3)
    model.save_snapshot("one")
    model.steps(2)
    model.members[0].save_snapshot("later")
    last = model.members[1].table_handle().snapshot_manager
    check, place = last.check_snapshot, tmp_path / "a" / "snapshots"

    def replaced_meanwhile(snapshot: Snapshot) -> None:
        check(snapshot)
        shutil.rmtree(place / "one")
        (place / "later").rename(place / "one")

    last.check_snapshot = replaced_meanwhile  # type: ignore[method-assign]
    with pytest.raises(SnapshotError, match="was replaced"):
        model.load_snapshot("one")
    assert model.at() == [5, 5]
    model.close()


def test_a_load_of_all_that_fails_half_way_lets_nobody_save_or_train(tmp_path) -> None:
    model = Model(tmp_path, TWO)
    model.steps(1)
    model.save_snapshot("one")
    model.steps(1)
    table = model.members[1].table_handle().snapshot_manager

    def fails(snapshot: Snapshot) -> None:
        raise StoreError("the disk is full")

    table.load = fails  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="the disk is full"):
        model.load_snapshot("one")
    del table.load
    for call in (
        lambda: model.save_snapshot("two"),
        lambda: model.steps(1),
        lambda: model.members[1].save_snapshot("x"),
    ):
        with pytest.raises(StoreError, match="rows of different steps"):
            call()
    model.load_snapshot("one")
    model.steps(1)
    assert model.at() == [2, 2]
    model.close()


def test_snapshots_alone_are_enough_to_go_back_to_one_instant(tmp_path) -> None:
    apart = {"snapshot_path": tmp_path / "apart"}
    plan = "step 2; save two; step 1; a save three; step 1"
    killed(played, tmp_path / "local", ("host", "ssd"), plan, apart)
    shutil.rmtree(tmp_path / "local")
    assert Model(tmp_path / "local", ("ssd", "host"), **apart).at() == [2, 2]


def test_a_deleted_snapshot_takes_all_back_to_the_moment_before(tmp_path) -> None:
    stores = ("host", "ssd")
    killed(played, tmp_path, stores, "step 1; save one; step 1; save two; step 1")
    shutil.rmtree(tmp_path / "b" / "snapshots" / "two")
    assert Model(tmp_path, stores).at() == [1, 1]


WITH_STATES = {"state_dict_snapshots": True}
STATES_AND_CLOSED = f"save none; {'step 1; state_dict; ' * 4}close"


def step_of_a(path: Path, count: int) -> int:
    member = Model(path, TWO).members[0]
    steps_of(member, count)
    return int(member.metrics()["table"]["step"])


def test_a_closed_member_is_read_while_another_process_trains_the_others(tmp_path) -> None:
    in_process(played, tmp_path, TWO, STATES_AND_CLOSED, WITH_STATES)
    running = Model(tmp_path, TWO)
    running.steps(1, "b")
    assert killed(step_of_a, tmp_path, 0) == 4
    assert "trains embeddings of the group 'a', 'b'" in killed(step_of_a, tmp_path, 1)
    running.close()
    assert killed(step_of_a, tmp_path, 1) == 5


def test_all_start_empty_if_none_was_saved_and_none_does_if_one_was(tmp_path) -> None:
    killed(played, tmp_path / "none", TWO, "step 2")
    assert killed(at, tmp_path / "none", TWO) == [0, 0]
    killed(played, tmp_path / "one", TWO, "step 2; a save two; step 1")
    said = killed(at, tmp_path / "one", TWO)
    assert said.startswith("StoreError")
    assert "'a' has snapshot 'two', at step 2, 'b' has no snapshot" in said
    assert at(tmp_path / "one", TWO, "mixed") == [2, 0]


def test_a_clean_embedding_is_refused_with_an_unclean_one_if_that_is_asked_for(tmp_path) -> None:
    killed(played, tmp_path, TWO, "step 2; save two; step 1; a close; step 1 b")
    model = Model(tmp_path, TWO, open="error")
    with pytest.raises(StoreError, match=rf"store folders '{tmp_path}/b' are trained together and were not closed"):
        model.members[0].size()
    assert at(tmp_path, TWO) == [2, 2]


@pytest.mark.parametrize("trained", ["b", "ab"])
def test_an_embedding_that_is_made_again_beside_a_live_one_has_rows_of_its_moment(tmp_path, trained) -> None:
    model = Model(tmp_path, TWO)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1, *trained)
    lost = model.members[1]
    lost.table_handle().open_table.failure = OSError("disk full")  # as a failed write leaves it
    lost.close()
    model.members[1] = make(options("host", tmp_path), "adagrad", name="b", tables=1, seed=0)
    if trained == "b":
        assert model.at() == [2, 2]
        return
    with pytest.raises(StoreError, match=r"b' was not closed cleanly, .*close 'a'; the next open recovers"):
        model.at()
    model.members[0].close()
    assert Model(tmp_path, TWO).at() == [2, 2]
