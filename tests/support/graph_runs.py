"""A graph that runs over a loader, and its batches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.embeddings import make
from support.stores import options
from tierbed import Graph, MultiTableEmbedding

STEPS = 12
IDS = torch.randint(0, 300, (STEPS, 32, 2), generator=torch.Generator().manual_seed(7))
LABELS = IDS.sum(-1, dtype=torch.float32) % 2


class Rating(Graph):
    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.mlp = rows, nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * rows.spec.dim, 1))
        self.add_optimizer(torch.optim.Adagrad([*rows.parameters(), *self.mlp.parameters()], lr=0.1))

    def build(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = F.mse_loss(self.mlp(self.rows(ids).flatten(1)).squeeze(1), labels)
        loss.backward()
        return loss


def rating(store: str, path: Path | None = None) -> Rating:
    return Rating(make(options(store, path), None, tables=2))
