"""The sides that only train rows, without a model: tierbed on its stores and across ranks, FBGEMM, torch, TorchRec."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from timing import read_top_tier
from torch import Tensor, nn
from traces import Batch, Shape, hash_rows
from workload import check_close

import tierbed
from tierbed import Graph, MultiTableEmbedding, make_table_options, make_uniform_initializer
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tierbed.optim import LAMB, CatchUpAdam, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad

DIM = 16
STORED_ROW_BYTES = 160  # bytes on disk: a row of dim DIM with Adagrad, with RocksDB's overhead
LR = 0.01
# Adam and SparseAdam add eps at different points. An eps far below every gradient makes no difference to rows.
EPS = 1e-10
BETAS = (0.9, 0.999)
CHECKED_STEPS = 3
TOLERANCE = 2e-6  # relative to the largest magnitude
FILL_ROWS = 1 << 17  # rows

Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, LR),
    "adagrad": lambda p: torch.optim.Adagrad(p, LR, eps=EPS),
    "rowwise_adagrad": lambda p: RowWiseAdagrad(p, LR, EPS),
    "adam": lambda p: torch.optim.Adam(p, LR, BETAS, EPS),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, LR, BETAS, EPS),
    "partial_rowwise_adam": lambda p: PartialRowWiseAdam(p, LR, BETAS, EPS),
    "catch_up_adam": lambda p: CatchUpAdam(p, LR, BETAS, EPS),
    "lamb": lambda p: LAMB(p, LR, BETAS, EPS),
    "partial_rowwise_lamb": lambda p: PartialRowWiseLAMB(p, LR, BETAS, EPS),
    "lars_sgd": lambda p: LarsSGD(p, LR),
    "rmsprop": lambda p: torch.optim.RMSprop(p, LR, eps=EPS),
}


class Contender(Protocol):
    """Tables filled with `initial_rows`. Batches are converted to the side's own layout before the clock starts."""

    name: str

    def step(self, index: int) -> Tensor | list[Tensor]:
        """Run forward, backward and update for a batch. Returns the output [batch, tables, dim], or one per table."""

    def rows(self, index: int) -> Tensor:
        """Return the current rows for a batch's ids: float32 [ids, dim], in the order of `flat`."""


def check(ours: Contender, others: Sequence[Contender], tolerance: float = TOLERANCE) -> None:
    """Run some steps on all sides and raise Mismatch if their outputs or updated rows differ.

    tolerance: the largest allowed difference, relative to the largest magnitude; 0 means equal bits.
    """
    for index in range(CHECKED_STEPS):
        for what in ("step", "rows"):
            expected = _stack(getattr(ours, what)(index)).clone()
            for other in others:
                actual = _stack(getattr(other, what)(index))
                check_close(f"{what} of batch {index} by {ours.name} and {other.name}", expected, actual, tolerance)


def _stack(out: Tensor | list[Tensor]) -> Tensor:
    return (torch.stack(out, 1) if isinstance(out, list) else out).detach()


def make_options(
    store: str, folder: Path, cache_rows: int = 0, dim: int = DIM, optimizer: str = "adagrad", **more: Any
) -> Any:
    """Make the options of the named store. A cache has room for about `cache_rows` rows."""
    if store == "device_mem":
        return tierbed.make_device_mem_store_options(**more)
    if store == "host_mem":
        return tierbed.make_host_mem_store_options(**more)
    budget = (cache_rows + 1) * measure_row_bytes(dim, optimizer) / 2**20
    if store == "cached_host_mem":
        return tierbed.make_cached_host_mem_store_options(budget, **more)
    return tierbed.make_cached_ssd_store_options(budget, folder, **more)


def make_embedding(
    tables: int,
    options: Any = None,
    dim: int = DIM,
    world: Any = None,
    name: str = "rows",
) -> MultiTableEmbedding:
    """Make an embedding, on device_mem by default. The fixed seed makes initial rows independent of the name."""
    initial = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * tables
    store = tierbed.make_device_mem_store_options() if options is None else options
    return MultiTableEmbedding(name, dim, torch.float32, torch.int64, initial, store, seed=0, world=world)


