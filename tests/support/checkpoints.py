"""A graph that is saved and loaded as a checkpoint, its batches, and all that it holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from support.embeddings import contents, make
from support.graphs import id_batches
from support.stores import options
from tierbed import Graph, MultiTableEmbedding
from tierbed.embedding.state_dict.saved_rows import exclude_rows

IDS = id_batches(16, 2, steps=12)


class Rating(Graph):
    """Rows, a batch norm, dropout, two optimizers with schedules of their own."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = rows
        self.mlp = nn.Sequential(nn.BatchNorm1d(2 * rows.spec.dim), nn.Dropout(0.3), nn.Linear(2 * rows.spec.dim, 1))
        sparse = torch.optim.Adam(rows.parameters(), lr=0.05)
        self.dense = dense = torch.optim.AdamW(self.mlp.parameters(), lr=0.02)
        self.add_optimizer(sparse, lr_scheduler.MultiStepLR(sparse, [2, 5, 8], 0.5))
        self.add_optimizer(dense, lr_scheduler.OneCycleLR(dense, 0.1, total_steps=50))
        self.clip_grad_norm(1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.set_grad_scaler(self.scaler)

    def build(self, ids: Tensor) -> Tensor:
        loss = (self.mlp(self.rows(ids).flatten(1)).squeeze(1) - ids[:, 0] / 25).square().mean()
        self.scaler.scale(loss).backward()
        return loss


def rating(store: str, path: Path | None, name: str = "rows") -> Rating:
    return Rating(make(options(store, path), None, name, tables=2))


def steps(graph: Rating, ids: Tensor) -> list[float]:
    return [float(loss) for loss in graph.run(list(ids))]


def state(graph: Rating) -> bytes:
    with exclude_rows():
        kept = graph.state_dict()
    extra = kept.pop("_extra_state")
    kept.pop("rows._extra_state")
    return contents(graph.rows).tobytes() + repr((sorted(kept.items()), extra)).encode()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
