"""Ranks train with the bits of one process that accumulates the same parts, and with those of NumPy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from support.device_ranks import run_device_ranks
from support.examples import examples
from support.optimizers import OPTIMIZERS
from support.parts import Case, Trained, train
from support.ranks import run_kept, run_ranks
from support.stores import STORES
from tierbed import Graph, MultiTableEmbedding, World, make_constant_initializer, make_host_mem_store_options
from tierbed.engine import _core

ON_DEVICES = [
    (store, *how)
    for store in ("cached_host", "device", "host", "ssd")
    for how in (("catch-up", torch.bfloat16), ("adagrad", torch.float32), ("adam", torch.float16))
]
OUTPUTS = [torch.float32, torch.bfloat16, torch.float16]
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
CASES = [
    Case(2, "host", "lamb", torch.bfloat16, 2, 8, types=TYPES[0]),
    Case(2, "ssd", "adam", torch.float16, 2, 0, types=TYPES[2]),
]
MORE = [  # the last parameters in turn
    Case(*one, OUTPUTS[turn % 3], 1 + turn % 2, 8 * (turn // 2 % 2), types=TYPES[turn // 3 % 3])
    for turn, one in enumerate(product((1, 2, 3, 4), STORES, OPTIMIZERS))
]


def on_rank(world: World, case: Case, path: Path) -> Trained:
    return train(case, path / "ranks", world)


def check(case: Case, path: Path, run: Callable[..., list[Trained]] = run_kept) -> None:
    """Train on ranks, which `run` starts, and in one process, and compare the bits."""
    alone = train(case, path / "alone", None)
    ranks = run(case.ranks, on_rank, case, path)
    for found in ranks:
        assert all(torch.equal(found.dense[name], value) for name, value in alone.dense.items())
    assert [loss for step in zip(*(found.losses for found in ranks), strict=True) for loss in step] == alone.losses
    rows = [name for found in ranks for name in found.rows]
    assert len(rows) == len(set(rows)), "two ranks have one row"
    assert {name: row for found in ranks for name, row in found.rows.items()} == alone.rows
    if case.ahead and case.ranks > 1 and not case.uneven:
        assert all(one.hits >= 4 for one in ranks), "a step took no batch that was announced"


@pytest.mark.tier
@pytest.mark.optimizer
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda case: "-".join(map(str, case[:3])),
)
def test_equal_runs(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 8])
def test_equal_runs_of_uneven_parts(tmp_path: Path, ahead: int) -> None:
    check(Case(2, "cached_host", "adam", torch.float32, 1, ahead, uneven=True), tmp_path)


def test_equal_runs_of_pooled_rows_that_are_rounded_last(tmp_path: Path) -> None:
    check(Case(2, "host", "sgd", torch.bfloat16, 1, 0), tmp_path)


@pytest.mark.parametrize(
    ("store", "optimizer", "output", "ahead"),
    [
        pytest.param(*one, ahead, marks=() if one == ON_DEVICES[0] and ahead else pytest.mark.slow)
        for one in ON_DEVICES
        for ahead in (0, 8)
    ],
)
def test_equal_runs_on_devices(tmp_path: Path, store: str, optimizer: str, output: torch.dtype, ahead: int) -> None:
    types = (output, torch.bfloat16 if output == torch.float16 else torch.float32)
    check(Case(2, store, optimizer, output, 1, ahead, types=types), tmp_path, run_device_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 8])
def test_equal_runs_of_uneven_parts_on_devices(tmp_path: Path, ahead: int) -> None:
    case = Case(3, "cached_host", "adam", torch.float16, 2, ahead, uneven=True)
    check(case, tmp_path, run_device_ranks)


def on_narrow_wire(world: World, case: Case, path: Path) -> Trained:
    narrow = World(rows=torch.bfloat16, grads=torch.float16)
    try:
        return train(case, path, narrow)
    finally:
        narrow.close()


@pytest.mark.slow
def test_a_narrow_wire_between_devices_has_the_bits_of_one_between_processors(tmp_path: Path) -> None:
    case = Case(2, "cached_host", "adagrad", torch.float32, 1, 8)
    here = run_ranks(2, on_narrow_wire, case, tmp_path / "here")
    for one, other in zip(here, run_device_ranks(2, on_narrow_wire, case, tmp_path / "there"), strict=True):
        assert (one.losses, one.rows) == (other.losses, other.rows)
        assert all(torch.equal(value, other.dense[name]) for name, value in one.dense.items())


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
    owners = _core.find_owners(np.zeros(len(KEYS), np.uint32), KEYS, ranks)
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
@examples(0.15)  # a group of processes each
def test_steps_equal_the_reference(steps: list[list[list[Part]]]) -> None:
    expected, found = reference(steps), {}
    for rows in run_kept(len(steps[0]), trained, steps):
        assert not rows.keys() & found.keys()
        found |= rows
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == row.tolist()
