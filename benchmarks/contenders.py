"""Who is measured: tierbed through its public API, FBGEMM's CPU operator and torch's sparse embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from workloads import BETAS, EPS, LR, Batch, Workload, hashed, initial_rows

from tierbed import (
    Graph,
    MultiTableEmbedding,
    make_device_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)
from tierbed.engine.optim import RowWiseAdagrad


class Contender(Protocol):
    """Holds one set of tables and the batches, laid out beforehand as it likes them."""

    name: str

    def step(self, index: int) -> Tensor:
        """Forward, backward and update of batch `index`: float32 [batch, tables, dim], the forward's output."""

    def rows(self, index: int) -> Tensor:
        """The rows of batch `index` as they are now: float32 [ids, dim], in the order of its `rows`."""


class _Step(Graph):
    def __init__(self, embedding: MultiTableEmbedding, optimizer: torch.optim.Optimizer, pooling: str | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.arguments = {} if pooling is None else {"pooling": pooling}
        self.add_optimizer(optimizer)

    def build(self, ids: Tensor, grad: Tensor) -> Tensor:
        out: Tensor = self.embedding(ids, **self.arguments)
        out.backward(grad)
        return out


class Tierbed:
    """Rows in a device_mem store, under hashed 64-bit keys."""

    def __init__(self, work: Workload, batches: list[Batch], name: str = "tierbed") -> None:
        self.name = name
        tables = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * work.tables
        self._embedding = MultiTableEmbedding(
            work.name.replace("-", "_"), work.dim, torch.float32, torch.int64, tables, make_device_mem_store_options()
        )
        pooled = work.length > 1
        self._graph = _Step(self._embedding, _row_optimizer(work, self._embedding), "sum" if pooled else None)
        for table in range(work.tables):
            self._embedding.put(hashed(torch.arange(work.rows)), initial_rows(work, table), table_ids=table)
        self._tables = torch.arange(work.tables)[:, None].expand(work.tables, work.length)
        self._keys = [hashed(batch.rows) for batch in batches]
        self._ids = self._keys if pooled else [keys.squeeze(2) for keys in self._keys]
        self._grads = [batch.grad for batch in batches]

    def step(self, index: int) -> Tensor:
        out: Tensor = self._graph(self._ids[index], self._grads[index])
        return out

    def rows(self, index: int) -> Tensor:
        return self._embedding.get(self._keys[index], self._tables).flatten(0, 2)


class RowsOf:
    """Rows in a store, device_mem unless told, that follow an optimizer, looked up without pooling."""

    def __init__(
        self,
        work: Workload,
        batches: list[Batch],
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        types: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        store: Mapping[str, Any] | None = None,
    ) -> None:
        """types: of rows and of the state that elements have."""
        self.batches = batches
        tables = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * work.tables
        self._embedding = MultiTableEmbedding(
            work.name,
            work.dim,
            types[0],
            torch.int64,
            tables,
            make_device_mem_store_options() if store is None else store,
            state_dtype=types[1],
        )
        self._graph = _Step(self._embedding, make(list(self._embedding.parameters())), None)
        self._ids = [batch.rows.squeeze(2) for batch in batches]

    def step(self, index: int) -> Tensor:
        out: Tensor = self._graph(self._ids[index], self.batches[index].grad)
        return out

    def fill(self, rows: int) -> None:
        """Write the first rows of each table, as they would begin in float32 but for their order."""
        draw = torch.Generator().manual_seed(0)
        for table in range(self._embedding.spec.num_tables):
            for keys in torch.arange(rows).split(1 << 16):
                values = torch.rand(len(keys), self._embedding.dim, generator=draw) * 0.2 - 0.1
                self._embedding.put(keys, values, table)

    def close(self) -> None:
        self._embedding.close()

    def of(self, rows: Tensor) -> Tensor:
        """The rows [n] of table 0 as they are now: float32 [n, dim]."""
        return self._embedding.get(rows, 0)


def _row_optimizer(work: Workload, embedding: nn.Module) -> torch.optim.Optimizer:
    if work.optimizer == "adagrad":
        return torch.optim.Adagrad(embedding.parameters(), lr=LR, eps=EPS)
    if work.optimizer == "adam":
        return torch.optim.Adam(embedding.parameters(), lr=LR, betas=BETAS, eps=EPS)
    return RowWiseAdagrad(embedding.parameters(), lr=LR, eps=EPS)


class Fbgemm:
    """FBGEMM's fused operator over dense row numbers, without its bounds check: its fastest setting."""

    name = "fbgemm"

    def __init__(self, work: Workload, batches: list[Batch]) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizers = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        specs = [(work.rows, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * work.tables
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=optimizers[work.optimizer],
            learning_rate=LR,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self._weights = self._tbe.split_embedding_weights()
        for table, weights in enumerate(self._weights):
            weights.copy_(initial_rows(work, table))
        self._batches = batches
        self._shape = (work.batch, work.tables, work.dim)
        self._indices = [batch.rows.transpose(0, 1).flatten() for batch in batches]
        self._offsets = torch.arange(0, work.ids + 1, work.length)
        self._grads = [batch.grad.flatten(1) for batch in batches]

    def step(self, index: int) -> Tensor:
        out: Tensor = self._tbe(self._indices[index], self._offsets)
        out.backward(self._grads[index])
        return out.detach().view(self._shape)

    def rows(self, index: int) -> Tensor:
        per_table = zip(self._weights, self._batches[index].rows.unbind(1), strict=True)
        return torch.stack([weights[rows] for weights, rows in per_table], dim=1).flatten(0, 2)


class Torch:
    """nn.Embedding(sparse=True), all tables one after the other in one module, with torch's sparse optimizers."""

    name = "torch"

    def __init__(self, work: Workload, batches: list[Batch]) -> None:
        self._embedding = nn.Embedding(work.tables * work.rows, work.dim, sparse=True)
        with torch.no_grad():
            for table in range(work.tables):
                self._embedding.weight[table * work.rows : (table + 1) * work.rows] = initial_rows(work, table)
        self._optimizer: torch.optim.Optimizer
        if work.optimizer == "adagrad":
            self._optimizer = torch.optim.Adagrad(self._embedding.parameters(), lr=LR, eps=EPS)
        else:
            self._optimizer = torch.optim.SparseAdam(self._embedding.parameters(), lr=LR, betas=BETAS, eps=EPS)
        first = (torch.arange(work.tables) * work.rows)[:, None]
        self._ids = [(batch.rows + first).squeeze(2) for batch in batches]
        self._grads = [batch.grad for batch in batches]

    def step(self, index: int) -> Tensor:
        self._optimizer.zero_grad()
        out: Tensor = self._embedding(self._ids[index])
        out.backward(self._grads[index])
        self._optimizer.step()
        return out.detach()

    def rows(self, index: int) -> Tensor:
        return self._embedding.weight.detach()[self._ids[index].flatten()]


PEERS: dict[str, Callable[[Workload, list[Batch]], Contender]] = {"fbgemm": Fbgemm, "torch": Torch}
