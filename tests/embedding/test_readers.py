"""Threads that read while another saves or loads: no call fails, waits for a save, or sees rows of two snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.embeddings import DIM, attach, make
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, prometheus_text
from tierbed.distributed.world import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.embedding.saving.snapshots import Snapshots
from tierbed.embedding.tables.training_group import train_together
from tierbed.snapshots.store.selection import ALL

ROWS, READERS, LOADS = 500, 3, 6
IDS = torch.arange(ROWS)
SOME = torch.arange(0, ROWS, 7)


class Reads(tierbed.Graph):
    """An evaluation."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = rows

    def build(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * 1.0


def filled(path: Path | None, store: str, name: str = "rows") -> MultiTableEmbedding:
    """Snapshots "1" and "2" have rows of ones, and of twos."""
    rows = make(options(store, path), "adagrad", name=name, tables=1)
    for value in (1, 2):
        rows.put(IDS, torch.full((ROWS, DIM), float(value)), 0)
        if path is not None:
            rows.save_snapshot(str(value))
    return rows


Load = Callable[[int], object]


def by_snapshot(rows: MultiTableEmbedding, path: Path) -> Load:
    return lambda value: rows.load_snapshot(str(value))


def by_state(rows: MultiTableEmbedding, path: Path) -> Load:
    model = nn.ModuleDict({"rows": rows})
    states = []
    for value in (1, 2):
        rows.load_snapshot(str(value))
        states.append(model.state_dict())
    return lambda value: model.load_state_dict(states[value - 1])


def by_checkpoint(rows: MultiTableEmbedding, path: Path) -> Load:
    model = nn.ModuleDict({"rows": rows})
    for value in (1, 2):
        rows.load_snapshot(str(value))
        tierbed.save_checkpoint(path / f"checkpoint{value}", model)
    return lambda value: tierbed.load_checkpoint(path / f"checkpoint{value}", model)


def by_dense(rows: MultiTableEmbedding, path: Path) -> Load:
    return lambda value: rows.load_dense({0: torch.full((ROWS, DIM), float(value))})


def by_part(rows: MultiTableEmbedding, path: Path) -> Load:
    return lambda value: rows.load_snapshot(str(value), where=lambda tables, keys: keys < ROWS)


LOADS_BY: dict[str, Callable[[MultiTableEmbedding, Path], Load]] = {
    "snapshot": by_snapshot,
    "state": by_state,
    "checkpoint": by_checkpoint,
    "dense": by_dense,
    "part": by_part,
}


def reads(rows: MultiTableEmbedding) -> dict[str, Callable[[], object]]:
    """What readers do; tensors are to be rows of one snapshot."""
    graph = Reads(rows)
    graph(SOME)  # compiled before other threads use it
    return {
        "lookup": lambda: rows(SOME),
        "graph": lambda: graph(SOME),
        "get": lambda: rows.get(SOME, 0),
        "size": lambda: torch.tensor([float(rows.size() == ROWS)]),
        "metrics": lambda: torch.tensor([float(rows.metrics()["table"]["rows"] == ROWS)]),
        "scrape": lambda: torch.tensor([float("tierbed_up" in prometheus_text(rows))]),
        "explain": lambda: torch.tensor([float(bool(rows.explain(7, 0)["stored"]))]),
        "hits": rows.hit_counts,
    }


@pytest.mark.parametrize("way", LOADS_BY)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("store")
def test_readers_see_the_rows_of_one_snapshot_and_never_fail(tmp_path: Path, store: str, way: str) -> None:
    rows, loaded = filled(tmp_path, store), Event()
    load, calls = LOADS_BY[way](rows, tmp_path), reads(rows)

    def read() -> int:
        count = 0
        while not loaded.is_set() or count == 0:
            for name, call in calls.items():
                found = call()
                if isinstance(found, Tensor):
                    found = found.detach()
                    assert len(found.unique()) == 1, (name, found.unique())
                    assert float(found.unique()) in (1.0, 2.0), name
            count += 1
        return count

    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(read) for _ in range(READERS)]
        try:
            for number in range(LOADS):
                load(1 + number % 2)
        finally:
            loaded.set()
        assert all(reader.result() for reader in readers)
    rows.close()


@pytest.mark.parametrize("store", ["host", "cached_host"])
def test_an_iteration_that_a_load_overtakes_goes_on_with_the_old_rows(tmp_path: Path, store: str) -> None:
    rows = filled(tmp_path, store)
    iteration = iter(rows)
    first = next(iteration)
    rows.load_snapshot("1")
    assert {float(row[0]) for _, _, row in [first, *iteration]} == {2.0}
    assert {float(row[0]) for _, _, row in rows} == {1.0}


class Paused:
    """A save that waits in the middle, between two chunks of its rows."""

    def __init__(self) -> None:
        self.reached, self.let_go = Event(), Event()

    def __call__(self, count: int) -> None:
        self.reached.set()
        assert self.let_go.wait(60)


