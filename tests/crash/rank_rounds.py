"""One round of ranks: some are killed in a folder, and what is left is compared with what their log allows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.forked import with_pipe
from support.ranks import run_ranks
from support.warm import SHIMMED, Child
from tierbed.distributed import World
from tierbed.engine import StoreError
from tierbed.engine.row_format import row_dtype
from tierbed.snapshots import Snapshot

from .expected import Expected
from .history import DIM, History
from .power import Disk
from .rank_plan import RankRound, RankSession
from .rank_trainer import UNSAVED, RankHistory, train
from .rounds import HUNG, KILLED, Check, Result, rows_of, way_of
from .trainer import Recovered, tierbed


class RankRounds:
    """Runs rounds below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        """Nothing is held."""

    def run(self, plan: RankRound) -> Result:
        """Raises AssertionError where the folder is not as it must be."""
        begin = time.perf_counter()
        place = self.folder / f"round-{plan.seed}"
        (place / "store").mkdir(parents=True)
        (place / "aside").mkdir()
        result, expected, history = Result(), Expected(), History(plan.keys, plan.life)
        for number, (session, stores) in enumerate(zip(plan.sessions, plan.checks, strict=True)):
            self._train(place, plan, number, session, expected, result)
            check = RankCheck(place / "store", history, expected, random.Random(session.seed), Recovered())
            result.snapshots_checked += check.snapshots()
            if stores is not None:
                result.recovered += check.ranks(stores, f"check-{number}", plan)
        result.seconds = time.perf_counter() - begin
        return result

    def _train(
        self, place: Path, plan: RankRound, number: int, session: RankSession, expected: Expected, result: Result
    ) -> None:
        fields = {name: getattr(plan, name) for name in ("keys", "life", "power")}
        orders = dataclasses.asdict(session) | fields | {"number": number}
        (place / "trace").write_text("")
        ends = run_until_killed(session, place, orders)
        assert HUNG not in ends, "a rank hung"
        told = "".join(file.read_text() for file in sorted(place.glob("ended-*")))
        assert ends[session.victim] == KILLED, f"the ranks ended with {ends}: {told}"
        allowed = {0, KILLED} if session.all_die else {0}
        others = {end for rank, end in enumerate(ends) if rank != session.victim}
        assert others <= allowed, f"the ranks ended with {ends}"
        lines = expected.follow(place / "log")
        done = [line for line in lines if line["at"] == "end"]
        result.saves += Counter(line["kind"] for line in done if line["op"] == "save")
        result.saves += Counter(line["op"] for line in done if line["op"] in ("background", "merge"))
        result.kills[way_of(expected, session.kill)] += 1
        if plan.power:
            result.lost_in_cuts += Disk(place / "store", (place / "trace").read_text()).cut(random.Random(session.seed))


def run_until_killed(session: RankSession, place: Path, orders: dict[str, Any]) -> list[int]:
    """The signal that ended each rank, or 0. The others end because the victim has."""
    from torch.distributed import TCPStore  # not where the workers of a run are started

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as group:
        ranks = []
        for rank in range(session.ranks):
            child, pipe = with_pipe(train, str(place), orders, rank, store.port, server=SHIMMED)
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
    """Until rank 0 has written so many lines of its log, or has ended."""
    seen = 0
    while seen < lines and (data := os.read(pipe.fileno(), 1 << 16)):
        seen += data.count(b"\n")


def _kill(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


class RankCheck(Check):
    """Comparisons of a folder by ranks that open it."""

    def ranks(self, stores: list[dict[str, Any]], name: str, plan: RankRound) -> bool:
        """They go on from the right step with the right rows. Returns whether they went back to a snapshot."""
        expected = self.expected
        steps = self.chance.randrange(4)
        other = self.chance.choice([None, *sorted({*expected.saved, name})])
        orders = (self.path, stores, plan.keys, plan.life, steps, name, other)
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
        expected.opened(step, recovered)
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
    steps: int,
    name: str,
    other: str | None,
) -> dict[str, Any] | str:
    """What a rank finds, with its rows then, after some steps, and after a load; or why the ranks cannot open."""
    history, remarks = RankHistory(keys, life, world), Recovered()
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
    scan = embedding.opened().own_table.scan()
    return np.concatenate([np.empty(0, row_dtype(2 * DIM)), *(rows.copy() for _, rows in scan)])
