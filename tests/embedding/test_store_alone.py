"""Stores of earlier versions, trained alone or in groups, open with what was theirs, and groups get a record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.embeddings import contents
from support.golden_groups import COUNTS, HISTORIES, OF_RANKS, Together
from support.golden_ranks import Trained
from support.golden_store import embedding_in, step, write_store
from support.places import GOLDEN
from support.ranks import run_ranks
from tierbed import StoreError
from tierbed.distributed import World
from tierbed.engine.durable import seal, unseal
from tierbed.snapshots.files.format import CHANGED_KEYS, FOLDER_FIELDS, LIVE_FILES, LIVE_VERSION, MANIFEST
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GROUP_FILE_PREFIX

NEW_FIELDS = LIVE_FILES, LIVE_VERSION, CHANGED_KEYS  # not in the markers of earlier versions
STORES = GOLDEN / "stores-2"
closed_and_killed = pytest.mark.parametrize(("store", "count"), [("closed", 3), ("killed", 2)])


def files(path: Path) -> dict[str, bytes]:
    """All files of a store but its locks, without what differs in each run: ids of snapshots and runs, times, rows.

    Of MARK the clean marker. Earlier versions kept no keys of changed rows.
    """
    found = {str(place.relative_to(path)): place for place in path.rglob("*") if place.is_file()}
    return {
        name: seal(_without_ids(unseal(place.read_bytes()))) if place.name in (MANIFEST, "MARK") else place.read_bytes()
        for name, place in found.items()
        if name not in ("LOCK", "SOCKET", "CHANGED")
    }


def _without_ids(manifest: dict[str, Any]) -> dict[str, Any]:
    described = manifest.get("description", manifest)
    described.pop("run", None)
    described.pop("row_counts", None)  # earlier versions wrote none
    if described is manifest:  # of MARK
        return {x: value for x, value in manifest.items() if x not in (*NEW_FIELDS, *FOLDER_FIELDS)}
    parent = manifest["parent"]
    return {**manifest, "id": "", "created": 0, "parent": parent and {**parent, "id": ""}}


def test_its_files_have_the_bytes_that_they_had(tmp_path) -> None:
    embedding = write_store(tmp_path)
    assert files(tmp_path / "rows") == files(STORES / "killed")
    embedding.close()
    assert files(tmp_path / "rows") == files(STORES / "closed")


@closed_and_killed
def test_it_opens_as_it_did(tmp_path, store, count) -> None:
    shutil.copytree(STORES / store, tmp_path / "before" / "rows")
    with embedding_in(tmp_path / "before") as found, write_store(tmp_path / "now") as made:
        assert found.metrics()["table"]["step"] == count
        for number in range(count + 1, 4):
            step(found, number)
        assert contents(found).tobytes() == contents(made).tobytes()
        found.load_snapshot("one")
        found.save_snapshot("three", "incremental")


def opened_over_ranks(world: World | None, folder: Path) -> tuple[int, bytes, bytes]:
    """The step at which rows of before open, and all rows, of these and of the store of today."""
    before, now = Trained(folder / "before", world), Trained(folder / "now", world)
    now.write()
    with before.rows, now.rows:
        before.rows.size()
        count = int(before.rows.metrics()["table"]["step"])
        for number in range(count + 1, 4):
            before.step(number)
        return count, before.contents(), now.contents()


@closed_and_killed
def test_a_store_on_ssd_or_of_two_ranks_opens_as_it_did(tmp_path, store, count) -> None:
    shutil.copytree(GOLDEN / "ssd-2" / store, tmp_path / "ssd" / "before" / "rows")
    shutil.copytree(GOLDEN / "ranks-2" / store, tmp_path / "ranks" / "before" / "rows")
    found = [opened_over_ranks(None, tmp_path / "ssd"), *run_ranks(2, opened_over_ranks, tmp_path / "ranks")]
    for step_count, before, now in found:
        assert (step_count, before) == (count, now)
        assert before
    for name in ("one", "two"):
        snapshot = tmp_path / "ranks" / "now" / "rows" / "snapshots" / name
        assert files(snapshot) == files(GOLDEN / "ranks-2" / "closed" / "snapshots" / name)


SUMS = {  # of the numbers of the steps that are found
    "closed": 3.0,
    "killed after saves of all": 3.0,
    "killed after saves of each": 1.0,
    "killed after a close of one": 1.0,
}


def opened(world: World | None, path: Path, count: int) -> list[float] | str:
    """The rows of a group that are found, which a step then changes, or why they are refused."""
    made = Together(path, count, world)
    try:
        found = made.read()
        made.step(16)
    except StoreError as error:
        return str(error)
    made.close()
    return found


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(("count", "ranks"), [*((count, 1) for count in COUNTS), (OF_RANKS, OF_RANKS)])
@pytest.mark.rotated("history")
def test_a_group_of_before(tmp_path, history, count, ranks) -> None:
    def again() -> list[float] | str:
        return opened(None, path, count) if ranks == 1 else run_ranks(ranks, opened, path, count)[0]

    path = tmp_path / "model"
    shutil.copytree(GOLDEN / "groups-4" / f"{count}{f' of {ranks} ranks' if ranks > 1 else ''}, {history}", path)
    found = again()
    records = [one for one in path.glob(f"{GROUP_FILE_PREFIX}*") if one.suffix != ".LOCK"]
    if history not in SUMS:
        assert "they have no saved step in common" in found
        assert all(f"{name!r} has snapshot 'one-{name}'" in found for name in "abc"[:count])
        assert 'open="mixed"' in found
        assert not records
        return
    assert found == [SUMS[history]] * count
    (file,) = records
    for name in "abc"[:count]:
        mark = FolderState(path / name).recovery_folder.mark
        assert mark.link is not None
        assert mark.link.list_paths(path / name)[0] == file
        assert not mark.old_fields
    assert again() == [SUMS[history] + 16] * count
