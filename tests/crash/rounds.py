"""One round: trainers are killed in a folder, and what is left is compared with what their log allows."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.embeddings import contents
from support.killed import Warm
from support.warm import SHIMMED
from tierbed import MultiTableEmbedding
from tierbed.engine.row_format import RowForm
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.store.retention import is_replaced

from .expected import Expected, Saved
from .history import History, in_order
from .plan import Kill, Round, Session
from .power import Disk
from .trainer import Recovered, run

KILLED, HUNG = 9, 14


@dataclass
class Result:
    """What happened in a round: kills by the operation and the way, finished saves by kind, and so on."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    lost_in_cuts: int = 0
    snapshots_checked: int = 0
    seconds: float = 0.0


class AnyRounds:
    """Runs rounds below a folder, whose trainers `train` until killed and whose folders a `checker` compares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        """Let go of what is held."""

    def train(self, place: Path, plan: Any, session: Any, orders: dict[str, Any]) -> None:
        """Raises AssertionError if a trainer ended otherwise than its session says."""
        raise NotImplementedError

    def checker(self, place: Path, plan: Any, session: Any, expected: Expected) -> Check:
        """Of the folder that a session left."""
        raise NotImplementedError

    def run(self, plan: Any) -> Result:
        """Raises AssertionError if the folder is not as it must be."""
        begin = time.perf_counter()
        place = self.folder / f"round-{plan.seed}"
        (place / "store").mkdir(parents=True)
        (place / "aside").mkdir()
        result, expected = Result(), Expected()
        for number, (session, check) in enumerate(zip(plan.sessions, plan.checks, strict=True)):
            fields = {name: getattr(plan, name) for name in ("keys", "life", "types", "power")}
            (place / "trace").write_text("")  # a trainer may be killed before it begins its own
            self.train(place, plan, session, dataclasses.asdict(session) | fields | {"number": number})
            self._note(place, plan, session, expected, result)
            checker = self.checker(place, plan, session, expected)
            result.snapshots_checked += checker.snapshots()
            if check is not None:
                result.recovered += checker.check_open(check, f"check-{number}")
        result.seconds = time.perf_counter() - begin
        return result

    def _note(self, place: Path, plan: Any, session: Any, expected: Expected, result: Result) -> None:
        """What the log of a session says; then the power is cut, where the plan has that."""
        lines = expected.follow(place / "log")
        done = [line for line in lines if line["at"] == "end"]
        result.saves += Counter(line["kind"] for line in done if line["op"] == "save")
        result.saves += Counter(line["op"] for line in done if line["op"] in ("background", "merge"))
        result.kills[way_of(expected, session.kill)] += 1
        if plan.power:
            disk = Disk(place / "store", (place / "trace").read_text())
            result.lost_in_cuts += disk.cut(random.Random(session.seed))


class Rounds(AnyRounds):
    """Rounds of trainers that run a script first, for tests of the harness."""

    def __init__(self, folder: Path, script: str = "") -> None:
        super().__init__(folder)
        self.script = script
        self._warm = Warm(run, SHIMMED)
        self._recovered = Recovered()
        logging.getLogger("tierbed").addHandler(self._recovered)

    def close(self) -> None:
        logging.getLogger("tierbed").removeHandler(self._recovered)

    def train(self, place: Path, plan: Round, session: Session, orders: dict[str, Any]) -> None:
        kill = session.kill
        after = [kill.events, kill.wait] if kill.inside is None else None
        answer = self._warm.order({"place": str(place), "plan": orders, "script": self.script}, after)
        assert answer["signal"] != HUNG, "the trainer hung"
        assert answer["signal"] == KILLED, f"the trainer ended by itself: {answer['signal'], answer['code']}"

    def checker(self, place: Path, plan: Round, session: Session, expected: Expected) -> Check:
        history = History(plan.keys, plan.life, plan.types)
        return Check(place / "store", history, expected, random.Random(session.seed), self._recovered)


class Check:
    """Comparisons of a folder with what is expected there."""

    def __init__(
        self, path: Path, history: History, expected: Expected, chance: random.Random, recovered: Recovered
    ) -> None:
        self.path, self.history, self.expected, self.chance = path, history, expected, chance
        self._snapshots = path / "rows" / "snapshots"
        self._recovered = recovered

    def snapshots(self) -> int:
        """Every one that must be there is, whole and bit-equal, and no other. Returns how many."""
        listing = list_snapshots(self._snapshots)
        assert not listing.damaged, listing.damaged
        named = [one for one in listing.snapshots if not is_replaced(one.folder)]
        there = {s.name: Saved(s.description["step"], s.kind, s.parent and s.parent.name) for s in named}
        self.expected.found(there)
        for snapshot in named:
            saved = self.expected.saved[snapshot.name]
            assert saved == there[snapshot.name], f"{snapshot.name}: not as saved"
            self.same(rows_of(snapshot), saved.step)
        return len(listing.snapshots)

    def check_open(self, store: Any, name: str) -> bool:
        """It goes on from the right step with the right rows. Returns whether it went back to a snapshot."""
        expected, history = self.expected, self.history
        self._recovered.seen = False
        with history.embedding(self.path, **store) as embedding:
            step = step_of(embedding)
            recovered = self._recovered.seen
            expected.note_open(step, recovered)
            self.same(contents(embedding), step)
            for number in range(step + 1, step + 1 + self.chance.randrange(4)):
                history.take(embedding, number)
                step = number
            self.save(embedding, name, step)
            self.same(contents(embedding), step)
            if self.chance.random() < 0.5:
                other = self.chance.choice(sorted(expected.saved))
                embedding.load_snapshot(other)
                step = expected.saved[other].step
                expected.bases = {other}
                self.same(contents(embedding), step)
        expected.clean, expected.dirty, expected.step = {step}, False, None
        return recovered

    def save(self, embedding: MultiTableEmbedding, name: str, step: int) -> None:
        expected = self.expected
        expected.begin_save(name, "full", step)
        embedding.save_snapshot(name)
        expected.end_save(name)
        there = [file for file in self._snapshots.iterdir() if not is_replaced(file)]
        left = [file.name for file in there if file.name not in expected.saved]
        assert not left, f"leftovers after a save: {left}"
        self.same(rows_of(Snapshot.open(self._snapshots / name)), step)

    def same(self, rows: Any, step: int) -> None:
        """The rows of that step, bit for bit."""
        rows, right = in_order(rows), self.history.rows(step)
        assert len(rows) == len(right), f"{len(rows)} rows at step {step}, not {len(right)}"
        differ = np.flatnonzero(rows != right)
        assert rows.tobytes() == right.tobytes(), f"step {step}: {rows[differ[:1]]}, not {right[differ[:1]]}"


def way_of(expected: Expected, kill: Kill) -> tuple[str, str]:
    """What a kill was inside of, and how it came about."""
    way = "at an instant" if kill.inside is None else {"torn": "half a write"}.get(kill.when, f"{kill.when} a call")
    inside = expected.inside or ("background" if expected.begun else "between")
    late = inside == "between" and kill.inside is not None  # that point was never reached
    return inside, "by itself" if late else way


def rows_of(snapshot: Snapshot) -> Any:
    """All rows, checksums compared."""
    snapshot.verify()
    empty = np.empty(0, RowForm.described(snapshot.description).dtype)
    return np.concatenate([empty, *(rows.copy() for _, rows in snapshot.chunks(50))])


def step_of(embedding: MultiTableEmbedding) -> int:
    return int(embedding.metrics()["table"]["step"])
