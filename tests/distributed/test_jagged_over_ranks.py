"""Collections and table-batched embeddings over ranks have the outputs and rows of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.ranks import fails, on_ranks, outcome, run_kept
from tierbed import EagerOptimizer, GroupError, StoreError, World, make_host_mem_store_options
from tierbed.distributed.sharded_table import ShardedBatch
from tierbed.engine.table.table import PinnedBatch
from tierbed.jagged import (
    ComputeDevice,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingLocation,
    KeyedJaggedTensor,
    OptimType,
    TableBatchedEmbeddingBags,
)

ROWS, RANKS, STEPS = 30, 2, 3
FEATURES = ["user", "item"]
LENGTHS = torch.tensor([2, 0, 3, 1, 4, 1])  # three samples of each feature


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def batch(step: int, rank: int) -> Tensor:
    """Ids of both features, each at most once in a feature, so that no sum has more than a term for each rank."""
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.cat([torch.randperm(ROWS, generator=random)[: int(n)] for n in (LENGTHS[:3].sum(), LENGTHS[3:].sum())])


def keyed(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, ids, lengths=LENGTHS)


class Bags(nn.Module):
    def __init__(self, world: World | None) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(ROWS, dim, name) for dim, name in zip((4, 8), FEATURES, strict=True)]
        self.tables = EmbeddingBagCollection(tables, make_host_mem_store_options(), world=world)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tables(keyed(ids)).values()
        return out


class Unpooled(nn.Module):
    def __init__(self, world: World | None) -> None:
        super().__init__()
        tables = [EmbeddingConfig(ROWS, 4, name) for name in FEATURES]
        self.tables = EmbeddingCollection(tables, make_host_mem_store_options(), world=world)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([jagged.values() for jagged in self.tables(keyed(ids)).values()])


def rows_of(tables: Any, names: list[Any]) -> list[Tensor]:
    embeddings = [(tables.embedding_of(name), name) for name in names]
    return [embedding.get(torch.arange(ROWS), name) for embedding, name in embeddings]


def looped(world: World | None, kind: Callable[[World | None], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of a plain loop, and rows after it. Without a world it makes the steps of both ranks."""
    model = kind(world)
    optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    outs = []
    for step in range(STEPS):
        for rank in range(RANKS) if world is None else [world.rank]:
            out = model(batch(step, rank))
            outs.append(out.detach().clone())
            out.square().sum().mul(1.0 if world is not None else 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return outs, rows_of(model.tables, FEATURES)


@pytest.mark.parametrize("kind", [Bags, Unpooled])
def test_a_collection_over_ranks_trains_as_in_one_process(kind: Any) -> None:
    outs, rows = looped(None, kind)
    for rank, (mine, here) in enumerate(run_kept(RANKS, looped, kind)):
        assert all(map(torch.equal, mine, outs[rank::RANKS]))
        assert all(map(torch.equal, here, rows))


def batched(
    world: World | None, dims: tuple[int, ...] = (4,), kind: Any = OptimType.EXACT_SGD, lr: float = 1.0
) -> TableBatchedEmbeddingBags:
    specs = [(ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in dims]
    return TableBatchedEmbeddingBags(specs, optimizer=kind, learning_rate=lr, world=world, seed=0)


def of_two(world: World | None) -> TableBatchedEmbeddingBags:
    tbe = batched(world, (4, 8), OptimType.EXACT_ADAGRAD, 0.5)
    tbe.init_embedding_weights_uniform(-0.1, 0.1)
    return tbe


def of_table_batched(world: World) -> Any:
    tbe, outs = of_two(world), []
    for step in range(STEPS):
        out = tbe(batch(step, world.rank), offsets_of(LENGTHS))
        outs.append(out.detach().clone())
        out.backward(torch.full_like(out, 0.25))
    with pytest.raises(StoreError, match="ranks share the rows"):
        tbe.split_optimizer_states()
    return outs, tbe.split_embedding_weights()


def test_a_table_batched_embedding_over_ranks_updates_in_backward() -> None:
    tbe = of_two(None)
    outs: list[Tensor] = []
    for step in range(STEPS):
        ids = [batch(step, rank).split([5, 6]) for rank in range(RANKS)]
        both = torch.cat([part[feature] for feature in (0, 1) for part in ids])
        lengths = torch.cat([LENGTHS[:3], LENGTHS[:3], LENGTHS[3:], LENGTHS[3:]])
        out = tbe(both, offsets_of(lengths))
        outs += out.detach().clone().split(3)
        out.backward(torch.full_like(out, 0.125))
    for rank, (mine, weights) in enumerate(run_kept(RANKS, of_table_batched)):
        assert all(map(torch.equal, mine, outs[rank::RANKS]))
        assert all(map(torch.equal, weights, tbe.split_embedding_weights()))


THREE, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])


