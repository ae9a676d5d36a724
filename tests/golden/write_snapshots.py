"""Writes tests/golden/snapshots-N: a snapshot of each kind of format N, and the rows that each of them holds.

And snapshots-N-named, one whose tables have names. Run once for a new format; what is there for earlier ones is never
written again.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.embeddings import contents, make, train
from support.stores import options
from support.table_names import opened
from tierbed.snapshots.files.format import FORMAT

NAMES = ("user", None, "Straße 7")


def write(folder: Path) -> None:
    folder.mkdir()
    with TemporaryDirectory() as store, make(options("ssd", Path(store), shards=1), "adagrad") as embedding:
        for kind in ("full", "incremental", "checkpoint"):
            for table in range(3):
                train(embedding, torch.arange(-20, 20) * (table + 1) + len(kind), table)
            embedding.delete([len(kind)], 0)
            embedding.save_snapshot(kind, kind)
            shutil.copytree(Path(store) / "rows" / "snapshots" / kind, folder / kind)
            np.save(folder / f"{kind}.npy", contents(embedding))


def write_named(folder: Path) -> None:
    folder.mkdir()
    with TemporaryDirectory() as store, opened(Path(store), *NAMES) as embedding:
        for table in range(3):
            train(embedding, torch.arange(2) + table, table)
        embedding.save_snapshot("full")
        shutil.copytree(Path(store) / "rows" / "snapshots" / "full", folder / "full")
        np.save(folder / "full.npy", contents(embedding))


if __name__ == "__main__":
    write(Path(__file__).parent / f"snapshots-{FORMAT}")
    write_named(Path(__file__).parent / f"snapshots-{FORMAT}-named")
