"""The store of an embedding that trains alone is what it was before embeddings were trained together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.embeddings import contents
from support.golden_store import embedding_in, step, write_store
from support.places import GOLDEN
from tierbed.engine.durable import seal, unseal
from tierbed.snapshots.files.format import MANIFEST

STORES = GOLDEN / "stores-2"


def files(path: Path) -> dict[str, bytes]:
    """All files of a store but its locks, without what differs in each run: ids of snapshots and times."""
    found = {str(place.relative_to(path)): place for place in path.rglob("*") if place.is_file()}
    return {
        name: seal(_without_ids(unseal(place.read_bytes()))) if place.name == MANIFEST else place.read_bytes()
        for name, place in found.items()
        if name not in ("LOCK", "SOCKET")
    }


def _without_ids(manifest: dict[str, Any]) -> dict[str, Any]:
    parent = manifest["parent"]
    return {**manifest, "id": "", "created": 0, "parent": parent and {**parent, "id": ""}}


def test_its_files_have_the_bytes_that_they_had(tmp_path: Path) -> None:
    embedding = write_store(tmp_path)
    assert files(tmp_path / "rows") == files(STORES / "killed")
    embedding.close()
    assert files(tmp_path / "rows") == files(STORES / "closed")


@pytest.mark.parametrize(("store", "count"), [("closed", 3), ("killed", 2)])
def test_it_opens_as_it_did(tmp_path: Path, store: str, count: int) -> None:
    shutil.copytree(STORES / store, tmp_path / "before" / "rows")
    with embedding_in(tmp_path / "before") as found, write_store(tmp_path / "now") as made:
        assert found.metrics()["table"]["step"] == count
        for number in range(count + 1, 4):
            step(found, number)
        assert contents(found).tobytes() == contents(made).tobytes()
        found.load_snapshot("one")
        found.save_snapshot("three", "incremental")
