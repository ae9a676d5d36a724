"""A rank that is lost in a save, a load or a close is named, and loses no earlier snapshot."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import make
from support.lost import Heard, calls, end_after, heard
from support.ranks import run_ranks, started, survivors
from support.stores import options
from tierbed import MultiTableEmbedding, World, list_snapshots
from tierbed.engine.options.lookup import Lookup

EXCHANGES = {"save": 12, "load": 13, "close": 0}  # of two ranks


def opened(world: World | None, folder: Path, store: str) -> MultiTableEmbedding:
    return make(options(store, folder), "adagrad", tables=1, world=world)


def step(embedding: MultiTableEmbedding, number: int) -> None:
    pinned = embedding.pin([Lookup(torch.arange(10 * number, 100))])
    pinned.update([torch.full_like(pinned.gather(0), 0.5 + number)])


def begin(embedding: MultiTableEmbedding) -> None:
    """Train, save, and train on."""
    for number in range(3):
        step(embedding, number)
    embedding.save_snapshot("a")
    step(embedding, 3)


def act(embedding: MultiTableEmbedding, action: str) -> None:
    if action == "save":
        embedding.save_snapshot("b")
    elif action == "load":
        embedding.load_snapshot("a")
    else:
        embedding.close()


def exchanges(world: World, folder: Path, action: str) -> int:
    with opened(world, folder, "host") as embedding:
        begin(embedding)
        before = calls(world)
        act(embedding, action)
        return calls(world) - before


@pytest.mark.parametrize("action", EXCHANGES)
def test_the_exchanges_of_an_action_are_these(tmp_path: Path, action: str) -> None:
    assert run_ranks(2, exchanges, tmp_path, action) == [EXCHANGES[action]] * 2


def lose(world: World, folder: Path, store: str, action: str, lost: int, number: int, at: int) -> Heard:
    embedding = opened(world, folder, store)
    begin(embedding)
    if world.rank == lost:
        end_after(world, at, number, is_sent=at % 2 == 0)
    return heard(world, lambda: (act(embedding, action), world.sum(torch.tensor(1))), embedding.close)


def own_rows(embedding: Any) -> bytes:
    return b"".join(rows.tobytes() for _, rows in embedding.table_handle().local_table.scan())


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
    with opened(world, folder, "host") as embedding:
        begin(embedding)
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
    lost, number = at // 2 % 2, int(signal.SIGKILL)
    with started(2, lose, tmp_path, store, action, lost, number, at) as group:
        (one,) = survivors(group, lost).values()
    assert f"rank {lost} did not answer (its process ended)" in one.said
    assert one.ranks == (lost,)
    check_saved(tmp_path, store, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "at"), [("save", 5), ("save", 12), ("load", 6), ("close", 1)])
def test_a_rank_that_is_frozen_costs_no_snapshot(
    tmp_path: Path, rows: list[dict[str, bytes]], action: str, at: int
) -> None:
    lost, number = at % 2, int(signal.SIGSTOP)
    with started(2, lose, tmp_path, "host", action, lost, number, at, timeout=2) as group:
        (one,) = survivors(group, lost).values()
    assert f"rank {lost} did not answer (no sign of it)" in one.said
    check_saved(tmp_path, "host", rows)
