"""The DLRM that benchmarks/dlrm.py trains: its sizes, its dense part, its batches, and the rows that all begin with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from traces import Zipf

ROW_LR = DENSE_LR = 0.01
EPS = 1e-8  # of Adagrad


@dataclass(frozen=True)
class Model:
    """rows: of a table; length: ids of a feature, whose rows are summed; bottom, top: widths of hidden layers."""

    batch: int
    length: int
    tables: int = 26
    rows: int = 100_000
    dim: int = 16
    features: int = 13
    bottom: tuple[int, ...] = (256, 64)
    top: tuple[int, ...] = (256, 64)


@dataclass(frozen=True)
class Batch:
    """rows: int64 [batch, tables, length], numbers within a table; features, labels: float32."""

    rows: Tensor
    features: Tensor
    labels: Tensor


class Dense(nn.Module):
    """All of the model but the lookups, as `torchrec.models.dlrm` has it: two MLPs and the dot products between."""

    pairs: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights for each contender
        self.bottom = _mlp([model.features, *model.bottom, model.dim])
        vectors = model.tables + 1
        self.top = _mlp([model.dim + vectors * (vectors - 1) // 2, *model.top, 1])[:-1]
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1), persistent=False)

    def forward(self, features: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        """The loss; pooled: [batch, tables, dim]."""
        dense = self.bottom(features)
        vectors = torch.cat([dense.unsqueeze(1), pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())))


def initial_rows(model: Model, table: int) -> Tensor:
    """float32 [rows, dim]."""
    return torch.rand(model.rows, model.dim, generator=torch.Generator().manual_seed(table)) * 0.2 - 0.1


class Batches:
    """Each batch follows from its number: ids as `Zipf` draws them, labels from the first id of the first table."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._trace = Zipf(model.tables, model.rows, model.batch * model.length)

    def __getitem__(self, number: int) -> Batch:
        model = self._model
        rows = torch.from_numpy(self._trace.numbers(number)).view(model.batch, model.length, model.tables)
        random = np.random.default_rng((1, number))
        features = torch.from_numpy(random.standard_normal((model.batch, model.features), np.float32))
        return Batch(rows.transpose(1, 2).contiguous(), features, (rows[:, 0, 0] % 3 == 0).float())
