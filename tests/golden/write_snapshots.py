"""Writes tests/golden/snapshots-N: a snapshot of each kind of format N, and the rows that each of them holds.

Run once for a new format; what is there for earlier ones is never written again.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from embeddings import contents, make, options, train

from tierbed.snapshots.format import FORMAT


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


if __name__ == "__main__":
    write(Path(__file__).parent / f"snapshots-{FORMAT}")
