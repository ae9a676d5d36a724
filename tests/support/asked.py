"""Trainers in processes of their own, which a test asks for snapshots, lets end, and kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from support.forked import with_pipe
from support.killed import embedding_at, ids_of, step, steps
from tierbed import MultiTableEmbedding

STORE = "rows"  # the folder of the embedding in the path of a trainer


class Training:
    """A process that calls `way(embedding, pipe, *more)` after a first step, then closes the embedding."""

    def __init__(self, way: Callable[..., Any], path: Path, store: str = "device", *more: Any) -> None:
        self.store = path / STORE
        self._child, self._pipe = with_pipe(_run, way, path, store, more)
        self.pid = self._child.pid
        assert self.says() == "ready"

    def says(self) -> Any:
        return self._pipe.recv()

    def end(self) -> Any:
        """Let it go on to its end; returns what `way` did."""
        self._pipe.send("go on")
        result = self.says()
        assert self._child.wait() == 0
        self._pipe.close()
        return result

    def kill(self) -> None:
        self._child.kill()
        self._pipe.close()


def _run(way: Callable[..., Any], path: Path, store: str, more: tuple[Any, ...], pipe: Connection) -> None:
    embedding = embedding_at(path, store)
    steps(embedding, 1)
    pipe.send("ready")
    result = way(embedding, pipe, *more)
    embedding.close()
    pipe.send(result)


def trains(embedding: MultiTableEmbedding, pipe: Connection, ahead: int = 0) -> int:
    """Until it is asked to continue; returns the number of steps. It announces that many ahead."""
    number = embedding.metrics()["table"]["step"]
    for hinted in range(ahead):
        embedding.prefetch(ids_of(number + hinted + 1), 0)
    while not pipe.poll(0.002):  # else rows_after has too much to do
        number = step(embedding)
        if ahead:
            embedding.prefetch(ids_of(number + ahead), 0)
    return number


def waits(embedding: MultiTableEmbedding, pipe: Connection) -> None:
    pipe.poll(None)


def fills(embedding: MultiTableEmbedding, pipe: Connection) -> int:
    """Puts that many rows that they take a while to save, then trains."""
    embedding.put(torch.arange(1000, 400_000), torch.ones(399_000, embedding.dim), 0)
    pipe.send("filled")
    return trains(embedding, pipe)


def dies_as_it_saves(embedding: MultiTableEmbedding, pipe: Connection) -> None:
    """Trains until it is killed where only the new name of the snapshot "lost" is left to do."""
    rename = Path.rename

    def killed_before(self: Path, target: Path) -> Path:
        if target.name == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = killed_before  # type: ignore[method-assign]
    trains(embedding, pipe)


def forks(embedding: MultiTableEmbedding, pipe: Connection) -> None:
    """Has a child that outlives it by a while, then waits."""
    if os.fork() == 0:
        os.setpgid(0, 0)  # it is not ended with its parent's group
        signal.alarm(600)
        pipe.send(os.getpid())  # once it has closed what a child does not keep
        pipe.close()
        signal.pause()
    waits(embedding, pipe)
