"""Writes `stores/`: stores that every later version must open, each closed and as a kill would leave it.

Run it only for another format: later versions must read the stores that are there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from support.golden_group import Together
from support.golden_ranks import Trained, copy_store, write_ranks
from support.golden_store import write_store
from support.ranks import run_ranks
from support.warm import running_server

STORES = Path(__file__).with_name("stores")


def main() -> None:
    shutil.rmtree(STORES, ignore_errors=True)
    with running_server(), TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        folders = {"alone": folder / "rows", "ssd": folder / "ssd" / "rows", "group": folder / "group"}
        alone, ssd, group = write_store(folder), Trained(folder / "ssd"), Together(folder / "group")
        ssd.write()
        group.write()
        for store, path in folders.items():
            copy_store(path, STORES / store / "killed")
        for each in (alone, ssd.rows, group):
            each.close()
        run_ranks(2, write_ranks, folder / "ranks", STORES / "ranks" / "killed")
        for store, path in {**folders, "ranks": folder / "ranks" / "rows"}.items():
            copy_store(path, STORES / store / "closed")


if __name__ == "__main__":
    main()
