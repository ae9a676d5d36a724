"""Where the link between two hosts is cut in a step, each host names the ranks of the other, and all end."""

from __future__ import annotations

import os
import re
from itertools import count

import pytest

from support.lost import Heard, heard
from support.ranked import Ranked, batch
from support.two_hosts import run_on_hosts
from tierbed import World

TIMEOUT = 2


def train(world: World, ready: int) -> Heard:
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
    found = run_on_hosts(train, 4, end, TIMEOUT)
    for rank, one in enumerate(found):
        others = (2, 3) if rank < 2 else (0, 1)
        assert f"ranks {others[0]}, {others[1]} did not answer (no sign of it)" in one.said
        assert one.ranks == others
        assert re.search(r"step \d+", one.said)
