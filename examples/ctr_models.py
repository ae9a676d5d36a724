"""DLRM, DeepFM and DCNv2 as plain torch modules, independent of the embedding.

Their inputs are the rows of the categorical fields, float32 [batch, fields, width], and the dense features, float32
[batch, features]. They return logits [batch]. `columns` lists the widths of a row's parts. Pass it as `embedding_dim`
to `MultiTableMultiColumnEmbedding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*widths: int, last: bool = False) -> nn.Sequential:
    """Return linear layers, each followed by a ReLU. `last` adds a linear layer of width 1 without ReLU."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, *[nn.Linear(widths[-1], 1)] * last)


def dot_interaction(vectors: Tensor) -> Tensor:
    """Return the dot products of all pairs i > j of `vectors` [batch, n, dim]: [batch, n * (n - 1) / 2]."""
    i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=vectors.device)
    return (vectors @ vectors.mT)[:, i, j]


class DLRM(nn.Module):
    """A bottom MLP maps the dense features to a vector. Dot products combine this vector and the fields' rows in pairs.
    A top MLP reads the dot products and the bottom MLP's output.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
    """

    def __init__(
        self, fields: int, dim: int, features: int, bottom: Sequence[int] = (64,), top: Sequence[int] = (64, 32)
    ) -> None:
        super().__init__()
        self.columns = [dim]
        self.bottom = mlp(features, *bottom, dim)
        self.top = mlp(dim + fields * (fields + 1) // 2, *top, last=True)

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        pairs = dot_interaction(torch.cat([bottom.unsqueeze(1), rows], 1))
        return self.top(torch.cat([bottom, pairs], 1)).squeeze(1)


def fm_interaction(vectors: Tensor) -> Tensor:
    """Return [batch]: the sum of the dot products of all pairs of `vectors` [batch, n, dim], in time linear in n.

    Rendle, "Factorization Machines", ICDM 2010, lemma 3.1.
    """
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2


class DeepFM(nn.Module):
    """A factorization machine and an MLP that share factors. It adds up first-order weights, the dot products of all
    pairs of factors, and the MLP's output.

    A row contains the factors, then the first-order weight. Dense features have factors and weights too, scaled by the
    feature's value. Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017.
    """

    def __init__(self, fields: int, dim: int, features: int, hidden: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.columns = [dim, 1]
        self.bias = nn.Parameter(torch.zeros(()))
        self.weights = nn.Parameter(torch.zeros(features))
        self.factors = nn.Parameter(torch.randn(features, dim) * 0.01)
        self.deep = mlp((fields + features) * dim, *hidden, last=True)

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        factors, weights = rows.split(self.columns, dim=2)
        factors = torch.cat([factors, dense.unsqueeze(2) * self.factors], 1)
        first_order = self.bias + weights.sum((1, 2)) + dense @ self.weights
        return first_order + fm_interaction(factors) + self.deep(factors.flatten(1)).squeeze(1)


class Cross(nn.Module):
    """A cross layer, x0 * (W x + b) + x, with x0 and x [batch, width]. With `rank`, W = U V has that rank.

    Equations 1 and 2 of the paper cited in DCNv2.
    """

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(width, width)
        if rank is not None:
            self.linear = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.linear(x) + x


class DCNv2(nn.Module):
    """Cross layers and an MLP. The MLP follows the cross layers (`stacked`) or runs in parallel. Each cross layer
    raises the degree of the polynomial by one. The input is one vector of all rows and dense features of an example.

    `rank` makes the cross layers' matrices low-rank (one expert). Wang et al., "DCN V2: Improved Deep & Cross Network
    and Practical Lessons for Web-scale Learning to Rank Systems", WWW 2021.
    """

    def __init__(
        self,
        fields: int,
        dim: int,
        features: int,
        hidden: Sequence[int] = (64, 32),
        layers: int = 2,
        rank: int | None = None,
        stacked: bool = True,
    ) -> None:
        super().__init__()
        self.columns = [dim]
        width = fields * dim + features
        self.stacked = stacked
        self.cross = nn.ModuleList(Cross(width, rank) for _ in range(layers))
        self.deep = mlp(width, *hidden)
        self.last = nn.Linear(hidden[-1] + (0 if stacked else width), 1)

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        x = x0 = torch.cat([rows.flatten(1), dense], 1)
        for layer in self.cross:
            x = layer(x0, x)
        x = self.deep(x) if self.stacked else torch.cat([x, self.deep(x0)], 1)
        return self.last(x).squeeze(1)
