"""Writes tests/golden/snapshots-3: a snapshot of each kind of format 3, in 3 parts, and the rows that each holds.

And snapshots-3-named, one whose tables have names. Run once for a new format; what is there for earlier ones is never
written again.
"""

from __future__ import annotations

import sys
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
from tierbed.snapshots.files.difference import changes_between
from tierbed.snapshots.files.format import FORMAT

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


if __name__ == "__main__":
    write(Path(__file__).parent / f"snapshots-{FORMAT}")
    write_named(Path(__file__).parent / f"snapshots-{FORMAT}-named")
