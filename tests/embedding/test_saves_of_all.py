"""A save of several embeddings under one name is made for all or for none: over a name, killed, and after errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.forked import Disk, disk_path, in_process
from support.shell import command
from support.together import Model, killed_at
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


def save_over(path: Path, stores: tuple[str, ...], kind: str, begin: Callable[[], None]) -> None:
    model = Model(path, stores)
    model.steps(1)
    model.save_snapshot("latest")
    if kind == "incremental":  # it is based on another one
        model.save_snapshot("other")
    model.steps(2)
    begin()
    model.save_snapshot("latest", kind, overwrite=True)


@pytest.mark.parametrize(
    ("stores", "kind", "sides"),
    [
        (("host", "host"), "full", [False]),
        *(pytest.param(("ssd", "ssd", "host"), kind, [False, True], marks=SLOW) for kind in ("full", "incremental")),
        pytest.param(("ssd", "ssd"), "checkpoint", [False, True], marks=SLOW),
    ],
)
def test_a_save_of_all_over_a_name_that_is_killed_leaves_the_old_ones_or_the_new_ones(
    tmp_path: Path, stores: tuple[str, ...], kind: str, sides: list[bool]
) -> None:
    in_process(kills_of_a_save, tmp_path, stores, kind, sides)


def kills_of_a_save(folder: Path, stores: tuple[str, ...], kind: str, sides: list[bool]) -> None:
    """Kill it before each rename, after each, or both, as `sides` have it."""
    found = set()
    for number in range(1, 100):
        for after in sides:
            path = folder / f"{number}-{after}" / "store"
            said = killed_at(path, "rename", number, save_over, path, stores, kind, after=after)
            if number % 2:  # a command takes the locks first, else a trainer
                assert command("snapshot", "prune", path, "--keep-last", 9) == 0
                assert saved(path, "latest") in ([1] * len(stores), [3] * len(stores))
            model = Model(path, stores)
            steps = model.at()
            assert steps in ([1] * len(stores), [3] * len(stores))
            assert saved(path, "latest") == steps
            assert not list(path.glob("*/snapshots/.tmp-*"))
            model.close()
            shutil.rmtree(path)
            found.add(steps[0])
        if said == "done":
            break
    assert number > 2 * len(stores)
    assert (found, steps[0]) == ({1, 3}, 3)


def test_rocksdb_checkpoints_of_all_need_rocksdb_in_all(tmp_path: Path) -> None:
    for folder, stores in (("disk", ("ssd", "ssd")), ("mixed", ("ssd", "host"))):
        model = Model(tmp_path / folder, stores)
        model.steps(1)
        if folder == "disk":
            model.save_snapshot("made", "checkpoint")
            snapshots = [list_snapshots(tmp_path / folder / name / "snapshots").snapshots for name in "ab"]
            assert [[one.kind for one in of_store] for of_store in snapshots] == [["checkpoint"]] * 2
            model.steps(1)
            model.load_snapshot("made")
            assert model.at() == [1, 1]
        else:
            with pytest.raises(OptionError, match=r"'b'.*checkpoint"):
                model.save_snapshot("made", "checkpoint")
            assert saved(tmp_path / folder, "made") == [None, None]
        model.close()


def test_a_model_with_an_embedding_without_a_folder_is_not_saved(tmp_path: Path) -> None:
    model = Model([tmp_path, None], ("host", "host"))
    model.steps(1)
    for background in (False, True):
        with pytest.raises(SnapshotError, match="'b' has no persistent_path"):
            model.save_snapshot("none", background=background)
    assert saved(tmp_path, "none") == [None]
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
def test_a_save_of_all_for_which_one_disk_has_no_room_leaves_no_snapshot(
    disk_path: Path, tmp_path: Path, small: str
) -> None:
    in_process(on_a_small_disk, disk_path, tmp_path, small)
