"""Writes tests/golden/groups-4: embeddings that are trained together, closed and killed, by commit f06ea8ac.

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
from support.golden_groups import COUNTS, HISTORIES, OF_RANKS, Together

GOLDEN = Path(__file__).parent / "groups-4"
IGNORED = shutil.ignore_patterns("LOCK", "SOCKET")

if __name__ == "__main__":
    if "RANK" in os.environ:
        from tierbed import World

        world, history, place = World.from_env(), sys.argv[1], Path(sys.argv[2])
        made = Together(place, OF_RANKS, world)
        HISTORIES[history](made)
        world.all_bytes(history, b"")
        if world.rank == 0:
            shutil.copytree(place, GOLDEN / f"{OF_RANKS} of {OF_RANKS} ranks, {history}", ignore=IGNORED)
        world.all_bytes(f"{history}: copied", b"")
        os._exit(0)  # as killed
    for history, run in HISTORIES.items():
        for count in COUNTS:
            with TemporaryDirectory() as folder:
                made = Together(Path(folder), count)  # which would be closed if it were let go of
                run(made)
                shutil.copytree(folder, GOLDEN / f"{count}, {history}", ignore=IGNORED)
        with TemporaryDirectory() as folder:
            group = {"WORLD_SIZE": f"{OF_RANKS}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
            command = [sys.executable, __file__, history, folder]
            ranks = [
                subprocess.Popen(command, env={**os.environ, **group, "RANK": str(rank)}) for rank in range(OF_RANKS)
            ]
            assert [rank.wait() for rank in ranks] == [0] * OF_RANKS
    os._exit(0)  # as killed
