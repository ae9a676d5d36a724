"""Twelve recommendation models, written from their papers, that take their embeddings from torch.nn or from tierbed.

Each has `batch()`, which draws a batch of random data, and `forward(*batch)`, which returns the loss. `layers` is the
module that the two classes of embeddings come from: a port changes this import and the line of the optimizer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

USERS, ITEMS, FIELDS, BATCH, LENGTH = 23, 31, (7, 19, 11), 12, 6


def labels() -> Tensor:
    return torch.randint(2, (BATCH,)).float()


def histories() -> Tensor:
    """Ids of items from 1, [BATCH, LENGTH], and 0 before histories that are shorter."""
    lengths = torch.randint(1, LENGTH + 1, (BATCH, 1))
    return torch.randint(1, ITEMS, (BATCH, LENGTH)) * (torch.arange(LENGTH) >= LENGTH - lengths)


def categories() -> Tensor:
    return torch.stack([torch.randint(size, (BATCH,)) for size in FIELDS], 1)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers)


class MatrixFactorization(nn.Module):
    """Koren, Bell and Volinsky 2009: the product of two rows, and biases."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.users, self.items = layers.Embedding(USERS, 8), layers.Embedding(ITEMS, 8)
        self.user_bias, self.item_bias = layers.Embedding(USERS, 1), layers.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.zeros(()))

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randint(USERS, (BATCH,)), torch.randint(ITEMS, (BATCH,)), torch.randint(1, 6, (BATCH,)).float()

    def forward(self, users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
        product = (self.users(users) * self.items(items)).sum(-1)
        biases = self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)
        return F.mse_loss(self.mean + product + biases, ratings)


class BayesianRanking(nn.Module):
    """Rendle et al. 2009, BPR-MF: an item that was chosen before one that was not; L2 of the rows of the batch."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.users, self.items, self.bias = (layers.Embedding(n, d) for n, d in ((USERS, 8), (ITEMS, 8), (ITEMS, 1)))

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randint(USERS, (BATCH,)), torch.randint(ITEMS, (BATCH,)), torch.randint(ITEMS, (BATCH,))

    def forward(self, users: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
        user, first, second = self.users(users), self.items(chosen), self.items(others)
        margin = (user * (first - second)).sum(-1) + (self.bias(chosen) - self.bias(others)).squeeze(-1)
        penalty = sum(rows.square().sum() for rows in (user, first, second)) / BATCH
        return -F.logsigmoid(margin).mean() + 0.01 * penalty


class WideAndDeep(nn.Module):
    """Cheng et al. 2016: a linear part of crossed categories, bags of width 1, beside a network over embeddings."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.wide = layers.EmbeddingBag(97, 1, mode="sum")
        self.deep = nn.ModuleList(layers.Embedding(size, 4) for size in FIELDS)
        self.net = nn.Sequential(mlp(12, 16, 8), nn.Linear(8, 1))

    def batch(self) -> tuple[Tensor, ...]:
        return categories(), labels()

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        crossed = torch.stack([ids[:, 0] * 19 + ids[:, 1], ids[:, 1] * 11 + ids[:, 2]], 1) % 97
        deep = torch.cat([table(column) for table, column in zip(self.deep, ids.unbind(1), strict=True)], 1)
        return F.binary_cross_entropy_with_logits((self.wide(crossed) + self.net(deep)).squeeze(1), clicks)


