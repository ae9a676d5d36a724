"""Ranks meet in the order of their calls, get each other's bytes, and hear of it where they differ."""

from __future__ import annotations

import os
import re
import threading
import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.ranks import fails, outcome, run_ranks
from tierbed import GroupError, InputError, OptionError, World


class Answers(NamedTuple):
    """What the collectives of each rank of a group return."""

    gathered: list[Tensor]
    total: Tensor
    given: Tensor
    numbers: Tensor
    texts: list[list[bytes]]
    exchanged: list[Tensor]


def collectives(world: World) -> Answers:
    whole = torch.arange(world.rank + 1) + world.rank
    gathered = [world.gather(part(world.rank)), world.gather(whole), world.gather(whole.to(torch.bfloat16))]
    given = random(world.rank)
    lengths = world.rank, 0, 100_000 * (world.size - world.rank)
    texts = [world.all_gather_object("names", partial(b"x".__mul__, length)) for length in lengths]
    sent = exchanged(world) if world.size > 1 else []
    return Answers(gathered, world.sum(given), given, world.sum(torch.tensor(world.rank)), texts, sent)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def answers(request: pytest.FixtureRequest) -> list[Answers]:
    """Of each rank of a group."""
    return run_ranks(request.param, collectives)


def part(rank: int) -> Tensor:
    """What rank `rank` gives: as many values as its number, so that one has none."""
    return torch.arange(2.0 * rank).view(-1, 2) + 10 * rank


def test_gather_has_the_parts_in_the_order_of_ranks(answers: list[Answers]) -> None:
    floats = torch.cat([part(rank) for rank in range(len(answers))])
    whole = torch.cat([torch.arange(rank + 1) + rank for rank in range(len(answers))])
    for found in answers:
        for value, expected in zip(found.gathered, [floats, whole, whole.to(torch.bfloat16)], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)


def random(rank: int) -> Tensor:
    return torch.randn(100, 3, generator=torch.Generator().manual_seed(rank)) * 1000**rank


def test_sum_adds_in_the_order_of_ranks(answers: list[Answers]) -> None:
    expected = random(0)
    for rank in range(1, len(answers)):
        expected = expected + random(rank)
    for rank, found in enumerate(answers):
        assert torch.equal(found.total, expected)
        assert torch.equal(found.given, random(rank))
        assert found.numbers == sum(range(len(answers)))


def test_bytes_of_any_length_reach_every_rank(answers: list[Answers]) -> None:
    ranks = range(len(answers))
    expected = [[b"x" * rank for rank in ranks], [b""] * len(ranks)]
    expected.append([b"x" * (100_000 * (len(ranks) - rank)) for rank in ranks])
    assert [found.texts for found in answers] == [expected] * len(ranks)


def exchanged(world: World) -> list[Tensor]:
    """Rank r sends r + s numbers to rank s, two exchanges at a time."""
    sizes = [world.rank + other for other in range(world.size)]
    given = [torch.arange(sum(sizes)).to(dtype) + 100 * world.rank for dtype in (torch.int64, torch.float32)]
    waiting = [world.start("numbers", numbers, sizes) for numbers in given]
    return [exchange.wait() for exchange in reversed(waiting)][::-1]


def test_exchanges_under_way_together_do_not_mix(answers: list[Answers]) -> None:
    for rank, found in enumerate(answers):
        expected = []
        for other in range(len(answers)):
            before = sum(other + to for to in range(rank))
            expected.append(torch.arange(before, before + rank + other) + 100 * other)
        assert len(found.exchanged) == 2 * (len(answers) > 1)
        for value in found.exchanged:
            assert torch.equal(value, torch.cat(expected).to(value.dtype))


def differing(world: World) -> list[str]:
    """What ranks hear that do different things; and then that the group still works."""
    heard = []
    for call in (
        lambda: world.gather(torch.zeros(2)) if world.rank else world.sum(torch.zeros(2)),
        lambda: world.sum(torch.zeros(2 + world.rank)),
        lambda: world.gather(torch.zeros(2, dtype=[torch.int64, torch.float32][world.rank])),
    ):
        heard.append(fails(call, GroupError))
    assert world.sum(torch.tensor(1)) == 2
    return heard


def test_ranks_that_differ_are_told_and_go_on() -> None:
    first, second = run_ranks(2, differing)
    assert first[0] == second[0]
    assert "rank 0: sum; rank 1: gather" in first[0]
    assert first[1:] == second[1:]
    assert first[1].startswith("sum: ranks differ, rank 0: tensor=torch.float32 [2]; rank 1: tensor=torch.float32 [3]")
    assert first[2].startswith("gather: ranks differ, rank 0: tensor=torch.int64 []; rank 1: tensor=torch.float32 []")


