"""Stores of embeddings that train alone are what they were before embeddings were trained together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.embeddings import contents
from support.golden_ranks import Trained
from support.golden_store import embedding_in, step, write_store
from support.places import GOLDEN
from support.ranks import run_ranks
from tierbed.distributed import World
from tierbed.engine.durable import seal, unseal
from tierbed.snapshots.files.format import FILES, FOLDER_FIELDS, LIVE, MANIFEST

STORES = GOLDEN / "stores-2"
closed_and_killed = pytest.mark.parametrize(("store", "count"), [("closed", 3), ("killed", 2)])


def files(path: Path) -> dict[str, bytes]:
    """All files of a store but its locks, without what differs in each run: ids of snapshots and runs, times, rows.

    Of MARK the clean marker.
    """
    found = {str(place.relative_to(path)): place for place in path.rglob("*") if place.is_file()}
    return {
        name: seal(_without_ids(unseal(place.read_bytes()))) if place.name in (MANIFEST, "MARK") else place.read_bytes()
        for name, place in found.items()
        if name not in ("LOCK", "SOCKET")
    }


def _without_ids(manifest: dict[str, Any]) -> dict[str, Any]:
    described = manifest.get("description", manifest)
    described.pop("run", None)
    if described is manifest:  # of MARK
        return {field: value for field, value in manifest.items() if field not in (FILES, LIVE, *FOLDER_FIELDS)}
    parent = manifest["parent"]
    return {**manifest, "id": "", "created": 0, "parent": parent and {**parent, "id": ""}}


def test_its_files_have_the_bytes_that_they_had(tmp_path: Path) -> None:
    embedding = write_store(tmp_path)
    assert files(tmp_path / "rows") == files(STORES / "killed")
    embedding.close()
    assert files(tmp_path / "rows") == files(STORES / "closed")


@closed_and_killed
def test_it_opens_as_it_did(tmp_path: Path, store: str, count: int) -> None:
    shutil.copytree(STORES / store, tmp_path / "before" / "rows")
    with embedding_in(tmp_path / "before") as found, write_store(tmp_path / "now") as made:
        assert found.metrics()["table"]["step"] == count
        for number in range(count + 1, 4):
            step(found, number)
        assert contents(found).tobytes() == contents(made).tobytes()
        found.load_snapshot("one")
        found.save_snapshot("three", "incremental")


@closed_and_killed
def test_a_store_on_ssd_opens_as_it_did(tmp_path: Path, store: str, count: int) -> None:
    shutil.copytree(GOLDEN / "ssd-2" / store, tmp_path / "before" / "rows")
    before, now = Trained(tmp_path / "before"), Trained(tmp_path / "now")
    now.write()
    with before.rows, now.rows:
        assert before.rows.size() > 0
        assert before.rows.metrics()["table"]["step"] == count
        for number in range(count + 1, 4):
            before.step(number)
        assert before.contents() == now.contents()


def opened_over_ranks(world: World, folder: Path) -> tuple[int, bytes, bytes]:
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
def test_a_store_of_two_ranks_opens_as_it_did(tmp_path: Path, store: str, count: int) -> None:
    shutil.copytree(GOLDEN / "ranks-2" / store, tmp_path / "before" / "rows")
    for step_count, before, now in run_ranks(2, opened_over_ranks, tmp_path):
        assert (step_count, before) == (count, now)
    for name in ("one", "two"):
        snapshot = tmp_path / "now" / "rows" / "snapshots" / name
        golden = GOLDEN / "ranks-2" / "closed" / "snapshots" / name
        assert files(snapshot) == files(golden)
