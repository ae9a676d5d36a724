"""Training in processes of their own, forked from a warm one, that end as a plan says: killed, or in good order."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from embeddings import make, options, train

from tierbed.engine import MultiTableEmbedding


def embedding_at(path: Path | None, store: str, optimizer: str | None = "adagrad", **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), optimizer, tables=1)


def step(embedding: MultiTableEmbedding) -> int:
    """One step, which depends on its number alone; returns the number. Rows follow from key and number of updates."""
    number = embedding.metrics()["table"]["step"] + 1
    ids = (torch.arange(24) * 7 + number * 5) % 97
    train(embedding, ids, grad=(1.0 + ids % 7)[:, None])
    return number


def run(path: str, store: str, steps: int, saves: list[int], end: str, events: int) -> None:
    """Train `steps` steps, save a snapshot after each of `saves`, then end. Tells `events` what is done."""
    embedding = embedding_at(Path(path), store)
    for _ in range(steps):
        number = step(embedding)
        os.write(events, b"step %d\n" % number)
        if number in saves or (end == "any" and number % 4 == 0):
            embedding.save_snapshot(f"s{number}")
            os.write(events, b"saved %d\n" % number)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fork":  # the end of a worker must not close the folder of the process that made the embedding
        if os.fork() == 0:
            del embedding
            gc.collect()
            sys.exit(0)
        os.wait()
        step(embedding)
    if end == "error":
        raise RuntimeError("as planned")
    sys.exit(0)


def serve() -> None:
    """Fork a child for each plan on standard input, kill it after `after` seconds if given, and print its events."""
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
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        with os.fdopen(ours) as events:
            happened = events.read().splitlines()
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
            stderr=subprocess.DEVNULL,  # of the planned exception
            text=True,
        )

    def train(
        self, path: Path, store: str, steps: int = 10**9, saves: Any = (), end: str = "kill", after: float | None = None
    ) -> list[str]:
        """What the run did, as 'step 3' and 'saved 3'. With `after`, it saves every fourth step until it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        plan = {"path": str(path), "store": store, "steps": steps, "saves": list(saves), "end": end, "after": after}
        print(json.dumps(plan), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert answer["signal"] == (signal.SIGKILL if end in ("kill", "any") else 0)
        return answer["events"]

    def close(self) -> None:
        self._process.communicate()