@on_ranks(RANKS, run_kept)
def test_an_argument_that_is_wrong_on_one_rank_is_told_to_all(world: World) -> None:
    bags, unpooled, tbe = Bags(world), Unpooled(world), of_two(world)
    ids, offsets = batch(0, world.rank), offsets_of(LENGTHS)
    features = KeyedJaggedTensor(FEATURES[:1], ids[:5], lengths=LENGTHS[:3]) if world.rank == 1 else keyed(ids)
    calls = (
        lambda: bags.tables(features),
        lambda: bags.tables.prefetch(features),
        lambda: unpooled.tables(features),
        lambda: tbe(ids.float() if world.rank == 1 else ids, offsets),
        lambda: tbe.prefetch(ids, offsets[:-1] if world.rank == 1 else offsets),
    )
    said = [outcome(call) for call in calls]
    bags(ids), unpooled(ids), tbe(ids, offsets)
    missing = "GroupError: rank 1: KeyError: \"feature 'item' is not in the batch"
    wrong = ["InputError: rank 1: indices", "InputError: rank 1: offsets"]
    assert all(map(str.startswith, said, [missing] * 3 + wrong)), said


@on_ranks(RANKS)
def test_a_gradient_of_weights_or_an_update_that_fails_on_one_rank_is_told_to_all(world: World) -> None:
    tbe, gradient, update = batched(world), ShardedBatch.weights_grad, PinnedBatch.update

    def no_gradient(pinned: ShardedBatch, *arguments: Any) -> Tensor:
        ShardedBatch.weights_grad = gradient  # type: ignore[method-assign]
        if world.rank == 1:
            raise ArithmeticError("no gradient")
        return gradient(pinned, *arguments)

    def no_update(*_: Any) -> None:
        PinnedBatch.update = update  # type: ignore[method-assign]
        raise ArithmeticError("stumbled")

    def step() -> None:
        tbe(THREE, OFFSETS, torch.ones(3, requires_grad=True)).sum().backward()

    ShardedBatch.weights_grad = no_gradient  # type: ignore[method-assign]  # this process ends with the test
    assert outcome(step) == "GroupError: rank 1: ArithmeticError: no gradient"
    assert not tbe.split_embedding_weights()[0].any()
    step()
    assert tbe.split_embedding_weights()[0].any()
    if world.rank == 1:
        PinnedBatch.update = no_update  # type: ignore[assignment,method-assign]
    assert outcome(step) == ("ArithmeticError: stumbled" if world.rank == 1 else "fine")
    for call in (lambda: tbe(THREE, OFFSETS), tbe.split_embedding_weights):
        said = outcome(call)
        assert said.startswith("StoreError: rank 1: embedding 'tbe-d")
        assert "raised ArithmeticError('stumbled') on this rank" in said


@pytest.mark.parametrize("table_batched", [False, True])
@on_ranks(RANKS)
def test_a_rank_that_cannot_exchange_gradients_ends_the_group(world: World, table_batched: bool) -> None:

    def no_memory(*_: Any) -> None:
        raise MemoryError("no more")

    if world.rank == 1:
        ShardedBatch.weights_grad = ShardedBatch._start_sending = no_memory  # type: ignore[assignment,method-assign]
    if table_batched:
        step: Any = batched(world)(THREE, OFFSETS, torch.ones(3, requires_grad=True)).sum().backward
    else:
        model = Bags(world)
        step = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model).step
        model(batch(0, world.rank)).sum().backward()
    said = fails(step, GroupError)
    assert f"of embedding '{'tbe' if table_batched else 'ebc'}-d" in said
    assert "failed with MemoryError('no more')" in said
    with pytest.raises(GroupError, match=r"^the group of ranks has ended: "):
        world.sum(torch.ones(1))
