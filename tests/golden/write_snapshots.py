"""Writes tests/golden/snapshots-3: a snapshot of each kind of format 3, in 3 parts, and the rows that each holds.

And snapshots-3-named, one whose tables have names; and snapshots-3-bfloat16 and snapshots-3-float16, of narrow rows.
Run once for a new format; what is there is never written again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.embeddings import contents, make, train
from support.snapshot_parts import in_parts, save_changes_in_parts
from support.stores import options
from support.table_names import opened
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files.format import FORMAT, KINDS
from tierbed.snapshots.files.merging import changes_between

NAMES = ("user", None, "Straße 7")
PARTS = 3


def write(folder: Path) -> None:
    folder.mkdir()
    with TemporaryDirectory() as store, make(options("host", Path(store)), "adagrad") as embedding:
        saved = Path(store) / "rows" / "snapshots"
        for kind in ("full", "incremental"):
            for table in range(3):
                train(embedding, torch.arange(-20, 20) * (table + 1) + len(kind), table)
            embedding.delete([len(kind)], 0)
            embedding.save_snapshot(kind)
            if kind == "full":
                in_parts(Snapshot.open(saved / kind), folder / kind, PARTS)
            else:
                parent, now = Snapshot.open(folder / "full"), Snapshot.open(saved / kind)
                changes = changes_between(parent.chunks(), now.chunks())
                save_changes_in_parts(folder / kind, parent, now.description, now.manifest.rows, changes, PARTS)
            np.save(folder / f"{kind}.npy", contents(embedding))


def write_named(folder: Path) -> None:
    folder.mkdir()
    with TemporaryDirectory() as store, opened(Path(store), *NAMES) as embedding:
        for table in range(3):
            train(embedding, torch.arange(2) + table, table)
        embedding.save_snapshot("full")
        in_parts(Snapshot.open(Path(store) / "rows" / "snapshots" / "full"), folder / "full", PARTS)
        np.save(folder / "full.npy", contents(embedding))


def write_narrow(folder: Path, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """One of each kind, and `parts`, the rows of the last in two parts."""
    folder.mkdir()
    types = {"dtype": dtype, "state_dtype": state_dtype}
    with TemporaryDirectory() as store, make(options("ssd", Path(store)), "adam", **types) as embedding:
        saved = Path(store) / "rows" / "snapshots"
        for kind in KINDS:
            for table in range(3):
                train(embedding, torch.arange(-2, 2) * (table + 1) + len(kind), table)
            embedding.delete([len(kind)], 0)
            embedding.save_snapshot(kind, kind)
            shutil.copytree(saved / kind, folder / kind)
            np.save(folder / f"{kind}.npy", contents(embedding))
    in_parts(Snapshot.open(folder / KINDS[-1]), folder / "parts", 2)
    shutil.copy(folder / f"{KINDS[-1]}.npy", folder / "parts.npy")


def write_once(name: str, write: Callable[[Path], None]) -> None:
    folder = Path(__file__).parent / f"snapshots-{FORMAT}{name}"
    if not folder.exists():
        write(folder)


if __name__ == "__main__":
    write_once("", write)
    write_once("-named", write_named)
    write_once("-bfloat16", lambda folder: write_narrow(folder, torch.bfloat16, torch.bfloat16))
    write_once("-float16", lambda folder: write_narrow(folder, torch.float16, torch.float32))
