"""The graph of the golden checkpoints, its batches, and what it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from support.embeddings import contents, make
from support.stores import options
from tierbed import Graph
from tierbed.embedding.state_dict.saved_rows import exclude_rows


class Golden(Graph):
    def __init__(self, path: Path | None = None, store: str = "device") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = make(options(store, path), None, tables=2)
        self.mlp = nn.Sequential(nn.BatchNorm1d(2 * self.rows.dim), nn.Linear(2 * self.rows.dim, 1))
        sparse = torch.optim.Adagrad(self.rows.parameters(), lr=0.05)
        dense = torch.optim.Adam(self.mlp.parameters(), lr=0.02)
        self.add_optimizer(sparse, lr_scheduler.StepLR(sparse, 2, 0.5))
        self.add_optimizer(dense)

    def build(self, ids: Tensor) -> Tensor:
        loss = (self.mlp(self.rows(ids).flatten(1)).squeeze(1) - ids[:, 0] / 25).square().mean()
        loss.backward()
        return loss


def batch(step: int) -> Tensor:
    return (torch.arange(16)[:, None] * 7 + step * 5 + torch.arange(2) * 3) % 31


def state_arrays(graph: Golden) -> dict[str, np.ndarray]:
    """Parameters and buffers by their names, the first moments of Adam, and all rows."""
    with exclude_rows():
        state = graph.state_dict()
    dense = state.pop("_extra_state")["optimizers"][1]["state"]
    tensors = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    tensors |= {f"exp_avg {number}": moments["exp_avg"] for number, moments in dense.items()}
    return {name: tensor.numpy() for name, tensor in tensors.items()} | {"all rows": contents(graph.rows)}