class DeepFM(nn.Module):
    """Guo et al. 2017: a factorization machine and a network over one table of all fields, at offsets."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, *FIELDS[:-1]]).cumsum(0))
        self.linear, self.factors = layers.Embedding(sum(FIELDS), 1), layers.Embedding(sum(FIELDS), 4)
        self.bias = nn.Parameter(torch.zeros(1))
        self.net = nn.Sequential(mlp(12, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def batch(self) -> tuple[Tensor, ...]:
        return categories(), labels()

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        ids = ids + self.offsets
        rows = self.factors(ids)
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
        logits = self.bias + self.linear(ids).sum(1) + pairs + self.net(rows.flatten(1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), clicks)


class DeepCrossV2(nn.Module):
    """Wang et al. 2021, DCN-v2: cross layers x0 * (W x + b) + x, then a network."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"field{n}": layers.Embedding(size, 4) for n, size in enumerate(FIELDS)})
        self.cross = nn.ModuleList(nn.Linear(14, 14) for _ in range(2))
        self.norm, self.net = nn.BatchNorm1d(2), nn.Sequential(mlp(14, 16), nn.Linear(16, 1))

    def batch(self) -> tuple[Tensor, ...]:
        return categories(), torch.rand(BATCH, 2), labels()

    def forward(self, ids: Tensor, numbers: Tensor, clicks: Tensor) -> Tensor:
        first = torch.cat([*(self.tables[f"field{n}"](ids[:, n]) for n in range(len(FIELDS))), self.norm(numbers)], 1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return F.binary_cross_entropy_with_logits(self.net(x).squeeze(1), clicks)


class NeuralFiltering(nn.Module):
    """He et al. 2017, NeuMF: a generalized product and a network, each with its own tables, into one layer."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.product = nn.ModuleList(layers.Embedding(size, 8) for size in (USERS, ITEMS))
        self.deep = nn.ModuleList(layers.Embedding(size, 8) for size in (USERS, ITEMS))
        self.net, self.out = mlp(16, 16, 8), nn.Linear(16, 1)

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randint(USERS, (BATCH,)), torch.randint(ITEMS, (BATCH,)), labels()

    def forward(self, users: Tensor, items: Tensor, clicks: Tensor) -> Tensor:
        product = self.product[0](users) * self.product[1](items)
        deep = self.net(torch.cat([self.deep[0](users), self.deep[1](items)], 1))
        return F.binary_cross_entropy_with_logits(self.out(torch.cat([product, deep], 1)).squeeze(1), clicks)


class SelfAttentive(nn.Module):
    """Kang and McAuley 2018, SASRec: a block of causal attention, an item table with padding that is the output too."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.items, self.positions = layers.Embedding(ITEMS, 8, padding_idx=0), layers.Embedding(LENGTH, 8)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.net = nn.Sequential(mlp(8, 8), nn.Linear(8, 8))

    def batch(self) -> tuple[Tensor, ...]:
        return histories(), torch.randint(1, ITEMS, (BATCH, LENGTH))

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        x = self.items(ids) * 8**0.5 + self.positions(torch.arange(LENGTH))
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.norms[0](x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0])
        x = self.norms[1](x + self.net(x))
        logits = x @ self.items.weight.T
        return F.cross_entropy(logits.flatten(0, 1), following.masked_fill(ids == 0, 0).flatten(), ignore_index=0)


class RecurrentSessions(nn.Module):
    """Hidasi et al. 2016, GRU4Rec: a GRU over padded sessions, scored against the rows of all items."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.items = layers.Embedding(ITEMS, 8, padding_idx=0)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.bias = layers.Embedding(ITEMS, 1)

    def batch(self) -> tuple[Tensor, ...]:
        return histories(), torch.randint(1, ITEMS, (BATCH,))

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        hidden = self.gru(self.items(ids))[1].squeeze(0)
        return F.cross_entropy(F.linear(hidden, self.items.weight) + self.bias.weight.view(-1), following)


class TwoTower(nn.Module):
    """Yi et al. 2019: a user with the mean of a history against an item, by a softmax over the items of the batch."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.users, self.items = layers.Embedding(USERS, 8), layers.Embedding(ITEMS, 8)
        self.history = layers.EmbeddingBag(ITEMS, 8, mode="mean", padding_idx=0)
        self.user_net, self.item_net = nn.Linear(16, 8), nn.Linear(8, 8)
        self.register_buffer("log_frequency", torch.rand(ITEMS).log())

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randint(USERS, (BATCH,)), histories(), torch.randint(1, ITEMS, (BATCH,))

    def forward(self, users: Tensor, ids: Tensor, items: Tensor) -> Tensor:
        user = F.normalize(self.user_net(torch.cat([self.users(users), self.history(ids)], 1)), dim=1)
        item = F.normalize(self.item_net(self.items(items)), dim=1)
        return F.cross_entropy(user @ item.T / 0.2 - self.log_frequency[items], torch.arange(len(users)))


