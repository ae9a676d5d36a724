"""Saving rows in the background changes no training, and training no save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from embeddings import DIM, STORES, contents, make, options, train
from forked import in_process
from images import change, changed, in_memory, joined, small_chunks, table_of
from stored import run_python

from tierbed.engine import ClosedError, MultiTableEmbedding, StoreError, background
from tierbed.engine.store.contract import Chunks
from tierbed.engine.store.image import MemoryImage

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")
stores = pytest.mark.parametrize("store", STORES)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for writer in Writer.all:
        writer.let_go()
    Writer.all.clear()


class Writer:
    """Keeps what it is given; waits before it reads on until it may."""

    all: ClassVar[list[Writer]] = []

    def __init__(self, allowed: int = 0) -> None:
        self.all.append(self)
        self.rows = b""
        self.allowed = threading.Semaphore(allowed)
        self.began = threading.Event()

    def __call__(self, chunks: Chunks) -> None:
        def slowly() -> Chunks:
            while True:
                self.began.set()
                self.allowed.acquire()
                if (chunk := next(chunks, None)) is None:
                    return
                yield chunk

        self.rows = joined(slowly())

    def let_go(self) -> None:
        self.allowed.release(1 << 20)


@stores
@pytest.mark.parametrize("kept_bytes", [1, 40_000, 1 << 28])
def test_training_goes_on_while_a_thread_saves(tmp_path: Path, store: str, kept_bytes: int) -> None:
    with make(options(store, tmp_path / "one"), "adagrad") as embedding:
        for number in range(4):
            change(embedding, number)
        expected, writer = contents(embedding).tobytes(), Writer(allowed=50)
        save = table_of(embedding).save_in_background("'one'", writer, kept_bytes)
        threading.Timer(0.05, writer.let_go).start()
        for number in range(4, 12):
            change(embedding, number)
        assert save.wait()
        assert save.done
        assert writer.rows == expected
        for number in range(12, 14):
            change(embedding, number)
        rows = contents(embedding).tobytes()
    assert rows == changed(options(store, tmp_path / "other"), range(14))


def waits_of(embedding: MultiTableEmbedding) -> int:
    image = table_of(embedding)._image
    assert isinstance(image, MemoryImage)
    return image.waits


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


CALLS: dict[str, Callable[[MultiTableEmbedding], object]] = {
    "step": lambda embedding: train(embedding, range(50)),
    "put": lambda embedding: embedding.put([1, 2], torch.ones(2, DIM), 0),
    "delete": lambda embedding: embedding.delete([1, 2], 0),
}


@in_memory
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_waits_where_too_much_is_kept(
    tmp_path: Path, store: str, call: Callable[[MultiTableEmbedding], object]
) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        change(embedding, 0)
        expected, writer = contents(embedding).tobytes(), Writer()
        save = table_of(embedding).save_in_background("'one'", writer, kept_bytes=1)
        train(embedding, range(50))  # nothing was kept yet
        rows = contents(embedding).tobytes()
        waiting = threading.Thread(target=call, args=(embedding,))
        waiting.start()
        until(lambda: waits_of(embedding) == 1)
        assert embedding.get([1], 0).shape == (1, DIM)  # who only reads does not wait
        assert contents(embedding).tobytes() == rows
        writer.let_go()
        waiting.join(60)
        assert not waiting.is_alive()
        assert save.wait(60)
        assert writer.rows == expected
        assert contents(embedding).tobytes() != rows


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

        save = table_of(embedding).save_in_background("snapshot 'one'", write, kept_bytes=1)
        if store in ("device", "host", "cached_host"):
            train(embedding, [1, 2, 3])
            stepping = threading.Thread(target=change, args=(embedding, 3))
            stepping.start()
            until(lambda: waits_of(embedding) == 1)
            going.set()
            stepping.join(60)
            assert not stepping.is_alive()
        going.set()
        with pytest.raises(OSError, match="no room"):
            save.wait()
        assert save.done
        assert "snapshot 'one' was not saved: no room" in caplog.text
        assert table_of(embedding).finish_saving() is None  # it was told
        again = Writer()
        again.let_go()
        expected = contents(embedding).tobytes()
        assert table_of(embedding).save_in_background("snapshot 'two'", again).wait()
        assert again.rows == expected


def test_an_error_that_nobody_waited_for_is_told_in_the_end(tmp_path: Path) -> None:
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)

        def write(chunks: Chunks) -> None:
            raise OSError("no room")

        save = table_of(embedding).save_in_background("snapshot 'one'", write)
        error = table_of(embedding).finish_saving()
        assert isinstance(error, OSError)
        assert save.done
        assert table_of(embedding).finish_saving() is None


def test_the_thread_that_saves_does_not_wait_for_itself() -> None:
    """Garbage may be collected in it, and close the table."""
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)
        expected, writer = contents(embedding).tobytes(), Writer(allowed=1 << 20)

        def write(chunks: Chunks) -> None:
            assert table_of(embedding).finish_saving() is None
            writer(chunks)

        table_of(embedding).save_in_background("snapshot 'one'", write).wait()
        assert writer.rows == expected


@stores
def test_a_table_that_closes_ends_the_save(tmp_path: Path, store: str) -> None:
    embedding = make(options(store, tmp_path), "adagrad")
    change(embedding, 0)
    table, writer = table_of(embedding), Writer(allowed=3)
    save = table.save_in_background("snapshot 'one'", writer, kept_bytes=1)
    writer.began.wait()
    table.close()
    writer.let_go()
    with pytest.raises(ClosedError, match="before all of them were saved"):
        save.wait()
    with contextlib.suppress(ClosedError):
        embedding.close()


@stores
def test_a_close_beside_a_reader(tmp_path: Path, store: str) -> None:
    """It meets the reader at any place."""
    for delay in np.linspace(0, 0.02, 8):
        embedding = make(options(store, tmp_path, open="fresh"), "adagrad")
        train(embedding, range(2000))
        table, writer = table_of(embedding), Writer(allowed=1 << 20)
        save = table.save_in_background("snapshot 'one'", writer)
        time.sleep(delay)
        table.close()
        with contextlib.suppress(ClosedError):
            save.wait()
        with contextlib.suppress(ClosedError):
            embedding.close()


@pytest.mark.parametrize("waits", ["wait", "finish"])
def test_a_save_does_not_rest_while_somebody_waits(monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    monkeypatch.setattr(background, "REST", 1e9)
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)
        save = table_of(embedding).save_in_background("snapshot 'one'", writer := Writer(allowed=1 << 20))
        getattr(save, waits)()
        assert writer.rows == contents(embedding).tobytes()


def test_a_save_does_not_rest_at_the_end_of_the_process() -> None:
    script = (
        "import threading; from embeddings import make, options, train; from tierbed.engine import background\n"
        "background.REST = 1e9\n"
        "def write(chunks):\n"
        "    threading.main_thread().join()\n"
        "    print(sum(len(rows) for _, rows in chunks))\n"
        "embedding = make(options('device'), 'sgd'); train(embedding, range(999))\n"
        "embedding._table().save_in_background('it', write)\n"
    )
    assert run_python(script) == "999\n"


def test_a_save_that_ended_holds_nobody_up() -> None:
    with make(options("device"), "adagrad") as embedding:
        table, writer = table_of(embedding), Writer(allowed=1 << 20)
        table.save_in_background("snapshot 'one'", writer).wait()
        with table.lock:
            other = threading.Thread(target=table.finish_saving)
            other.start()
            other.join(60)
            assert not other.is_alive()


@stores
@pytest.mark.parametrize("waits", ["wait", "finish"])
def test_a_wait_holding_the_lock_lets_the_save_go_on(tmp_path: Path, store: str, waits: str) -> None:
    """As in the handler of a signal that came in a step."""
    with make(options(store, tmp_path), "adagrad") as embedding:
        change(embedding, 0)
        table, writer = table_of(embedding), Writer()
        with table.lock, table.lock:
            save = table.save_in_background("snapshot 'one'", writer)
            writer.let_go()
            getattr(save, waits)()
        assert writer.rows == contents(embedding).tobytes()


def test_a_wait_for_some_time_does_not_wait_for_the_lock() -> None:
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)
        table, writer = table_of(embedding), Writer()
        save = table.save_in_background("snapshot 'one'", writer)
        waits = threading.Thread(target=save.wait, args=(0.01,))
        with table.lock:  # as a long step holds it
            waits.start()
            waits.join(60)
            assert not waits.is_alive()
        writer.let_go()


def test_there_is_one_save_at_a_time() -> None:
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)
        table, writer = table_of(embedding), Writer()
        table.track_changes("1" * 32)
        save = table.save_in_background("snapshot 'one'", writer)
        assert not save.done
        assert not save.wait(0)
        for other in (
            table.image,
            table.check_not_saving,
            lambda: table.changed("1" * 32),
            lambda: table.save_in_background("snapshot 'two'", writer),
        ):
            with pytest.raises(StoreError, match=r"snapshot 'one' is still being saved .*wait\(\)"):
                other()
        writer.let_go()
        save.wait()
        table.check_not_saving()
        table.image().close()


@stores
def test_changes_during_a_save_are_not_in_it(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        table, writer = table_of(embedding), Writer()
        table.track_changes("1" * 32)
        train(embedding, [1, 2])
        save = table.save_in_background("snapshot 'one'", writer)
        train(embedding, [2, 3])
        writer.let_go()
        save.wait()

        def names(since: str) -> list[int]:
            found = table.changed(since)
            assert found is not None
            return sorted(key for _, rows, _ in found for key in rows["key"].tolist())

        if store == "host":  # it failed to become the one that changes are noted since
            assert names("1" * 32) == [1, 2, 3]
        table.changes_saved("2" * 32)
        assert names("2" * 32) == ([] if store == "host" else [2, 3])


def test_the_thread_that_saves_is_nicer_than_those_that_train() -> None:
    found = []

    def write(chunks: Chunks) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with make(options("device"), "adagrad") as embedding:
        table_of(embedding).save_in_background("snapshot 'one'", write).wait()
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert found == [min(19, ours + 10)]


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C comes as soon as the condition holds."""

    def interrupt() -> None:
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