@cache
def measure_row_bytes(dim: int, optimizer: str) -> float:
    """Return the bytes of one cached row, including the optimizer's state and the cache's bookkeeping."""
    with make_embedding(1, tierbed.make_cached_host_mem_store_options(16), dim) as embedding:
        RowsStep(embedding, optimizer)
        top = read_top_tier(embedding)
        return top["bytes"] / top["capacity"]


def fill(embedding: MultiTableEmbedding, rows: int) -> float:
    """Write each row with its initial value, so that every row is stored. Returns the seconds it took."""
    begin = time.perf_counter()
    for table in range(embedding.spec.num_tables):
        for numbers in torch.arange(rows).split(FILL_ROWS):
            keys = hash_rows(numbers)
            embedding.put(keys, embedding.get(keys, table), table)
    return time.perf_counter() - begin


def initial_rows(shape: Shape) -> list[Tensor]:
    """Return the rows with which every contender starts: float32 [rows, dim] for each table."""
    with make_embedding(shape.tables, dim=shape.dim) as embedding:
        keys = hash_rows(torch.arange(shape.rows))
        return [embedding.get(keys, table) for table in range(shape.tables)]


def find_tables(batch: Batch) -> Tensor:
    """Return the table number of each id in `flat`."""
    samples, tables = batch.grad.shape[:2]
    return torch.arange(tables).repeat_interleave(batch.offsets[::samples].diff())


class RowsStep(Graph):
    """A graph that looks rows up, applies the given output gradients and updates the rows.

    Args:
        rows: An embedding or a collection of embeddings.
        optimizer: A name in OPTIMIZERS.
        look_up: Called with the ids to get the output; `rows` by default.
        calls: How many calls are accumulated into one optimizer step.
    """

    def __init__(
        self,
        rows: nn.Module,
        optimizer: str = "adagrad",
        look_up: Callable[..., Tensor] | None = None,
        calls: int = 1,
    ) -> None:
        super().__init__()
        self.embedding = rows
        self._look_up = partial(rows) if look_up is None else look_up
        self.add_optimizer(OPTIMIZERS[optimizer](rows.parameters()))
        if calls > 1:
            self.accumulate_grads(calls, mean=True)

    def build(self, *inputs: Any) -> Tensor:
        *ids, grad = inputs
        out = self._look_up(*ids)
        out.backward(grad)
        return out


class Rows:
    """tierbed with hashed 64-bit keys. With a world, each rank passes its own part of each batch."""

    def __init__(
        self,
        shape: Shape,
        batches: Sequence[Batch],
        name: str = "tierbed",
        world: Any = None,
        is_filled: bool = True,
    ) -> None:
        self.name = name
        self.embedding = make_embedding(shape.tables, None, shape.dim, world, name)
        pooled = max(shape.lengths) > 1
        look_up = partial(self.embedding, pooling="sum") if pooled else None
        self.graph = RowsStep(self.embedding, shape.optimizer, look_up)
        if is_filled:
            fill(self.embedding, shape.rows)
        self._batches = batches
        ids = [hash_rows(batch.rows) for batch in batches]
        self._ids = ids if pooled else [each.squeeze(2) for each in ids]

    def step(self, index: int) -> Tensor:
        number = index % len(self._ids)
        out: Tensor = self.graph(self._ids[number], self._batches[number].grad)
        return out

    def rows(self, index: int) -> Tensor:
        batch = self._batches[index]
        return self.embedding.get(hash_rows(batch.flat), find_tables(batch))

    def close(self) -> None:
        self.embedding.close()


