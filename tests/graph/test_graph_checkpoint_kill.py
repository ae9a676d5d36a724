"""A checkpoint that is there is whole, whenever the process that saves is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.checkpoints import IDS, rating, steps
from support.forked import in_process
from support.killed import returned_until_killed


def save_until_killed(path: Path, saved: int) -> None:
    """Steps and checkpoints in turn, reported on `saved` when a save has returned."""
    graph = rating("host", path / "store")
    for number in range(1, 10_000):
        steps(graph, IDS[number % 5 : number % 5 + 1])
        graph.save(path / f"step-{number:05}")
        os.write(saved, b"%d\n" % number)


def kill_and_look(path: Path, seed: int) -> None:
    returned = returned_until_killed(save_until_killed, path, seed)
    there = {int(folder.name.removeprefix("step-")) for folder in path.glob("step-*")}
    assert set(returned) <= there
    assert len(there) <= len(returned) + 1  # one may be whole whose save did not return
    graph = rating("device", None)
    for step in there:
        graph.load(path / f"step-{step:05}")
        assert graph.rows.metrics()["table"]["step"] == step


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_kill_at_any_instant_leaves_whole_checkpoints_alone(tmp_path: Path, seed: int) -> None:
    in_process(kill_and_look, tmp_path, seed)
