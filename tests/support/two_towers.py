"""A model of two embeddings and a dense part, trained by a plain loop or a framework: its losses show its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.stores import options
from tierbed import EagerOptimizer, MultiTableEmbedding

KINDS = ["host", "host folder", "ssd folder"]
kinds = pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]), KINDS[2]])
IDS = torch.randint(0, 40, (30, 2, 16), generator=torch.Generator().manual_seed(3))


def stores(kind: str, path: Path) -> Any:
    """Store options of a kind: rows in states, or in a folder, where states name snapshots."""
    store, *folder = kind.split()
    return options(store, path, budget_mb=0.1, state_dict_snapshots=True) if folder else options(store, None)


class TwoTowers(nn.Module):
    def __init__(self, store_options: Any, world: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = (
            MultiTableEmbedding(name, dim, torch.float32, torch.int64, None, store_options, world=world)
            for name, dim in (("users", 4), ("items", 6))
        )
        self.mlp = nn.Sequential(nn.Linear(10, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.users(ids[0]), self.items(ids[1])], 1)
        return (self.mlp(both) - ids.sum(0)[:, None].float() / 40).square().mean()

    def close(self) -> None:
        self.users.close()
        self.items.close()


def optimizer_of(model: nn.Module) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.Adam(model.parameters(), lr=0.02), model)


def losses(model: nn.Module, optimizer: Any, ids: Tensor, max_norm: float | None = None) -> Iterator[float]:
    """The losses of steps, whose dropout depends on the batch alone. max_norm: of all gradients together, if any."""
    for number, batch in enumerate(ids):
        torch.manual_seed(int(batch.sum()) + number * (max_norm is None))
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        yield float(loss.detach())
