"""A save in one thread, while another steps, loads, deletes or saves: hangs, errors, and rows of two steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.embeddings import DIM, ask_to_leave, make, rows_by_key
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.distributed.world import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.row_step import row_step

IDS = torch.arange(50)
FEW = 0.2  # seconds in which a thread that need not wait is done


def pair(path: Path) -> list[MultiTableEmbedding]:
    both = [make(options("host", path), "sgd", name=name, tables=1) for name in ("a", "b")]
    train_together(both)
    for rows in both:
        rows.put(IDS, torch.ones(len(IDS), DIM), 0)
    return both


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_a_group_waits_for_the_step_of_another_thread(tmp_path: Path, background: bool) -> None:
    both, amid = pair(tmp_path), Event()
    tables = [rows.table_handle().snapshots for rows in both]

    def save() -> None:
        amid.wait()
        if saving := save_together(World.of_one(), tables, "kept", background=background):
            saving.wait()

    def train() -> None:
        for rows in both:
            rows.table_handle().table.yield_to_reader()
        pinned = [rows.pin([Lookup(IDS, torch.zeros_like(IDS))]) for rows in both]
        pinned[0].update([torch.ones(len(IDS), DIM)])
        amid.set()
        while not (both[0].table_handle().table.step_gate.is_wanted or saved.done()):
            pass
        pinned[1].update([torch.ones(len(IDS), DIM)])

    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(save)
        row_step([(rows, rows.row_optimizer) for rows in both], "a test", train)
        saved.result()
    assert [table.snapshot("kept").description["step"] for table in tables] == [1, 1]
    for rows in both:
        rows.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_save_for_another_process_waits_for_a_save_of_the_group(tmp_path: Path, reverse: bool) -> None:
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
            asked.append(Thread(target=handles[0].requests.save_between_steps, args=(save,), daemon=True))
            asked[0].start()
            asked[0].join(FEW)

    tables = [handle.snapshots for handle in handles]
    saving = Thread(target=save_together, args=(World.of_one(), tables, "kept"), kwargs={"progress": progress})
    saving.daemon = True  # a deadlock fails this test alone
    saving.start()
    saving.join(30)
    assert not saving.is_alive()
    asked[0].join(30)
    assert not asked[0].is_alive()
    assert tables[0].snapshot("other").description["step"] == 0
    for rows in both:
        rows.close()


def test_rows_that_wait_to_be_erased_are_erased_by_the_thread_that_has_the_lock(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path), "sgd", tables=1) as rows:
        rows.put(IDS, torch.ones(len(IDS), DIM), 0)
        table = rows.table_handle().table
        for call in (table.flush_ahead, lambda: next(table.scan())):
            with table.lock:
                ask_to_leave(table, [int(rows.size()) - 1])
                other = Thread(target=call)
                other.start()
                other.join(FEW)
                assert table.pending_erase is not None
                table.ready()
            other.join()
        assert sorted(key for _, key in rows_by_key(rows)) == IDS[:-2].tolist()


def test_a_save_that_a_load_overtakes_saves_the_new_rows(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path), "sgd", tables=1) as rows:
        rows.save_snapshot("empty")
        rows.put(IDS, torch.ones(len(IDS), DIM), 0)
        before = rows.table_handle().table
        rows.load_snapshot("empty")
        before.flush_ahead()  # as a save that waited for the load
