"""The groups that tests/golden/groups-4 has as commit f06ea8ac wrote them, of embeddings that are trained together."""

from __future__ import annotations

from collections.abc import Callable
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


def close(made: Together) -> None:
    """Closed one step after a save of all."""
    made.step(1)
    made.save_snapshot("one")
    made.step(2)
    made.close()


def save_all(made: Together) -> None:
    """Killed after two saves of all, a step of all and one of some."""
    made.step(1)
    made.save_snapshot("one")
    made.step(2)
    made.save_snapshot("two")
    made.step(4)
    made.step(8, "a")


def save_each(made: Together) -> None:
    """Killed after separate saves of each between two steps."""
    made.step(1)
    for one in made.all:
        one.save_snapshot(f"one-{one.name}")
    made.step(2)


def save_apart(made: Together) -> None:
    """Killed after saves of each with a step in between."""
    for one in made.all:
        made.step(1)
        one.save_snapshot(f"one-{one.name}")
    made.step(2)


def close_one(made: Together) -> None:
    """Killed when one of them was closed, a step after a save of all."""
    made.step(1)
    made.save_snapshot("one")
    made.step(2)
    made.all[0].close()


HISTORIES: dict[str, Callable[[Together], None]] = {
    "closed": close,
    "killed after saves of all": save_all,
    "killed after saves of each": save_each,
    "killed after saves apart": save_apart,
    "killed after a close of one": close_one,
}
COUNTS = (2, 3)
OF_RANKS = 2  # embeddings, and ranks
