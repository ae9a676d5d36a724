"""Mistakes of one rank outside a step, and in dense optimizers, are raised on all ranks, and they continue together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.live_rows import remarks_of
from support.parts import PADDING
from support.ranks import alike, fails, run_ranks
from tierbed import (
    CapacityError,
    Graph,
    GroupError,
    MultiTableEmbedding,
    TierbedError,
    World,
    make_constant_initializer,
    make_host_mem_store_options,
    make_table_options,
)
from tierbed.distributed import peer_monitor

DIM = 3
ONE_ROW = np.ones((1, DIM), np.float32)


def rows(world: World | None, **more: Any) -> MultiTableEmbedding:
    start = [make_table_options(make_constant_initializer(0.0))]
    store = make_host_mem_store_options(**more)
    return MultiTableEmbedding("e", DIM, torch.float32, torch.int64, start, store, None, PADDING, world=world)


def wrong(world: World, folder: Path) -> list[str]:
    """Arguments that are wrong on rank 1 alone, some of which no message between ranks can carry."""
    embedding, bad = rows(world, persistent_path=folder), world.rank == 1
    calls = (
        lambda: embedding.put([1], np.zeros((1, DIM + bad), np.float32)),
        lambda: embedding.put([PADDING if bad else 1], ONE_ROW),
        lambda: embedding.get([1.5] if bad else [1]),
        lambda: embedding.delete(["a"] if bad else [1]),
        lambda: embedding(torch.tensor([1.0] if bad else [1], dtype=torch.float32 if bad else torch.int64)),
        lambda: embedding.save_snapshot("b", overwrite=np.True_ if bad else True),
        lambda: embedding.prune_snapshots(np.int64(1) if bad else 1),
        lambda: embedding.prune_snapshots(10**30 if bad else 1),
        lambda: embedding.load_snapshot("a", tables=["x\udc80"] if bad else None),
        lambda: embedding.load_snapshot("a", strict=np.True_ if bad else True),
    )
    said = [fails(call, TierbedError) for call in calls[:5]]
    assert embedding.size() == 0
    embedding.put([1], ONE_ROW)
    embedding.save_snapshot("a")
    said += [fails(call, TierbedError) for call in calls[5:]]
    assert embedding.prune_snapshots(np.int64(1)) == []
    embedding.save_snapshot("b")
    return said


def test_a_wrong_argument_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    said = alike(2, wrong, tmp_path)
    assert all(text.startswith("rank 1: ") for text in said[:5])
    for text, part in zip(said[5:], ("overwrite=", "np.int64(1)", str(10**30), "udc80", "strict="), strict=True):
        assert part in text
    assert "the snapshot's id" not in said[8]


def full(world: World) -> list[Any]:
    embedding, heard = rows(world, capacity=20), []
    for count in (8, 4, 2):
        keys = np.arange(count) + 100 * world.rank + 1000 * count
        try:
            embedding.put(keys, np.ones((count, DIM), np.float32))
        except CapacityError as error:
            heard.append(str(error))
        heard.append(embedding.size())
    return heard


def test_put_counts_the_rows_of_all_ranks_before_one_is_written() -> None:
    first, said, *sizes = alike(2, full)
    assert [first, *sizes] == [16, 16, 20]
    assert "capacity=20" in said


class Two(Graph):
    """Rows and a linear layer, each with an optimizer of its own."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.rows, self.linear = rows(world), nn.Linear(DIM, 1)
        self.dense = torch.optim.Adam(self.linear.parameters(), lr=0.01)
        self.add_optimizer(torch.optim.SGD(self.rows.parameters(), lr=0.1))
        self.add_optimizer(self.dense)

    def build(self, ids: Tensor) -> Tensor:
        loss = self.linear(self.rows(ids)).square().mean()
        loss.backward()
        return loss


def differing(world: World) -> list[str]:
    graph, heard = Two(world), []
    ids = torch.arange(4)
    graph(ids)
    for name, value in (("lr", 0.5), ("betas", (0.5, 0.5))):
        group = graph.dense.param_groups[0]
        before = group[name]
        group[name] = value if world.rank else before
        heard.append(fails(lambda: graph(ids), GroupError))
        group[name] = before
        graph(ids)
    assert torch.equal(world.sum(graph.linear.weight.detach()), 2 * graph.linear.weight.detach())
    return heard


def test_a_dense_optimizer_that_differs_is_told_by_the_name_of_the_setting() -> None:
    rate, betas = alike(2, differing)
    assert "Adam 1, group 0: lr=0.01; rank 1" in rate
    assert "Adam 1, group 0: lr=0.5" in rate
    assert "Adam 1, group 0: betas=[0.5, 0.5]" in betas


def forgotten(world: World) -> str:
    said = remarks_of()
    embedding = rows(None)
    assert not said
    embedding.size()
    return said[0]


def test_an_embedding_without_a_world_among_ranks_is_said() -> None:
    assert all("give world=World.from_env()" in said for said in run_ranks(2, forgotten))


def cannot_connect(world: World) -> tuple[str, tuple[int, ...]]:
    """A second world, whose rank 1 cannot reach rank 0."""

    def no_way(other: int, *_: Any) -> Any:
        raise GroupError(f"rank 1 cannot reach rank {other}: set GLOO_SOCKET_IFNAME", [other])

    if world.rank == 1:
        peer_monitor._connect_to = no_way  # type: ignore[assignment]  # this process ends with the test
    with pytest.raises(GroupError) as error:
        World(timeout=10)
    return str(error.value), error.value.ranks


def test_a_rank_that_cannot_connect_is_named_to_the_others() -> None:
    (first, ranks), (second, _) = run_ranks(2, cannot_connect)
    assert first == second == "rank 1 cannot reach rank 0: set GLOO_SOCKET_IFNAME"
    assert ranks == (1,)
