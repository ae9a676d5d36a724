"""Embeddings that ranks train together go back to one instant, and go from ranks to one process and on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from support import shim
from support.embeddings import make
from support.killed import copy_as_killed, step
from support.live_rows import left_open, opened, own_rows
from support.live_rows import step as train
from support.ranks import alike, fails, on_ranks, run_kept, started
from support.stores import options
from support.together import Model
from tierbed import GroupError, StoreError
from tierbed.distributed import World
from tierbed.embedding.tables.shared_folder import SharedFolder
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.store import group
from tierbed.snapshots.store.folder import StoreFolder

NO_COMMON_STEP = "they have no saved step in common"


def model_of(world: World, path: Path, store: str = "host", **more: Any) -> Model:
    return Model(path, (store, "host"), world, **more)


def at(world: World, path: Path, mode: str = "resume") -> list[int] | str:
    """The steps that a model opens at, or what it says."""
    model = model_of(world, path, open=mode)
    try:
        return model.counts()
    except StoreError as error:
        return str(error)
    finally:
        model.close()


def end(world: World) -> None:
    """A kill, when all have come so far."""
    world.sum(torch.ones(1))
    os.kill(os.getpid(), signal.SIGKILL)


def killed(*task: Any, ranks: int = 2) -> None:
    with started(ranks, *task) as group:
        assert [child.wait() for child, _ in group] == [-signal.SIGKILL] * ranks


def trained(world: World, path: Path, store: str = "host") -> None:
    model = model_of(world, path, store)
    for number in range(1, 9):
        model.steps(1)
        if number == 3:
            model.save_snapshot("three")
        if number == 5:
            model.save_snapshot("five", "incremental")
            saving: Any = model.save_snapshot("background", background=True)
        if number == 6:
            assert saving.wait()
        if number in (6, 7):
            model.members[number - 6].save_snapshot(f"s{number}")
    end(world)


def taken_up(world: World, path: Path, store: str) -> list[list[int]]:
    model = model_of(world, path, store)
    found = [model.counts()]
    model.load_snapshot("three")
    found.append(model.counts())
    model.steps(1)
    model.save_snapshot("four")
    model.steps(1)
    model.close()
    return found


@pytest.mark.parametrize("store", [pytest.param("host", marks=pytest.mark.slow), "ssd"])
def test_ranks_go_back_to_one_instant_of_all_embeddings(tmp_path: Path, store: str) -> None:
    killed(trained, tmp_path, store)
    assert alike(2, taken_up, tmp_path, store) == [[5, 5], [3, 3]]
    names = [[one.name for one in list_snapshots(tmp_path / name / "snapshots").snapshots] for name in "ab"]
    assert names == [["three", "five", "background", "s6", "four"], ["three", "five", "background", "s7", "four"]]


def apart(world: World, path: Path) -> None:
    model = model_of(world, path)
    for member in model.members:
        model.steps(1)
        member.save_snapshot("alone")
    end(world)


def loads_one(world: World, path: Path) -> None:
    model_of(world, path).members[0].load_snapshot("alone")
    end(world)


def loads_each(world: World, path: Path) -> list[Any]:
    """All ranks open without a common step, for a load: this is the error until each has been loaded."""
    model = model_of(world, path)
    a, b = model.members
    a.table_handle(for_load=True)
    said = [fails(a.size, StoreError), fails(lambda: a.save_snapshot("x"), StoreError), fails(b.size, StoreError)]
    for one in model.members:
        one.load_snapshot("alone")
    found = model.counts()
    model.save_snapshot("both")
    model.close()
    return [*said, found]


def test_ranks_without_a_common_step_are_told_so_and_use_no_rows_before_each_is_loaded(tmp_path: Path) -> None:
    killed(apart, tmp_path)
    assert "'a' has snapshot 'alone', at step 1, 'b' has snapshot 'alone', at step 2" in alike(2, at, tmp_path)
    killed(loads_one, tmp_path)
    assert NO_COMMON_STEP in alike(2, at, tmp_path)
    *said, found = alike(2, loads_each, tmp_path)
    assert [NO_COMMON_STEP in one for one in said] == [True] * 3
    assert found == [1, 2]
    assert alike(2, at, tmp_path) == [1, 2]


def test_ranks_without_a_common_step_may_accept_what_is_there(tmp_path: Path) -> None:
    killed(apart, tmp_path)
    assert alike(2, at, tmp_path, "mixed") == [1, 2]
    assert alike(1, at, tmp_path) == [1, 2]


def closed_by_one(world: World, path: Path) -> list[int]:
    """Rank 0 closes all, and rank 1 leaves one embedding as a kill does."""
    model = model_of(world, path)
    found = model.counts()
    model.steps(1)
    if found == [0, 0]:
        model.save_snapshot("one", "full")
        model.steps(1)
    model.members[0].save_snapshot("x", "full")
    model.steps(1)
    if world.rank == 1:
        left_open(model.members[1])
    model.close()
    return found


def test_the_names_of_snapshots_that_ranks_went_back_before_are_free_again(tmp_path: Path) -> None:
    assert alike(2, closed_by_one, tmp_path) == [0, 0]
    assert alike(2, closed_by_one, tmp_path) == [1, 1]


def no_space(*_: Any) -> None:
    raise StoreError("No space left")


def cannot_note(world: World, path: Path) -> None:
    """Rank 0 cannot write the record in a first write, in loads and in a save."""
    model = model_of(world, path)
    model.steps(1)
    model.save_snapshot("one")
    model.steps(1)
    model.close()
    model = model_of(world, path)
    model.counts()
    a = model.members[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "write_record", no_space)
        for call in (
            lambda: step(a),
            lambda: model.load_snapshot("one"),
            lambda: a.load_snapshot("one"),
            lambda: model.save_snapshot("three"),
        ):
            assert "No space left" in fails(call, StoreError)
            assert model.counts() == [2, 2]
    model.steps(1)
    model.save_snapshot("three")
    model.close()


def test_a_record_that_rank_0_cannot_write_fails_the_call_on_all_ranks(tmp_path: Path) -> None:
    run_kept(2, cannot_note, tmp_path)
    assert alike(2, at, tmp_path) == [3, 3]


def half_loaded(world: World, path: Path) -> None:
    """Rank 1 cannot read its part of the second embedding, once the first is loaded."""
    model = model_of(world, path)
    model.steps(1)
    model.save_snapshot("one")
    model.steps(1)
    own: Any = model.members[1].table_handle().local  # type: ignore[attr-defined]
    load = own.load_part

    def fail(*given: Any) -> Any:
        if world.rank == 1:
            raise StoreError("no memory is left")
        return load(*given)

    own.load_part = fail
    with pytest.raises(StoreError, match="no memory is left"):
        model.load_snapshot("one")
    with pytest.raises(StoreError, match="a load of 2 embeddings raised during its changes"):
        step(model.members[0])
    model.close()


def test_ranks_that_loaded_some_embeddings_alone_neither_train_nor_close_them_as_one(tmp_path: Path) -> None:
    run_kept(2, half_loaded, tmp_path)
    assert alike(2, at, tmp_path) == [1, 1]


@on_ranks(2, run_kept)
def test_rows_that_ranks_loaded_keep_their_version_in_the_next_run(world: World, tmp_path: Path) -> None:
    found = list[list[Any]]()
    for loads in (True, False):
        model = model_of(world, tmp_path)
        if loads:
            model.steps(1)
            model.save_snapshot("one")
            model.steps(1)
            model.load_snapshot("one")
        found.append([member.table_handle().snapshot_manager.make_rows_reference().version for member in model.members])
        model.close()
    assert found[0] == found[1]
    assert None not in found[0]


def loaded_alone(world: World, path: Path, steps: int) -> None:
    model = model_of(world, path)
    for name in ("two", "four"):
        model.steps(2)
        model.save_snapshot(name)
    model.members[1].load_snapshot("two")
    model.steps(steps)
    end(world)


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_load_of_one_by_ranks_counts_beside_a_snapshot_of_the_other(tmp_path: Path, steps: int) -> None:
    killed(loaded_alone, tmp_path, steps)
    assert alike(2, at, tmp_path) == [4, 2]


def closed_and_killed(world: World, path: Path, is_killed: bool) -> list[int]:
    model = model_of(world, path, snapshot_path=path / "apart")
    found = model.counts()
    if is_killed:
        model.steps(1)
        model.members[0].close()
        end(world)
    model.close()
    return found


def test_ranks_killed_before_a_first_snapshot_elsewhere_begin_all_anew(tmp_path: Path) -> None:
    killed(closed_and_killed, tmp_path, True)
    assert alike(2, closed_and_killed, tmp_path, False) == [0, 0]


def fresh(world: World, path: Path) -> list[int]:
    with make(options("host", path, open="fresh"), "adagrad", name="a", tables=1, seed=0, world=world) as one:
        return [int(one.metrics()["table"]["step"]), one.size()]


def test_an_embedding_of_ranks_that_begins_fresh_leaves_the_others_their_rows(tmp_path: Path) -> None:
    killed(trained, tmp_path)
    assert alike(2, fresh, tmp_path) == [0, 0]
    assert alike(2, at, tmp_path) == [0, 5]  # all go back to one step first


def killed_in_a_save(world: World, path: Path, victim: int, call: str, number: int) -> None:
    """The victim is killed before a call that changes files, in a save of all over one of step 1; then the other."""
    model = model_of(world, path)
    model.steps(1)
    model.save_snapshot("latest")
    model.steps(2)
    if world.rank == victim:
        shim.watch(path)
        shim.die_at(call, number)
    with suppress(GroupError):
        model.save_snapshot("latest", overwrite=True)
        path.joinpath("done").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def saved(path: Path) -> list[int]:
    listings = [list_snapshots(path / name / "snapshots") for name in "ab"]
    return [one.description["step"] for listing in listings for one in listing.snapshots if one.name == "latest"]


@pytest.mark.parametrize(
    ("victim", "call", "numbers"),
    [
        (0, "rename", range(11, 13)),  # before the first of them gets its name, and before the second does
        (1, "sync", range(2, 3)),
        pytest.param(0, "rename", range(1, 40), marks=pytest.mark.slow),
        pytest.param(1, "sync", range(1, 40), marks=pytest.mark.slow),
    ],
)
def test_a_save_of_all_in_which_a_rank_is_killed_is_used_for_all_or_for_none(
    tmp_path: Path, victim: int, call: str, numbers: range
) -> None:
    for number in numbers:
        path = tmp_path / str(number) / "store"
        killed(killed_in_a_save, path, victim, call, number)
        latest = saved(path)
        assert latest in ([1, 1], [3, 1], [3, 3])
        found = alike(2, at, path)
        assert found in ([1, 1], [min(latest)] * 2)  # the save counts once the record says so
        assert saved(path) == latest
        assert not list(path.glob("*/snapshots/.tmp-*"))
        if (path / "done").exists():
            assert found == [3, 3]
            break


STORES = ("ssd", "host")


def went_on(
    world: World | None, live: Path, steps: int = 1, save: str | None = None, own: bool = False, **more: Any
) -> list[int]:
    """What a model has as it opens; it is trained and closed after that. own: whether the disks of ranks differ."""
    path = live / str(world.rank) if own and world is not None else live
    model = Model(path, STORES, world, snapshot_path=live.parent / "snapshots", **more)
    found = model.counts()
    model.steps(steps)
    if save is not None:
        model.save_snapshot(save)
    model.close()
    return found


def of_one(path: Path) -> list[int]:
    return went_on(None, path, 0)


def test_ranks_with_own_disks_go_on_with_all_that_they_closed(tmp_path: Path) -> None:
    live = tmp_path / "live"
    assert alike(2, went_on, live, 2, "two", True) == [0, 0]
    assert alike(2, went_on, live, 1, None, True) == [2, 2]
    assert alike(2, went_on, live, 0, None, True) == [3, 3]
    shutil.rmtree(live / "1" / "b")
    assert alike(2, went_on, live, 0, None, True) == [2, 2]


def test_one_process_does_not_lose_what_ranks_have_on_other_hosts(tmp_path: Path) -> None:
    live, away = tmp_path / "live", tmp_path / "away"
    run_kept(2, went_on, live, 1, "one")
    run_kept(2, went_on, live, 1)
    (live / "b" / "ranks" / "1-of-2").rename(away)
    said = fails(lambda: of_one(live), StoreError)
    assert "live rows of 2 ranks, and the shards of rank 1 are not here" in said
    away.rename(live / "b" / "ranks" / "1-of-2")
    assert "live rows from step 2, and no snapshot of these rows" in fails(lambda: of_one(live), StoreError)
    assert alike(2, went_on, live, 0, "two") == [2, 2]
    assert of_one(live) == [2, 2]
    assert alike(3, went_on, live, 1, "three") == [2, 2]
    assert of_one(live) == [3, 3]


def copied(live: Path, to: Path) -> Path:
    """A copy of a model and of its snapshots."""
    copy_as_killed(live.parent, to)
    for name in "ab":
        (to / "live" / name / "snapshots").unlink()
        (to / "live" / name / "snapshots").symlink_to(to / "snapshots" / name / "snapshots")
    return to / "live"


def take_over(world: World, path: Path, number: int) -> None:
    if world.rank == 0:
        shim.watch(path.parent)
        shim.die_at("rename", number)
    with suppress(GroupError):
        went_on(world, path, 1)
        path.with_name("done").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "numbers", [range(9, 40, 21), pytest.param(range(1, 200), marks=pytest.mark.slow)], ids=["few", "all"]
)
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_a_kill_as_another_number_of_ranks_takes_over_leaves_all_that_was_saved(
    tmp_path: Path, numbers: range, before: int, now: int
) -> None:
    live = tmp_path / "before" / "live"
    run_kept(before, went_on, live, 1, "one")
    for number in numbers:
        path = copied(live, tmp_path / str(number))
        killed(take_over, path, number, ranks=now)
        again = copied(path, tmp_path / f"{number} again")
        assert of_one(path) in ([1, 1], [2, 2])
        if now > 1:  # else rows that one process closed may have no snapshot, which ranks need
            assert alike(2, went_on, again, 0) in ([1, 1], [2, 2])
        if path.with_name("done").exists():
            break


def full(*_: Any, **fields: Any) -> None:
    raise StoreError("No space left")


def refuse(call: Callable[[], Any]) -> None:
    assert "No space left" in fails(call, StoreError)


@on_ranks(2, run_kept)
def test_a_mark_that_one_rank_cannot_write_fails_the_call_on_all(world: World, tmp_path: Path) -> None:
    """MARK of the store, on rank 0, and of the shard of rank 1 cannot be written, each for a while."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(SharedFolder, "begin", full)
        refuse(lambda: opened(world, tmp_path).size())
    with opened(world, tmp_path) as rows:
        train(rows, 0)
        rows.save_snapshot("a")
        train(rows, 1)
    with opened(world, tmp_path) as rows, pytest.MonkeyPatch.context() as patch:
        before = own_rows(rows)
        if world.rank == 1:
            patch.setattr(StoreFolder, "clear_clean_marker", full)
        refuse(lambda: rows.load_snapshot("a"))
        assert own_rows(rows) == before
    with opened(world, tmp_path) as rows:
        assert own_rows(rows) == before
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(StoreFolder, "change", full)
            refuse(lambda: rows.load_snapshot("a"))
            refuse(lambda: rows.load_snapshot("a", tables=[0]))
            refuse(lambda: rows.save_snapshot("b"))
        assert own_rows(rows) == before
        rows.load_snapshot("a")
        train(rows, 5)
        rows.save_snapshot("b", "incremental")
        rows.load_snapshot("b", tables=[0])
        before = own_rows(rows)
    with opened(world, tmp_path) as rows:
        assert own_rows(rows) == before
