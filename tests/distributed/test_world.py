"""Ranks meet in the order of their calls, get each other's bytes, and hear of it where they differ."""

from __future__ import annotations

import os
import re
import threading
import warnings
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.ranks import fails, on_ranks, outcome, run_kept, run_ranks
from support.refusals import Refusal, check_refusal
from tierbed import GroupError, InputError, OptionError, World


def part(rank: int) -> Tensor:
    """What rank `rank` gives: as many values as its number, so that one has none."""
    return torch.arange(2.0 * rank).view(-1, 2) + 10 * rank


def random(rank: int) -> Tensor:
    return torch.randn(100, 3, generator=torch.Generator().manual_seed(rank)) * 1000**rank


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_have_the_parts_of_ranks_in_their_order(ranks: int) -> None:
    run_kept(ranks, collectives)


def collectives(world: World) -> None:
    rank, ranks = world.rank, range(world.size)
    whole = torch.arange(rank + 1) + rank
    floats, wholes = torch.cat([part(one) for one in ranks]), torch.cat([torch.arange(one + 1) + one for one in ranks])
    for given, expected in ((part(rank), floats), (whole, wholes), (whole.bfloat16(), wholes.bfloat16())):
        torch.testing.assert_close(world.gather(given), expected, rtol=0, atol=0)
    given, total = random(rank), random(0)
    for other in ranks[1:]:
        total = total + random(other)
    assert torch.equal(world.sum(given), total)
    assert torch.equal(given, random(rank))
    assert world.sum(torch.tensor(rank)) == sum(ranks)
    for lengths in (ranks, [0] * world.size, [100_000 * (world.size - one) for one in ranks]):
        texts = world.all_gather_object("names", partial(b"x".__mul__, lengths[rank]))
        assert texts == [b"x" * length for length in lengths]
    if world.size > 1:  # two exchanges at a time do not mix
        sizes = [rank + other for other in ranks]  # of what goes to each rank
        numbers = [torch.arange(sum(sizes)).to(dtype) + 100 * rank for dtype in (torch.int64, torch.float32)]
        waiting = [world.start_all_to_all("numbers", one, sizes) for one in numbers]
        begins = [sum(other + to for to in range(rank)) for other in ranks]
        parts = [torch.arange(begin, begin + rank + other) + 100 * other for other, begin in enumerate(begins)]
        for exchange, one in zip(reversed(waiting), reversed(numbers), strict=True):
            assert torch.equal(exchange.wait(), torch.cat(parts).to(one.dtype))


@on_ranks(2, run_kept)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_of_any_dtype_layout_or_shape_is_sent_or_refused_on_all_ranks(ranks: int) -> None:
    run_kept(ranks, odd_tensors)


def odd_tensors(world: World) -> None:
    """Of tensors that cannot be sent rank 0 gives one; then those that can."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch will remove them
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    refused = {"quantized": quantized, "sparse": torch.ones(3).to_sparse(), "meta": torch.ones(3, device="meta")}
    refused |= {"list": [1.0], "nested": nested}
    good, ranks = torch.ones(3), range(world.size)
    calls = [(call, what, bad) for call in (world.gather, world.sum) for what, bad in refused.items()]
    calls += [(world.sum, "torch", bad) for bad in (good > 0, good.to(torch.uint16), good.to(torch.float8_e5m2))]
    for call, what, bad in calls:
        said = fails(partial(call, bad if world.rank == 0 else good), InputError)
        assert re.match(f"{'rank 0: ' if world.size > 1 else ''}x: got .*{what}", said), said
    for shape in ((), (0,), (2, 0), (0, 3), (1, 0, 4)):
        given = torch.full(shape, world.rank + 1.0)
        assert world.gather(given).shape == (world.size * (shape or (1,))[0], *shape[1:])
        assert world.sum(given).shape == shape
    assert world.sum(torch.tensor(world.rank + 1.0)) == sum(ranks) + world.size
    numbers, flags = torch.full((2,), complex(0, world.rank)).conj(), torch.full((2,), world.rank, dtype=torch.bool)
    assert world.gather(numbers).tolist() == [complex(0, -rank) for rank in ranks for _ in range(2)]
    assert world.gather(flags).tolist() == [bool(rank) for rank in ranks for _ in range(2)]
    assert world.sum(numbers).shape == (2,)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_thread_a_closed_world_and_a_second_world_are_refused(ranks: int) -> None:
    run_ranks(ranks, in_a_thread_and_closed)
    World.single().close()
    assert World.single().sum(torch.tensor(2)) == 2  # the close of one ends no other


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
    found = other.rank, other.size, other.num_ranks_on_host, other.row_dtype, other.grad_dtype, other.timeout
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
