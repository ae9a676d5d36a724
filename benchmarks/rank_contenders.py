"""Who takes steps over ranks: an embedding with a world, its parts alone, and TorchRec's row-wise collection."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from workloads import EPS, LR, Batch, Workload

from tierbed import (
    Graph,
    MultiTableEmbedding,
    make_device_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)
from tierbed.distributed import World
from tierbed.embedding.plan import plan


class Contender(Protocol):
    """Tables that begin with the rows of `initial`; each rank steps with its own part of a batch."""

    name: str

    def step(self, index: int) -> Tensor | list[Tensor]:
        """Forward, backward and update: the output of this rank's part [samples, tables, dim], or of each table."""

    def rows(self, keys: Tensor, table: int) -> Tensor:
        """The rows of these keys [n] as they are now: float32 [n, dim]. All ranks call it."""


def initial(name: str, work: Workload, world: World | None = None, options: Any = None) -> MultiTableEmbedding:
    """An embedding none of whose rows was trained."""
    tables = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * work.tables
    store = make_device_mem_store_options() if options is None else options
    return MultiTableEmbedding(name, work.dim, torch.float32, torch.int64, tables, store, seed=0, world=world)


class RowsStep(Graph):
    """A lookup, given gradients, Adagrad. parts: how many calls make one step of the optimizer."""

    def __init__(self, embedding: MultiTableEmbedding, parts: int = 1) -> None:
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.Adagrad(embedding.parameters(), lr=LR, eps=EPS))
        if parts > 1:
            self.accumulate_grads(parts, mean=True)

    def build(self, ids: Tensor, grad: Tensor) -> Tensor:
        out: Tensor = self.embedding(ids)
        out.backward(grad)
        return out


class Embedding:
    """An embedding in a Graph, over the ranks of `world`; without one, of this rank's ids alone."""

    def __init__(
        self, name: str, work: Workload, batches: Sequence[Batch], world: World | None = None, options: Any = None
    ) -> None:
        self.name = name
        self.embedding = initial(name, work, world, options)
        self.graph = RowsStep(self.embedding)
        self._ids, self._grads = own_parts(batches)

    def step(self, index: int) -> Tensor:
        out: Tensor = self.graph(*self.part(index))
        return out

    def part(self, index: int) -> tuple[Tensor, Tensor]:
        """This rank's ids and gradients of a batch."""
        return self._ids[index], self._grads[index]

    def rows(self, keys: Tensor, table: int) -> Tensor:
        return self.embedding.get(keys, table)


class Accumulated:
    """The reference: every rank alone makes the step of all ranks, by accumulating their parts."""

    name = "accumulated"

    def __init__(self, work: Workload, batches: Sequence[Batch]) -> None:
        self.embedding = initial("accumulated", work)
        self._graph = RowsStep(self.embedding, dist.get_world_size())
        self._batches = batches

    def step(self, index: int) -> Tensor:
        outs = [self._graph(*part) for part in parts(self._batches[index])]
        out: Tensor = outs[dist.get_rank()]
        return out

    def rows(self, keys: Tensor, table: int) -> Tensor:
        return self.embedding.get(keys, table)


