"""Writes tests/golden/ranks-2 and ssd-2: stores of two ranks and on SSD, closed and killed, by commit 778f551.

What is there is never written again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.golden_ranks import Trained

GOLDEN = Path(__file__).parent
IGNORED = shutil.ignore_patterns("LOCK", "SOCKET", "LOG", "LOG.old*")


def keep(trained: Trained, folder: Path, golden: Path) -> None:
    """Copy the folder before the close, as a kill leaves it, and after it."""
    world = trained.rows.world
    trained.write()
    for state in ("killed", "closed"):
        if state == "closed":
            trained.rows.close()
        if world is not None:
            world.all_bytes(state, b"")
        if trained.rank == 0:
            shutil.copytree(folder / "rows", golden / state, ignore=IGNORED)
        if world is not None:
            world.all_bytes(f"{state} is copied", b"")


if __name__ == "__main__":
    if "RANK" in os.environ:
        from tierbed import World

        keep(Trained(Path(sys.argv[1]), World.from_env()), Path(sys.argv[1]), GOLDEN / "ranks-2")
    else:
        with TemporaryDirectory() as place:
            keep(Trained(Path(place)), Path(place), GOLDEN / "ssd-2")
        with TemporaryDirectory() as place:
            group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
            command = [sys.executable, __file__, place]
            ranks = [subprocess.Popen(command, env={**os.environ, **group, "RANK": str(rank)}) for rank in (0, 1)]
            assert [rank.wait() for rank in ranks] == [0, 0]