@contextmanager
def paused(save: Callable[[Paused], Any]) -> Iterator[Future[Any]]:
    """A block while a save in another thread is in the middle."""
    paused = Paused()
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, paused)
        try:
            while not paused.reached.wait(0.05):
                assert not saving.done(), saving.exception()
            yield saving
            assert not saving.done()
        finally:
            paused.let_go.set()
        saving.result()


def tables_of(*embeddings: MultiTableEmbedding) -> list[Snapshots]:
    return [rows.table_handle().snapshots for rows in embeddings]


@pytest.mark.parametrize("store", STORES)
def test_scrapes_lookups_and_steps_do_not_wait_for_a_save(tmp_path: Path, store: str) -> None:
    rows = filled(tmp_path, store)
    with paused(lambda progress: save_together(World.of_one(), tables_of(rows), "kept", progress=progress)):
        assert 'tierbed_up{embedding="rows"} 1.0' in prometheus_text(rows)
        assert set(rows(SOME).unique().tolist()) == {2.0}
        rows.put(IDS, torch.full((ROWS, DIM), 3.0), 0)
        assert set(rows.get(SOME, 0).unique().tolist()) == {3.0}
        with pytest.raises(ValueError, match="as usual"):  # what a reader raises is not lost
            raise ValueError("as usual")
    rows.load_snapshot("kept")
    assert set(rows.get(IDS, 0).unique().tolist()) == {2.0}
    rows.close()


def test_a_save_of_a_group_has_rows_of_its_beginning_while_others_go_on(tmp_path: Path) -> None:
    both = [filled(tmp_path, store, name) for store, name in (("host", "a"), ("ssd", "b"))]
    train_together(both)
    tables = tables_of(*both)
    with paused(lambda progress: save_together(World.of_one(), tables, "kept", progress=progress)):
        for rows in both:
            assert 'tierbed_up{embedding="a"} 1.0' in prometheus_text(*both)
            assert set(rows(SOME).unique().tolist()) == {2.0}
            rows.put(IDS, torch.full((ROWS, DIM), 3.0), 0)
    for rows in both:
        rows.load_snapshot("kept")
        assert set(rows.get(IDS, 0).unique().tolist()) == {2.0}
        rows.close()


AFTER_A_SAVE: dict[str, Callable[[MultiTableEmbedding], object]] = {
    "load": lambda rows: rows.load_snapshot("1"),
    "save": lambda rows: rows.save_snapshot("other"),
    "delta": lambda rows: rows.save_snapshot("other", "incremental"),
    "state": lambda rows: rows.state_dict(),
    "background": lambda rows: rows.save_snapshot("other", background=True).wait(),  # type: ignore[union-attr]
    "prune": lambda rows: rows.prune_snapshots(5),
    "optimizer": lambda rows: attach(rows, "adam"),
    "close": lambda rows: rows.close(),
}


@pytest.mark.parametrize("then", AFTER_A_SAVE)
@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.rotated("store")
def test_what_cannot_run_beside_a_save_waits_for_it(tmp_path: Path, store: str, then: str) -> None:
    rows = make(options(store, tmp_path, state_dict_snapshots=True), tables=1)  # without optimizer
    for value in (1, 2):
        rows.put(IDS, torch.full((ROWS, DIM), float(value)), 0)
        rows.save_snapshot(str(value))
    began = Event()

    def other() -> None:
        began.set()
        AFTER_A_SAVE[then](rows)

    with ThreadPoolExecutor(1) as pool:
        with paused(lambda progress: save_together(World.of_one(), tables_of(rows), "kept", progress=progress)):
            waiting = pool.submit(other)
            began.wait()
        waiting.result()
    again = rows if then != "close" else make(options(store, tmp_path), tables=1)
    again.load_snapshot("kept")
    assert set(again.get(IDS, 0).unique().tolist()) == {2.0}
    again.close()


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_scrape_during_a_load_has_the_numbers_before_it(tmp_path: Path, store: str) -> None:
    rows = filled(tmp_path, store)
    handle: Any = rows._handle

    def load(progress: Paused) -> None:
        handle.own.load_part(handle.snapshots.snapshot("1"), ALL, True, verified=lambda: progress(0))

    with ThreadPoolExecutor(1) as pool:
        with paused(load):
            for _ in range(3):
                text = prometheus_text(rows)
                assert 'tierbed_up{embedding="rows"} 1.0' in text
                assert f'tierbed_rows{{embedding="rows",tier="table"}} {float(ROWS)}' in text
            assert rows.metrics()["table"]["rows"] == ROWS
            reading = pool.submit(lambda: rows(SOME))
        assert set(reading.result().unique().tolist()) == {1.0}
    rows.close()
    assert 'tierbed_up{embedding="rows"} 0.0' in prometheus_text(rows)
