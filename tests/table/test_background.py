"""Saving rows in the background changes no training, and training no save."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from support.background_saves import Writer, no_thread_is_left, saving, until, waits_of
from support.embeddings import contents, make, train
from support.images import change, changed, small_chunks, table_of
from support.stores import STORES, options
from tierbed import ClosedError, StoreError
from tierbed.engine.row_format import Chunks

__all__ = ["no_thread_is_left", "small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")
stores = pytest.mark.parametrize("store", STORES)


@stores
@pytest.mark.parametrize("kept_bytes", [1, 40_000, 1 << 28])
@pytest.mark.rotated("kept_bytes")
def test_training_goes_on_while_a_thread_saves(tmp_path: Path, store: str, kept_bytes: int) -> None:
    with saving(options(store, tmp_path / "one"), kept_bytes, changes=4, allowed=50) as now:
        threading.Timer(0.05, now.writer.let_go).start()
        for number in range(4, 12):
            change(now.embedding, number)
        now.check()
        for number in range(12, 14):
            change(now.embedding, number)
        rows = contents(now.embedding).tobytes()
    assert rows == changed(options(store, tmp_path / "other"), range(14))


@stores
def test_an_error_of_the_writer_ends_the_save_alone(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    with make(options(store, tmp_path / "one"), "adagrad") as embedding:
        for number in range(3):
            change(embedding, number)
        going = threading.Event()

        def write(chunks: Chunks) -> None:
            next(chunks)
            going.wait()
            raise OSError("no room")

        save = table_of(embedding).observers.save_in_background("snapshot 'one'", write, max_bytes=1)
        if store in ("device", "host", "cached_host"):
            train(embedding, [1, 2, 3])
            stepping = threading.Thread(target=change, args=(embedding, 3))
            stepping.start()
            until(lambda: waits_of(embedding) == 1)
            going.set()
            stepping.join()
        going.set()
        with pytest.raises(OSError, match="no room"):
            save.wait()
        assert save.done
        assert "snapshot 'one' was not saved: no room" in caplog.text
        assert table_of(embedding).observers.finish_saving() is None  # the error was raised before
        expected, again = contents(embedding).tobytes(), Writer().let_go()
        assert table_of(embedding).observers.save_in_background("snapshot 'two'", again).wait()
        assert again.rows == expected


def test_an_error_that_nobody_waited_for_is_told_in_the_end(tmp_path: Path) -> None:
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)

        def write(chunks: Chunks) -> None:
            raise OSError("no room")

        observers = table_of(embedding).observers
        save = observers.save_in_background("snapshot 'one'", write)
        assert isinstance(observers.finish_saving(), OSError)
        assert save.done
        assert observers.finish_saving() is None


def test_the_thread_that_saves_does_not_wait_for_itself_and_is_nicer_than_those_that_train() -> None:
    """Garbage may be collected in it, and close the table."""
    nice = []
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)
        expected, writer = contents(embedding).tobytes(), Writer().let_go()

        def write(chunks: Chunks) -> None:
            assert table_of(embedding).observers.finish_saving() is None
            nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            writer(chunks)

        table_of(embedding).observers.save_in_background("snapshot 'one'", write).wait()
        assert writer.rows == expected
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert nice == [min(19, ours + 10)]


@stores
def test_a_table_that_closes_ends_the_save(tmp_path: Path, store: str) -> None:
    with contextlib.suppress(ClosedError), saving(options(store, tmp_path), 1, allowed=3) as now:
        now.writer.began.wait()
        table_of(now.embedding).close()
        now.writer.let_go()
        with pytest.raises(ClosedError, match="before all of them were saved"):
            now.save.wait()


@stores
def test_a_close_beside_a_reader(tmp_path: Path, store: str) -> None:
    """It meets the reader at any place."""
    for delay in np.linspace(0, 0.02, 5):
        with contextlib.suppress(ClosedError), make(options(store, tmp_path, open="fresh"), "adagrad") as embedding:
            train(embedding, range(2000))
            table, writer = table_of(embedding), Writer().let_go()
            save = table.observers.save_in_background("snapshot 'one'", writer)
            time.sleep(delay)
            table.close()
            save.wait()


def test_there_is_one_save_at_a_time() -> None:
    with saving(options("device")) as now:
        observers = table_of(now.embedding).observers
        assert not now.save.done
        assert not now.save.wait(0)
        for other in (
            observers.open_image,
            observers.check_not_saving,
            lambda: observers.track_changes("1" * 32) or observers.read_changes("1" * 32),
            lambda: observers.save_in_background("snapshot 'two'", now.writer),
        ):
            with pytest.raises(StoreError, match=r"snapshot 'one' is still being saved .*wait\(\)"):
                other()
        now.check()
        observers.check_not_saving()
        observers.open_image().close()


@stores
def test_changes_during_a_save_are_not_in_it(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        table, writer = table_of(embedding), Writer()
        table.observers.track_changes("1" * 32)
        train(embedding, [1, 2])
        save = table.observers.save_in_background("snapshot 'one'", writer)
        train(embedding, [2, 3])
        writer.let_go()
        save.wait()

        def names(since: str) -> list[int]:
            found = table.observers.read_changes(since)
            assert found is not None
            return sorted(key for _, rows, _ in found for key in rows["key"].tolist())

        if store == "host":  # it failed to become the one that changes are noted since
            assert names("1" * 32) == [1, 2, 3]
        table.observers.record_save("2" * 32)
        assert names("2" * 32) == ([] if store == "host" else [2, 3])