def odd_tensors(world: World) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """What every rank hears of tensors that cannot be sent, of which rank 0 gives one; then those that can."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch will remove them
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    refused: list[Any] = [quantized, torch.ones(3).to_sparse(), torch.ones(3, device="meta"), [1.0]]
    refused.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged))
    good = torch.ones(3)
    heard = []
    for call in (world.gather, world.sum):
        for bad in refused:
            heard.append(fails(partial(call, bad if world.rank == 0 else good), InputError))
    for bad in (good > 0, good.to(torch.uint16), good.to(torch.float8_e5m2)):
        heard.append(fails(partial(world.sum, bad if world.rank == 0 else good), InputError))
    shapes = (), (0,), (2, 0), (0, 3), (1, 0, 4)
    given = [torch.full(shape, world.rank + 1.0) for shape in shapes]
    given += [torch.full((2,), complex(0, world.rank)).conj(), torch.full((2,), world.rank, dtype=torch.bool)]
    return heard, [world.gather(x) for x in given], [world.sum(x) for x in given[:-1]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_of_any_dtype_layout_or_shape_is_sent_or_refused_on_all_ranks(ranks: int) -> None:
    every = run_ranks(ranks, odd_tensors)
    for heard, gathered, summed in every:
        assert heard == every[0][0]
        for said, what in zip(
            heard, 2 * ["quantized", "sparse", "meta", "list", "nested"] + 3 * ["torch"], strict=True
        ):
            assert re.match(f"{'rank 0: ' if ranks > 1 else ''}x: got .*{what}", said), said
        expected = [(ranks,), (0,), (2 * ranks, 0), (0, 3), (ranks, 0, 4), (2 * ranks,), (2 * ranks,)]
        assert [tuple(x.shape) for x in gathered] == expected
        assert [tuple(x.shape) for x in summed] == [(), (0,), (2, 0), (0, 3), (1, 0, 4), (2,)]
        assert summed[0] == sum(range(1, ranks + 1))
        assert gathered[5].tolist() == [complex(0, -rank) for rank in range(ranks) for _ in range(2)]
        assert gathered[6].tolist() == [bool(rank) for rank in range(ranks) for _ in range(2)]


def from_two_threads(world: World) -> list[str]:
    world.sum(torch.tensor(1))
    raised = list[str]()
    thread = threading.Thread(target=lambda: raised.append(outcome(lambda: world.sum(torch.tensor(1)))), name="reader")
    thread.start()
    thread.join()
    assert world.sum(torch.tensor(1)) == world.size
    return raised


def test_a_second_thread_is_refused_and_the_group_goes_on() -> None:
    for (report,) in run_ranks(2, from_two_threads):
        assert "reader uses a world that another thread uses" in report


def test_any_thread_may_call_a_world_of_one() -> None:
    assert run_ranks(1, from_two_threads) == [["fine"]]


def closed(world: World) -> str:
    world.close()
    world.close()
    return fails(lambda: world.sum(torch.tensor(1)), GroupError)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_world_refuses_calls(ranks: int) -> None:
    assert run_ranks(ranks, closed) == ["the group of ranks has ended: this world is closed"] * ranks


def test_a_world_of_one_that_is_closed_ends_no_other() -> None:
    World.of_one().close()
    assert World.of_one().sum(torch.tensor(2)) == 2


def raising(world: World) -> None:
    if world.rank == 1:
        raise KeyError("rank 1's own")


def test_what_a_rank_raises_reaches_the_test() -> None:
    with pytest.raises(KeyError) as error:
        run_ranks(2, raising)
    assert error.value.args == ("rank 1's own",)
    assert "on rank 1:" in error.value.__notes__[0]


def dtypes(world: World) -> tuple[int, int, torch.dtype, torch.dtype, float]:
    other = World(timeout=5.5, rows=torch.bfloat16, grads=torch.float16)
    assert world.sum(torch.tensor(1)) + other.sum(torch.tensor(1)) == 4
    other.close()
    assert world.sum(torch.tensor(1)) == 2
    return other.rank, other.size, other.rows, other.grads, other.timeout


def test_worlds_of_the_same_ranks_are_apart() -> None:
    assert run_ranks(2, dtypes) == [(rank, 2, torch.bfloat16, torch.float16, 5.5) for rank in range(2)]


def without_gloo(world: World) -> str:
    import torch.testing._internal.distributed.fake_pg  # a backend that needs no GPU

    said = fails(lambda: World(dist.new_group(backend="fake")), OptionError)
    both = World(dist.new_group(backend="cpu:gloo,cuda:fake"))
    assert both.sum(torch.tensor(1)) == world.size
    both.close()
    return said


def test_a_group_without_gloo_is_refused_with_the_remedy() -> None:
    for reports in run_ranks(2, without_gloo):
        assert re.match(r"group: its backends are cpu:fake.*through host memory.*cuda:nccl.*backend='gloo'", reports), (
            reports
        )


def counts_ranks_of_this_host(world: World) -> int:
    return world.on_host


def test_ranks_know_how_many_of_them_are_on_their_host() -> None:
    assert run_ranks(3, counts_ranks_of_this_host) == [3, 3, 3]


def test_a_process_alone_is_a_group_of_one() -> None:
    world = World.from_env(timeout=1)
    assert (world.rank, world.size, world.failure) == (0, 1, None)
    x = torch.randn(3)
    assert torch.equal(world.gather(x), x)
    assert torch.equal(world.sum(x), x)


def test_arguments_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="timeout=0"):
        World(timeout=0)
    with pytest.raises(OptionError, match=r"rows=torch.int8: give one of torch.float32, torch.bfloat16, torch.float16"):
        World(rows=torch.int8)
    with pytest.raises(OptionError, match=r"grads=torch.float64"):
        World(grads=torch.float64)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="there is no process group"):
        World()


def made_again(world: World) -> str:
    world.close()
    return fails(World, OptionError)


def test_a_second_world_after_the_first_is_refused_not_waited_for() -> None:
    for said in run_ranks(2, made_again):
        assert "create one World, and close it at the end" in said
