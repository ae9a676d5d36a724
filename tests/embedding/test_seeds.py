"""Rows begin by the name of their embedding, by a seed that is given, or by that of the rows that are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import DIM, TABLES, attach, train
from support.ranks import run_ranks
from support.stores import STORES, options
from tierbed import MultiTableEmbedding
from tierbed.distributed import World

IDS = torch.arange(40)


def embedding(name: str, store: str = "host", path: Path | None = None, **more: Any) -> MultiTableEmbedding:
    made = MultiTableEmbedding(name, DIM, torch.float32, torch.int64, TABLES[:1], options(store, path), **more)
    attach(made, "adagrad")
    return made


def rows(made: MultiTableEmbedding) -> bytes:
    return made.get(IDS).numpy().tobytes()


@pytest.mark.parametrize("store", STORES)
def test_two_names_begin_with_other_rows_and_one_seed_with_equal_ones(tmp_path: Path, store: str) -> None:
    users, items = (embedding(name, store, tmp_path) for name in ("users", "items"))
    assert not (users.get(IDS) == items.get(IDS)).any()
    a, b = (embedding(name, store, tmp_path, seed=5) for name in ("a", "b"))
    assert rows(a) == rows(b)
    assert rows(embedding("users", "device")) == rows(users)


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("way", ["closed", "snapshot"])
def test_a_store_that_exists_opens_as_it_is(
    tmp_path: Path, store: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = embedding("users", store, tmp_path, seed=0)
    train(first, range(5))
    expected = rows(first)
    if way == "snapshot":
        first.save_snapshot("one")
        fresh = embedding("others", store, tmp_path)
        assert rows(fresh) != expected
        (tmp_path / "others" / "snapshots").mkdir(exist_ok=True)
        (tmp_path / "others" / "snapshots" / "one").symlink_to(tmp_path / "users" / "snapshots" / "one")
        fresh.load_snapshot("one")
        assert rows(fresh) == expected
        return
    first.close()
    again = embedding("users", store, tmp_path)
    assert rows(again) == expected
    train(again, range(30, 35))
    again.close()
    assert rows(embedding("users", store, tmp_path, seed=0)) != expected  # five more rows are trained
    assert not caplog.records
    embedding("users", store, tmp_path, seed=9).size()
    assert "another seed" in caplog.text


def test_a_state_brings_its_seed(tmp_path: Path) -> None:
    first = embedding("users", seed=3)
    train(first, range(5))
    second = embedding("items")
    second.load_state_dict(first.state_dict())
    assert rows(second) == rows(first)


def of_ranks(world: World, path: Path) -> list[bytes]:
    made = embedding("users", "host", path, world=world, seed=0)
    train(made, range(5))
    expected = rows(made)
    made.close()
    again = embedding("users", "host", path, world=world)
    assert rows(again) == expected
    return [rows(embedding(name, "host", None, world=world)) for name in ("users", "items")]


def test_over_ranks_as_in_one_process(tmp_path: Path) -> None:
    (one, two), other = run_ranks(2, of_ranks, tmp_path)
    assert one != two
    assert other == [one, two] == [rows(embedding(name)) for name in ("users", "items")]