class Fbgemm:
    """FBGEMM's fused operator in its fastest setting: dense row numbers, pooled output, no bounds check."""

    name = "FBGEMM"

    def __init__(self, shape: Shape, batches: Sequence[Batch]) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizers = {  # all that FBGEMM has on the CPU, except one that it calls experimental
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "sgd": EmbOptimType.EXACT_SGD,
        }
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * shape.tables,
            optimizer=optimizers[shape.optimizer],
            learning_rate=LR,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self._weights = self._tbe.split_embedding_weights()
        for weights, rows in zip(self._weights, initial_rows(shape), strict=True):
            weights.copy_(rows)
        self._batches = batches
        self._grads = [batch.grad.flatten(1) for batch in batches]

    def step(self, index: int) -> Tensor:
        number = index % len(self._batches)
        batch = self._batches[number]
        out: Tensor = self._tbe(batch.flat, batch.offsets)
        out.backward(self._grads[number])
        return out.detach().view_as(batch.grad)

    def rows(self, index: int) -> Tensor:
        batch = self._batches[index]
        parts = batch.flat.split(find_tables(batch).bincount().tolist())
        return torch.cat([weights[numbers] for weights, numbers in zip(self._weights, parts, strict=True)])


class Torch:
    """One nn.Embedding(sparse=True) for all tables, with torch's sparse optimizers."""

    name = "torch"

    def __init__(self, shape: Shape, batches: Sequence[Batch]) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; without this call torch warns
        rows = torch.cat(initial_rows(shape))
        self._embedding = nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)
        optimizer = "sparse_adam" if shape.optimizer == "adam" else shape.optimizer
        self._optimizer = OPTIMIZERS[optimizer](self._embedding.parameters())
        first = torch.arange(shape.tables) * shape.rows
        self._ids = [batch.rows.squeeze(2) + first for batch in batches]
        self._grads = [batch.grad for batch in batches]

    def step(self, index: int) -> Tensor:
        number = index % len(self._ids)
        self._optimizer.zero_grad()
        out: Tensor = self._embedding(self._ids[number])
        out.backward(self._grads[number])
        self._optimizer.step()
        return out.detach()

    def rows(self, index: int) -> Tensor:
        return self._embedding.weight.detach()[self._ids[index].T.flatten()]


class AccumulatedRows(Rows):
    """The reference for a step over ranks. Each rank computes the whole step alone: it accumulates all ranks' parts."""

    def __init__(self, shape: Shape, batches: Sequence[Batch]) -> None:
        own, ranks = dist.get_rank(), dist.get_world_size()
        super().__init__(shape, [batch.take_part(own, ranks) for batch in batches], "accumulated", is_filled=False)
        self.graph = RowsStep(self.embedding, shape.optimizer, calls=ranks)
        parts = [[batch.take_part(rank, ranks) for rank in range(ranks)] for batch in batches]
        self._parts = [[(hash_rows(part.rows.squeeze(2)), part.grad) for part in each] for each in parts]

    def step(self, index: int) -> Tensor:
        outs = [self.graph(*part) for part in self._parts[index]]
        out: Tensor = outs[dist.get_rank()]
        return out


