"""Which threads wait for a save in the background, and which do not."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from support.background_saves import Writer, no_thread_is_left, saving, until, waits_of
from support.embeddings import DIM, contents, make, pin_and_update, train
from support.forked import in_process
from support.images import change, in_memory, small_chunks, table_of
from support.scripts import run_script
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, StoreError
from tierbed.engine.optim.kernel import load_kernels
from tierbed.engine.table import background_save
from tierbed.snapshots.store import group

__all__ = ["no_thread_is_left", "small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")
stores = pytest.mark.parametrize("store", STORES)


CALLS: dict[str, Callable[[MultiTableEmbedding], object]] = {
    "step": lambda embedding: train(embedding, range(50)),
    "put": lambda embedding: embedding.put([1, 2], torch.ones(2, DIM), 0),
    "delete": lambda embedding: embedding.delete([1, 2], 0),
}


@in_memory
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.rotated("call")
def test_a_call_waits_where_too_much_is_kept(
    tmp_path: Path, store: str, call: Callable[[MultiTableEmbedding], object]
) -> None:
    with saving(options(store, tmp_path), 1) as now:
        embedding = now.embedding
        train(embedding, range(50))  # nothing was kept yet
        rows = contents(embedding).tobytes()
        waiting = threading.Thread(target=call, args=(embedding,))
        waiting.start()
        until(lambda: waits_of(embedding) == 1)
        assert embedding.get([1], 0).shape == (1, DIM)  # who only reads does not wait
        assert contents(embedding).tobytes() == rows
        now.writer.let_go()
        waiting.join()
        now.check()
        assert contents(embedding).tobytes() != rows


@pytest.mark.parametrize("waits", ["wait", "finish"])
def test_a_save_does_not_rest_while_somebody_waits(monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    monkeypatch.setattr(background_save, "PAUSE_RATIO", 1e9)
    with saving(options("device")) as now:
        now.writer.let_go()
        getattr(now.save, waits)()
        now.check()


def test_a_save_does_not_rest_at_the_end_of_the_process() -> None:
    script = (
        "import threading; from support.embeddings import make, train; from support.stores import options\n"
        "from tierbed.engine.table import background_save\n"
        "background_save.PAUSE_RATIO = 1e9\n"
        "def write(chunks):\n"
        "    threading.main_thread().join()\n"
        "    print(sum(len(rows) for _, rows in chunks))\n"
        "embedding = make(options('device'), 'sgd'); train(embedding, range(999))\n"
        "embedding.table_handle().table.observers.save_in_background('it', write)\n"
    )
    assert run_script(script, whole=True).stdout == "999\n"


def test_a_save_that_ended_holds_nobody_up() -> None:
    with make(options("device"), "adagrad") as embedding:
        table, writer = table_of(embedding), Writer().let_go()
        table.observers.save_in_background("snapshot 'one'", writer).wait()
        with table.lock:
            other = threading.Thread(target=table.observers.finish_saving)
            other.start()
            other.join()


@stores
@pytest.mark.parametrize("waits", ["wait", "finish"])
@pytest.mark.rotated("waits")
def test_a_wait_holding_the_lock_lets_the_save_go_on(tmp_path: Path, store: str, waits: str) -> None:
    """As in the handler of a signal that came in a step."""
    with make(options(store, tmp_path), "adagrad") as embedding:
        change(embedding, 0)
        table, writer = table_of(embedding), Writer()
        with table.lock, table.lock:
            save = table.observers.save_in_background("snapshot 'one'", writer)
            writer.let_go()
            getattr(save, waits)()
        assert writer.rows == contents(embedding).tobytes()


def test_a_wait_for_some_time_does_not_wait_for_the_lock() -> None:
    with saving(options("device")) as now:
        waits = threading.Thread(target=now.save.wait, args=(0.01,))
        with table_of(now.embedding).lock:  # as a long step holds it
            waits.start()
            waits.join()


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
    with saving(options("device")) as now:
        with interrupted_when(now.save._hurry_event.is_set):
            now.save.wait()
        assert not now.save.done
        change(now.embedding, 1)
        now.check()


@in_memory
def test_ctrl_c_while_a_step_waits_leaves_the_rows(tmp_path: Path, store: str) -> None:
    with saving(options(store, tmp_path), 1) as now:
        train(now.embedding, range(20))
        rows = contents(now.embedding).tobytes()
        with interrupted_when(lambda: waits_of(now.embedding) > 0):
            pin_and_update(now.embedding, range(30))
        assert contents(now.embedding).tobytes() == rows
        now.check()
        train(now.embedding, range(30))
        assert table_of(now.embedding).step == 3


def _wait_in_a_child(path: Path) -> str:
    with saving(options("device", path)) as now:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                now.save.wait()
            except StoreError as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        now.check()
        return os.read(reading, 1000).decode().replace(str(os.getpid()), "ours")


def test_a_forked_child_does_not_wait(tmp_path: Path) -> None:
    said = in_process(_wait_in_a_child, tmp_path)
    assert said == "snapshot 'one' is being saved by process ours; wait for it there"


def test_a_close_by_the_garbage_collector_never_waits_for_a_save_that_needs_this_thread(tmp_path: Path) -> None:
    embedding = make(options("host", tmp_path), "adagrad")
    train(embedding, range(20))
    before = contents(embedding).tobytes()
    with group._groups_lock:  # as in the middle of another embedding's save, where garbage may be collected
        embedding.save_snapshot("s", background=True)
        del embedding
        gc.collect()
        (closing,) = [thread for thread in threading.enumerate() if thread.name == "tierbed-close"]
    closing.join()
    with make(options("host", tmp_path), "adagrad") as embedding:
        assert contents(embedding).tobytes() == before
        embedding.load_snapshot("s")
        assert contents(embedding).tobytes() == before


def test_an_embedding_may_be_collected_inside_of_a_parse(tmp_path: Path) -> None:
    load_kernels.cache_clear()  # a close that needs the kernels would parse them
    embedding = make(options("host", tmp_path), "adagrad")
    train(embedding, range(20))
    cycle: list[object] = [embedding]
    cycle.append(cycle)
    threshold = gc.get_threshold()
    gc.disable()
    del embedding, cycle
    gc.set_threshold(10)
    gc.enable()
    try:
        ast.parse(f"x = [{'f(a, b), ' * 5000}]")
    finally:
        gc.set_threshold(*threshold)
    with make(options("host", tmp_path, open="error"), "adagrad") as embedding:
        assert embedding.size() == 20
