"""Mistakes of one rank outside a step, and what its script made otherwise, are raised on all, which go on together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.live_rows import remarks_of
from support.parts import PADDING
from support.ranked import assert_equal
from support.ranks import assert_alike, fails, on_ranks, outcome, run_kept
from tierbed import (
    Graph,
    GraphError,
    GroupError,
    MultiTableEmbedding,
    StoreError,
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


@on_ranks(2, run_kept)
def test_a_wrong_argument_on_one_rank_is_raised_on_all(world: World, tmp_path: Path) -> None:
    """Some of these no message between ranks can carry."""
    embedding, bad = rows(world, persistent_path=tmp_path), world.rank == 1
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
    assert all(text.startswith("rank 1: ") for text in said[:5])
    for text, part in zip(said[5:], ("overwrite=", "np.int64(1)", str(10**30), "udc80", "strict="), strict=True):
        assert part in text
    assert "the snapshot's id" not in said[8]


@on_ranks(2, run_kept)
def test_put_counts_the_rows_of_all_ranks_before_one_is_written(world: World) -> None:
    embedding = rows(world, capacity=20)
    for count, size in ((8, 16), (4, 16), (2, 20)):
        keys = np.arange(count) + 100 * world.rank + 1000 * count
        said = outcome(partial(embedding.put, keys, np.ones((count, DIM), np.float32)))
        assert ("capacity=20" in said) if count == 4 else said == "fine"
        assert embedding.size() == size


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


@on_ranks(2, run_kept)
def test_a_dense_optimizer_that_differs_is_told_by_the_name_of_the_setting(world: World) -> None:
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
    assert "Adam 1, group 0: lr=0.01; rank 1" in heard[0]
    assert "Adam 1, group 0: lr=0.5" in heard[0]
    assert "Adam 1, group 0: betas=[0.5, 0.5]" in heard[1]


@on_ranks(2)
def test_an_embedding_without_a_world_among_ranks_is_said(world: World) -> None:
    said = remarks_of()
    embedding = rows(None)
    assert not said
    embedding.size()
    assert "give world=World.from_env()" in said[0]


@on_ranks(2)
def test_a_rank_that_cannot_connect_is_named_to_the_others(world: World) -> None:

    def no_way(other: int, *_: Any) -> Any:
        raise GroupError(f"rank 1 cannot reach rank {other}: set GLOO_SOCKET_IFNAME", [other])

    if world.rank == 1:
        peer_monitor._connect_to = no_way  # type: ignore[assignment]  # this process ends with the test
    with pytest.raises(GroupError, match=r"^rank 1 cannot reach rank 0: set GLOO_SOCKET_IFNAME$") as error:
        World(timeout=10)
    assert world.rank == 1 or error.value.ranks == (1,)


IDS = torch.arange(12).view(4, 3)


class Bags(Graph):
    """Bags of two embeddings, of which `build` uses the second first."""

    def __init__(self, world: World | None, output: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        store = make_host_mem_store_options()
        self.one, self.two = (
            MultiTableEmbedding(name, 4, torch.float32, torch.int64, None, store, output_dtype=output, world=world)
            for name in ("one", "two")
        )
        self.top = nn.Linear(4, 1)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))
        self.clip_grad_norm(0.01)

    def build(self, ids: Tensor) -> Tensor:
        both = self.two(ids + 1, pooling="sum") + self.one(ids, pooling="sum")
        loss = self.top(both.float()).square().mean()
        loss.backward()
        return loss

    def found(self) -> dict[str, Tensor]:
        """Dense parameters and rows. Collective."""
        ids = torch.arange(20)
        dense = {name: value.detach().clone() for name, value in self.top.named_parameters()}
        return dense | {"one": self.one.get(ids), "two": self.two.get(ids)}


def of_one_process(steps: int, alone: int = 0, output: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What steps of two ranks, and steps of rank 0 alone after them, come to."""
    graph = Bags(None, output)
    graph.accumulate_grads(2, mean=True)
    for rank in [0, 1] * steps:
        graph(IDS + rank)
    graph.accumulate_grads(1)
    for _ in range(alone):
        graph(IDS)
    return graph.found()


@on_ranks(2, run_kept)
def test_a_rank_without_a_batch_takes_part_in_bags_of_a_narrow_dtype_and_in_clipping(world: World) -> None:
    graph = Bags(world, torch.bfloat16)
    for _ in graph.run([(IDS + world.rank,)] * (3 - 2 * world.rank), uneven="join"):
        pass
    assert_equal(graph.found(), of_one_process(1, 2, torch.bfloat16))


@on_ranks(2, run_kept)
def test_dtypes_that_differ_between_ranks_are_named(world: World) -> None:
    narrow = World(timeout=10, rows=torch.bfloat16 if world.rank else torch.float32)
    graphs = (Bags(narrow), Bags(world, torch.bfloat16 if world.rank else torch.float32))
    of_world, of_lookups = (fails(partial(graph, IDS), GroupError) for graph in graphs)
    assert "rank 0: rows of the world=torch.float32; rank 1: rows of the world=torch.bfloat16" in of_world
    assert "rank 0: output_dtype=torch.float32; rank 1: output_dtype=torch.bfloat16" in of_lookups


@on_ranks(2, run_kept)
def test_a_step_that_one_rank_announced_alone_is_told_and_training_goes_on(world: World) -> None:
    graph = Bags(world)
    graph(IDS + world.rank)
    for times in (1, 2):  # more on rank 0, which is in its last announcement when rank 1 begins its step
        with pytest.raises(GroupError, match="rank 0: announcement of embedding 'one'"):  # noqa: PT012
            for _ in range(times if world.rank == 0 else times - 1):
                graph.one.prefetch(IDS + world.rank, pooling="sum")
            graph(IDS + world.rank)
    for _ in range(2):
        graph.one.prefetch(IDS + world.rank, pooling="sum")
        graph(IDS + world.rank)
    assert graph.one.metrics()["table"]["prefetch_hits"] > 0
    assert_equal(graph.found(), of_one_process(3))


class Around(Graph):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.inner = Bags(world)

    def build(self, ids: Tensor) -> Any:
        return self.inner(ids)


@on_ranks(2)
def test_what_another_thread_asks_and_a_graph_in_another_leave_the_group_as_it_is(world: World) -> None:
    graph = Bags(world)
    run = graph.run([(IDS + world.rank,)] * 4, ahead=2)
    errors = list[str]()
    assert "a graph cannot run inside another" in fails(lambda: Around(world)(IDS), GraphError)
    for call in (graph.one.get, graph) * 2:
        next(run)  # the ids of announced steps are in flight
        thread = Thread(target=lambda call=call: errors.append(outcome(partial(call, IDS))), name="reader")
        thread.start()
        thread.join()
    assert ["reader uses a world that another thread uses" in error for error in errors] == [True] * 4, errors
    assert_alike(world, graph.found())


@on_ranks(2, run_kept)
def test_rows_that_cannot_be_made_ready_are_an_error_of_their_step(world: World) -> None:
    graph = Bags(world)
    graph(IDS)
    if world.rank == 1:
        graph.one.table_handle().open_table.failure = OSError("disk full")  # as a failed write leaves it
    for _ in range(3):
        graph.one.prefetch(IDS, pooling="sum")  # the second begins what the third ends
    with pytest.raises(StoreError, match=r"^rank 1: .*disk full"):
        graph(IDS)
