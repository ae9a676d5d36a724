"""Rows of all ranks by their keys, steps without a graph, what travels for them, and what is refused on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.device_ranks import run_device_ranks
from support.embeddings import attach, make, train
from support.live_rows import own_rows
from support.parts import PADDING
from support.ranks import fails, on_ranks, outcome, run_kept
from support.stores import options
from tierbed import (
    CapacityError,
    MultiTableEmbedding,
    OptimizerError,
    StoreError,
    World,
    make_constant_initializer,
    make_device_mem_store_options,
    make_host_mem_store_options,
    make_table_options,
)
from tierbed.engine import _core
from tierbed.engine.options.lookup import Lookup
from tierbed.planning.plan import plan

DIM = 5
Run = Callable[..., list[Any]]
ON = {"cpu": run_kept, "device": run_device_ranks}
on_both = pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in ON.items()])


def rows(world: World | None, **more: Any) -> MultiTableEmbedding:
    """An embedding of two tables, trained by SGD of learning rate 1."""
    starts = [make_constant_initializer(value) for value in (0.0, 1.0)]
    tables = [make_table_options(start, ids=more.get("ids")) for start in starts]
    given = {"store_options": make_host_mem_store_options(), "seed": 3, "padding_idx": PADDING, **more}
    lr, _ = given.pop("lr", 1.0), given.pop("ids", None)
    embedding = MultiTableEmbedding("e", DIM, torch.float32, torch.int64, tables, world=world, **given)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=lr)
    embedding.attach(optimizer, optimizer.param_groups[0])
    return embedding


def step(embedding: MultiTableEmbedding, ids: list[int], gradient: float = 1.0) -> Tensor:
    """One training step of table 0. Returns the rows that were looked up."""
    lookup = Lookup(torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.int64))
    batch = embedding.pin([lookup])
    found = batch.gather(0)
    batch.update([torch.full((len(ids), DIM), gradient)])
    return found


@pytest.mark.parametrize(
    ("run", "ranks"), [(run_kept, 2), (run_kept, 3), pytest.param(run_device_ranks, 2, marks=pytest.mark.slow)]
)
def test_rows_by_their_keys(run: Run, ranks: int) -> None:
    run(ranks, keyed)


def keyed(world: World) -> None:
    embedding, ranks = rows(world), world.size
    keys = torch.arange(100 * world.rank, 100 * world.rank + 40)
    embedding.put(keys, torch.full((40, DIM), float(world.rank)), 1)
    embedding.put([7, 7, 500], np.array([[1] * DIM, [world.rank + 2] * DIM, [9] * DIM], np.float32), 0)
    assert embedding.size() == 40 * ranks + 2
    expected = torch.ones(100 * ranks, DIM)
    for rank in range(ranks):
        expected[100 * rank : 100 * rank + 40] = rank
    assert torch.equal(embedding.get(torch.arange(100 * ranks), 1), expected)
    found = embedding.get([7, 8, 500], 0)[:, 0].tolist()
    assert found == [ranks + 1, 0, 9]  # of a key that ranks put, the last rank's row
    assert embedding.delete([100 * rank for rank in range(ranks)], 1) == ranks
    assert embedding.size() == 39 * ranks + 2
    assert embedding(torch.tensor([[7, 0], [PADDING, 1]]))[:, :, 0].tolist() == [[ranks + 1, 1], [0, 0]]
    mine = sum(len(keys) for _, keys, _ in embedding.chunks())
    assert world.sum(torch.tensor(mine)) == 39 * ranks + 2


MISTAKES = {
    "seed": "GroupError: .*seed",
    "learning rate": "GroupError: .*its numbers",
    "optimizer": "(Group|Optimizer)Error: .*(sgd.*adam|adam.*sgd)",
    "illegal id": "InputError: rank 1: ids of embedding 'e': ",
    "gradient": "InputError: rank 1: ",
    "other call": "GroupError: .*ranks are in different calls",
}


@on_both
def test_a_mistake_of_one_rank_is_raised_on_all(run: Run) -> None:
    run(2, mistakes)


def mistakes(world: World) -> None:
    """Of rank 1. Where it was in a step, nothing has moved and steps go on."""
    wrong = world.rank == 1
    for case, pattern in MISTAKES.items():
        more = {"seed": {"seed": 3 + wrong}, "learning rate": {"lr": 1.0 + wrong}, "illegal id": {"ids": 50}}
        embedding = rows(world, **more.get(case, {}))
        said = outcome(partial(mistaken, embedding, case, wrong))
        assert re.match(pattern, said), said
        if case in ("illegal id", "gradient", "other call"):
            assert not embedding.get([1, 2], 0).any()
            assert embedding.metrics()["table"]["step"] == 0
            step(embedding, [] if wrong else [1])  # a rank without ids takes part
            assert embedding.get([1], 0)[0, 0] == -0.5


def mistaken(embedding: MultiTableEmbedding, mistake: str, wrong: bool) -> None:
    if mistake == "optimizer" and wrong:
        attach(embedding, "adam")
    if mistake == "other call" and wrong:
        embedding.get([1], 0)
    elif mistake == "gradient":
        batch = embedding.pin([Lookup(torch.tensor([1, 2]), torch.tensor([0, 0]))])
        batch.gather(0)
        batch.update([torch.ones(2, DIM + wrong)])
    else:
        step(embedding, [51 if wrong and mistake == "illegal id" else 1])


@on_both
def test_a_capacity_counts_the_rows_of_all_ranks(run: Run) -> None:
    run(2, full)


def full(world: World) -> None:
    embedding = rows(world, store_options=make_device_mem_store_options(capacity=6), padding_idx=None)
    step(embedding, [world.rank * 100 + i for i in range(2)])
    for too_many in ([7, 8, 9], list(range(40, 80))):  # in all, and for one rank
        said = fails(partial(step, embedding, too_many), CapacityError)
        assert "capacity" in said
        assert " 6 " in said.replace("=", " ")
    step(embedding, [0, 7 + world.rank])
    assert embedding.size() == 6
    assert embedding.get([0, 7, 8], 0)[:, 0].tolist() == [-1.5, -0.5, -0.5]


LETS_GO: list[Callable[[MultiTableEmbedding], Any]] = [
    lambda embedding: embedding.put([1], torch.full((1, DIM), 7.0), 0),
    lambda embedding: embedding.delete([1, 2, 3], 0),
    lambda embedding: embedding.close(),
]


@on_ranks(2, run_kept)
def test_rows_that_were_let_go_are_not_read_where_they_lay(world: World) -> None:
    embedding = rows(world)
    for call in LETS_GO:
        step(embedding, [1, 2, 3, 4])
        batch = embedding.pin([Lookup(torch.arange(1, 5), torch.zeros(4, dtype=torch.int64))])
        batch.gather(0)
        call(embedding)
        with pytest.raises(StoreError, match="the batch is no longer pinned"):
            batch.weights_grad(0, torch.ones(4, DIM))
        with pytest.raises(StoreError, match="put, delete or a load"):
            batch.gather(0)


@on_ranks(2, run_kept)
def test_a_rank_without_rows_keeps_the_optimizer_that_another_rank_has_to_keep(world: World) -> None:
    embedding = make(make_host_mem_store_options(), "adagrad", world=world)
    keys = torch.arange(20)
    owners = _core.find_owners(torch.zeros(20, dtype=torch.int32).numpy().view("u4"), keys.numpy().view("u8"), 2)
    of_first = keys[torch.from_numpy(owners.astype("i8")) == 0]
    train(embedding, of_first)
    with pytest.raises(OptimizerError, match=r"rank 0: .* has rows of optimizer adagrad"):
        attach(embedding, "adam")
    train(embedding, of_first)
    assert embedding.size() > 0
    assert bool(own_rows(embedding)) == (world.rank == 0)


@on_ranks(2, run_kept)
def test_a_rank_that_loses_its_rows_to_an_optimizer_closes_those_of_all(world: World, tmp_path: Path) -> None:
    embedding = make(options("ssd", tmp_path), tables=1, world=world)
    keys = torch.arange(20)
    embedding.put(keys, torch.rand(20, 5))
    before = embedding.get(keys)
    current = next((tmp_path / "rows" / "ranks" / "1-of-2").rglob("CURRENT"))
    good = current.read_bytes()
    world.sum(torch.ones(1))  # both have read it
    if world.rank == 1:
        current.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="rank 1: "):
        attach(embedding, "adagrad")
    with pytest.raises(StoreError, match="closed"):
        embedding.size()
    if world.rank == 1:
        current.write_bytes(good)
    world.sum(torch.ones(1))
    assert torch.equal(make(options("ssd", tmp_path), tables=1, world=world).get(keys), before)


RANKS, WIDE = 3, 6


def batches(tables: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, 90, (12, tables), generator=draw) for _ in range(4)]


@pytest.mark.parametrize(("tables", "wire"), [(1, torch.float32), (3, torch.bfloat16)], ids=str)
@on_ranks(RANKS, run_kept)
def test_a_run_counts_what_the_plan_says(world: World, tables: int, wire: torch.dtype) -> None:
    world.grad_dtype = wire
    start, store = [make_constant_initializer(0.0)] * tables, make_host_mem_store_options()
    embedding = MultiTableEmbedding("e", WIDE, torch.float32, torch.int64, start, store, world=world)
    attach(embedding, "sgd")
    for batch in batches(tables):
        ids = batch.chunk(world.size)[world.rank]
        pinned = embedding.pin([Lookup(ids, torch.arange(tables).expand(ids.shape))])
        pinned.update([torch.ones(*ids.shape, WIDE)])
    expected = plan([batch.numpy() for batch in batches(tables)], WIDE, 0, tables=tables, world_size=RANKS).ranks
    assert expected is not None
    rank, ids_of, sent = world.rank, expected.ids, expected.bytes(torch.float32, wire)
    assert embedding.metrics()["ranks"] == {
        "ids_sent": ids_of[rank].sum() - ids_of[rank, rank],
        "ids_received": ids_of[:, rank].sum() - ids_of[rank, rank],
        "rows_sent": ids_of[:, rank].sum() - ids_of[rank, rank],
        "rows_received": ids_of[rank].sum() - ids_of[rank, rank],
        "bytes_sent": sent[rank].sum(),
        "bytes_received": sent[:, rank].sum(),
    }
    world.grad_dtype = torch.float32
