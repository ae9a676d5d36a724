"""The sides that train a whole model, an MLP or a DLRM: tierbed, plain torch, TorchRec, the dense part alone."""

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
from traces import Trace, Zipf, hash_rows

from tierbed import Graph

Batch = tuple[Tensor, ...]
Step = Callable[[int], Tensor]  # takes the step number, returns the loss


@dataclass(frozen=True)
class Model:
    """A model's sizes: embedding tables and a dense part.

    rows: rows per table. hidden: hidden widths in the MLP; its output is one number. optimizer: for rows, and for the
    dense part if `dense_optimizer` is None. length: ids per bag; their rows are summed. features: how many dense
    features there are. With dense features, the dense part is the one in `torchrec.models.dlrm`: an MLP, the dot
    products of all pairs of vectors, and a second MLP.
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
    """Draw batches of (row numbers, labels[, dense features]).

    Row numbers are int64 [batch, tables], or [batch, tables, length] if length > 1. Labels are float32 [batch] and
    computed from the row numbers.
    """
    trace = _trace(draw, model.tables, model.rows, model.batch * model.length)
    batches: list[Batch] = []
    for step in range(first, first + count):
        rows = torch.from_numpy(trace.draw_rows(step))
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


def hash_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Replace row numbers by 64-bit keys, for tierbed."""
    return [(hash_rows(rows), *rest) for rows, *rest in batches]


def cycle(step: Callable[..., Tensor], batches: Sequence[Batch]) -> Step:
    return lambda number: step(*batches[number % len(batches)])


class Dense(nn.Module):
    """The dense part: computes the loss from pooled rows [batch, tables, dim]. Initial weights are always the same."""

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
    """tierbed on the named store. `cached`: how many rows its cache has room for."""

    def __init__(self, model: Model, folder: Path, store: str = "device_mem", cached: int = 0, **options: Any) -> None:
        super().__init__()
        store_options = make_options(store, folder, cached, model.dim, model.optimizer, **options)
        self.embedding = make_embedding(model.tables, store_options, model.dim, name=store)
        self.dense = Dense(model)
        self.pooling = {} if model.length == 1 else {"pooling": "sum"}
        if model.dense_optimizer is None:
            self.optimizer = OPTIMIZERS[model.optimizer]([*self.embedding.parameters(), *self.dense.parameters()])
        else:
            self.optimizer = OPTIMIZERS[model.optimizer](self.embedding.parameters())
            self.add_optimizer(OPTIMIZERS[model.dense_optimizer](self.dense.parameters()))
        self.add_optimizer(self.optimizer)
        self.fill_seconds = 0.0 if options.get("open") == "resume" else fill(self.embedding, model.rows)

    def build(self, ids: Tensor, *rest: Tensor) -> Tensor:
        loss: Tensor = self.dense(self.embedding(ids, **self.pooling), *rest)
        loss.backward()
        return loss


class Eager:
    """A plain torch loop over the dense part, with a copy of `graph`'s current rows and torch's optimizers."""

    def __init__(self, model: Model, graph: GraphStep) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; without this call torch warns
        keys = hash_rows(torch.arange(model.rows))
        self.rows = [graph.embedding.get(keys, table) for table in range(model.tables)]
        self.model, self.dense = model, Dense(model)
        self.optimizers = [OPTIMIZERS[model.dense_optimizer or model.optimizer](self.dense.parameters())]

    def pool(self, rows: Any) -> Tensor:
        raise NotImplementedError

    def __call__(self, rows: Any, *rest: Tensor) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss: Tensor = self.dense(self.pool(rows), *rest)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def prepare(self, batch: Batch) -> tuple[Any, ...]:
        """Convert a batch to this side's input, outside the clock."""
        return batch


class EagerStep(Eager):
    """torch: an nn.Embedding per table, or nn.EmbeddingBag for a DLRM. Gradients are sparse except with SGD."""

    def __init__(self, model: Model, graph: GraphStep) -> None:
        super().__init__(model, graph)
        sparse = model.optimizer != "sgd"
        kind = partial(nn.EmbeddingBag.from_pretrained, mode="sum") if model.features else nn.Embedding.from_pretrained
        self.tables = nn.ModuleList(kind(rows, freeze=False, sparse=sparse) for rows in self.rows)
        name = "sparse_adam" if model.optimizer == "adam" else model.optimizer
        self.optimizers.append(OPTIMIZERS[name](self.tables.parameters()))

    def prepare(self, batch: Batch) -> tuple[Any, ...]:
        rows, *rest = batch
        parts = [part.contiguous() for part in rows.view(self.model.batch, self.model.tables, -1).unbind(1)]
        return (parts if self.model.features else [part.squeeze(1) for part in parts], *rest)

    def pool(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([table(part) for table, part in zip(self.tables, rows, strict=True)], dim=1)


class TorchRecStep(Eager):
    """`FusedEmbeddingBagCollection` with its defaults. `compile_dense`: pass the dense part to torch.compile."""

    def __init__(self, model: Model, graph: GraphStep, compile_dense: bool = False) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        super().__init__(model, graph)
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
        if compile_dense:
            self.dense = torch.compile(self.dense)

    def prepare(self, batch: Batch) -> tuple[Any, ...]:
        rows, *rest = batch
        flat = rows.transpose(0, 1).flatten()
        lengths = torch.full((self.model.tables * self.model.batch,), self.model.length)
        return (self._jagged(keys=self._keys, values=flat, lengths=lengths), *rest)

    def pool(self, rows: Any) -> Tensor:
        pooled: Tensor = self._collection(rows).values()
        return pooled.view(self.model.batch, self.model.tables, self.model.dim)


class DenseAlone(Eager):
    """The dense part on a constant tensor instead of pooled rows; it computes that tensor's gradient too."""

    def __init__(self, model: Model, graph: GraphStep) -> None:
        super().__init__(model, graph)
        self._pooled = torch.rand(model.batch, model.tables, model.dim, requires_grad=True)

    def pool(self, rows: Any) -> Tensor:
        self._pooled.grad = None
        return self._pooled
