"""Writes tests/golden/stores-2: the folder of a store that was closed, and of one that was killed.

They are by commit 778f551, which knew no embeddings that are trained together. What is there is never written again.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.golden_store import write_store

if __name__ == "__main__":
    golden = Path(__file__).parent / "stores-2"
    with TemporaryDirectory() as place:
        ignored = shutil.ignore_patterns("LOCK", "SOCKET")
        embedding = write_store(Path(place))
        shutil.copytree(Path(place) / "rows", golden / "killed", ignore=ignored)
        embedding.close()
        shutil.copytree(Path(place) / "rows", golden / "closed", ignore=ignored)
