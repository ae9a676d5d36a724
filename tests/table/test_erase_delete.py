"""`delete` on every store: rows are erased from every tier, their memory is free, and they start again."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from support.embeddings import ask_to_leave, contents, make, rows_by_key, train
from support.stores import STORES, options
from tierbed import CapacityError, ClosedError, InputError, StoreError
from tierbed.engine.options.lookup import Lookup

stores = pytest.mark.parametrize("store", STORES)


@stores
def test_deleted_rows_are_like_rows_that_were_never_seen(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adam") as embedding, make(options("device"), "adam") as never:
        initial = embedding.get(np.arange(100), 1)
        train(embedding, range(100), 1)
        train(embedding, range(100), 1)
        kept = rows_by_key(embedding)
        assert embedding.delete([3, 3, 50, 200, -1], 1) == 2
        assert embedding.delete([3, 50], 1) == 0
        assert embedding.delete([4], 0) == 0
        assert embedding.size() == 98
        assert embedding.metrics()["table"]["deleted"] == 2
        assert torch.equal(embedding.get([3, 50], 1), initial[[3, 50]])
        assert rows_by_key(embedding) == {row: values for row, values in kept.items() if row[1] not in (3, 50)}
        never.table_handle().table.step = 2
        assert torch.equal(train(embedding, [3, 50], 1), train(never, [3, 50], 1))
        rows = contents(embedding)
        assert rows[np.isin(rows["key"], [3, 50])].tobytes() == contents(never).tobytes()
        assert embedding.size() == 100


@stores
def test_deleted_rows_stay_away_across_runs_and_snapshots(tmp_path: Path, store: str) -> None:
    how = options(store, tmp_path)
    with make(how, "adagrad") as embedding:
        train(embedding, range(200))
        embedding.save_snapshot("all")
        everything = contents(embedding).tobytes()
        assert embedding.delete(np.arange(0, 200, 2), 0) == 100
        embedding.save_snapshot("odd")
    with make(how, "adagrad") as embedding:
        assert embedding.size() == 100
        assert {key for _, key in rows_by_key(embedding)} == set(range(1, 200, 2))
        assert embedding.delete(np.arange(200), 0) == 100
        assert (embedding.size(), len(contents(embedding))) == (0, 0)
        embedding.load_snapshot("odd")
        assert {key for _, key in rows_by_key(embedding)} == set(range(1, 200, 2))
        embedding.load_snapshot("all")
        assert contents(embedding).tobytes() == everything
        assert embedding.size() == 200


@stores
def test_the_room_of_deleted_rows_is_free(tmp_path: Path, store: str) -> None:
    how = options(store, tmp_path, capacity=10)
    with make(how, "sgd") as embedding:
        train(embedding, range(10))
        for gone, fresh in (([0, 1, 2, 77], [20, 21, 22]), ([5], [30])):
            embedding.delete(gone, 0)
            with pytest.raises(CapacityError):
                train(embedding, [*fresh, 40])
            train(embedding, fresh)
        embedding.delete([6], 0)
    with make(how, "sgd") as embedding:
        assert embedding.size() == 9
        train(embedding, [31])
        with pytest.raises(CapacityError):
            train(embedding, [32])


@stores
def test_a_delete_ends_a_step_that_is_under_way(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adam") as embedding:
        train(embedding, range(40))
        ids = torch.arange(30)
        pinned = embedding.pin([Lookup(ids, torch.zeros_like(ids))])
        assert embedding.delete([1, 2], 0) == 2
        with pytest.raises(StoreError, match="no longer pinned"):
            pinned.update([torch.ones(30, embedding.dim)])
        assert embedding.size() == 38
        assert torch.equal(train(embedding, [1, 2]), make(options("device"), "adam", name="new").get([1, 2], 0))


@stores
def test_rows_that_were_brought_up_ahead_can_be_deleted(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "sgd") as embedding, make(options("device"), "sgd", name="plain") as plain:
        for step in range(6):
            ids = torch.arange(step * 5, step * 5 + 40)
            for ahead in range(1, 4):
                embedding.prefetch(ids + 5 * ahead, 0)
            assert torch.equal(train(embedding, ids), train(plain, ids))
            gone = ids[::3] + 7
            assert embedding.delete(gone, 0) == plain.delete(gone, 0)
            assert contents(embedding).tobytes() == contents(plain).tobytes()


def test_rows_are_deleted_without_their_optimizer(tmp_path: Path) -> None:
    with make(options("host", tmp_path), "adam") as embedding:
        train(embedding, range(10))
    with make(options("host", tmp_path)) as embedding:
        assert embedding.delete([1, 2, 3], 0) == 3
    with make(options("host", tmp_path), "adam") as embedding:
        assert embedding.size() == 7


def test_threads_delete_and_read_at_once() -> None:
    embedding = make(options("cached_host"), "sgd")
    train(embedding, range(400))
    initial = make(options("device"), "sgd", name="new").get(range(400), 0)
    counts = []
    threads = [
        threading.Thread(target=lambda part=part: counts.append(embedding.delete(range(part, 400, 4), 0)))
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        embedding.get(range(400), 0)
    for thread in threads:
        thread.join()
    assert counts == [100] * 4
    assert torch.equal(embedding.get(range(400), 0), initial)


def test_ids_that_are_no_rows_are_passed_over() -> None:
    embedding = make(options("device"), "sgd", padding_idx=3)
    train(embedding, range(5))
    assert embedding.delete([3, 4], 0) == 1
    with pytest.raises(InputError, match="table id 7 at position 0"):
        embedding.delete([1], 7)
    with pytest.raises(InputError, match="convert them with"):
        embedding.delete(torch.ones(2), 0)
    assert embedding.size() == 3
    embedding.close()
    with pytest.raises(ClosedError):
        embedding.delete([1], 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_while_rows_leave_loses_no_table(error: type[BaseException]) -> None:
    def fail(step: int) -> None:
        if error is MemoryError:
            raise MemoryError
        signal.raise_signal(signal.SIGINT)  # comes when they left

    with make(options("host"), "sgd") as embedding:
        embedding.put(range(9), torch.ones(9, embedding.dim), 0)
        table = embedding.table_handle().table
        ask_to_leave(table, [3, 4])
        before, table.before_write = table.before_write, fail
        with pytest.raises(error):
            embedding.get([5], 0)
        assert table.failure is None
        assert (table.pending_erasure is None) == (error is KeyboardInterrupt)
        table.before_write = before
        assert embedding.get([5], 0).tolist() == [[1.0] * embedding.dim]
        assert embedding.size() == 7


def test_a_table_that_was_closed_goes_at_once() -> None:
    embedding = make(options("host"), "sgd")
    train(embedding, range(5))
    table = weakref.ref(embedding.table_handle().table)
    gc.disable()
    try:
        embedding.close()
        assert table() is None
    finally:
        gc.enable()
