"""Ctrl-C at any instant, and a writer beside a save or a close: rows are right, or the store says that they are not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from support.embeddings import DIM, attach, make, rows_by_key, train
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, StoreError

ACTIONS: dict[str, Callable[[MultiTableEmbedding, str], object]] = {
    "iterate": lambda embedding, name: rows_by_key(embedding),
    "save": lambda embedding, name: embedding.save_snapshot(name),
    "load": lambda embedding, name: embedding.load_snapshot("base"),
    "train": lambda embedding, name: train(embedding, list(range(500)), grad=0.0),
}


def put(embedding: MultiTableEmbedding, keys: range, value: float) -> None:
    embedding.put(torch.tensor(keys), torch.full((len(keys), DIM), value), 0)


def values_of(embedding: MultiTableEmbedding) -> set[float]:
    return {value for row in rows_by_key(embedding).values() for value in row}


class Interrupts:
    """Sends SIGINT every 0.7 ms; while `armed`, the next one raises KeyboardInterrupt."""

    armed = False

    def __enter__(self) -> Interrupts:
        self._done = threading.Event()
        self._before = signal.signal(signal.SIGINT, self._arrive)
        self._sender = threading.Thread(target=self._send)
        self._sender.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._sender.join()
        signal.signal(signal.SIGINT, self._before)

    def cut(self, action: Callable[[], object]) -> bool:
        """Run it with interrupts armed; whether one cut it."""
        try:
            self.armed = True
            action()
            self.armed = False  # here, where one that still arrives is caught
        except KeyboardInterrupt:
            return True
        except BaseException:
            self.armed = False
            raise
        return False

    def _send(self) -> None:
        while not self._done.wait(0.0007):
            os.kill(os.getpid(), signal.SIGINT)

    def _arrive(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("store", STORES)
def test_ctrl_c_at_any_instant_leaves_whole_puts(tmp_path: Path, store: str) -> None:
    path = None if store in ("device", "host") else tmp_path
    with make(options(store, path), tables=1) as embedding:
        value, came = 0, 0
        put(embedding, range(300), 0.0)
        with Interrupts() as interrupts:
            while came < 40:
                value += 1
                came += interrupts.cut(partial(put, embedding, range(value % 7, 300), float(value)))
        rows = rows_by_key(embedding)
        assert len(rows) == embedding.size()
        assert all(len(set(row)) == 1 for row in rows.values()), "a row of two puts"
        # every put covers keys 7 to 299, so that these are of the latest one that took place
        assert len({row[0] for (_, key), row in rows.items() if key >= 7}) == 1
        put(embedding, range(400), -1.0)
        assert values_of(embedding) == {-1.0}


# an interrupt between open() and `with` leaves a file to the garbage collector, which says so
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("store", ["cached_host", "ssd_host"])
def test_ctrl_c_in_any_action_loses_no_row(tmp_path: Path, store: str, action: str) -> None:
    def make_it(**more: str) -> MultiTableEmbedding:
        made = make(options(store, tmp_path, **more), tables=1)
        attach(made, "sgd", weight_decay=0.0)
        return made

    embedding = make_it()
    put(embedding, range(2000), 1.0)
    embedding.save_snapshot("base")
    came, count = 0, 0
    with Interrupts() as interrupts:
        while came < 6:
            count += 1
            try:
                came += interrupts.cut(partial(ACTIONS[action], embedding, f"s{count}"))
            except StoreError:  # a load that was cut between two tables closes the embedding, and says so
                assert action == "load"
                embedding = make_it()
    assert len(rows_by_key(embedding)) == embedding.size() == 2000
    assert values_of(embedding) == {1.0}
    embedding.close()
    with make_it(open="error") as again:
        assert len(rows_by_key(again)) == 2000


@pytest.mark.parametrize("store", ["host", "cached_host", "ssd_host"])
def test_a_handler_that_saves_a_checkpoint_never_saves_half_a_put(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), tables=1) as embedding:
        put(embedding, range(400), 0.0)
        saves = iter(range(1000))
        before = signal.signal(signal.SIGTERM, lambda number, frame: embedding.save_snapshot(f"s{next(saves)}"))
        sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        sender.start()
        for value in range(1, 60):
            put(embedding, range(400), float(value))
        sender.join()
        put(embedding, range(400), 100.0)
        signal.signal(signal.SIGTERM, before)
        assert next(saves) == 1
        embedding.load_snapshot("s0")
        assert len(values_of(embedding)) == 1


@pytest.mark.parametrize("store", STORES)
def test_a_snapshot_or_a_close_beside_a_writing_thread_holds_one_step(tmp_path: Path, store: str) -> None:
    embedding = make(options(store, tmp_path), tables=1)
    put(embedding, range(500), 0.0)

    def write() -> None:
        with contextlib.suppress(StoreError):  # closed
            for value in range(1, 10_000):
                put(embedding, range(500), float(value))

    writer = threading.Thread(target=write)
    writer.start()
    for name in "ab":
        embedding.save_snapshot(name)
    time.sleep(0.02)
    embedding.close()
    writer.join()
    with make(options(store, tmp_path, open="error"), tables=1) as again:
        for name in ("", *"ab"):
            if name:
                again.load_snapshot(name)
            assert len(values_of(again)) == 1
            assert again.size() == 500
