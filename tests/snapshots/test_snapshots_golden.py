"""Snapshots of every format that was ever promised are read for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from support.embeddings import contents, make, train
from support.places import GOLDEN
from support.stores import options
from support.table_names import opened
from tierbed.engine import StoreError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files.format import FORMAT

FORMATS = range(2, FORMAT + 1)
KINDS = {2: ("full", "incremental", "checkpoint"), 3: ("full", "incremental")}
NAMES = ("user", None, "Straße 7")


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize(("number", "kind"), [(number, kind) for number in FORMATS for kind in KINDS[number]])
def test_a_golden_snapshot_is_verified_loaded_and_trained_on(
    tmp_path: Path, number: int, kind: str, store: str
) -> None:
    golden = GOLDEN / f"snapshots-{number}"
    expected = np.load(golden / f"{kind}.npy")
    snapshot = Snapshot.open(golden / kind)
    assert (snapshot.kind, snapshot.manifest.rows) == (kind, len(expected))
    assert snapshot.manifest.parts == (None if number == 2 else 3)
    snapshot.verify()
    assert np.concatenate([rows for _, rows in snapshot.chunks()]).tobytes() == expected.tobytes()
    with make(options(store, tmp_path), "adagrad") as embedding:
        shutil.copytree(golden, tmp_path / "rows" / "snapshots")
        embedding.load_snapshot(kind)
        assert contents(embedding).tobytes() == expected.tobytes()
        train(embedding, [1, 2, 3])
        assert embedding.metrics()["table"]["step"] == snapshot.description["step"] + 1


@pytest.mark.parametrize("number", FORMATS)
def test_a_golden_snapshot_with_names_is_of_tables_in_that_order_alone(tmp_path: Path, number: int) -> None:
    golden = GOLDEN / f"snapshots-{number}-named"
    expected = np.load(golden / "full.npy")
    for place, names, fits in (
        ("a", NAMES, True),
        ("b", ("user", "x", NAMES[2], "y"), True),
        ("c", NAMES[::-1], False),
    ):
        with opened(tmp_path / place, *names) as embedding:
            embedding.size()
            shutil.copytree(golden, tmp_path / place / "rows" / "snapshots")
            if fits:
                embedding.load_snapshot("full")
                assert contents(embedding).tobytes() == expected.tobytes()
            else:
                with pytest.raises(StoreError, match=r"\['user', '1', 'Straße 7'\]"):
                    embedding.load_snapshot("full")
