"""Steps over ranks, with calls accumulated in each rank, against NumPy."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.ranks import run_ranks
from tierbed import MultiTableEmbedding, World, make_host_mem_store_options
from tierbed.engine import _core, make_constant_initializer, make_table_options
from tierbed.graph import Graph

DIM, LR = 3, 0.5
Part = tuple[list[int], NDArray[np.float32]]  # ids [n], and the gradients of their rows [n, DIM]


class Summing(Graph):
    """Trains rows by given gradients."""

    def __init__(self, world: World) -> None:
        super().__init__()
        start = [make_table_options(make_constant_initializer(1.0))]
        self.rows = MultiTableEmbedding(
            "e", DIM, torch.float32, torch.int64, start, make_host_mem_store_options(), world=world
        )
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
    found = {key: row.tolist() for _, key, row in graph.rows}
    graph.rows.close()
    return found


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


def drawn(seed: int, ranks: int, calls: int) -> list[list[list[Part]]]:
    """Random steps: batches of no ids, of one id many times, and of ids that one rank has all of."""
    rng = np.random.default_rng(seed)
    keys = np.arange(400, dtype=np.uint64)
    owners = _core.owners(np.zeros(400, np.uint32), keys, ranks)
    steps = []
    for _ in range(6):
        step = []
        for _ in range(ranks):
            parts = []
            for _ in range(calls):
                kind = rng.integers(4)
                choice = keys if kind < 3 else keys[owners == rng.integers(ranks)]
                ids = rng.choice(choice[:3] if kind == 2 else choice, [0, 9][min(kind, 1)])
                parts.append((ids.astype(np.int64).tolist(), rng.normal(size=(len(ids), DIM)).astype(np.float32)))
            step.append(parts)
        steps.append(step)
    return steps


@pytest.mark.rotated("seed")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_equal_the_reference(ranks: int, calls: int, seed: int) -> None:
    steps = drawn(seed, ranks, calls)
    expected, found = reference(steps), {}
    for rows in run_ranks(ranks, trained, steps):
        assert not rows.keys() & found.keys()
        found |= rows
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == row.tolist()
