"""The sides that train a whole model, an MLP or a DLRM on rows: tierbed, torch by hand, TorchRec, dense part alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import DIM, EPS, LR, OPTIMIZERS, fill, make_embedding, make_options
from torch import Tensor, nn
from traces import Trace, Zipf, hashed

from tierbed import Graph

Batch = tuple[Tensor, ...]
Step = Callable[[int], Tensor]  # of a number, its loss


@dataclass(frozen=True)
class Model:
    """Rows of all features and a dense part on them.

    rows: of a table. hidden: widths of the MLP but the last, which is 1. optimizer: of rows, and of the dense part
    unless that has `dense_optimizer`. length: ids of a feature, whose rows are summed. features: dense ones, with which
    the dense part is that of `torchrec.models.dlrm`: two MLPs and the dot products of all pairs between.
    """

    rows: int
    tables: int
    batch: int
    hidden: tuple[int, ...]
    optimizer: str = "sgd"
    dense_optimizer: str | None = None
    dim: int = DIM
    length: int = 1
    features: int = 0


def make_batches(model: Model, count: int, first: int = 0, draw: type = Zipf) -> list[Batch]:
    """Row numbers, int64 [batch, tables], labels that follow from them, float32 [batch], and dense features if any.

    The numbers are [batch, tables, length] if a feature has several.
    """
    trace = _trace(draw, model.tables, model.rows, model.batch * model.length)
    batches: list[Batch] = []
    for step in range(first, first + count):
        rows = torch.from_numpy(trace.numbers(step))
        if model.length > 1:
            rows = rows.view(model.batch, model.length, model.tables).transpose(1, 2).contiguous()
        labels = (rows.view(model.batch, -1)[:, 0] % 3 == 0).float()
        random = np.random.default_rng((1, step))
        features = torch.from_numpy(random.standard_normal((model.batch, model.features), np.float32))
        batches.append((rows, labels, features) if model.features else (rows, labels))
    return batches


@cache
def _trace(draw: type, tables: int, rows: int, batch: int) -> Trace:
    trace: Trace = draw(tables, rows, batch)
    return trace


def keyed(batches: Sequence[Batch]) -> list[Batch]:
    """As tierbed takes them: 64-bit keys for row numbers."""
    return [(hashed(rows), *rest) for rows, *rest in batches]


def cycle(step: Callable[..., Tensor], batches: Sequence[Batch]) -> Step:
    return lambda number: step(*batches[number % len(batches)])


class Dense(nn.Module):
    """The loss of pooled rows [batch, tables, dim], labels and dense features; the same weights at each call."""

    pairs: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(0)
        if not model.features:
            self.top = _mlp([model.tables * model.dim, *model.hidden, 1])
            return
        self.bottom = nn.Sequential(_mlp([model.features, *model.hidden, model.dim]), nn.ReLU())
        vectors = model.tables + 1
        self.top = _mlp([model.dim + vectors * (vectors - 1) // 2, *model.hidden, 1])
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1), persistent=False)

    def forward(self, pooled: Tensor, labels: Tensor, features: Tensor | None = None) -> Tensor:
        if features is None:
            inputs = pooled.flatten(1)
        else:
            dense = self.bottom(features)
            vectors = torch.cat([dense.unsqueeze(1), pooled], dim=1)
            products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
            inputs = torch.cat([dense, products], dim=1)
        return nn.functional.binary_cross_entropy_with_logits(self.top(inputs).flatten(), labels)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class GraphStep(Graph):
    """tierbed, on a store of these options; `cached`: rows that its cache has room for."""

    def __init__(self, model: Model, folder: Path, store: str = "device_mem", cached: int = 0, **options: Any) -> None:
        super().__init__()
        made = make_options(store, folder, cached, model.dim, model.optimizer, **options)
        self.embedding = make_embedding(model.tables, made, model.dim, name=store)
        self.dense = Dense(model)
        self.pooling = {} if model.length == 1 else {"pooling": "sum"}
        if model.dense_optimizer is None:
            self.optimizer = OPTIMIZERS[model.optimizer]([*self.embedding.parameters(), *self.dense.parameters()])
        else:
            self.optimizer = OPTIMIZERS[model.optimizer](self.embedding.parameters())
            self.add_optimizer(OPTIMIZERS[model.dense_optimizer](self.dense.parameters()))
        self.add_optimizer(self.optimizer)
        self.filled = 0.0 if options.get("open") == "resume" else fill(self.embedding, model.rows)

    def build(self, ids: Tensor, *rest: Tensor) -> Tensor:
        loss: Tensor = self.dense(self.embedding(ids, **self.pooling), *rest)
        loss.backward()
        return loss


class Eager:
    """Tables with the rows that `like` has now, the dense part, and torch's optimizers, in a loop by hand."""

    def __init__(self, model: Model, like: GraphStep) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # as by default, which Adagrad warns of
        keys = hashed(torch.arange(model.rows))
        self.rows = [like.embedding.get(keys, table) for table in range(model.tables)]
        self.model, self.dense = model, Dense(model)
        self.optimizers = [OPTIMIZERS[model.dense_optimizer or model.optimizer](self.dense.parameters())]

    def pooled(self, rows: Any) -> Tensor:
        raise NotImplementedError

    def __call__(self, rows: Any, *rest: Tensor) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss: Tensor = self.dense(self.pooled(rows), *rest)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        """The batch as this side's loader would give it."""
        return batch


