"""Steps over ranks, with calls accumulated in each rank, against NumPy."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from support.examples import examples
from support.ranks import run_ranks
from tierbed import Graph, MultiTableEmbedding, World, make_constant_initializer, make_host_mem_store_options
from tierbed.engine import _core

DIM, LR = 3, 0.5
SIZE = 6  # of a batch that has ids: a step is compiled for each size
Part = tuple[list[int], NDArray[np.float32]]  # ids [n], and the gradients of their rows [n, DIM]


class Summing(Graph):
    """Trains rows by given gradients."""

    def __init__(self, world: World) -> None:
        super().__init__()
        start, store = [make_constant_initializer(1.0)], make_host_mem_store_options()
        self.rows = MultiTableEmbedding("e", DIM, torch.float32, torch.int64, start, store, world=world)
        self.add_optimizer(torch.optim.SGD(self.rows.parameters(), lr=LR))

    def build(self, ids: Tensor, gradients: Tensor) -> Tensor:
        loss = (self.rows(ids) * gradients).sum()
        loss.backward()
        return loss


def trained(world: World, steps: list[list[list[Part]]]) -> dict[int, list[float]]:
    """The rows of this rank after steps. Of a step, rank and call: its part."""
    graph = Summing(world)
    graph.accumulate_grads(len(steps[0][0]), mean=True)
    for step in steps:
        for ids, gradients in step[world.rank]:
            graph(torch.tensor(ids, dtype=torch.int64), torch.from_numpy(gradients))
    return {key: row.tolist() for _, key, row in graph.rows}


def summed(parts: list[list[tuple[int, NDArray[np.float32]]]]) -> list[tuple[int, NDArray[np.float32]]]:
    """One float32 gradient of each row: rows of parts added in their order."""
    total: dict[int, NDArray[np.float32]] = {}
    for part in parts:
        for key, gradient in part:
            total[key] = total[key] + gradient if key in total else gradient
    return list(total.items())


def reference(steps: list[list[list[Part]]]) -> dict[int, NDArray[np.float32]]:
    """All rows: an id's gradients are added within a call, then over calls, then over ranks."""
    rows: dict[int, NDArray[np.float32]] = defaultdict(lambda: np.ones(DIM, np.float32))
    for step in steps:
        of_ranks = []
        for calls in step:
            of_calls = [summed([list(zip(ids, gradients, strict=True))]) for ids, gradients in calls]
            of_ranks.append(of_calls[0] if len(calls) == 1 else summed(of_calls))
        scale = np.float32(1 / len(step[0]) / len(step))
        for key, gradient in summed(of_ranks):
            rows[key] = rows[key] - np.float32(LR) * (gradient * scale)
    return rows


KEYS = np.arange(40, dtype=np.uint64)


@st.composite
def steps_of_ranks(draw: st.DrawFn) -> list[list[list[Part]]]:
    """Steps of 2 or 3 ranks and up to 3 calls: batches of no ids, of one id many times, of ids of one rank alone."""
    ranks, calls = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    owners = _core.owners(np.zeros(len(KEYS), np.uint32), KEYS, ranks)
    of_one_rank = st.integers(0, ranks - 1).map(lambda rank: KEYS[owners == rank].tolist())

    def some(keys: list[int]) -> st.SearchStrategy[list[int]]:
        return st.lists(st.sampled_from(keys), min_size=SIZE, max_size=SIZE)

    ids = st.one_of(
        st.just([]), some(KEYS.tolist()), st.integers(0, 39).map(lambda key: [key] * SIZE), of_one_rank.flatmap(some)
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def part() -> Part:
        given = draw(ids)
        return given, random.normal(size=(len(given), DIM)).astype(np.float32)

    return [[[part() for _ in range(calls)] for _ in range(ranks)] for _ in range(draw(st.integers(1, 4)))]


@given(steps_of_ranks())
@examples(0.2)  # a group of processes each
def test_steps_equal_the_reference(steps: list[list[list[Part]]]) -> None:
    expected, found = reference(steps), {}
    for rows in run_ranks(len(steps[0]), trained, steps):
        assert not rows.keys() & found.keys()
        found |= rows
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == row.tolist()
