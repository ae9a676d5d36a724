"""A checkpoint that is there is whole, whenever the process that saves is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import in_process
from test_graph_checkpoint import IDS, rating, steps


def save_until_killed(path: Path, saved: int) -> None:
    """Steps and checkpoints in turn, told on `saved` when a save has returned."""
    graph = rating("host", path / "store")
    for number in range(1, 10_000):
        steps(graph, IDS[number % 5 : number % 5 + 1])
        graph.save(path / f"step-{number:05}")
        os.write(saved, b"%d\n" % number)


def returned_until_killed(save: Callable[[Path, int], None], path: Path, seed: int) -> list[int]:
    """The steps that a process told which runs `save`, and which is killed at an instant that depends on the seed."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save(path, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as lines:
        returned = [int(lines.readline())]  # when all is compiled and open
        time.sleep(random.Random(seed).uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        returned += map(int, lines.read().split())
    assert os.WTERMSIG(status) == signal.SIGKILL
    return returned


def kill_and_look(path: Path, seed: int) -> None:
    returned = returned_until_killed(save_until_killed, path, seed)
    there = {int(folder.name.removeprefix("step-")) for folder in path.glob("step-*")}
    assert set(returned) <= there
    assert len(there) <= len(returned) + 1  # one may be whole whose save did not return
    for step in there:
        graph = rating("device", None)
        graph.load(path / f"step-{step:05}")
        assert graph.rows.metrics()["table"]["step"] == step


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))])
def test_kill_at_any_instant_leaves_whole_checkpoints_alone(tmp_path: Path, seed: int) -> None:
    in_process(kill_and_look, tmp_path, seed)
