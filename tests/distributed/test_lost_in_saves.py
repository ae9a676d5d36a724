"""A rank that is lost in a save, a load or a close is named, and loses no earlier snapshot."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.live_rows import opened, own_rows, step
from support.lost import Heard, all_name, calls, end_after, heard
from support.ranks import run_ranks, started, survivors
from tierbed import World, list_snapshots

EXCHANGES = {"save": 12, "load": 13, "close": 0}  # of two ranks


def begun(world: World, folder: Path, store: str = "host") -> Any:
    """An embedding that is trained, saved, and trained on."""
    embedding = opened(world, folder, store)
    for number in range(3):
        step(embedding, number)
    embedding.save_snapshot("a")
    step(embedding, 3)
    return embedding


def act(embedding: Any, action: str) -> None:
    if action == "save":
        embedding.save_snapshot("b")
    elif action == "load":
        embedding.load_snapshot("a")
    else:
        embedding.close()


def exchanges(world: World, folder: Path) -> dict[str, int]:
    embedding, counts = begun(world, folder), {}
    for action in EXCHANGES:
        before = calls(world)
        act(embedding, action)
        counts[action] = calls(world) - before
    return counts


def test_the_exchanges_of_an_action_are_these(tmp_path: Path) -> None:
    assert run_ranks(2, exchanges, tmp_path) == [EXCHANGES] * 2


def lose(world: World, folder: Path, store: str, action: str, lost: int, number: int, at: int) -> Heard:
    embedding = begun(world, folder, store)
    if world.rank == lost:
        end_after(world, at, number, is_sent=at % 2 == 0)
    return heard(world, lambda: (act(embedding, action), world.sum(torch.tensor(1))), embedding.close)


def saved(world: World, folder: Path, store: str) -> dict[str, bytes]:
    """The rows of this rank in every snapshot, each loaded; then the group goes on."""
    with opened(world, folder, store) as embedding:
        found = {}
        for listed in list_snapshots(folder / "rows" / "snapshots").snapshots:
            embedding.load_snapshot(listed.name)
            found[listed.name] = own_rows(embedding)
        step(embedding, 4)
        embedding.save_snapshot("next")
    return found


def whole(world: World, folder: Path) -> dict[str, bytes]:
    with begun(world, folder) as embedding:
        later = own_rows(embedding)
        embedding.load_snapshot("a")
        return {"a": own_rows(embedding), "b": later}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """By rank, the rows of the snapshots where none is lost; they are the same on every store."""
    return run_ranks(2, whole, tmp_path_factory.mktemp("whole"))


def check_saved(folder: Path, store: str, rows: list[dict[str, bytes]]) -> None:
    """The earlier snapshot exists, a later one is whole or not there, and training goes on."""
    for found, expected in zip(run_ranks(2, saved, folder, store), rows, strict=True):
        assert found.items() <= expected.items()
        assert "a" in found


@pytest.mark.parametrize("store", ["host", pytest.param("ssd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("action", "at"),
    [
        pytest.param(action, at, marks=() if action == "close" or at == 12 else pytest.mark.slow)
        for action, count in EXCHANGES.items()
        for at in range(1, max(count, 1) + 1)
    ],
)
def test_a_rank_that_is_killed_costs_no_snapshot(
    tmp_path: Path, rows: list[dict[str, bytes]], store: str, action: str, at: int
) -> None:
    lost = at // 2 % 2
    with started(2, lose, tmp_path, store, action, lost, int(signal.SIGKILL), at) as group:
        all_name(survivors(group, lost).values(), lost, "its process ended")
    check_saved(tmp_path, store, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "at"), [("save", 5), ("save", 12), ("load", 6), ("close", 1)])
def test_a_rank_that_is_frozen_costs_no_snapshot(
    tmp_path: Path, rows: list[dict[str, bytes]], action: str, at: int
) -> None:
    lost = at % 2
    with started(2, lose, tmp_path, "host", action, lost, int(signal.SIGSTOP), at, timeout=2) as group:
        all_name(survivors(group, lost).values(), lost, "no sign of it")
    check_saved(tmp_path, "host", rows)
