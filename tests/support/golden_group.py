"""The golden group: embeddings a and b that are trained together. tests/golden/stores/group has their stores."""

from __future__ import annotations

from pathlib import Path

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
    """Embeddings a and b in the folder `path`: each step subtracts a number from all rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.all = list[MultiTableEmbedding]()
        for name in "ab":
            start = [make_constant_initializer(0.0)]
            one = MultiTableEmbedding(name, DIM, torch.float32, torch.int64, start, options("host", path))
            optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
            one.attach(optimizer, optimizer.param_groups[0])
            self.all.append(one)
            self.add_module(name, one)
        train_together(self.all)

    def step(self, number: int) -> None:
        batches = [one.pin([Lookup(KEYS, torch.zeros_like(KEYS))]) for one in self.all]
        for batch in batches:
            batch.gather(0)
            batch.update([torch.full((len(KEYS), DIM), float(number))], scale=1.0)

    def write(self) -> None:
        """Steps by 1 and by 2, with a snapshot of the first."""
        self.step(1)
        self.save_snapshot("one")
        self.step(2)

    def read(self) -> list[float]:
        """The value of the rows of each, which all have alike."""
        found = [one.get(KEYS.tolist()) for one in self.all]
        assert all(bool((rows == rows[0, 0]).all()) for rows in found)
        return [-float(rows[0, 0]) for rows in found]

    def close(self) -> None:
        for one in self.all:
            one.close()
