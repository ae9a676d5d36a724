"""A save of several embeddings under one name is used for all or for none: over a name, killed, and after errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from support.forked import Disk, disk_path, in_process
from support.shell import command
from support.together import Model, killed_at, played_from
from tierbed.engine import durable
from tierbed.engine.durable import publish
from tierbed.engine.errors import OptionError, SnapshotError
from tierbed.snapshots import list_snapshots

__all__ = ["disk_path"]

SLOW = pytest.mark.slow


def saved(path: Path, name: str) -> list[int | None]:
    """The step of the snapshot of this name in each store; None if there is none."""
    listings = [list_snapshots(marker.with_name("snapshots")) for marker in sorted(path.glob("*/MARK"))]
    assert not any(listing.damaged for listing in listings)
    steps = [{one.name: one.description["step"] for one in listing.snapshots} for listing in listings]
    return [of_store.get(name) for of_store in steps]


@pytest.mark.parametrize(
    ("stores", "kind", "name", "calls"),
    [
        *((("host", "host"), "full", name, [("rename", False)]) for name in ("latest", "next")),
        *(
            pytest.param(("ssd", "ssd", "host"), kind, "latest", [("rename", False), ("rename", True)], marks=SLOW)
            for kind in ("full", "incremental")
        ),
        pytest.param(("ssd", "host"), "incremental", "next", [("sync", False)], marks=SLOW),
        pytest.param(("ssd", "ssd"), "checkpoint", "latest", [("rename", False), ("rename", True)], marks=SLOW),
    ],
)
def test_a_save_of_all_that_is_killed_is_used_whole_or_not_at_all(tmp_path, stores, kind, name, calls) -> None:
    in_process(kills_of_a_save, tmp_path, stores, kind, name, calls)


def kills_of_a_save(folder: Path, stores: tuple[str, ...], kind: str, name: str, calls: list[tuple[str, bool]]) -> None:
    """Kill it at each of these calls: before them, or after them."""
    found, members = set(), len(stores)
    before = [1] * members if name == "latest" else [None] * members
    plan = "step 1; save latest; "
    if kind == "incremental":  # it is based on another one
        plan += "save other; "
    plan += f"step 2; begin; {'overwrite' if name == 'latest' else 'save'} {name} {kind}"
    for number in range(1, 100):
        for call, after in calls:
            path = folder / f"{number}-{after}" / "store"
            said = killed_at(path, call, number, played_from, path, stores, plan, after=after)
            if number % 2:  # a command takes the locks first, else a trainer
                assert command("snapshot", "prune", path, "--keep-last", 9) == 0
            of_name = saved(path, name)
            done = of_name.count(3)
            assert of_name == [3] * done + before[done:]
            model = Model(path, stores)
            steps = model.at()
            assert steps in ([1] * members, [3] * members)  # all have their names, and the record does not say it
            assert done == members or steps[0] == 1
            assert saved(path, name) == of_name
            assert not list(path.glob("*/snapshots/.tmp-*"))
            if 0 < done < members:
                with pytest.raises(SnapshotError, match=r"not saved together|there is no snapshot"):
                    model.load_snapshot(name)
            if steps[0] == 1:
                model.save_snapshot(name, overwrite=name == "latest")
                assert saved(path, name) == steps
            model.close()
            shutil.rmtree(path)
            found.add((done, steps[0]))
        if said == "done":
            break
    assert number > members
    assert found >= {(0, 1), (1, 1), (members, 3)}


def test_a_save_of_all_that_one_cannot_make_is_refused(tmp_path) -> None:
    disk, mixed = Model(tmp_path / "disk", ("ssd", "ssd")), Model(tmp_path / "mixed", ("ssd", "host"))
    nowhere = Model([tmp_path / "nowhere", None], ("host", "host"))
    for model in (disk, mixed, nowhere):
        model.steps(1)
    disk.save_snapshot("made", "checkpoint")
    snapshots = [list_snapshots(tmp_path / "disk" / name / "snapshots").snapshots for name in "ab"]
    assert [[one.kind for one in of_store] for of_store in snapshots] == [["checkpoint"]] * 2
    disk.steps(1)
    disk.load_snapshot("made")
    assert disk.at() == [1, 1]
    with pytest.raises(OptionError, match=r"'b'.*checkpoint"):
        mixed.save_snapshot("made", "checkpoint")
    assert saved(tmp_path / "mixed", "made") == [None, None]
    for background in (False, True):
        with pytest.raises(SnapshotError, match="'b' has no persistent_path"):
            nowhere.save_snapshot("none", background=background)
    assert saved(tmp_path / "nowhere", "none") == [None]
    for model in (disk, mixed, nowhere):
        model.close()


def save_and_wait(model: Model, name: str, background: bool) -> None:
    saving = model.save_snapshot(name, background=background)
    if saving is not None:
        saving.wait()


def on_a_small_disk(path: Path, other: Path, small: str) -> None:
    disk = Disk(path, 1 << 18)
    places = [disk.path if name == small else other for name in "ab"]
    model = Model(places, ("host", "host"))
    model.steps(1)
    model.save_snapshot("one")
    model.members["ab".index(small)].put(torch.arange(8000), torch.ones(8000, 5))
    for background in (False, True):
        with pytest.raises(SnapshotError, match="No space left"):
            save_and_wait(model, "large", background)
        for place in places:
            assert not list(place.glob("*/snapshots/*large*"))
    model.load_snapshot("one")
    model.steps(1)
    save_and_wait(model, "two", True)
    assert [saved(place, "two") for place in places] == [[2], [2]]
    model.close()


@pytest.mark.parametrize("small", ["a", "b"])
def test_a_save_of_all_for_which_one_disk_has_no_room_leaves_no_snapshot(disk_path, tmp_path, small) -> None:
    in_process(on_a_small_disk, disk_path, tmp_path, small)


@pytest.mark.parametrize("background", [False, True])
def test_a_rename_that_fails_leaves_the_snapshots_before_it_and_says_which(tmp_path, monkeypatch, background) -> None:
    model = Model(tmp_path, ("host", "host"))
    model.steps(1)
    model.save_snapshot("one")
    model.steps(1)
    with monkeypatch.context() as patched:

        def fails_in_b(temporary: Path, path: Path, overwrite: bool = False) -> None:
            if path.parent.parent.name == "b":
                raise OSError("the device fails")
            publish(temporary, path, overwrite)

        patched.setattr(durable, "publish", fails_in_b)
        said = r"'two' was not written to '.*b/snapshots'.*saved in '.*a/snapshots', but not in '.*b/snapshots'"
        with pytest.raises(SnapshotError, match=said):
            save_and_wait(model, "two", background)
    assert saved(tmp_path, "two") == [2, None]
    assert not list(tmp_path.glob("*/snapshots/.tmp-*"))
    with pytest.raises(SnapshotError, match="there is no snapshot 'two'"):
        model.load_snapshot("two")
    model.steps(1)
    model.save_snapshot("two", overwrite=True)
    assert saved(tmp_path, "two") == [3, 3]
    model.close()


def test_a_background_save_of_all_is_full_for_one_without_a_parent(tmp_path) -> None:
    model = Model(tmp_path, ("host", "host"))
    model.steps(1)
    model.members[0].save_snapshot("base")
    saving = model.save_snapshot("all", "incremental", background=True)
    assert saving is not None
    saving.wait()
    snapshots = [list_snapshots(tmp_path / name / "snapshots").snapshots[-1] for name in "ab"]
    assert [(one.name, one.kind) for one in snapshots] == [("all", "incremental"), ("all", "full")]
    model.close()
