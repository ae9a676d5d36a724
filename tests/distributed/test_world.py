"""Ranks meet in the order of their calls, get each other's bytes, and hear of it where they differ."""

from __future__ import annotations

import os
import re
import threading
import warnings
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.ranks import fails, on_ranks, outcome, run_ranks
from support.refusals import Refusal, check_refusal
from tierbed import GroupError, InputError, OptionError, World


def part(rank: int) -> Tensor:
    """What rank `rank` gives: as many values as its number, so that one has none."""
    return torch.arange(2.0 * rank).view(-1, 2) + 10 * rank


def random(rank: int) -> Tensor:
    return torch.randn(100, 3, generator=torch.Generator().manual_seed(rank)) * 1000**rank


def collectives(world: World) -> tuple[list[Tensor], list[Tensor], list[list[bytes]], list[Tensor]]:
    """What gathers, sums, exchanges of bytes, and two exchanges of numbers at a time return."""
    whole = torch.arange(world.rank + 1) + world.rank
    gathered = [world.gather(part(world.rank)), world.gather(whole), world.gather(whole.to(torch.bfloat16))]
    given = random(world.rank)
    sums = [world.sum(given), given, world.sum(torch.tensor(world.rank))]
    lengths = world.rank, 0, 100_000 * (world.size - world.rank)
    texts = [world.all_gather_object("names", partial(b"x".__mul__, length)) for length in lengths]
    sizes = [world.rank + other for other in range(world.size)]  # of what goes to each rank
    numbers = [torch.arange(sum(sizes)).to(dtype) + 100 * world.rank for dtype in (torch.int64, torch.float32)]
    waiting = [world.start("numbers", one, sizes) for one in numbers] if world.size > 1 else []
    return gathered, sums, texts, [exchange.wait() for exchange in reversed(waiting)][::-1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_have_the_parts_of_ranks_in_their_order(ranks: int) -> None:
    floats = torch.cat([part(rank) for rank in range(ranks)])
    whole = torch.cat([torch.arange(rank + 1) + rank for rank in range(ranks)])
    total = random(0)
    for rank in range(1, ranks):
        total = total + random(rank)
    all_texts = [[b"x" * rank for rank in range(ranks)], [b""] * ranks]
    all_texts.append([b"x" * (100_000 * (ranks - rank)) for rank in range(ranks)])
    for rank, (gathered, sums, texts, exchanged) in enumerate(run_ranks(ranks, collectives)):
        for value, expected in zip(gathered, [floats, whole, whole.to(torch.bfloat16)], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
        assert torch.equal(sums[0], total)
        assert torch.equal(sums[1], random(rank))
        assert sums[2] == sum(range(ranks))
        assert texts == all_texts
        parts = []
        for other in range(ranks):
            before = sum(other + to for to in range(rank))
            parts.append(torch.arange(before, before + rank + other) + 100 * other)
        assert len(exchanged) == 2 * (ranks > 1)
        assert all(torch.equal(value, torch.cat(parts).to(value.dtype)) for value in exchanged)


@on_ranks(2)
def test_ranks_that_differ_are_told_and_go_on(world: World) -> None:
    heard = []
    for call in (
        lambda: world.gather(torch.zeros(2)) if world.rank else world.sum(torch.zeros(2)),
        lambda: world.sum(torch.zeros(2 + world.rank)),
        lambda: world.gather(torch.zeros(2, dtype=[torch.int64, torch.float32][world.rank])),
    ):
        heard.append(fails(call, GroupError))
    assert world.sum(torch.tensor(1)) == 2
    calls, shapes, dtypes = heard
    assert "rank 0: sum; rank 1: gather" in calls
    assert shapes.startswith("sum: ranks differ, rank 0: tensor=torch.float32 [2]; rank 1: tensor=torch.float32 [3]")
    assert dtypes.startswith("gather: ranks differ, rank 0: tensor=torch.int64 []; rank 1: tensor=torch.float32 []")


def odd_tensors(world: World) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """What every rank hears of tensors that cannot be sent, of which rank 0 gives one; then those that can."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch will remove them
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    refused: list[Any] = [quantized, torch.ones(3).to_sparse(), torch.ones(3, device="meta"), [1.0]]
    refused.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged))
    good = torch.ones(3)
    calls = [(call, bad) for call in (world.gather, world.sum) for bad in refused]
    calls += [(world.sum, bad) for bad in (good > 0, good.to(torch.uint16), good.to(torch.float8_e5m2))]
    heard = [fails(partial(call, bad if world.rank == 0 else good), InputError) for call, bad in calls]
    shapes = (), (0,), (2, 0), (0, 3), (1, 0, 4)
    given = [torch.full(shape, world.rank + 1.0) for shape in shapes]
    given += [torch.full((2,), complex(0, world.rank)).conj(), torch.full((2,), world.rank, dtype=torch.bool)]
    return heard, [world.gather(x) for x in given], [world.sum(x) for x in given[:-1]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_of_any_dtype_layout_or_shape_is_sent_or_refused_on_all_ranks(ranks: int) -> None:
    every = run_ranks(ranks, odd_tensors)
    for heard, gathered, summed in every:
        assert heard == every[0][0]
        kinds = 2 * ["quantized", "sparse", "meta", "list", "nested"] + 3 * ["torch"]
        for said, what in zip(heard, kinds, strict=True):
            assert re.match(f"{'rank 0: ' if ranks > 1 else ''}x: got .*{what}", said), said
        expected = [(ranks,), (0,), (2 * ranks, 0), (0, 3), (ranks, 0, 4), (2 * ranks,), (2 * ranks,)]
        assert [tuple(x.shape) for x in gathered] == expected
        assert [tuple(x.shape) for x in summed] == [(), (0,), (2, 0), (0, 3), (1, 0, 4), (2,)]
        assert summed[0] == sum(range(1, ranks + 1))
        assert gathered[5].tolist() == [complex(0, -rank) for rank in range(ranks) for _ in range(2)]
        assert gathered[6].tolist() == [bool(rank) for rank in range(ranks) for _ in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_thread_a_closed_world_and_a_second_world_are_refused(ranks: int) -> None:
    run_ranks(ranks, in_a_thread_and_closed)
    World.of_one().close()
    assert World.of_one().sum(torch.tensor(2)) == 2  # the close of one ends no other


def in_a_thread_and_closed(world: World) -> None:
    world.sum(torch.tensor(1))
    said = list[str]()
    thread = threading.Thread(target=lambda: said.append(outcome(lambda: world.sum(torch.tensor(1)))), name="reader")
    thread.start()
    thread.join()
    assert world.sum(torch.tensor(1)) == world.size
    assert ("reader uses a world that another thread uses" in said[0]) if world.size > 1 else said == ["fine"]
    world.close()
    world.close()
    with pytest.raises(GroupError, match=r"^the group of ranks has ended: this world is closed$"):
        world.sum(torch.tensor(1))
    assert world.size == 1 or "create one World, and close it at the end" in fails(World, OptionError)


def raising(world: World) -> None:
    if world.rank == 1:
        raise KeyError("rank 1's own")


def test_what_a_rank_raises_reaches_the_test() -> None:
    with pytest.raises(KeyError) as error:
        run_ranks(2, raising)
    assert error.value.args == ("rank 1's own",)
    assert "on rank 1:" in error.value.__notes__[0]


@on_ranks(2)
def test_worlds_of_the_same_ranks_are_apart_and_one_without_gloo_is_refused_with_the_remedy(world: World) -> None:
    import_module("torch.testing._internal.distributed.fake_pg")  # a backend that needs no GPU
    said = fails(lambda: World(dist.new_group(backend="fake")), OptionError)
    other = World(timeout=5.5, rows=torch.bfloat16, grads=torch.float16)
    both = World(dist.new_group(backend="cpu:gloo,cuda:fake"))
    assert [one.sum(torch.tensor(1)) for one in (world, other, both)] == [2, 2, 2]
    other.close()
    both.close()
    assert world.sum(torch.tensor(1)) == 2
    found = other.rank, other.size, other.on_host, other.rows, other.grads, other.timeout
    assert found == (world.rank, 2, 2, torch.bfloat16, torch.float16, 5.5)
    assert re.match(r"group: its backends are cpu:fake.*through host memory.*cuda:nccl.*backend='gloo'", said), said


def test_a_process_alone_is_a_group_of_one() -> None:
    world = World.from_env(timeout=1)
    assert (world.rank, world.size, world.failure) == (0, 1, None)
    x = torch.randn(3)
    assert torch.equal(world.gather(x), x)
    assert torch.equal(world.sum(x), x)


REFUSED: list[Refusal] = [
    (lambda: World(timeout=0), OptionError, "timeout", "0", ""),
    (lambda: World(rows=torch.int8), OptionError, "rows=torch.int8", "torch.bfloat16", "torch.float16"),
    (lambda: World(grads=torch.float64), OptionError, "grads=torch.float64", "torch.float32", ""),
]


@pytest.mark.parametrize("refusal", REFUSED)
def test_arguments_that_cannot_work_are_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    check_refusal((World, OptionError, "there is no process group", "", ""))