class BareExchange:
    """What the ranks must send each other for these batches, from buffers to buffers, and nothing else.

    The numbers of ids, the ids with their tables, the rows, the gradients: of rows that another rank owns.
    """

    name = "bare exchange"

    def __init__(self, work: Workload, batches: Sequence[Batch]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        asked = [asked_of(work, batch, size) for batch in batches]
        self._out = [matrix[rank].tolist() for matrix in asked]
        self._in = [matrix[:, rank].tolist() for matrix in asked]
        most = max(sum(counts) for counts in self._out + self._in)
        self._numbers = torch.ones(2, size, dtype=torch.int64)
        self._ids = torch.ones(2, most * (2 if work.tables > 1 else 1), dtype=torch.int64)
        self._rows = torch.ones(2, most * work.dim)
        self._words, self._dim = (2 if work.tables > 1 else 1), work.dim

    def step(self, index: int) -> None:
        out, came = self._out[index], self._in[index]
        dist.all_to_all_single(self._numbers[0], self._numbers[1])
        _exchange(self._ids, out, came, self._words)
        _exchange(self._rows, came, out, self._dim)
        _exchange(self._rows, out, came, self._dim)


def _exchange(buffers: Tensor, out: list[int], came: list[int], width: int) -> None:
    sizes, received = [width * n for n in out], [width * n for n in came]
    dist.all_to_all_single(buffers[0, : sum(received)], buffers[1, : sum(sizes)], received, sizes)


class TorchRec:
    """An EmbeddingCollection that DistributedModelParallel shards row by row over the ranks, with a fused Adagrad."""

    name = "torchrec"

    def __init__(self, work: Workload, batches: Sequence[Batch]) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        rank, size = dist.get_rank(), dist.get_world_size()
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        names = [f"t{table}" for table in range(work.tables)]
        configs = [
            EmbeddingConfig(num_embeddings=work.rows, embedding_dim=work.dim, name=name, feature_names=[name])
            for name in names
        ]
        collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": LR, "eps": EPS})
        sharder = EmbeddingCollectionSharder()
        by_row = row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value)
        sharding = construct_module_sharding_plan(
            collection,
            dict.fromkeys(names, by_row),
            sharder=sharder,
            local_size=size,
            world_size=size,
            device_type="cpu",
        )
        self._model = DistributedModelParallel(
            nn.ModuleDict({"rows": collection}),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"rows": sharding}),
            sharders=[sharder],  # type: ignore[list-item]
        )
        self._collection = self._model.module["rows"]
        self._names, self._rows = names, work.rows
        with initial("initial", work) as rows:
            for table, shard in enumerate(self._shards()):
                first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                shard.tensor.copy_(rows.get(torch.arange(first, first + count), table))
        ids, grads = own_parts(batches)
        ones = torch.ones(ids[0].numel(), dtype=torch.int32)
        self._features = [KeyedJaggedTensor(names, part.T.flatten(), lengths=ones) for part in ids]
        self._grads = [part.unbind(1) for part in grads]

    def step(self, index: int) -> list[Tensor]:
        out = self._collection(self._features[index])
        values = [out[name].values() for name in self._names]
        torch.autograd.backward(values, self._grads[index])
        return values

    def rows(self, keys: Tensor, table: int) -> Tensor:
        """Of the keys that other ranks have, zeros are added to what these have."""
        shard = self._shards()[table]
        first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        mine = (keys >= first) & (keys < first + count)
        rows = torch.zeros(len(keys), shard.tensor.shape[1])
        rows[mine] = shard.tensor.detach()[keys[mine] - first]
        dist.all_reduce(rows)
        return rows

    def _shards(self) -> list[Any]:
        state = self._collection.state_dict()
        return [state[f"embeddings.{name}.weight"].local_shards()[0] for name in self._names]


def parts(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """The ids [samples, tables] and gradients [samples, tables, dim] of each rank."""
    size = dist.get_world_size()
    ids, grads = (tensor.chunk(size) for tensor in (batch.rows.squeeze(2), batch.grad))
    return list(zip(ids, grads, strict=True))


def own_parts(batches: Sequence[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's part of each batch: its ids, and its gradients."""
    mine = [parts(batch)[dist.get_rank()] for batch in batches]
    return [ids.contiguous() for ids, _ in mine], [grads.contiguous() for _, grads in mine]


def asked_of(work: Workload, batch: Batch, size: int) -> NDArray[Any]:
    """int64 [size, size]: the rows that rank i asks rank j for, none where it is itself."""
    ranks = plan([batch.rows.squeeze(2)], work.dim, 0, tables=work.tables, world_size=size).ranks
    assert ranks is not None
    asked = ranks.ids.copy()
    for rank in range(size):
        asked[rank, rank] = 0
    return asked
