"""Embeddings that are trained together go back to one instant, after kills anywhere, or say that there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.embeddings import make
from support.forked import in_process
from support.killed import remarks
from support.killed import step as one_step
from support.stores import options
from support.together import Model, killed, killed_at, played
from tierbed.engine.errors import ClosedError, SnapshotError, StoreError
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile

SLOW = pytest.mark.slow
TWO = [("ssd", "host"), *(pytest.param(stores, marks=SLOW) for stores in (("host", "host"), ("ssd", "ssd")))]


def names(path: Path, *members: str) -> list[list[str]]:
    return [[one.name for one in list_snapshots(path / name / "snapshots").snapshots] for name in members or "ab"]


def at(path: Path, stores: tuple[str, ...], mode: str = "resume") -> list[int]:
    model = Model(path, stores, open=mode)
    found = model.at()
    model.steps(1)
    return found


APART = "step 10; a save ten; step 10; b save twenty; step 3"


@pytest.mark.parametrize("stores", TWO)
def test_snapshots_of_two_steps_are_no_recovery_until_it_is_asked_for(tmp_path: Path, stores: tuple[str, ...]) -> None:
    killed(played, tmp_path, stores, APART)
    for _ in range(2):
        said = killed(at, tmp_path, stores)
        assert said.startswith("StoreError")
        for part in ("'a' has snapshot 'ten', at step 10", "'b' has snapshot 'twenty', at step 20", 'open="mixed"'):
            assert part in said
    assert killed(at, tmp_path, stores, "error").startswith("StoreError")
    assert killed(at, tmp_path, stores, "mixed") == [10, 20]
    assert killed(at, tmp_path, stores) == [10, 20]  # it was accepted


def load_each(path: Path, stores: tuple[str, ...]) -> list[int]:
    model = Model(path, stores)
    model.members[1].load_snapshot("twenty")
    model.members[0].load_snapshot("ten")
    model.steps(2)
    return model.at()


@pytest.mark.parametrize("stores", TWO)
def test_a_snapshot_loaded_into_each_is_a_way_out(tmp_path: Path, stores: tuple[str, ...]) -> None:
    killed(played, tmp_path, stores, APART)
    assert killed(load_each, tmp_path, stores) == [12, 22]
    assert killed(at, tmp_path, stores) == [10, 20]


ALL_THEN_EACH = (
    "step 4; save all; step 1; a save s5; step 1; b save s6; step 2; prune 1; "
    "a overwrite latest; step 1; b overwrite latest; step 1"
)


@pytest.mark.parametrize("stores", TWO)
def test_later_saves_of_one_do_not_move_what_all_go_back_to(
    tmp_path: Path, stores: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    killed(played, tmp_path, stores, ALL_THEN_EACH)
    model = Model(tmp_path, stores)
    assert model.at() == [4, 4]
    said = remarks(caplog)
    assert len(said) == 2
    for one in said:
        assert "restored snapshot 'all', of step 4; what was written since, steps 5 to " in one
        assert "its later snapshot 'latest', of step " in one
    assert [member.last_snapshot for member in model.members] == ["all", "all"]
    model.steps(2)
    for _ in range(3):  # over the name that the last run gave: at every instant both have rows of one step
        for member in model.members:
            member.save_snapshot("latest", overwrite=True)
    model.close()


@pytest.mark.parametrize("stores", TWO)
def test_one_name_for_each_save_never_loses_the_last_step_of_all(tmp_path: Path, stores: tuple[str, ...]) -> None:
    each, more = "step 1; a overwrite latest; b overwrite latest; ", "step 1; a overwrite latest"
    killed(played, tmp_path, stores, 2 * each + more)
    assert killed(at, tmp_path, stores) == [2, 2]
    killed(played, tmp_path, stores, each + more)
    assert killed(at, tmp_path, stores) == [3, 3]


@pytest.mark.parametrize("stores", TWO)
def test_a_frozen_embedding_stays_as_it_is(tmp_path: Path, stores: tuple[str, ...]) -> None:
    killed(played, tmp_path, stores, "step 2; close")
    killed(played, tmp_path, stores, "step 1 b; b save s1; step 1 b; b save s2; step 1 b; b save s3; step 1 b")
    assert Model(tmp_path, stores).at() == [2, 5]


def opened_first(path: Path, stores: tuple[str, ...], order: str) -> list[int]:
    model = Model(path, stores)
    for name in order:
        next(member for member in model.members if member.name == name).size()
    return model.at()


def save_all(path: Path, stores: tuple[str, ...], kind: str, begin: Callable[[], None]) -> None:
    saved(path, stores, kind, begin)


def saved(path: Path, stores: tuple[str, ...], kind: str, begin: Callable[[], None]) -> Model:
    model = Model(path, stores)
    model.steps(1)
    model.save_snapshot("first")
    model.steps(2)
    begin()
    model.save_snapshot("final", kind, overwrite=True)
    return model


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("stores", "kind", "calls"),
    [
        (("host", "host"), "full", ("rename",)),
        *(
            pytest.param(stores, kind, ("rename", "sync"), marks=SLOW)
            for stores in (("ssd", "host"), ("host", "host", "ssd"))
            for kind in ("full", "incremental")
        ),
    ],
)
def test_a_save_of_all_is_used_whole_or_not_at_all_wherever_it_is_killed(
    tmp_path: Path, stores: tuple[str, ...], kind: str, calls: tuple[str, ...]
) -> None:
    in_process(kills_of_a_save, tmp_path, stores, kind, calls)


def kills_of_a_save(folder: Path, stores: tuple[str, ...], kind: str, calls: tuple[str, ...]) -> None:
    for call in calls:
        for number in range(1, 100):
            path = folder / f"{call}{number}" / "store"
            said = killed_at(path, call, number, save_all, path, stores, kind)
            model = Model(path, stores)
            found = model.at()
            kept = names(path, *"abc"[: len(stores)])
            assert found in ([1] * len(stores), [3] * len(stores))
            has_final = ["final" in one for one in kept]
            assert has_final == sorted(has_final, reverse=True)  # a kill between two renames leaves the first
            assert found[0] == 1 or all(has_final)
            model.close()
            shutil.rmtree(path.parent)
            if said == "done":
                assert found[0] == 3
                break
        assert number > len(stores)


def copied(made: Path, path: Path) -> Path:
    shutil.copytree(made, path, ignore=shutil.ignore_patterns("SOCKET"))
    return path


def there_and_back(path: Path, stores: tuple[str, ...]) -> None:
    saved(path, stores, "full", nothing).close()
    Model(path, stores).load_snapshot("first")


def load_all(path: Path, stores: tuple[str, ...], begin: Callable[[], None]) -> None:
    model = Model(path, stores)
    model.counts()
    begin()
    model.load_snapshot("final")
    model.steps(1)


@pytest.mark.parametrize("stores", [("host", "host"), pytest.param(("ssd", "host"), marks=SLOW)])
def test_a_load_of_all_is_finished_from_its_first_mark_on_wherever_it_and_the_recovery_are_killed(
    tmp_path: Path, stores: tuple[str, ...]
) -> None:
    in_process(kills_of_a_load, tmp_path, stores)


def kills_of_a_load(folder: Path, stores: tuple[str, ...]) -> None:
    killed(there_and_back, folder / "made", stores)
    expected = [1, 1]
    for number in range(1, 60):
        path = copied(folder / "made", folder / f"{number}" / "store")
        said = killed_at(path, "rename", number, load_all, path, stores)
        if all(says(path / name, "final") for name in "ab") and expected == [1, 1]:
            expected = [3, 3]
            for second in range(1, 60):
                again = copied(path, folder / f"{number}-{second}" / "store")
                late = killed_at(again, "rename", second, use_one, again, stores, "ab"[second % 2])
                assert killed(opened_first, again, stores, "ab") == expected
                if late == "done":
                    break
        assert killed(opened_first, path, stores, ("ab", "ba")[number % 2]) == expected
        if said == "done":
            break
    assert expected == [3, 3]


def says(store: Path, name: str) -> bool:
    """Whether the record says that a store has the rows of a snapshot."""
    file = GroupFile(FolderState(store))
    return file.record.now[file.store].snapshot == Snapshot.open(store / "snapshots" / name).manifest.id


def use_one(path: Path, stores: tuple[str, ...], name: str, begin: Callable[[], None]) -> None:
    begin()
    model = Model(path, stores)
    model.members["ab".index(name)].size()


def recover(path: Path, stores: tuple[str, ...], begin: Callable[[], None]) -> None:
    begin()
    Model(path, stores).at()


@pytest.mark.parametrize("stores", [("host", "ssd", "host")])
@pytest.mark.slow
def test_a_recovery_that_is_killed_is_finished_by_the_next(tmp_path: Path, stores: tuple[str, ...]) -> None:
    in_process(kills_of_a_recovery, tmp_path, stores)


def kills_of_a_recovery(folder: Path, stores: tuple[str, ...]) -> None:
    killed(played, folder / "made", stores, "step 2; save all; step 1; a save later; c close; step 1 a b")
    for number in range(1, 60):
        path = copied(folder / "made", folder / f"{number}" / "store")
        said = killed_at(path, "rename", number, recover, path, stores)
        assert killed(opened_first, path, stores, ("cab", "bca")[number % 2]) == [2, 2, 2]
        if said == "done":
            break
    assert number > 3


def test_a_run_of_one_alone_rolls_nothing_back(tmp_path: Path) -> None:
    stores = ("host", "host")
    killed(played, tmp_path, stores, ALL_THEN_EACH)
    with make(options("host", tmp_path), "adagrad", name="a", tables=1, seed=0) as alone:
        assert alone.metrics()["table"]["step"] == 4
        from support.killed import steps

        steps(alone, 3)
    assert Model(tmp_path, stores).at() == [7, 4]


def test_names_saved_at_two_instants_are_not_loaded_as_one(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "host"))
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


def test_a_save_of_all_in_the_background_is_of_the_step_it_began_at(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "ssd", "device"))
    model.steps(3)
    saving = model.save_snapshot("behind", background=True)
    model.steps(2)
    assert saving is not None
    assert saving.wait()
    assert names(tmp_path, "a", "b", "c") == [["behind"]] * 3
    model.load_snapshot("behind")
    assert model.at() == [3, 3, 3]
    model.close()


def test_a_load_of_all_waits_for_the_snapshots_that_replace_those_it_loads(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "host"))
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


def test_a_snapshot_that_is_replaced_while_all_are_loaded_is_not_loaded(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "host"))
    model.steps(3)
    model.save_snapshot("one")
    model.steps(2)
    model.members[0].save_snapshot("later")
    last = model.members[1].table_handle().snapshots
    check, place = last.check_snapshot, tmp_path / "a" / "snapshots"

    def replaced_meanwhile(snapshot: Snapshot) -> None:
        check(snapshot)
        shutil.rmtree(place / "one")
        (place / "later").rename(place / "one")

    last.check_snapshot = replaced_meanwhile  # type: ignore[method-assign]
    with pytest.raises(SnapshotError, match="was replaced by another"):
        model.load_snapshot("one")
    assert model.at() == [5, 5]
    model.close()


def test_a_closed_model_and_a_name_of_another_type_are_errors_that_say_so(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "ssd"))
    model.steps(1)
    with pytest.raises(SnapshotError, match="snapshot name 5"):
        model.load_snapshot(5)  # type: ignore[arg-type]
    model.close()
    for call in (lambda: model.save_snapshot("one"), lambda: model.load_snapshot("one")):
        with pytest.raises(ClosedError, match="embedding 'a' was closed"):
            call()


def test_a_load_of_all_that_fails_half_way_lets_nobody_save_or_train(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "host"))
    model.steps(1)
    model.save_snapshot("one")
    model.steps(1)
    table = model.members[1].table_handle().snapshots

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


def test_an_embedding_that_begins_fresh_leaves_the_others_their_rows(tmp_path: Path) -> None:
    stores = ("host", "host")
    killed(played, tmp_path, stores, ALL_THEN_EACH)
    with make(options("host", tmp_path, open="fresh"), "adagrad", name="a", tables=1, seed=0) as fresh:
        assert fresh.size() == 0
    found = Model(tmp_path, stores)
    assert found.at()[0] == 0
    assert found.at()[1] > 0


def test_a_model_that_was_copied_goes_by_its_own_folders(tmp_path: Path) -> None:
    stores = ("host", "ssd")
    killed(played, tmp_path / "one", stores, ALL_THEN_EACH)
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("SOCKET"))
    assert Model(tmp_path / "two", stores).at() == [4, 4]
    shutil.rmtree(tmp_path / "one" / "b")
    assert killed(at, tmp_path / "one", stores).startswith("StoreError")
    assert killed(at, tmp_path / "one", stores, "mixed")[1] == 0


def other_store(path: Path, stores: tuple[str, ...], count: int) -> list[int]:
    model = Model(path, stores)
    found = model.at()
    model.steps(count, "b")
    if count == 2:
        model.close()
    return found


def test_rows_that_another_kind_of_store_takes_over_stay_of_their_instant(tmp_path: Path) -> None:
    killed(other_store, tmp_path, ("host", "host"), 2)
    assert killed(other_store, tmp_path, ("ssd", "host"), 0) == [0, 2]
    assert killed(other_store, tmp_path, ("host", "ssd"), 1) == [0, 2]


def lost_disks(path: Path, apart: Path) -> None:
    model = Model(path, ("host", "ssd"), snapshot_path=apart)
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1)
    model.members[0].save_snapshot("three")
    model.steps(1)


def test_snapshots_alone_are_enough_to_go_back_to_one_instant(tmp_path: Path) -> None:
    killed(lost_disks, tmp_path / "local", tmp_path / "apart")
    shutil.rmtree(tmp_path / "local")
    model = Model(tmp_path / "local", ("ssd", "host"), snapshot_path=tmp_path / "apart")
    assert model.at() == [2, 2]


def twice_saved(path: Path, stores: tuple[str, ...]) -> None:
    model = Model(path, stores)
    for name in ("one", "two"):
        model.steps(1)
        model.save_snapshot(name)
    model.steps(1)


def test_a_deleted_snapshot_takes_all_back_to_the_moment_before(tmp_path: Path) -> None:
    stores = ("host", "ssd")
    killed(twice_saved, tmp_path, stores)
    shutil.rmtree(tmp_path / "b" / "snapshots" / "two")
    assert Model(tmp_path, stores).at() == [1, 1]


def with_a_third(path: Path) -> list[int]:
    model = Model(path, ("host", "host", "host"))
    found = model.at()
    model.steps(1)
    model.save_snapshot("of-three")
    model.steps(1)
    return found


def test_a_member_joins_and_leaves(tmp_path: Path) -> None:
    killed(played, tmp_path, ("host", "host"), "step 2; save two; step 1")
    assert killed(with_a_third, tmp_path) == [2, 2, 0]
    assert killed(at, tmp_path, ("host", "host")) == [3, 3]
    assert killed(at, tmp_path, ("host",) * 3) == [3, 3, 1]


def states_and_closed(path: Path) -> None:
    model = Model(path, ("host", "host"), state_dict_snapshots=True)
    model.save_snapshot("none")
    for _ in range(4):
        model.steps(1)
        model.state_dict()
    model.close()


def late(path: Path) -> list[int]:
    model = Model(path, ("host", "host"), state_dict_snapshots=True)
    model.steps(3)
    model.save_snapshot("late")
    model.steps(1)
    return model.at()


def test_a_save_after_states_of_an_earlier_run_is_the_latest(tmp_path: Path) -> None:
    in_process(states_and_closed, tmp_path)
    assert killed(late, tmp_path) == [8, 8]
    assert killed(at, tmp_path, ("host", "host")) == [7, 7]


def test_a_closed_member_is_read_while_another_process_trains_the_others(tmp_path: Path) -> None:
    in_process(states_and_closed, tmp_path)
    running = Model(tmp_path, ("host", "host"))
    running.steps(1, "b")
    assert killed(step_of_a, tmp_path) == 4
    assert "trains embeddings of the group 'a', 'b'" in killed(one_step_of_a, tmp_path)
    running.close()
    assert killed(one_step_of_a, tmp_path) == 5


def step_of_a(path: Path) -> int:
    return int(Model(path, ("host", "host")).members[0].metrics()["table"]["step"])


def one_step_of_a(path: Path) -> int:
    member = Model(path, ("host", "host")).members[0]
    one_step(member)
    return int(member.metrics()["table"]["step"])


def test_all_start_empty_if_none_was_saved_and_none_does_if_one_was(tmp_path: Path) -> None:
    stores = ("host", "host")
    killed(played, tmp_path / "none", stores, "step 2")
    assert killed(at, tmp_path / "none", stores) == [0, 0]
    killed(played, tmp_path / "one", stores, "step 2; a save two; step 1")
    said = killed(at, tmp_path / "one", stores)
    assert said.startswith("StoreError")
    assert "'a' has snapshot 'two', at step 2, 'b' has no snapshot" in said
    assert killed(at, tmp_path / "one", stores, "mixed") == [2, 0]


def test_a_clean_embedding_is_refused_with_an_unclean_one_if_that_is_asked_for(tmp_path: Path) -> None:
    killed(played, tmp_path, ("host", "host"), "step 2; save two; step 1; a close; step 1 b")
    model = Model(tmp_path, ("host", "host"), open="error")
    with pytest.raises(StoreError, match=rf"store folders '{tmp_path}/b' are trained together and were not closed"):
        model.members[0].size()
    assert killed(at, tmp_path, ("host", "host")) == [2, 2]


@pytest.mark.parametrize("trained", ["b", "ab"])
def test_an_embedding_that_is_made_again_beside_a_live_one_has_rows_of_its_moment(tmp_path: Path, trained: str) -> None:
    model = Model(tmp_path, ("host", "host"))
    model.steps(2)
    model.save_snapshot("two")
    model.steps(1, *trained)
    lost = model.members[1]
    lost.table_handle().local_table.failure = OSError("disk full")  # as a failed write leaves it
    lost.close()
    model.members[1] = make(options("host", tmp_path), "adagrad", name="b", tables=1, seed=0)
    if trained == "b":
        assert model.at() == [2, 2]
        return
    with pytest.raises(StoreError, match=r"b' was not closed cleanly, .*close 'a'; the next open recovers"):
        model.at()
    model.members[0].close()
    assert Model(tmp_path, ("host", "host")).at() == [2, 2]