class EagerStep(Eager):
    """torch: nn.Embedding for each table, or nn.EmbeddingBag with dense features; gradients are sparse but for SGD."""

    def __init__(self, model: Model, like: GraphStep) -> None:
        super().__init__(model, like)
        sparse = model.optimizer != "sgd"
        kind = partial(nn.EmbeddingBag.from_pretrained, mode="sum") if model.features else nn.Embedding.from_pretrained
        self.tables = nn.ModuleList(kind(rows, freeze=False, sparse=sparse) for rows in self.rows)
        name = "sparse_adam" if model.optimizer == "adam" else model.optimizer
        self.optimizers.append(OPTIMIZERS[name](self.tables.parameters()))

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        rows, *rest = batch
        parts = [part.contiguous() for part in rows.view(self.model.batch, self.model.tables, -1).unbind(1)]
        return (parts if self.model.features else [part.squeeze(1) for part in parts], *rest)

    def pooled(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([table(part) for table, part in zip(self.tables, rows, strict=True)], dim=1)


class TorchRecStep(Eager):
    """`FusedEmbeddingBagCollection` with its defaults, over row numbers; `compiled`: dense part by torch.compile."""

    def __init__(self, model: Model, like: GraphStep, compiled: bool = False) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        super().__init__(model, like)
        self._jagged, self._keys = KeyedJaggedTensor, [f"feature{table}" for table in range(model.tables)]
        configs = [
            EmbeddingBagConfig(
                name=f"table{table}", embedding_dim=model.dim, num_embeddings=model.rows, feature_names=[key]
            )
            for table, key in enumerate(self._keys)
        ]
        self._collection = FusedEmbeddingBagCollection(configs, torch.optim.Adagrad, {"lr": LR, "eps": EPS})
        with torch.no_grad():
            for table, rows in enumerate(self.rows):
                self._collection.embedding_bags[f"table{table}"].weight.copy_(rows)
        if compiled:
            self.dense = torch.compile(self.dense)

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        rows, *rest = batch
        flat = rows.transpose(0, 1).flatten()
        lengths = torch.full((self.model.tables * self.model.batch,), self.model.length)
        return (self._jagged(keys=self._keys, values=flat, lengths=lengths), *rest)

    def pooled(self, rows: Any) -> Tensor:
        pooled: Tensor = self._collection(rows).values()
        return pooled.view(self.model.batch, self.model.tables, self.model.dim)


class DenseAlone(Eager):
    """The dense part on given vectors in place of pooled rows, whose gradient it computes as well."""

    def __init__(self, model: Model, like: GraphStep) -> None:
        super().__init__(model, like)
        self._pooled = torch.rand(model.batch, model.tables, model.dim, requires_grad=True)

    def pooled(self, rows: Any) -> Tensor:
        self._pooled.grad = None
        return self._pooled
