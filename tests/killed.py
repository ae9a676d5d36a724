"""Training in processes of their own, forked from a warm one, that end as a plan says: killed, or in good order."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from embeddings import contents, make, options, train

from tierbed.engine import MultiTableEmbedding


def embedding_at(path: Path | None, store: str, optimizer: str | None = "adagrad", **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), optimizer, tables=1)


def step(embedding: MultiTableEmbedding) -> int:
    """One step, which depends on its number alone; returns the number. Rows follow from key and number of updates."""
    number = embedding.metrics()["table"]["step"] + 1
    ids = (torch.arange(12) * 7 + number * 5) % 31
    train(embedding, ids, grad=(1.0 + ids % 7)[:, None])
    return number


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
    """What was logged since the last call."""
    said = [record.getMessage() for record in caplog.records if record.name == "tierbed"]
    caplog.clear()
    return said


def run(path: str, store: str, count: int, saves: list[int], end: str, events: int) -> None:
    """Train `count` steps, save a snapshot after each of `saves`, then end. Tells `events` what is done."""
    embedding = embedding_at(Path(path), store)
    for _ in range(count):
        number = step(embedding)
        os.write(events, b"step %d\n" % number)
        if number in saves or (end == "any" and number % 4 == 0):
            embedding.save_snapshot(f"s{number}")
            os.write(events, b"saved %d\n" % number)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fork":  # the end of a worker must not close the folder of the process that made the embedding
        if os.fork() == 0:
            signal.alarm(5)  # what hangs fails
            del embedding
            gc.collect()
            sys.exit(0)
        _, status = os.wait()
        os.write(events, b"worker ended %d\n" % status)
        step(embedding)
    if end == "error":
        raise RuntimeError("as planned")
    sys.exit(0)


def serve() -> None:
    """Fork a child for each plan on standard input, kill it where `after` asks for that, and print its events."""
    embedding_at(None, "device")  # the first optimizer imports half of torch
    for line in sys.stdin:
        plan = json.loads(line)
        after = plan.pop("after")
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            sys.stdin.close()
            run(**plan, events=theirs)
        os.close(theirs)
        with os.fdopen(ours) as events:
            happened = []
            if after is not None:
                happened = [events.readline() for _ in range(after[0])]
                time.sleep(after[1])
                os.kill(child, signal.SIGKILL)
            happened = "".join([*happened, events.read()]).splitlines()
        _, status = os.waitpid(child, 0)
        print(json.dumps({"events": happened, "signal": status & 0x7F}), flush=True)


class Trainer:
    """The warm process."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", "import killed; killed.serve()"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(
        self, path: Path, store: str, count: int = 10**9, saves: Any = (), end: str = "kill", after: Any = None
    ) -> list[str]:
        """What the run did, as 'step 3' and 'saved 3'.

        end: "kill" after the last step, "exit", "error", "fork", or "any": it saves every fourth step until it is
        killed, `after` a number of events and some seconds.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        plan = {"path": str(path), "store": store, "count": count, "saves": list(saves), "end": end, "after": after}
        print(json.dumps(plan), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert answer["signal"] == (signal.SIGKILL if end in ("kill", "any") else 0), answer
        return answer["events"]

    def close(self) -> None:
        self._process.communicate()
