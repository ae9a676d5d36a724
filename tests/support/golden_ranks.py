"""The golden stores on SSD and of two ranks, in tests/golden/stores, written by public names alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tierbed import (
    EagerOptimizer,
    MultiTableEmbedding,
    World,
    make_cached_ssd_store_options,
    make_host_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)


class Trained:
    """Rows of 5 columns under Adagrad, on SSD or, over a world, in host memory; each rank looks up its own ids."""

    def __init__(self, folder: Path, world: World | None = None) -> None:
        self.rank = 0 if world is None else world.rank
        table = make_table_options(make_uniform_initializer(low=-0.05, high=0.05))
        if world is None:
            store = make_cached_ssd_store_options(0.01, str(folder), overflow_mb=0.02, shards=2)
        else:
            store = make_host_mem_store_options(str(folder))
        self.rows = MultiTableEmbedding("rows", 5, torch.float32, torch.int64, [table], store, seed=7, world=world)
        self.optimizer = EagerOptimizer(torch.optim.Adagrad(self.rows.parameters(), lr=0.1), self.rows)

    def step(self, number: int) -> None:
        self.rows(torch.arange(4) + 3 * number + self.rank).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def write(self) -> None:
        """Steps 1 to 3, with a snapshot of step 1 and an incremental one of step 2."""
        self.step(1)
        self.rows.save_snapshot("one")
        self.step(2)
        self.rows.save_snapshot("two", "incremental")
        self.step(3)

    def contents(self) -> bytes:
        """Rows by key, those of all ranks."""
        return bytes(self.rows.get(torch.arange(20)).numpy().tobytes())


def copy_store(folder: Path, copy: Path) -> None:
    """Copy a store's folder, open or closed, without locks."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("LOCK", "*.LOCK", "SOCKET"))


def write_ranks(world: World, folder: Path, copy: Path) -> None:
    """Write the store of `folder`, and copy it before it is closed."""
    trained = Trained(folder, world)
    trained.write()
    world.call_on_rank_0("copy", lambda: copy_store(folder / "rows", copy))
    trained.rows.close()
