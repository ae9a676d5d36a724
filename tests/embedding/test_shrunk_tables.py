"""Stored ids beyond those that a table takes cause a warning, by whatever way their rows come."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embeddings import DIM
from support.ranks import started
from support.stores import options
from tierbed import (
    EagerOptimizer,
    Graph,
    MultiTableEmbedding,
    load_checkpoint,
    make_constant_initializer,
    make_table_options,
    save_checkpoint,
)
from tierbed.distributed import World


def rows(path: Path | None, ids: int | None, store: str = "host", **more: Any) -> MultiTableEmbedding:
    facts = {} if ids is None else {"ids": ids}
    table = make_table_options(make_constant_initializer(1.0), name="users", **facts)
    world = more.pop("world", None)
    return MultiTableEmbedding(
        "rows", DIM, torch.float32, torch.int64, [table], options(store, path, **more), world=world
    )


class Scores(Graph):
    def __init__(self, embedding: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = embedding
        self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> None:
        self.rows(ids).sum().backward()


def written(embedding: MultiTableEmbedding) -> Scores:
    graph = Scores(embedding)
    graph(torch.tensor([3, 5, 8, 9]))
    return graph


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [line for line in found if "has 2 rows of table users with ids from 7 on" in line]


@pytest.mark.parametrize("before", [10, None])
@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_reopened_store_tells_at_each_open_and_not_once_it_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, store: str, before: int | None
) -> None:
    with rows(tmp_path, before, store) as embedding:
        written(embedding)
    for ids, tells in ((7, 1), (7, 1), (10, 0), (7, 1), (10, 0)):
        with rows(tmp_path, ids, store) as embedding:
            assert embedding.size() == 4
        assert len(warnings_in(caplog)) == tells


def by_checkpoint(path: Path) -> Callable[[], object]:
    graph = written(rows(path / "first", 10))
    graph.save(path / "saved")
    other = Scores(rows(path / "second", 7))
    return lambda: other.load(path / "saved")


def by_loop(path: Path) -> Callable[[], object]:
    first = rows(path / "first", 10)
    optimizer = EagerOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), first)
    first(torch.tensor([3, 5, 8, 9])).sum().backward()
    optimizer.step()
    save_checkpoint(path / "saved", first, optimizer)
    second = rows(path / "second", 7)
    parts = second, EagerOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second)
    return lambda: load_checkpoint(path / "saved", *parts)


def by_value(path: Path) -> Callable[[], object]:
    state = written(rows(None, 10)).rows.state_dict()
    return lambda: rows(None, 7).load_state_dict(state)


def by_reference(path: Path) -> Callable[[], object]:
    first = rows(path, 10, state_dict_snapshots=True)
    graph = written(first)
    state = first.state_dict()
    graph(torch.tensor([1]))
    first.close()

    def load() -> None:
        with rows(path, 7, open="fresh", state_dict_snapshots=True) as second:
            second.size()
            second.load_state_dict(state)

    return load


def killed(world: World, path: Path) -> None:
    graph = written(rows(path, 10))
    graph.rows.save_snapshot("one")
    graph(torch.tensor([1]))
    os._exit(1)


def by_recovery(path: Path) -> Callable[[], object]:
    with started(1, killed, path) as [(child, _)]:
        assert child.wait() == 1  # only then is the folder's lock free
    return lambda: rows(path, 7).size()


@pytest.mark.parametrize("way", [by_checkpoint, by_loop, by_value, by_reference, by_recovery])
def test_each_way_of_a_load_tells_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: Callable[[Path], Callable[[], object]]
) -> None:
    load = way(tmp_path)
    caplog.clear()
    load()
    assert len(warnings_in(caplog)) == 1
