"""Training in processes of their own that end as a plan says: killed, or in good order."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.stores import options
from support.warm import Child
from tierbed import MultiTableEmbedding
from tierbed.engine.store import rocksdb

# (signal, exit code). A second Ctrl-C may meet Python at any point of its own end, and torch aborts where a thread
# frees a tensor while the interpreter ends.
ENDS = {
    "kill": [(9, 0)],
    "any": [(9, 0)],
    "close": [(9, 0)],
    "error": [(0, 1)],
    "interrupt": [(0, 1), (2, 0)],
    "thread": [(0, 0), (6, 0)],
}
SENT = {"any": signal.SIGKILL, "close": signal.SIGKILL, "interrupt": signal.SIGINT, "thread": signal.SIGTERM}


def embedding_at(path: Path | None, store: str, optimizer: str | None = "adagrad", **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), optimizer, tables=1)


def step(embedding: MultiTableEmbedding) -> int:
    """One step, which depends on its number alone; returns the number. Rows follow from key and number of updates."""
    number = embedding.metrics()["table"]["step"] + 1
    ids = ids_of(number)
    train(embedding, ids, grad=(1.0 + ids % 7)[:, None])
    return number


def ids_of(number: int) -> torch.Tensor:
    return (torch.arange(12) * 7 + number * 5) % 31


def copy_as_killed(source: Path, target: Path) -> Path:
    """Copies folders of stores that may be open, as a kill would leave them. Returns `target`.

    RocksDB's threads may replace files meanwhile. Then copies again, because the copy would mix two moments.
    """

    def list_files() -> list[tuple[Path, int, int]]:
        paths = [path for path in sorted(source.rglob("*")) if not path.is_relative_to(target)]
        return [(path, (found := path.lstat()).st_size, found.st_mtime_ns) for path in paths]

    for _ in range(100):
        with suppress(FileNotFoundError, shutil.Error):  # a file was removed
            before = list_files()
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("SOCKET"))
            if list_files() == before:
                return target
        shutil.rmtree(target)
    raise AssertionError(f"files in {source} change all the time")


def steps(embedding: MultiTableEmbedding, count: int) -> None:
    for _ in range(count):
        step(embedding)


@cache
def rows_after(count: int) -> bytes:
    """All that a table holds that never stopped."""
    with embedding_at(None, "device") as embedding:
        steps(embedding, count)
        return contents(embedding).tobytes()


def holds(embedding: MultiTableEmbedding, count: int) -> None:
    """It is where `count` steps lead."""
    assert embedding.metrics()["table"]["step"] == count
    rows = contents(embedding)
    assert embedding.size() == len(rows)
    assert rows.tobytes() == rows_after(count)


def remarks(caplog: pytest.LogCaptureFixture) -> list[str]:
    warned = (one for one in caplog.records if one.name == "tierbed" and one.levelno >= logging.WARNING)
    said = [record.getMessage() for record in warned]
    caplog.clear()
    return said


def run(path: str, store: str, count: int, saves: list[int], end: str, ahead: int, events: int) -> None:
    """Train `count` steps, save a snapshot after each of `saves`, then end. Tells `events` what is done."""
    embedding = embedding_at(Path(path), store)

    def work() -> None:
        for hinted in range(1, ahead + 1):
            embedding.prefetch(ids_of(hinted), 0)
        for _ in range(count):
            number = step(embedding)
            os.write(events, b"step %d\n" % number)
            if ahead:
                embedding.prefetch(ids_of(number + ahead), 0)
            if number in saves or (end == "any" and number % 4 == 0):
                embedding.save_snapshot(f"s{number}")
                os.write(events, b"saved %d\n" % number)

    while end == "close":  # again and again
        for _ in range(3):
            number = step(embedding)
        if number % 2:
            embedding.save_snapshot(f"s{number}")
        embedding.close()
        os.write(events, b"closed %d\n" % number)
        embedding = embedding_at(Path(path), store)
    if end == "thread":  # the interpreter ends while a thread trains
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        threading.Thread(target=work, daemon=True).start()
        while True:  # pause() would miss a signal that comes just before it
            time.sleep(0.05)
    work()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "_exit":
        os._exit(0)
    if end == "fork":  # the end of a worker must not close the folder of the process that made the embedding
        if os.fork() == 0:
            signal.alarm(600)  # what hangs fails
            del embedding
            gc.collect()
            sys.exit(0)
        _, status = os.wait()
        os.write(events, b"worker ended %d\n" % status)
        step(embedding)
    if end == "error":
        raise RuntimeError("as planned")
    sys.exit(0)


class Warm:
    """Runs plans: `run(**plan, events=file)` in a process of its own, forked from a warm one."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def order(self, plan: dict[str, Any], after: Any = None, number: int = signal.SIGKILL) -> dict[str, Any]:
        """`events`, `signal` and `code` of a child. `after`: events and waits in s until it is sent a signal."""
        ours, theirs = os.pipe()
        with os.fdopen(ours) as events, open(os.devnull, "w") as null:
            try:
                child = Child(_run, self._run, plan, files=[theirs], stdout=null.fileno())
            finally:
                os.close(theirs)
            with child:
                count, *waits = after or (0,)
                happened = [events.readline() for _ in range(count)]
                for wait in waits:
                    time.sleep(wait)
                    os.kill(child.pid, number)
                happened = "".join([*happened, events.read()]).splitlines()
                code = child.wait()
        return {"events": happened, "signal": max(-code, 0), "code": max(code, 0)}


def _run(run: Callable[..., None], plan: dict[str, Any], events: int) -> None:
    run(**plan, events=events)


class Trainer(Warm):
    def __init__(self) -> None:
        super().__init__(run)

    def train(
        self,
        path: Path,
        store: str,
        count: int = 10**9,
        saves: Any = (),
        end: str = "kill",
        after: Any = None,
        ahead: int = 0,
    ) -> list[str]:
        """What the run did, as 'step 3' and 'saved 3'. It announces that many steps `ahead`.

        end: "kill" after the last step, "exit", "_exit", "error", "fork"; or one that `after` a number of events, and
        each of some waits in seconds, is sent a signal: "any" saves every fourth step until it is killed, "close"
        closes and opens every third, "interrupt" is sent SIGINT, "thread" exits by SIGTERM while a thread trains.
        """
        plan = {"path": str(path), "store": store, "count": count, "saves": list(saves), "end": end, "ahead": ahead}
        answer = self.order(plan, after, SENT.get(end, signal.SIGKILL))
        assert (answer["signal"], answer["code"]) in ENDS.get(end, [(0, 0)]), answer
        return answer["events"]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def two_rows_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of RocksDB comes in many chunks though tables are small."""
    monkeypatch.setattr(rocksdb, "SCAN_BYTES", 200)


def returned_until_killed(save: Callable[[Path, int], None], path: Path, seed: int) -> list[int]:
    """The steps that a process reported which runs `save`, and is killed at an instant that depends on the seed."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save(path, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as lines:
        returned = [int(lines.readline())]  # when all is compiled and open
        time.sleep(random.Random(seed).uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        returned += map(int, lines.read().split())
    assert os.WTERMSIG(status) == signal.SIGKILL
    return returned
