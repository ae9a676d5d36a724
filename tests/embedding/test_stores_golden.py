"""The golden stores open with what was theirs; other formats are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.embeddings import contents
from support.golden_group import Together
from support.golden_ranks import Trained
from support.golden_store import embedding_in, step, write_store
from support.places import GOLDEN
from support.ranks import run_ranks
from tierbed.distributed import World
from tierbed.engine.durable import seal, unseal
from tierbed.engine.errors import SnapshotError, StoreError
from tierbed.graph.state.folders import STATE_FILE, read_checkpoint
from tierbed.snapshots.files.format import CHANGED_KEYS, FOLDER_FIELDS, LIVE_FILES, LIVE_VERSION, MANIFEST
from tierbed.snapshots.files.reader import Snapshot
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile

STORES = GOLDEN / "stores"
closed_and_killed = pytest.mark.parametrize(("state", "count"), [("closed", 3), ("killed", 2)])


def files(path: Path) -> dict[str, bytes]:
    """All files of a store but its locks, without what differs in each run: ids of snapshots and runs, and times."""
    found = {str(place.relative_to(path)): place for place in path.rglob("*") if place.is_file()}
    return {
        name: seal(_without_ids(unseal(place.read_bytes()))) if place.name in (MANIFEST, "MARK") else place.read_bytes()
        for name, place in found.items()
        if name not in ("LOCK", "SOCKET")
    }


def _without_ids(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest, or the clean marker in MARK, without ids."""
    described = content.get("description", content)
    described.pop("run", None)
    if described is content:
        ids = {LIVE_FILES, LIVE_VERSION, CHANGED_KEYS, *FOLDER_FIELDS} - {"format", "place", "ranks"}
        return {name: value for name, value in content.items() if name not in ids}
    parent = content["parent"]
    return {**content, "id": "", "created": 0, "parent": parent and {**parent, "id": ""}}


def test_a_store_has_the_bytes_of_the_golden_one(tmp_path: Path) -> None:
    embedding = write_store(tmp_path)
    assert files(tmp_path / "rows") == files(STORES / "alone" / "killed")
    embedding.close()
    assert files(tmp_path / "rows") == files(STORES / "alone" / "closed")


@closed_and_killed
def test_a_golden_store_is_opened_and_trained_on(tmp_path: Path, state: str, count: int) -> None:
    shutil.copytree(STORES / "alone" / state, tmp_path / "golden" / "rows")
    with embedding_in(tmp_path / "golden") as found, write_store(tmp_path / "now") as made:
        assert found.metrics()["table"]["step"] == count
        for number in range(count + 1, 4):
            step(found, number)
        assert contents(found).tobytes() == contents(made).tobytes()
        found.load_snapshot("one")
        found.save_snapshot("three", "incremental")


def opened_over_ranks(world: World | None, folder: Path) -> tuple[int, bytes, bytes]:
    """The step at which the golden rows open, and all rows, of these and of a store of today."""
    golden, now = Trained(folder / "golden", world), Trained(folder / "now", world)
    now.write()
    with golden.rows, now.rows:
        golden.rows.size()
        count = int(golden.rows.metrics()["table"]["step"])
        for number in range(count + 1, 4):
            golden.step(number)
        return count, golden.contents(), now.contents()


@closed_and_killed
def test_a_golden_store_on_ssd_or_of_two_ranks_is_opened_and_trained_on(tmp_path: Path, state: str, count: int) -> None:
    shutil.copytree(STORES / "ssd" / state, tmp_path / "ssd" / "golden" / "rows")
    shutil.copytree(STORES / "ranks" / state, tmp_path / "ranks" / "golden" / "rows")
    found = [opened_over_ranks(None, tmp_path / "ssd"), *run_ranks(2, opened_over_ranks, tmp_path / "ranks")]
    for step_count, golden, now in found:
        assert (step_count, golden) == (count, now)
        assert golden
    for name in ("one", "two"):
        snapshot = tmp_path / "ranks" / "now" / "rows" / "snapshots" / name
        assert files(snapshot) == files(STORES / "ranks" / "closed" / "snapshots" / name)


@pytest.mark.parametrize(("state", "value"), [("closed", 3.0), ("killed", 1.0)])
def test_a_golden_group_is_opened_and_trained_on(tmp_path: Path, state: str, value: float) -> None:
    path = tmp_path / "model"
    shutil.copytree(STORES / "group" / state, path)
    for expected in (value, value + 16):
        group = Together(path)
        assert group.read() == [expected] * 2
        group.step(16)
        group.close()


@pytest.mark.parametrize(
    ("source", "name", "error", "read"),
    [
        (STORES / "group" / "closed", "a/MARK", StoreError, lambda path: FolderState(path / "a").mark),
        (STORES / "group" / "closed", "GROUP-*", StoreError, lambda path: GroupFile(FolderState(path / "a"))),
        (GOLDEN / "snapshots", f"full/{MANIFEST}", SnapshotError, lambda path: Snapshot.open(path / "full")),
        (GOLDEN / "checkpoint", STATE_FILE, SnapshotError, read_checkpoint),
    ],
)
def test_another_format_is_refused_by_file_number_and_remedy(tmp_path, source, name, error, read) -> None:
    shutil.copytree(source, tmp_path / "copy")
    read(tmp_path / "copy")
    (file,) = (tmp_path / "copy").glob(name)
    file.write_bytes(seal(unseal(file.read_bytes()) | {"format": 77}))
    with pytest.raises(error, match=rf"{file.name}.* format (is )?77.* reads (format )?\d.* wrote"):
        read(tmp_path / "copy")