class BareExchange:
    """Only a step's communication: exchanges as many counts, ids, rows and gradients as the ranks need, from buffers.

    num_sent: for each batch, int64 [ranks, ranks]: how many rows rank i requests from rank j.
    """

    def __init__(self, shape: Shape, num_sent: Sequence[Any]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._out = [matrix[rank].tolist() for matrix in num_sent]
        self._in = [matrix[:, rank].tolist() for matrix in num_sent]
        max_rows = max(sum(counts) for counts in self._out + self._in)
        self._words, self._dim = (2 if shape.tables > 1 else 1), shape.dim
        self._numbers = torch.ones(2, size, dtype=torch.int64)
        self._ids = torch.ones(2, max_rows * self._words, dtype=torch.int64)
        self._rows = torch.ones(2, max_rows * shape.dim)

    def step(self, index: int) -> None:
        out, into = self._out[index % len(self._out)], self._in[index % len(self._in)]
        dist.all_to_all_single(self._numbers[0], self._numbers[1])
        self._exchange(self._ids, out, into, self._words)
        self._exchange(self._rows, into, out, self._dim)
        self._exchange(self._rows, out, into, self._dim)

    @staticmethod
    def _exchange(buffers: Tensor, out: list[int], into: list[int], width: int) -> None:
        sizes, received = [width * n for n in out], [width * n for n in into]
        dist.all_to_all_single(buffers[0, : sum(received)], buffers[1, : sum(sizes)], received, sizes)


class TorchRec:
    """An EmbeddingCollection that DistributedModelParallel shards by row over the ranks, with fused Adagrad."""

    name = "TorchRec"

    def __init__(self, shape: Shape, batches: Sequence[Batch]) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        rank, size = dist.get_rank(), dist.get_world_size()
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        self._names = [f"t{table}" for table in range(shape.tables)]
        configs = [
            EmbeddingConfig(num_embeddings=shape.rows, embedding_dim=shape.dim, name=name, feature_names=[name])
            for name in self._names
        ]
        collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": LR, "eps": EPS})
        sharder = EmbeddingCollectionSharder()
        by_row = row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value)
        sharding = construct_module_sharding_plan(
            collection,
            dict.fromkeys(self._names, by_row),
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
        for shard, rows in zip(self._shards(), initial_rows(shape), strict=True):
            shard.tensor.copy_(rows[self._part(shard)])
        self._shape, self._batches = shape, batches
        ones = torch.ones(len(batches[0].flat), dtype=torch.int32)
        self._features = [KeyedJaggedTensor(self._names, batch.flat, lengths=ones) for batch in batches]

    def step(self, index: int) -> list[Tensor]:
        number = index % len(self._batches)
        out = self._collection(self._features[number])
        values = [out[name].values() for name in self._names]
        torch.autograd.backward(values, self._batches[number].grad.unbind(1))
        return values

    def rows(self, index: int) -> Tensor:
        """A collective call: every rank has to make it."""
        tables = torch.zeros(self._shape.tables, self._shape.rows, self._shape.dim)
        for rows, shard in zip(tables, self._shards(), strict=True):
            rows[self._part(shard)] = shard.tensor.detach()
        dist.all_reduce(tables)
        return tables[find_tables(self._batches[index]), self._batches[index].flat]

    @staticmethod
    def _part(shard: Any) -> slice:
        first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        return slice(first, first + count)

    def _shards(self) -> list[Any]:
        state = self._collection.state_dict()
        return [state[f"embeddings.{name}.weight"].local_shards()[0] for name in self._names]


class Collection:
    """An EmbeddingBagCollection in a Graph, called with a KeyedJaggedTensor of row numbers."""

    name = "tierbed"

    def __init__(self, shape: Shape, batches: Sequence[Batch], options: Any = None) -> None:
        """options: the store's; device_mem by default."""
        keys = [f"f{table}" for table in range(shape.tables)]
        tables = [EmbeddingBagConfig(shape.rows, shape.dim, f"t{key}", feature_names=[key]) for key in keys]
        self.bags = bags = EmbeddingBagCollection(tables, options or tierbed.make_device_mem_store_options())
        self.embedding = bags.embedding_of(tables[0].name)  # of all tables
        for table, rows in enumerate(initial_rows(shape)):
            self.embedding.put(torch.arange(shape.rows), rows, table)
        self._graph = RowsStep(bags, shape.optimizer, lambda features: bags(features).values())
        self._batches = batches
        self.features = [KeyedJaggedTensor(keys, batch.flat, offsets=batch.offsets) for batch in batches]
        self._grads = [batch.grad.flatten(1) for batch in batches]

    def step(self, index: int) -> Tensor:
        number = index % len(self._batches)
        out: Tensor = self._graph(self.features[number], self._grads[number])
        return out.view_as(self._batches[0].grad)

    def rows(self, index: int) -> Tensor:
        return self.embedding.get(self._batches[index].flat, find_tables(self._batches[index]))

    def steps(self, first: int, count: int, ahead: int | str | None = None) -> Iterator[Tensor]:
        """Yield the outputs of these steps.

        ahead: None makes plain calls; a number or "default" makes one `graph.run` that announces that many batches.
        """
        numbers = (index % len(self._batches) for index in range(first, first + count))
        inputs = ((self.features[number], self._grads[number]) for number in numbers)
        if ahead is None:
            return (self._graph(*each) for each in inputs)
        return self._graph.run(inputs, ahead=None if isinstance(ahead, str) else ahead)
