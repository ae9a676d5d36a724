"""One round of ranks: some are killed in a folder, and what is left is compared with what their log allows."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.forked import with_pipe
from support.ranks import run_ranks
from support.warm import SHIMMED, Child
from tierbed import StoreError
from tierbed.distributed import World
from tierbed.snapshots import Snapshot

from .expected import Expected
from .history import History, Types
from .rank_plan import RankRound, RankSession
from .rank_trainer import UNSAVED, RankHistory, train
from .rounds import HUNG, KILLED, AnyRounds, Check, rows_of
from .trainer import Recovered, tierbed


class RankRounds(AnyRounds):
    """Rounds of several ranks."""

    def train(self, place: Path, plan: RankRound, session: RankSession, orders: dict[str, Any]) -> None:
        ends = run_until_killed(session, place, orders)
        assert HUNG not in ends, "a rank hung"
        reports = "".join(file.read_text() for file in sorted(place.glob("ended-*")))
        assert ends[session.victim] == KILLED, f"the ranks ended with {ends}: {reports}"
        allowed = {0, KILLED} if session.all_die else {0}
        others = {end for rank, end in enumerate(ends) if rank != session.victim}
        assert others <= allowed, f"the ranks ended with {ends}"

    def checker(self, place: Path, plan: RankRound, session: RankSession, expected: Expected) -> RankCheck:
        if expected.inside == "open":  # by another number of ranks, so it was loading the snapshot of these rows
            expected.allow_recovery_of_same_step()
        return RankCheck(place / "store", plan, expected, random.Random(session.seed))


def run_until_killed(session: RankSession, place: Path, orders: dict[str, Any], task: Any = train) -> list[int]:
    """The signal that ended each rank, or 0. The others end because the victim has."""
    from torch.distributed import TCPStore  # not where the workers of a run are started

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as group:
        ranks = []
        for rank in range(session.ranks):
            child, pipe = with_pipe(task, str(place), orders, rank, store.port, server=SHIMMED)
            ranks.append((group.enter_context(child), group.enter_context(pipe)))
        victim = ranks[session.victim][0]
        if session.kill.inside is None:
            wait_for(ranks[0][1], session.kill.events)
            time.sleep(session.kill.wait)
            _kill(victim)
        ends = {session.victim: victim.wait()}
        for rank, (child, _) in enumerate(ranks):
            if rank != session.victim:
                if session.all_die:
                    _kill(child)
                ends[rank] = child.wait()
        return [max(-ends[rank], 0) for rank in range(session.ranks)]


def wait_for(pipe: Connection, lines: int) -> None:
    """Until rank 0 has written that many lines of its log, or has ended."""
    seen = 0
    while seen < lines and (data := os.read(pipe.fileno(), 1 << 16)):
        seen += data.count(b"\n")


def _kill(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


class RankCheck(Check):
    """Comparisons of a folder by ranks that open it."""

    def __init__(self, path: Path, plan: RankRound, expected: Expected, chance: random.Random) -> None:
        super().__init__(path, History(plan.keys, plan.life, plan.types), expected, chance, Recovered())
        self.plan = plan

    def check_open(self, stores: list[dict[str, Any]], name: str) -> bool:
        """They go on from the right step with the right rows. Returns whether they went back to a snapshot."""
        expected = self.expected
        steps = self.chance.randrange(4)
        other = self.chance.choice([None, *sorted({*expected.saved, name})])
        orders = (self.path, stores, self.plan.keys, self.plan.life, self.plan.types, steps, name, other)
        found = run_ranks(len(stores), checked, *orders)
        if isinstance(found[0], str):  # rows of another number of ranks, which no snapshot has
            step = int(UNSAVED.search(found[0])[1])  # type: ignore[index]
            assert step in expected.clean, f"live rows of step {step} are whole, not of {expected.clean}"
            expected.begin_save(f"kept-{name}", "full", step)
            tierbed("snapshot", "save", self.path / "rows", "--", f"kept-{name}")
            expected.end_save(f"kept-{name}")
            expected.clean = {step}
            found = run_ranks(len(stores), checked, *orders)
        step, recovered = found[0]["step"], found[0]["recovered"]
        expected.note_open(step, recovered)
        self.same(np.concatenate([rank["opened"] for rank in found]), step)
        step += steps
        expected.begin_save(name, "full", step)
        expected.end_save(name)
        self.same(np.concatenate([rank["trained"] for rank in found]), step)
        self.same(rows_of(Snapshot.open(self.path / "rows" / "snapshots" / name)), step)
        if other is not None:
            step = expected.saved[other].step
            expected.bases = {other}
            self.same(np.concatenate([rank["loaded"] for rank in found]), step)
        expected.clean, expected.dirty, expected.step = {step}, False, None
        return bool(recovered)


def checked(
    world: World,
    path: Path,
    stores: list[dict[str, Any]],
    keys: int,
    life: str,
    types: Types,
    steps: int,
    name: str,
    other: str | None,
) -> dict[str, Any] | str:
    """What a rank finds, with its rows then, after some steps, and after a load; or why the ranks cannot open."""
    history, remarks = RankHistory(keys, life, types, world), Recovered()
    logging.getLogger("tierbed").addHandler(remarks)
    with history.embedding(path, **stores[world.rank]) as embedding:
        try:
            embedding.size()
        except StoreError as error:
            if UNSAVED.search(str(error)) is None:
                raise
            return str(error)
        step = embedding.metrics()["table"]["step"]
        found = {"step": step, "recovered": remarks.seen, "opened": own_rows(embedding)}
        for number in range(step + 1, step + 1 + steps):
            history.take(embedding, number)
        embedding.save_snapshot(name)
        found["trained"] = own_rows(embedding)
        left = [file.name for file in (path / "rows" / "snapshots").iterdir() if file.name.startswith(".tmp-")]
        assert not left, f"leftovers after a save: {left}"
        if other is not None:
            embedding.load_snapshot(other)
            found["loaded"] = own_rows(embedding)
    return found


def own_rows(embedding: Any) -> NDArray[np.void]:
    """The rows that this rank has."""
    scan = embedding.table_handle().local_table.scan()
    return np.concatenate(
        [np.empty(0, embedding.table_handle().local_table.form.dtype), *(rows.copy() for _, rows in scan)]
    )
