"""A snapshot that another process asks of ranks has the rows of all of them after a whole number of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from support.embeddings import make, train
from support.ranks import answer, run_ranks, started
from support.stores import options
from support.together import Model
from tierbed import InputError, SnapshotError, StoreError
from tierbed.distributed import World
from tierbed.snapshots import Snapshot
from tierbed.snapshots.control import server as serving
from tierbed.snapshots.control.client import request_prune, request_row, request_save, request_status

KEYS = torch.arange(100)


def serves(world: World, folder: Path, way: str = "trains") -> int:
    """Two steps; then steps, reads or nothing until the file `stop` exists, or a close when a save is asked for."""
    embedding = make(options("host", folder), "sgd", tables=1, world=world)
    train(embedding, KEYS)
    train(embedding, KEYS + 7 * world.rank)
    (folder / f"ready-{world.rank}").touch()
    requests: Any = embedding.table_handle().request_handler  # type: ignore[union-attr]
    while way in ("trains", "reads") and not is_over(world, folder):
        embedding.get(KEYS) if way == "reads" else train(embedding, KEYS + 7 * world.rank)
    while way == "closes" and world.rank == 0 and not requests.can_serve():
        pass
    if way == "idles":
        until(folder / "stop")
        train(embedding, KEYS)
    step = embedding.table_handle().open_table.step
    embedding.close()
    return step


def is_over(world: World, folder: Path) -> bool:
    return bool(world.all_gather_object("stop", lambda: b"1" if (folder / "stop").exists() else b"")[0])


def until(*files: Path) -> None:
    while not all(file.exists() for file in files):
        sleep(0.01)


def all_updates(snapshot: Snapshot) -> set[tuple[int, int]]:
    """The counts of updates of the rows that every step of one rank or of both updates, with the snapshot's step."""
    rows = np.concatenate([rows.copy() for _, rows in snapshot.chunks()])
    shared = rows[(rows["key"] >= 7) & (rows["key"] < 100)]
    return {(int(count), snapshot.description["step"]) for count in shared["updates"]}


@contextmanager
def asked(folder: Path, way: Any, *more: Any) -> Iterator[Callable[[], list[Any]]]:
    """Two ranks that are ready. What is given stops them, and returns what they return."""
    with started(2, way, folder, *more) as group:
        until(folder / "ready-0", folder / "ready-1")

        def stop() -> list[Any]:
            (folder / "stop").touch()
            found = [answer(pipe) for _, pipe in group]
            assert [child.wait() for child, _ in group] == [0, 0]
            return found

        yield stop


def test_ranks_that_train_save_what_they_are_asked_for(tmp_path: Path) -> None:
    store = tmp_path / "rows"
    with asked(tmp_path, serves) as stop:
        reports: list[int] = []
        manifest = request_save(store, "asked", progress=lambda rows, of: reports.append(rows))
        assert manifest is not None
        with pytest.raises(SnapshotError, match="asked' exists: choose another name"):
            request_save(store, "asked")
        request_save(store, "more", "incremental")
        status = request_status(store)
        steps = stop()
    assert status is not None
    assert status["ranks"] == 2
    assert reports
    for name in ("asked", "more"):
        snapshot = Snapshot.open(store / "snapshots" / name)
        snapshot.verify()
        (counts,) = all_updates(snapshot)
        assert counts[0] == counts[1] <= steps[0] == steps[1]
    assert Snapshot.open(store / "snapshots" / "asked").manifest.num_shards == 2
    assert manifest.rows == 107


def test_ranks_that_only_read_save_as_well(tmp_path: Path) -> None:
    with asked(tmp_path, serves, "reads") as stop:
        assert request_save(tmp_path / "rows", "asked") is not None
        assert stop() == [2, 2]


def test_a_save_that_waits_in_vain_says_that_no_step_came(tmp_path: Path) -> None:
    with asked(tmp_path, serves, "idles") as stop:
        with pytest.raises(StoreError, match=r"did not finish its current step for 0\.5 seconds"):
            request_save(tmp_path / "rows", "asked", timeout=0.5)
        stop()
    assert not os.path.exists(tmp_path / "rows" / "snapshots" / "asked")


def test_a_close_does_not_wait_for_a_save_that_was_asked_for(tmp_path: Path) -> None:
    with asked(tmp_path, serves, "closes") as stop:
        with pytest.raises(SnapshotError, match="closed the store before snapshot 'asked' was complete"):
            request_save(tmp_path / "rows", "asked")
        assert stop() == [2, 2]


def trains_both(world: World, folder: Path) -> list[int]:
    """Steps of two embeddings, until the file `stop` exists. Returns their steps."""
    serving._EVERY = 0
    model = Model(folder, ("host", "host"), world)
    model.steps(2)
    (folder / f"ready-{world.rank}").touch()
    while not is_over(world, folder):
        model.steps(1)
    return model.counts()


def test_ranks_save_all_stores_of_a_model_at_one_instant_and_give_rows(tmp_path: Path) -> None:
    stores = [tmp_path / name for name in "ab"]
    with asked(tmp_path, trains_both) as stop:
        reports: list[int] = []
        assert request_save(stores[0], "asked", progress=lambda rows, of: reports.append(rows), stores=stores)
        assert reports[-1] > 0
        with pytest.raises(SnapshotError, match="asked' exists"):
            request_save(stores[1], "asked", stores=stores)
        with pytest.raises(StoreError, match=r"does not have .* open; save that store by itself"):
            request_save(stores[1], "other", stores=[*stores, tmp_path / "c"])
        snapshots = [Snapshot.open(store / "snapshots" / "asked") for store in stores]
        some = [int(next(snapshots[0].chunks())[1]["key"][0]), 10**9]
        rows = [request_row(stores[0], 0, key) for key in some]
        with pytest.raises(InputError):
            request_row(stores[0], 9, 1)
        assert request_prune(stores[0], 1, None) == ([], ["asked"])
        steps = stop()
    assert steps[0] == steps[1]
    assert snapshots[0].description["step"] == snapshots[1].description["step"] >= 2
    assert rows[0]["key"] == some[0]
    assert rows[0]["updates"] >= 1
    assert rows[1] == {}
    assert run_ranks(1, reopened, tmp_path) == [[snapshots[0].description["step"]] * 2]


def reopened(world: World, folder: Path) -> list[int]:
    model = Model(folder, ("host", "host"), world, open="fresh")  # whether the ranks had closed their rows or not
    model.load_snapshot("asked")
    return model.counts()
