"""One round: trainers are killed in a folder, and what is left is compared with what their log allows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.forked import with_pipe
from support.killed import Warm
from support.ranks import run_ranks
from support.warm import Child
from tierbed import MultiTableEmbedding, StoreError
from tierbed.distributed import World
from tierbed.engine.row_format import RowFormat
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.store.retention import is_backup

from .expected import Expected, Saved
from .history import History, in_order
from .model_trainer import train
from .plan import Kill
from .power import Disk
from .trainer import UNSAVED, Recovered, run, tierbed

KILLED, HUNG = 9, 14
SAVES = ("save", "save_all", "background", "merge", "checkpoint", "overwrite", "over", "state", "live")


@dataclass
class Result:
    """What happened in a round: kills by the operation and the way, finished saves by kind, and so on."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    lost_in_cuts: int = 0
    snapshots_checked: int = 0
    answers: int = 0
    seconds: float = 0.0


class Rounds:
    """Runs rounds below a folder. script: what trainers run first, for tests of the harness."""

    runs: Callable[..., None] = staticmethod(run)
    counted = SAVES  # what `Result.saves` counts

    def __init__(self, folder: Path, script: str = "") -> None:
        self.folder, self.script = folder, script
        self.warm = Warm(self.runs)

    def run(self, plan: Any) -> Result:
        """Raises AssertionError if the folder is not as it must be."""
        begin = time.perf_counter()
        place = self.folder / f"round-{plan.seed}"
        (place / "store").mkdir(parents=True)
        (place / "aside").mkdir()
        result, expected, seen = Result(), self.expected(plan), 0
        was_cut = True
        for number, session in enumerate(plan.sessions):
            if was_cut:
                (place / "trace").write_text("")  # a trainer may be killed before it begins its own
            self.train(place, session, self.orders(plan, session) | {"number": number, "power": plan.power})
            text = (place / "log").read_text() if (place / "log").exists() else ""
            lines = [json.loads(line) for line in text.split("\n")[:-1]][seen:]  # the last may be torn
            seen += len(lines)
            expected.follow(lines)
            saved = [line for line in lines if line["at"] == "end" and line["op"] in self.counted]
            result.saves += Counter(line.get("kind", line["op"]) for line in saved)
            result.kills[way_of(expected.inside, session.kill)] += 1
            if was_cut := self.cuts_power(plan, number):
                disk = Disk(place / "store", (place / "trace").read_text())
                result.lost_in_cuts += disk.cut(random.Random(session.seed))
            self.check(place / "store", plan, number, expected, result)
        result.seconds = time.perf_counter() - begin
        return result

    def expected(self, plan: Any) -> Any:
        """What the log allows, line by line."""
        return Expected()

    def cuts_power(self, plan: Any, number: int) -> bool:
        """Whether the power is cut once the trainer of this number is killed, else later."""
        return bool(plan.power)

    def orders(self, plan: Any, session: Any) -> dict[str, Any]:
        return dataclasses.asdict(plan) | dataclasses.asdict(session)

    def train(self, place: Path, session: Any, orders: dict[str, Any]) -> None:
        """Raises AssertionError if a trainer ended otherwise than its session says."""
        after = [session.kill.events, session.kill.wait] if session.kill.inside is None else None
        answer = self.warm.order({"place": str(place), "plan": orders, "script": self.script}, after)
        assert answer["signal"] != HUNG, "the trainer hung"
        assert answer["signal"] == KILLED, f"the trainer ended by itself: {answer['signal'], answer['code']}"

    def check(self, path: Path, plan: Any, number: int, expected: Any, result: Result) -> None:
        """Of the folder that a session left."""
        check = Check(path, plan, expected, random.Random(plan.sessions[number].seed))
        result.snapshots_checked += check.snapshots()
        if plan.checks[number] is not None:
            result.recovered += check.open(partial(self.found, plan.checks[number], path, plan), f"check-{number}")

    def found(self, stores: Any, *given: Any) -> list[Any]:
        """What `checked` returns, by rank."""
        return [checked(None, stores, *given)]


