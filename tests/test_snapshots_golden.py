"""Snapshots of every format that was ever promised are read for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from embeddings import contents, make, options, train

from tierbed.snapshots import Snapshot
from tierbed.snapshots.format import FORMAT

GOLDEN = Path(__file__).parent / "golden"
FORMATS = range(2, FORMAT + 1)


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("kind", ["full", "incremental", "checkpoint"])
@pytest.mark.parametrize("number", FORMATS)
def test_a_golden_snapshot_is_verified_loaded_and_trained_on(
    tmp_path: Path, number: int, kind: str, store: str
) -> None:
    golden = GOLDEN / f"snapshots-{number}"
    expected = np.load(golden / f"{kind}.npy")
    snapshot = Snapshot.open(golden / kind)
    assert (snapshot.kind, snapshot.manifest.rows) == (kind, len(expected))
    snapshot.verify()
    assert np.concatenate([rows for _, rows in snapshot.chunks()]).tobytes() == expected.tobytes()
    with make(options(store, tmp_path), "adagrad") as embedding:
        shutil.copytree(golden, tmp_path / "rows" / "snapshots")
        embedding.load_snapshot(kind)
        assert contents(embedding).tobytes() == expected.tobytes()
        train(embedding, [1, 2, 3])
        assert embedding.metrics()["table"]["step"] == snapshot.description["step"] + 1