class InterestNetwork(nn.Module):
    """Zhou et al. 2018, DIN: a history weighted by what its items have to do with the candidate, without softmax."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.users, self.items = layers.Embedding(USERS, 8), layers.Embedding(ITEMS, 8, padding_idx=0)
        self.weigh = nn.Sequential(mlp(32, 8), nn.Linear(8, 1))
        self.net = nn.Sequential(nn.Linear(24, 8), nn.PReLU(), nn.Linear(8, 1))

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randint(USERS, (BATCH,)), histories(), torch.randint(1, ITEMS, (BATCH,)), labels()

    def forward(self, users: Tensor, ids: Tensor, candidates: Tensor, clicks: Tensor) -> Tensor:
        history, candidate = self.items(ids), self.items(candidates)
        query = candidate.unsqueeze(1).expand_as(history)
        weights = self.weigh(torch.cat([query, history, query - history, query * history], -1))
        interest = (weights * history * (ids != 0).unsqueeze(-1)).sum(1)
        logits = self.net(torch.cat([self.users(users), interest, candidate], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


class DeepRecommendation(nn.Module):
    """Naumov et al. 2019, DLRM: bags of each field, and products of every two of them and the dense numbers."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.bags = nn.ModuleList(layers.EmbeddingBag(size, 8, mode="sum", sparse=False) for size in FIELDS)
        self.bottom, self.top = mlp(3, 8), nn.Sequential(mlp(14, 8), nn.Linear(8, 1))

    def batch(self) -> tuple[Tensor, ...]:
        lengths = torch.randint(0, 4, (len(FIELDS), BATCH))
        offsets = lengths.cumsum(1) - lengths
        ids = [torch.randint(size, (int(n),)) for size, n in zip(FIELDS, lengths.sum(1), strict=True)]
        return torch.rand(BATCH, 3), offsets, *ids, labels()

    def forward(self, numbers: Tensor, offsets: Tensor, *ids_and_clicks: Tensor) -> Tensor:
        *ids, clicks = ids_and_clicks
        dense = self.bottom(numbers)
        rows = [bag(part, at) for bag, part, at in zip(self.bags, ids, offsets, strict=True)]
        x = torch.stack([dense, *rows], 1)
        one, other = torch.tril_indices(x.shape[1], x.shape[1], -1)
        logits = self.top(torch.cat([dense, (x @ x.mT)[:, one, other]], 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), clicks)


class TextClassifier(nn.Module):
    """Joulin et al. 2017, fastText: means of words, sums of weighted ones, with the end of the last text in offsets."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.words = layers.EmbeddingBag(47, 8, mode="mean", include_last_offset=True, padding_idx=1)
        self.keywords = layers.EmbeddingBag(47, 8, mode="sum", include_last_offset=True)
        self.out = nn.Linear(8, 5)

    def batch(self) -> tuple[Tensor, ...]:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 9, (BATCH,)).cumsum(0)])
        count = int(offsets[-1])
        return torch.randint(47, (count,)), offsets, torch.rand(count), torch.randint(5, (BATCH,))

    def forward(self, words: Tensor, offsets: Tensor, weights: Tensor, classes: Tensor) -> Tensor:
        hidden = self.words(words, offsets) + self.keywords(words, offsets, per_sample_weights=weights)
        return F.cross_entropy(self.out(hidden), classes)