class Check:
    """Comparisons of a folder with what is expected there."""

    def __init__(self, path: Path, plan: Any, expected: Expected, chance: random.Random) -> None:
        self.path, self.plan, self.expected, self.chance = path, plan, expected, chance
        self.history = History(plan.keys, plan.life, plan.types)
        self.folder = path / "rows" / "snapshots"

    def snapshots(self) -> int:
        """Every one that must be there is, whole and bit-equal, and no other. Returns how many."""
        listing = list_snapshots(self.folder)
        assert not listing.damaged, listing.damaged
        named = [one for one in listing.snapshots if not is_backup(one.folder)]
        listed = {s.name: Saved(s.description["step"], s.kind, s.parent and s.parent.name) for s in listing.snapshots}
        there = {s.name: listed.pop(s.name) for s in named}
        self.expected.found(there, listed)
        for snapshot in named:
            saved = self.expected.saved[snapshot.name]
            assert saved == there[snapshot.name], f"{snapshot.name}: not as saved"
            self.same([rows_of(snapshot)], saved.step)
        return len(listing.snapshots)

    def open(self, check: Callable[..., list[Any]], name: str) -> bool:
        """Processes go on from the right step with the right rows. Returns whether they went back to a snapshot."""
        expected, steps = self.expected, self.chance.randrange(4)
        other = self.chance.choice([None, *sorted({*expected.saved, name})])
        found = check(steps, name, other)
        if isinstance(found[0], str):  # rows of another number of ranks, which no snapshot has
            step = int(UNSAVED.search(found[0])[1])  # type: ignore[index]
            assert step in expected.clean, f"live rows of step {step} are whole, not of {expected.clean}"
            expected.begin_save(f"kept-{name}", "full", step)
            tierbed("snapshot", "save", self.path / "rows", "--", f"kept-{name}")
            expected.end_save(f"kept-{name}")
            expected.clean = {step}
            found = check(steps, name, other)
        steps_found, recovered, opened, trained, loaded = zip(*found, strict=True)
        step = steps_found[0]
        expected.note_open(step, recovered[0])
        self.same(opened, step)
        step += steps
        expected.begin_save(name, "full", step)
        expected.end_save(name)
        self.same(trained, step)
        self.same([rows_of(Snapshot.open(self.folder / name))], step)
        left = [file.name for file in self.folder.iterdir() if not is_backup(file)]
        assert {*left} <= expected.saved.keys(), f"leftovers after a save: {left}"
        if other is not None:
            step = expected.saved[other].step
            expected.bases = {other}
            self.same(loaded, step)
        expected.clean, expected.dirty, expected.step = {step}, False, None
        return bool(recovered[0])

    def same(self, parts: Sequence[Any], step: int) -> None:
        """Together the rows of that step, bit for bit."""
        rows, right = in_order(np.concatenate(parts)), self.history.rows(step)
        assert len(rows) == len(right), f"{len(rows)} rows at step {step}, not {len(right)}"
        differ = np.flatnonzero(rows != right)
        assert rows.tobytes() == right.tobytes(), f"step {step}: {rows[differ[:1]]}, not {right[differ[:1]]}"


def checked(
    world: World | None, stores: Any, path: Path, plan: Any, steps: int, name: str, other: str | None
) -> tuple[int, bool, Any, Any, Any] | str:
    """What a process finds: the step, whether it recovered, its rows then, after some steps, and after a load.

    Or why ranks cannot open.
    """
    history = History(plan.keys, plan.life, plan.types, world)
    store = stores if world is None else stores[world.rank]
    with Recovered() as remarks, history.embedding(path, **store) as embedding:
        try:
            embedding.size()
        except StoreError as error:
            if UNSAVED.search(str(error)) is None:
                raise
            return str(error)
        step, recovered, opened = step_of(embedding), remarks.seen, own_rows(embedding)
        for number in range(step + 1, step + 1 + steps):
            history.take(embedding, number)
        embedding.save_snapshot(name)
        trained = loaded = own_rows(embedding)
        if other is not None:
            embedding.load_snapshot(other)
            loaded = own_rows(embedding)
    return step, recovered, opened, trained, loaded


def own_rows(embedding: Any) -> NDArray[np.void]:
    """The rows that this process has."""
    table = embedding.table_handle().open_table
    return np.concatenate([np.empty(0, table.row_format.dtype), *(rows.copy() for _, rows in table.scan())])


def way_of(inside: str, kill: Kill) -> tuple[str, str]:
    """What a kill was inside of, and how it came about."""
    if kill.inside is None:
        return inside, "at an instant"
    way = "half a write" if kill.when == "torn" else f"{kill.when} a call"
    return inside, "by itself" if inside == "between" else way  # that point was never reached


def rows_of(snapshot: Snapshot) -> Any:
    """All rows, checksums compared."""
    snapshot.verify()
    empty = np.empty(0, RowFormat.from_description(snapshot.description).dtype)
    return np.concatenate([empty, *(rows.copy() for _, rows in snapshot.chunks(50))])


def step_of(embedding: MultiTableEmbedding) -> int:
    return int(embedding.metrics()["table"]["step"])


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


def train_ranks(place: Path, session: Any, orders: dict[str, Any]) -> None:
    """Until the victim is killed. The others end because it has."""
    from torch.distributed import TCPStore  # not where the workers of a run are started

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as group:
        ranks = []
        for rank in range(session.ranks):
            child, pipe = with_pipe(train, str(place), orders, rank, store.port)
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
