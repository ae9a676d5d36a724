"""The groups that tests/golden/groups-4 has as commit f06ea8ac wrote them, of embeddings that are trained together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.stores import options
from tierbed import MultiTableEmbedding, make_constant_initializer
from tierbed.embedding.state_dict.model_snapshots import ModelSnapshots
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.options.lookup import Lookup

KEYS = torch.arange(4)
DIM = 2


class Together(ModelSnapshots, nn.Module):
    """Embeddings a, b and so on in the folder `path`: each step subtracts a number from all rows of some of them."""

    def __init__(self, path: Path, count: int, world: Any = None, **more: Any) -> None:
        super().__init__()
        self.world, self.all = world, list[MultiTableEmbedding]()
        for name in "abc"[:count]:
            start, stored = [make_constant_initializer(0.0)], options("host", path, **more)
            one = MultiTableEmbedding(name, DIM, torch.float32, torch.int64, start, stored, world=world)
            optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
            one.attach(optimizer, optimizer.param_groups[0])
            self.all.append(one)
            self.add_module(name, one)
        train_together(self.all)

    def step(self, number: int, names: str = "abc") -> None:
        ids = KEYS if self.world is None else KEYS[self.world.rank :: self.world.size]
        batches = [one.pin([Lookup(ids, torch.zeros_like(ids))]) for one in self.all if one.name in names]
        for batch in batches:
            batch.gather(0)
            batch.update([torch.full((len(ids), DIM), float(number))], scale=1.0)

    def read(self) -> list[float]:
        """The value of the rows of each, which all have alike."""
        found = [one.get(KEYS.tolist()) for one in self.all]
        assert all(bool((rows == rows[0, 0]).all()) for rows in found)
        return [-float(rows[0, 0]) for rows in found]

    def close(self) -> None:
        for one in self.all:
            one.close()


HISTORIES = (  # a number is a step by it, a word a snapshot of all; but for the first they were then killed
    "closed",  # 1 one 2 close
    "killed after saves of all",  # 1 one 2 two 4, and a step of a alone by 8
    "killed after saves of each",  # 1, a snapshot of each alone, 2
    "killed after saves apart",  # for each: 1, a snapshot of it alone; then 2
    "killed after a close of one",  # 1 one 2, and a close of a alone
)
COUNTS = (2, 3)
OF_RANKS = 2  # embeddings, and ranks
