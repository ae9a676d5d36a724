"""A rank that is lost at any exchange of a training step is named on the others, which close without it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from itertools import count

import pytest

from support.lost import Heard, all_name, calls, end_after, heard
from support.ranked import Ranked, batch
from support.ranks import run_ranks, started, survivors
from support.two_hosts import run_on_hosts
from tierbed import World

EXCHANGES = 14  # of a step of `Ranked`, and one more


def step_exchanges(world: World) -> int:
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    before = calls(world)
    graph(*batch(world.rank, 1))
    return calls(world) - before


def test_the_exchanges_of_a_step_are_these() -> None:
    assert run_ranks(2, step_exchanges) == [EXCHANGES - 1] * 2


def train(world: World, lost: int, number: int, exchanges: int) -> Heard:
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    if world.rank == lost:
        end_after(world, exchanges, number, is_sent=exchanges % 2 == 0)
    steps = (batch(world.rank, step) for step in count(1))

    def run() -> None:
        while True:
            graph(*next(steps))

    def close() -> None:
        graph.users.close()
        graph.items.close()

    return heard(world, run, close)


def check(found: dict[int, Heard], lost: int, how: str) -> None:
    all_name(found.values(), lost, how)
    assert all(re.search(r"step \d+", one.said) for one in found.values())


@pytest.mark.parametrize(
    "exchanges", [pytest.param(n, marks=() if n in (5, 12) else pytest.mark.slow) for n in range(1, EXCHANGES + 1)]
)
def test_a_rank_that_is_killed_in_a_step(exchanges: int) -> None:
    ranks = 2 + exchanges % 2
    lost = exchanges // 2 % ranks
    with started(ranks, train, lost, int(signal.SIGKILL), exchanges, whole=exchanges == 12) as group:
        check(survivors(group, lost), lost, "its process ended")


@pytest.mark.slow
def test_a_rank_that_is_frozen_in_a_step() -> None:
    timeout = 2
    with contextlib.ExitStack() as groups:
        every = [
            (lost, groups.enter_context(started(2, train, lost, int(signal.SIGSTOP), exchanges, timeout=timeout)))
            for lost, exchanges in ((0, 1), (1, 4), (0, 6))
        ]
        for lost, group in every:
            found = survivors(group, lost)
            check(found, lost, "no sign of it")
            assert all(one.seconds < timeout + 5 + timeout for one in found.values())


TIMEOUT = 2


def train_on_hosts(world: World, ready: int) -> Heard:
    assert world.on_host == world.size // 2
    graph = Ranked(world)
    steps = (batch(world.rank, step) for step in count())
    graph(*next(steps))
    os.write(ready, b".")

    def run() -> None:
        while True:
            graph(*next(steps))

    return heard(world, run, graph.users.close)


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 1])
def test_the_ranks_behind_a_link_that_is_cut_are_named(end: int) -> None:
    found = run_on_hosts(train_on_hosts, 4, end, TIMEOUT)
    for rank, one in enumerate(found):
        others = (2, 3) if rank < 2 else (0, 1)
        assert f"ranks {others[0]}, {others[1]} did not answer (no sign of it)" in one.said
        assert one.ranks == others
        assert re.search(r"step \d+", one.said)
