"""Who trains the DLRM: tierbed, TorchRec, torch's sparse embeddings, and the dense part alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from dlrm_model import DENSE_LR, EPS, ROW_LR, Batch, Dense, Model, initial_rows
from torch import Tensor, nn
from workloads import hashed

from tierbed import (
    Graph,
    MultiTableEmbedding,
    make_device_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)


class Contender(Protocol):
    """Holds one model, which begins with the same rows and dense weights as all others."""

    name: str

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        """The batch as this contender's loader would give it."""

    def run(self, batches: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        """A step for each batch; their losses."""


class _Step(Graph):
    def __init__(self, model: Model) -> None:
        super().__init__()
        tables = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * model.tables
        self.embedding = MultiTableEmbedding(
            "dlrm", model.dim, torch.float32, torch.int64, tables, make_device_mem_store_options()
        )
        self.dense = Dense(model)
        self.pooling = None if model.length == 1 else "sum"
        self.add_optimizer(torch.optim.Adagrad(self.embedding.parameters(), lr=ROW_LR, eps=EPS))
        self.add_optimizer(torch.optim.SGD(self.dense.parameters(), lr=DENSE_LR))
        for table in range(model.tables):
            self.embedding.put(hashed(torch.arange(model.rows)), initial_rows(model, table), table_ids=table)

    def build(self, features: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        pooled = self.embedding(ids) if self.pooling is None else self.embedding(ids, pooling=self.pooling)
        loss: Tensor = self.dense(features, pooled, labels)
        loss.backward()
        return loss


class Tierbed:
    """A `Graph` on `device_mem`, under hashed 64-bit keys; its dense part as torch has it, or as the docs recommend."""

    name = "tierbed"
    recommended_name = "tierbed as recommended"

    def __init__(self, model: Model, recommended: bool = False) -> None:
        self.name = self.recommended_name if recommended else self.name
        self.graph, self._length, self._recommended = _Step(model), model.length, recommended
        if recommended:
            self.graph.compile_dense()

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        ids = hashed(batch.rows)
        return batch.features, ids.squeeze(2) if self._length == 1 else ids, batch.labels

    def run(self, batches: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        return (
            list(self.graph.run(batches, ahead=0)) if self._recommended else [self.graph(*batch) for batch in batches]
        )


class TorchRec:
    """`FusedEmbeddingBagCollection` with its defaults, over row numbers; `compiled`: dense part by torch.compile."""

    name = "TorchRec"
    compiled_name = "TorchRec, dense part compiled"

    def __init__(self, model: Model, compiled: bool = False) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self.name = self.compiled_name if compiled else self.name
        self._model, self._jagged = model, KeyedJaggedTensor
        self._keys = [f"feature{table}" for table in range(model.tables)]
        configs = [
            EmbeddingBagConfig(
                name=f"table{table}", embedding_dim=model.dim, num_embeddings=model.rows, feature_names=[key]
            )
            for table, key in enumerate(self._keys)
        ]
        self._rows = FusedEmbeddingBagCollection(configs, torch.optim.Adagrad, {"lr": ROW_LR, "eps": EPS})
        with torch.no_grad():
            for table in range(model.tables):
                self._rows.embedding_bags[f"table{table}"].weight.copy_(initial_rows(model, table))
        dense = Dense(model)
        self._optimizer = torch.optim.SGD(dense.parameters(), lr=DENSE_LR)
        self._dense = torch.compile(dense) if compiled else dense

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        lengths = torch.full((self._model.tables * self._model.batch,), self._model.length)
        ids = self._jagged(keys=self._keys, values=batch.rows.transpose(0, 1).flatten(), lengths=lengths)
        return batch.features, ids, batch.labels

    def run(self, batches: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        return [self._step(*batch) for batch in batches]

    def _step(self, features: Tensor, ids: Any, labels: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        pooled = self._rows(ids).values().view(self._model.batch, self._model.tables, self._model.dim)
        loss: Tensor = self._dense(features, pooled, labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class Torch:
    """`nn.EmbeddingBag(sparse=True)` for each table, with torch's Adagrad."""

    name = "torch sparse"

    def __init__(self, model: Model) -> None:
        self._tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(initial_rows(model, table), freeze=False, mode="sum", sparse=True)
            for table in range(model.tables)
        )
        self._dense = Dense(model)
        self._optimizers = [
            torch.optim.Adagrad(self._tables.parameters(), lr=ROW_LR, eps=EPS),
            torch.optim.SGD(self._dense.parameters(), lr=DENSE_LR),
        ]

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        return batch.features, [rows.contiguous() for rows in batch.rows.unbind(1)], batch.labels

    def run(self, batches: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        return [self._step(*batch) for batch in batches]

    def _step(self, features: Tensor, ids: Sequence[Tensor], labels: Tensor) -> Tensor:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        pooled = torch.stack([table(rows) for table, rows in zip(self._tables, ids, strict=True)], dim=1)
        loss: Tensor = self._dense(features, pooled, labels)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()


class DenseAlone:
    """The dense part on given vectors in place of pooled rows, whose gradient it computes as well."""

    name = "dense part alone"

    def __init__(self, model: Model) -> None:
        self._dense = Dense(model)
        self._optimizer = torch.optim.SGD(self._dense.parameters(), lr=DENSE_LR)
        self._pooled = torch.rand(model.batch, model.tables, model.dim, requires_grad=True)

    def prepared(self, batch: Batch) -> tuple[Any, ...]:
        return batch.features, batch.labels

    def run(self, batches: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        return [self._step(*batch) for batch in batches]

    def _step(self, features: Tensor, labels: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        self._pooled.grad = None
        loss: Tensor = self._dense(features, self._pooled, labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()
