"""Ranks that look up otherwise than others, or that their scripts made otherwise."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.ranked import assert_equal
from support.ranks import alike, fails, outcome, run_ranks
from tierbed import Graph, GraphError, GroupError, MultiTableEmbedding, StoreError, World, make_host_mem_store_options

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


def joined(world: World) -> dict[str, Tensor]:
    graph = Bags(world, torch.bfloat16)
    for _ in graph.run([(IDS + world.rank,)] * (3 - 2 * world.rank), uneven="join"):
        pass
    return graph.found()


def test_a_rank_without_a_batch_takes_part_in_bags_of_a_narrow_dtype_and_in_clipping() -> None:
    expected = of_one_process(1, 2, torch.bfloat16)
    for found in run_ranks(2, joined):
        assert_equal(found, expected)


def made_otherwise(world: World) -> list[str]:
    narrow = World(timeout=10, rows=torch.bfloat16 if world.rank else torch.float32)
    graphs = (Bags(narrow), Bags(world, torch.bfloat16 if world.rank else torch.float32))
    return [fails(partial(graph, IDS), GroupError) for graph in graphs]


def test_dtypes_that_differ_between_ranks_are_named() -> None:
    of_world, of_lookups = alike(2, made_otherwise)
    assert "rank 0: rows of the world=torch.float32; rank 1: rows of the world=torch.bfloat16" in of_world
    assert "rank 0: output_dtype=torch.float32; rank 1: output_dtype=torch.bfloat16" in of_lookups


def announced_alone(world: World) -> dict[str, Tensor]:
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
    return graph.found()


def test_a_step_that_one_rank_announced_alone_is_told_and_training_goes_on() -> None:
    expected = of_one_process(3)
    for found in run_ranks(2, announced_alone):
        assert_equal(found, expected)


class Around(Graph):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.inner = Bags(world)

    def build(self, ids: Tensor) -> Any:
        return self.inner(ids)


def around(world: World) -> str:
    return fails(lambda: Around(world)(IDS), GraphError)


def test_a_graph_in_another_is_refused_as_in_one_process() -> None:
    assert all("a graph cannot run inside another" in said for said in run_ranks(2, around))


def in_two_threads(world: World) -> dict[str, Tensor]:
    graph = Bags(world)
    run = graph.run([(IDS + world.rank,)] * 4, ahead=2)
    errors = list[str]()
    for call in (graph.one.get, graph) * 2:
        next(run)  # the ids of announced steps are in flight
        thread = Thread(target=lambda call=call: errors.append(outcome(partial(call, IDS))), name="reader")
        thread.start()
        thread.join()
    assert ["reader uses a world that another thread uses" in error for error in errors] == [True] * 4, errors
    return graph.found()


def test_what_another_thread_asks_leaves_the_group_as_it_is() -> None:
    one, two = run_ranks(2, in_two_threads)
    assert_equal(one, two)


def broken(world: World) -> str:
    graph = Bags(world)
    graph(IDS)
    if world.rank == 1:
        graph.one.table_handle().local_table.failure = OSError("disk full")  # as a failed write leaves it
    for _ in range(3):
        graph.one.prefetch(IDS, pooling="sum")  # the second begins what the third ends
    return fails(lambda: graph(IDS), StoreError)


def test_rows_that_cannot_be_made_ready_are_an_error_of_their_step() -> None:
    said = alike(2, broken)
    assert said.startswith("rank 1: ")
    assert "disk full" in said
