"""Mistakes of one rank outside a step, and in dense optimizers, are raised on all ranks, and they continue together."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.parts import PADDING
from support.ranked import Ranked, batch
from support.ranks import fails, outcome, run_ranks
from tierbed import (
    CapacityError,
    Graph,
    GroupError,
    InputError,
    MultiTableEmbedding,
    TierbedError,
    World,
    make_constant_initializer,
    make_host_mem_store_options,
    make_table_options,
)
from tierbed.distributed import peer_monitor

DIM = 3


def rows(world: World | None, **more: Any) -> MultiTableEmbedding:
    start = [make_table_options(make_constant_initializer(0.0))]
    return MultiTableEmbedding(
        "e", DIM, torch.float32, torch.int64, start, make_host_mem_store_options(**more), None, PADDING, world=world
    )


def wrong(world: World) -> list[str]:
    embedding, heard = rows(world), []
    bad = world.rank == 1
    for call in (
        lambda: embedding.put([1], np.zeros((1, DIM + bad), np.float32)),
        lambda: embedding.put([PADDING if bad else 1], np.zeros((1, DIM), np.float32)),
        lambda: embedding.get([1.5] if bad else [1]),
        lambda: embedding.delete(["a"] if bad else [1]),
        lambda: embedding(torch.tensor([1.0] if bad else [1], dtype=torch.float32 if bad else torch.int64)),
    ):
        heard.append(fails(call, InputError))
    assert embedding.size() == 0
    embedding.close()
    return heard


def test_a_wrong_argument_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(2, wrong)
    assert first == second
    assert all(text.startswith("rank 1: ") for text in first)


def full(world: World) -> list[Any]:
    embedding, heard = rows(world, capacity=20), []
    for count in (8, 4, 2):
        keys = np.arange(count) + 100 * world.rank + 1000 * count
        try:
            embedding.put(keys, np.ones((count, DIM), np.float32))
        except CapacityError as error:
            heard.append(str(error))
        heard.append(embedding.size())
    embedding.close()
    return heard


def test_put_counts_the_rows_of_all_ranks_before_one_is_written() -> None:
    first, second = run_ranks(2, full)
    assert first == second
    assert [one for one in first if isinstance(one, int)] == [16, 16, 20]
    assert "capacity=20" in first[1]


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
    graph.rows.close()
    return heard


def test_a_dense_optimizer_that_differs_is_told_by_the_name_of_the_setting() -> None:
    first, second = run_ranks(2, differing)
    assert first == second
    assert "Adam 1, group 0: lr=0.01; rank 1" in first[0]
    assert "Adam 1, group 0: lr=0.5" in first[0]
    assert "Adam 1, group 0: betas=[0.5, 0.5]" in first[1]


def in_a_thread(world: World) -> str:
    graph, heard = Ranked(world), list[str]()
    graph(*batch(world.rank, 0))
    thread = Thread(target=lambda: heard.append(outcome(lambda: graph(*batch(world.rank, 1)))))
    thread.start()
    thread.join()
    graph(*batch(world.rank, 1))
    return heard[0]


def test_a_step_of_another_thread_is_refused() -> None:
    assert all("one thread" in reports for reports in run_ranks(2, in_a_thread))


def forgotten(world: World) -> str:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("tierbed").addHandler(handler)
    embedding = rows(None)
    assert not records
    embedding.size()
    return records[0].getMessage()


def test_an_embedding_without_a_world_among_ranks_is_said() -> None:
    assert all("give world=World.from_env()" in said for said in run_ranks(2, forgotten))


def of_wrong_kinds(world: World, folder: Path) -> list[str]:
    """Arguments that no message between ranks can carry, or that are wrong, on rank 1 alone."""
    store = make_host_mem_store_options(persistent_path=folder)
    embedding = MultiTableEmbedding("e", DIM, torch.float32, torch.int64, None, store, world=world)
    embedding.put([1], np.ones((1, DIM), np.float32))
    embedding.save_snapshot("a")
    bad, heard = world.rank == 1, []
    for call in (
        lambda: embedding.save_snapshot("b", overwrite=np.True_ if bad else True),
        lambda: embedding.prune_snapshots(np.int64(1) if bad else 1),
        lambda: embedding.prune_snapshots(10**30 if bad else 1),
        lambda: embedding.load_snapshot("a", tables=["x\udc80"] if bad else None),
        lambda: embedding.load_snapshot("a", strict=np.True_ if bad else True),
    ):
        heard.append(fails(call, TierbedError))
    assert embedding.prune_snapshots(np.int64(1)) == []
    embedding.save_snapshot("b")
    return heard


def test_arguments_that_ranks_cannot_tell_each_other_are_refused_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, of_wrong_kinds, tmp_path)
    assert first == second
    for said, part in zip(first, ("overwrite=", "np.int64(1)", str(10**30), "udc80", "strict="), strict=True):
        assert part in said
    assert "the snapshot's id" not in first[3]


def cannot_connect(world: World) -> tuple[str, list[int]]:
    """A second world, whose rank 1 cannot reach rank 0."""

    def no_way(other: int, *_: Any) -> Any:
        raise GroupError(f"rank 1 cannot reach rank {other}: set GLOO_SOCKET_IFNAME", [other])

    if world.rank == 1:
        peer_monitor._connect_to = no_way  # type: ignore[assignment]  # this process ends with the test
    with pytest.raises(GroupError) as error:
        World(timeout=10)
    return str(error.value), list(error.value.ranks)


def test_a_rank_that_cannot_connect_is_named_to_the_others() -> None:
    (first, ranks), (second, _) = run_ranks(2, cannot_connect)
    assert first == second == "rank 1 cannot reach rank 0: set GLOO_SOCKET_IFNAME"
    assert ranks == [1]