def test_ctrl_c_while_waiting_ends_the_wait_alone() -> None:
    with make(options("device"), "adagrad") as embedding:
        change(embedding, 0)
        expected, writer = contents(embedding).tobytes(), Writer()
        save = table_of(embedding).save_in_background("snapshot 'one'", writer)
        with interrupted_when(save._hurry.is_set):
            save.wait()
        assert not save.done
        change(embedding, 1)
        writer.let_go()
        assert save.wait()
        assert writer.rows == expected


@in_memory
def test_ctrl_c_while_a_step_waits_leaves_the_rows(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        change(embedding, 0)
        expected, writer = contents(embedding).tobytes(), Writer()
        save = table_of(embedding).save_in_background("snapshot 'one'", writer, kept_bytes=1)
        train(embedding, range(20))
        rows = contents(embedding).tobytes()
        with interrupted_when(lambda: waits_of(embedding) > 0):
            train(embedding, range(30))
        assert contents(embedding).tobytes() == rows
        writer.let_go()
        assert save.wait()
        assert writer.rows == expected
        train(embedding, range(30))
        assert table_of(embedding).step == 3


def _wait_in_a_child(path: Path) -> str:
    with make(options("device", path), "adagrad") as embedding:
        change(embedding, 0)
        writer = Writer()
        save = table_of(embedding).save_in_background("snapshot 'one'", writer)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save.wait()
            except StoreError as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        writer.let_go()
        save.wait()
        return os.read(reading, 1000).decode().replace(str(os.getpid()), "ours")


def test_a_forked_child_does_not_wait(tmp_path: Path) -> None:
    said = in_process(_wait_in_a_child, tmp_path)
    assert said == "snapshot 'one' is being saved by process ours; wait for it there"
