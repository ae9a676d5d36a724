"""Rounds of ranks: some are killed in a folder, and what is left is compared with what their log allows."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.forked import with_pipe
from support.ranks import run_ranks
from support.warm import SHIMMED, Child

from . import model_rounds
from .model_rounds import ModelRounds
from .rank_trainer import train
from .rounds import HUNG, KILLED, Result, Rounds, checked


class RankRounds(Rounds):
    """Rounds of several ranks."""

    def train(self, place: Path, session: Any, orders: dict[str, Any]) -> None:
        train_ranks(place, session, orders)

    def check(self, path: Path, plan: Any, number: int, expected: Any, result: Result) -> None:
        if expected.inside == "open":  # by another number of ranks, so it was loading the snapshot of these rows
            expected.allow_recovery_of_same_step()
        super().check(path, plan, number, expected, result)

    def found(self, stores: Any, *given: Any) -> list[Any]:
        return run_ranks(len(stores), checked, stores, *given)


class ModelRankRounds(ModelRounds):
    """Runs rounds of that many ranks, of which one is killed, and the others find out or are killed with it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder)
        self.ranks = ranks

    def train(self, place: Path, session: Any, orders: dict[str, Any]) -> None:
        chance = random.Random(session.seed + 2)
        killed = {"ranks": self.ranks, "victim": chance.randrange(self.ranks), "all_die": chance.random() < 0.5}
        train_ranks(place, SimpleNamespace(kill=session.kill, **killed), {**orders, **killed})

    def found(self, *given: Any) -> list[Any]:
        return run_ranks(self.ranks, model_rounds.checked, *given)


def train_ranks(place: Path, session: Any, orders: dict[str, Any]) -> None:
    """Until the victim is killed. The others end because it has."""
    from torch.distributed import TCPStore  # not where the workers of a run are started

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as group:
        ranks = []
        for rank in range(session.ranks):
            child, pipe = with_pipe(train, str(place), orders, rank, store.port, server=SHIMMED)
            ranks.append((group.enter_context(child), group.enter_context(pipe)))
        victim, kill = ranks[session.victim][0], session.kill
        if kill.inside is None:
            wait_for(ranks[0][1], kill.events)
            time.sleep(kill.wait)
            _kill(victim)
        ends = {session.victim: max(-victim.wait(), 0)}
        for rank, (child, _) in enumerate(ranks):
            if rank != session.victim:
                if session.all_die:
                    _kill(child)
                ends[rank] = max(-child.wait(), 0)
    assert HUNG not in ends.values(), "a rank hung"
    reports = "".join(file.read_text() for file in sorted(place.glob("ended-*")))
    assert ends.pop(session.victim) == KILLED, f"the victim ended by itself: {reports}"
    allowed = {0, KILLED} if session.all_die else {0}
    assert {*ends.values()} <= allowed, f"the others ended with {ends}: {reports}"


def wait_for(pipe: Connection, lines: int) -> None:
    """Until rank 0 has written that many lines of its log, or has ended."""
    seen = 0
    while seen < lines and (data := os.read(pipe.fileno(), 1 << 16)):
        seen += data.count(b"\n")


def _kill(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
