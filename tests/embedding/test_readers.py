"""Threads that read, step or save while another saves or loads: no call fails, hangs, or sees rows of two moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.embeddings import DIM, ask_to_leave, attach, make, rows_by_key
from support.graphs import graph_of
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, prometheus_text
from tierbed.distributed.world import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.row_step import run_row_step
from tierbed.snapshots.store.selection import ALL

ROWS, READERS, LOADS = 500, 2, 2
IDS = torch.arange(ROWS)
SOME = torch.arange(0, ROWS, 7)


def filled(path: Path, store: str, name: str = "rows", **more: Any) -> MultiTableEmbedding:
    """Snapshots "1" and "2" have rows of ones, and of twos."""
    rows = make(options(store, path, **more), name=name, tables=1)
    for value in (1, 2):
        rows.put(IDS, torch.full((ROWS, DIM), float(value)), 0)
        rows.save_snapshot(str(value))
    return rows


def has(rows: Tensor, value: float) -> None:
    assert rows.detach().unique().tolist() == [value]


def by_state(rows: MultiTableEmbedding, path: Path) -> Callable[[int], object]:
    model = nn.ModuleDict({"rows": rows})
    states = []
    for value in (1, 2):
        rows.load_snapshot(str(value))
        states.append(model.state_dict())
    return lambda value: model.load_state_dict(states[value - 1])


def by_checkpoint(rows: MultiTableEmbedding, path: Path) -> Callable[[int], object]:
    model = nn.ModuleDict({"rows": rows})
    for value in (1, 2):
        rows.load_snapshot(str(value))
        tierbed.save_checkpoint(path / f"checkpoint{value}", model)
    return lambda value: tierbed.load_checkpoint(path / f"checkpoint{value}", model)


LOADS_BY = {
    "snapshot": lambda rows, path: lambda value: rows.load_snapshot(str(value)),
    "state": by_state,
    "checkpoint": by_checkpoint,
    "dense": lambda rows, path: lambda value: rows.load_dense({0: torch.full((ROWS, DIM), float(value))}),
    "part": lambda rows, path: lambda value: rows.load_snapshot(str(value), where=lambda tables, keys: keys < ROWS),
}


def reads(rows: MultiTableEmbedding) -> dict[str, Callable[[], object]]:
    """What readers do; tensors are to be rows of one snapshot."""
    graph = graph_of(lambda graph, ids: graph.rows(ids) * 1.0, rows=rows)
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
def test_readers_see_the_rows_of_one_snapshot_and_never_fail(tmp_path, store, way) -> None:
    rows, loaded = filled(tmp_path, store), Event()
    attach(rows, "adagrad")
    load, calls = LOADS_BY[way](rows, tmp_path), reads(rows)

    def read() -> int:
        count = 0
        while not loaded.is_set() or count == 0:
            for name, call in calls.items():
                found = call()
                if isinstance(found, Tensor):
                    assert found.detach().unique().tolist() in ([1.0], [2.0]), name
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
def test_an_iteration_that_a_load_overtakes_goes_on_with_the_old_rows(tmp_path, store) -> None:
    rows = filled(tmp_path, store)
    iteration = iter(rows)
    first = next(iteration)
    rows.load_snapshot("1")
    assert {float(row[0]) for _, _, row in [first, *iteration]} == {2.0}
    assert {float(row[0]) for _, _, row in rows} == {1.0}


@contextmanager
def paused(save: Callable[[Callable[[int], None]], Any]) -> Iterator[Future[Any]]:
    """A block while a save in another thread waits in the middle, between two chunks of its rows."""
    reached, let_go = Event(), Event()

    def progress(count: int) -> None:
        reached.set()
        assert let_go.wait(60)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, progress)
        try:
            while not reached.wait(0.05):
                assert not saving.done(), saving.exception()
            yield saving
            assert not saving.done()
        finally:
            let_go.set()
        saving.result()


@contextmanager
def paused_save(*embeddings: MultiTableEmbedding) -> Iterator[None]:
    """A block while a save "kept" of these embeddings is in the middle."""
    tables = [rows.table_handle().snapshot_manager for rows in embeddings]
    with paused(lambda progress: save_together(World.single(), tables, "kept", progress=progress)):
        yield


@pytest.mark.parametrize("stores", [*((store,) for store in ("host", "cached_host", "ssd")), ("host", "ssd")])
def test_scrapes_lookups_and_steps_do_not_wait_for_a_save_which_has_rows_of_its_beginning(tmp_path, stores) -> None:
    every = [filled(tmp_path, store, f"rows{number}") for number, store in enumerate(stores)]
    if len(every) > 1:
        train_together(every)
    with paused_save(*every):
        for rows in every:
            assert f'tierbed_up{{embedding="{rows.name}"}} 1.0' in prometheus_text(*every)
            has(rows(SOME), 2.0)
            rows.put(IDS, torch.full((ROWS, DIM), 3.0), 0)
            has(rows.get(SOME, 0), 3.0)
        with pytest.raises(ValueError, match="as usual"):  # what a reader raises is not lost
            raise ValueError("as usual")
    for rows in every:
        rows.load_snapshot("kept")
        has(rows.get(IDS, 0), 2.0)
        rows.close()


AFTER_A_SAVE = {
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
def test_what_cannot_run_beside_a_save_waits_for_it(tmp_path, store, then) -> None:
    rows = filled(tmp_path, store, state_dict_snapshots=True)  # without optimizer
    began = Event()

    def other() -> None:
        began.set()
        AFTER_A_SAVE[then](rows)

    with ThreadPoolExecutor(1) as pool:
        with paused_save(rows):
            waiting = pool.submit(other)
            began.wait()
        waiting.result()
    again = rows if then != "close" else make(options(store, tmp_path), tables=1)
    again.load_snapshot("kept")
    has(again.get(IDS, 0), 2.0)
    again.close()


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_scrape_during_a_load_has_the_numbers_before_it(tmp_path, store) -> None:
    rows = filled(tmp_path, store)
    handle: Any = rows._handle

    def load(progress: Callable[[int], None]) -> None:
        handle.local.load_part(handle.snapshot_manager.open_by_name("1"), ALL, True, on_verified=lambda: progress(0))

    with ThreadPoolExecutor(1) as pool:
        with paused(load):
            for _ in range(3):
                text = prometheus_text(rows)
                assert 'tierbed_up{embedding="rows"} 1.0' in text
                assert f'tierbed_rows{{embedding="rows",tier="table"}} {float(ROWS)}' in text
            assert rows.metrics()["table"]["rows"] == ROWS
            reading = pool.submit(lambda: rows(SOME))
        has(reading.result(), 1.0)
    rows.close()
    assert 'tierbed_up{embedding="rows"} 0.0' in prometheus_text(rows)


FIRST = torch.arange(50)
FEW = 0.2  # seconds in which a thread that need not wait is done


def pair(path: Path) -> list[MultiTableEmbedding]:
    both = [make(options("host", path), "sgd", name=name, tables=1) for name in ("a", "b")]
    train_together(both)
    for rows in both:
        rows.put(FIRST, torch.ones(len(FIRST), DIM), 0)
    return both


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_a_group_waits_for_the_step_of_another_thread(tmp_path, background) -> None:
    both, amid = pair(tmp_path), Event()
    tables = [rows.table_handle().snapshot_manager for rows in both]

    def save() -> None:
        amid.wait()
        if saving := save_together(World.single(), tables, "kept", background=background):
            saving.wait()

    def train() -> None:
        for rows in both:
            rows.table_handle().table.yield_to_reader()
        pinned = [rows.pin([Lookup(FIRST, torch.zeros_like(FIRST))]) for rows in both]
        pinned[0].update([torch.ones(len(FIRST), DIM)])
        amid.set()
        while not (both[0].table_handle().table.step_gate.has_reader or saved.done()):
            pass
        pinned[1].update([torch.ones(len(FIRST), DIM)])

    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(save)
        run_row_step([(rows, rows.row_optimizer) for rows in both], "a test", train)
        saved.result()
    assert [table.open_by_name("kept").description["step"] for table in tables] == [1, 1]
    for rows in both:
        rows.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_save_for_another_process_waits_for_a_save_of_the_group(tmp_path, reverse) -> None:
    both = pair(tmp_path)
    handles: list[Any] = [rows.table_handle() for rows in both][:: -1 if reverse else 1]
    asked: list[Thread] = []

    def progress(count: int) -> None:
        if not asked:
            save = SimpleNamespace(
                name="other",
                kind="full",
                overwrite=False,
                stores=(),
                progress=lambda _: None,
                is_given_up=lambda: False,
            )
            asked.append(Thread(target=handles[0].request_handler.save_between_steps, args=(save,), daemon=True))
            asked[0].start()
            asked[0].join(FEW)

    tables = [handle.snapshot_manager for handle in handles]
    saving = Thread(target=save_together, args=(World.single(), tables, "kept"), kwargs={"progress": progress})
    saving.daemon = True  # a deadlock fails this test alone
    saving.start()
    saving.join(30)
    assert not saving.is_alive()
    asked[0].join(30)
    assert not asked[0].is_alive()
    assert tables[0].open_by_name("other").description["step"] == 0
    for rows in both:
        rows.close()


def test_rows_that_wait_to_be_erased_are_erased_by_the_thread_that_has_the_lock(tmp_path) -> None:
    with make(options("ssd", tmp_path), "sgd", tables=1) as rows:
        rows.put(FIRST, torch.ones(len(FIRST), DIM), 0)
        table = rows.table_handle().table
        for call in (table.flush_ahead, lambda: next(table.scan())):
            with table.lock:
                ask_to_leave(table, [int(rows.size()) - 1])
                other = Thread(target=call)
                other.start()
                other.join(FEW)
                assert table.pending_erasure is not None
                table.finish_erasures()
            other.join()
        assert sorted(key for _, key in rows_by_key(rows)) == FIRST[:-2].tolist()


def test_a_save_that_a_load_overtakes_saves_the_new_rows(tmp_path) -> None:
    with make(options("ssd", tmp_path), "sgd", tables=1) as rows:
        rows.save_snapshot("empty")
        rows.put(FIRST, torch.ones(len(FIRST), DIM), 0)
        before = rows.table_handle().table
        rows.load_snapshot("empty")
        before.flush_ahead()  # as a save that waited for the load
