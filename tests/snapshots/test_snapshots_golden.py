"""Every later version reads the golden snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from support.docs import reader_of_the_docs
from support.embeddings import contents, make, train
from support.places import GOLDEN
from support.snapshot_parts import in_parts
from support.stores import options
from support.table_names import opened
from tierbed import StoreError
from tierbed.engine.durable import seal, unseal
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.files.format import MANIFEST

NAMES = ("user", None, "Straße 7")


PLAIN, NARROW = ("full", "incremental", "checkpoint"), {"bfloat16": "bfloat16", "float16": "float32"}  # types of states
GOLDEN_SNAPSHOTS = [
    *(("snapshots", kind) for kind in PLAIN),
    *(("snapshots-sharded", kind) for kind in PLAIN[:2]),
    *((f"snapshots-{dtype}", kind) for dtype in NARROW for kind in (*PLAIN, "parts")),
]


@pytest.mark.parametrize(("name", "kind"), GOLDEN_SNAPSHOTS)
def test_a_golden_snapshot_is_verified_loaded_and_trained_on(tmp_path: Path, name: str, kind: str) -> None:
    golden, store = GOLDEN / name, "ssd" if kind == "checkpoint" else "host"
    dtype = name.removeprefix("snapshots-") if name.removeprefix("snapshots-") in NARROW else ""
    states = NARROW.get(dtype, "float32")
    expected = np.load(golden / f"{kind}.npy")
    snapshot = Snapshot.open(golden / kind)
    assert (snapshot.manifest.rows, snapshot.kind) == (len(expected), "full" if kind == "parts" else kind)
    assert snapshot.manifest.num_shards == (2 if kind == "parts" else 3 if name == "snapshots-sharded" else None)
    snapshot.verify()
    if dtype:
        assert (snapshot.description["dtype"], snapshot.description["state_dtypes"]) == (dtype, [states] * 2)
    if kind != "checkpoint":
        found, form = reader_of_the_docs()(golden / kind), snapshot.manifest.row_format
        assert len(found) == len(expected)
        for row in expected:
            numbers = np.concatenate([form.values(row[None], field)[0] for field in form.counts])
            assert found[int(row["table"]), int(row["key"])].tolist() == numbers.tolist()
    types = {"dtype": getattr(torch, dtype), "state_dtype": getattr(torch, states)} if dtype else {}
    with make(options(store, tmp_path), "adam" if dtype else "adagrad", **types) as embedding:
        snapshots = tmp_path / "rows" / "snapshots"
        snapshots.mkdir(parents=True)
        for there in PLAIN[:2] if kind == "incremental" else [kind]:
            (snapshots / there).symlink_to(golden / there)
        embedding.load_snapshot(kind)
        assert contents(embedding).tobytes() == expected.tobytes()
        train(embedding, [1, 2, 3])
        assert embedding.metrics()["table"]["step"] == snapshot.description["step"] + 1


@pytest.mark.parametrize("name", ["snapshots", "snapshots-sharded"])
def test_rows_of_a_golden_snapshot_are_written_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    golden = Snapshot.open(GOLDEN / name / "full")
    if name == "snapshots":
        write_snapshot(tmp_path / "s", golden.description, golden.chunks())
    else:
        in_parts(golden, tmp_path / "s", 3)
    assert bytes_of(tmp_path / "s") == bytes_of(golden.folder)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a snapshot, the manifest without what is another for each save."""
    manifest = unseal((folder / MANIFEST).read_bytes()) | {"id": "", "created": 0, "sequence": 0}
    return {file.name: file.read_bytes() for file in folder.iterdir()} | {MANIFEST: seal(manifest)}


def test_a_golden_snapshot_with_names_is_of_tables_in_that_order_alone(tmp_path: Path) -> None:
    golden = GOLDEN / "snapshots-named"
    expected = np.load(golden / "full.npy")
    for place, names in {"a": NAMES, "b": ("user", "x", NAMES[2], "y"), "c": NAMES[::-1]}.items():
        with opened(tmp_path / place, *names) as embedding:
            embedding.size()
            shutil.copytree(golden, tmp_path / place / "rows" / "snapshots")
            if place != "c":
                embedding.load_snapshot("full")
                assert contents(embedding).tobytes() == expected.tobytes()
            else:
                with pytest.raises(StoreError, match=r"\['user', '1', 'Straße 7'\]"):
                    embedding.load_snapshot("full")
