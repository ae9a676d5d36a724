"""One round of embeddings that are trained together: each kill leaves rows of the latest moment that the log allows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

from support.killed import Warm
from support.warm import SHIMMED
from tierbed.engine.errors import StoreError
from tierbed.snapshots import list_snapshots

from .model_plan import NAMES, ModelRound, ModelSession, as_orders
from .model_trainer import NO_STEP, Members, names_in, rows_after, run
from .power import Disk
from .record_processes import Refused, Rows
from .replica import Names, Replica
from .rounds import KILLED, Result

REMOVES = ("prune", "prune_all", "command", "live", "overwrite", "over")
SAVES = ("save", "save_all", "background", "checkpoint", "overwrite", "over", "state", "live")


class Allowed:
    """What a log allows the folders of members to be: as in one of `ways`."""

    def __init__(self, members: int, ranks: int = 1) -> None:
        self.ways, self.ranks = [Replica(NAMES[:members], ranks)], ranks
        self.dense: dict[str, float] = {}  # by the name of a checkpoint or a state
        self.inside = "between"  # the operation in flight
        self._running: list[Callable[[Replica], object]] = []  # the ways in which that may go
        self._is_behind = False  # whether a save in the background goes on
        self._removes = False  # whether a kill was in an operation that removes snapshots
        self._read = 0

    def follow(self, log: Path) -> list[dict[str, Any]]:
        """Take the lines of a log that are new."""
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text[self._read :].splitlines() if line]
        self._read = len(text)
        for line in lines:
            try:
                getattr(self, f"_{line['at']}")(line)
            except AssertionError as error:
                raise AssertionError(f"{error}, at {line}") from error
        return lines

    def _begin(self, line: dict[str, Any]) -> None:
        operation, more = line["op"], line.get("more", ())
        self.inside = operation
        if operation in ("checkpoint", "state"):
            self.dense[more[0]] = line["dense"]
        if line.get("first") or operation == "mixed":  # the recovery of what the last trainer left
            return
        if operation == "background":
            self._go(lambda way: way.background(*more))
            self._is_behind = True
            return
        names = subsets(self.ways[0].members) if operation == "load_state" else [()]
        self._running = [partial(_run, operation, [*more, some] if some else more) for some in names]

    def _end(self, line: dict[str, Any]) -> None:
        operation = line["op"]
        if operation in ("restore", "load_state"):
            assert line["dense"] == self.dense[line["more"][0]], "the dense part is another"
        if line.get("first"):
            self.found(line["rows"], line["mode"], line["names"])
            return
        if operation == "background":
            self._is_behind = False
            self._go(lambda way: way.process.background and way.process.finish_together())
        else:
            before = self._expanded()
            self.ways = [made for way in before for run in self._running for made in way.after(run)]
            self.ways = self._expanded()
        self._running, self.inside = [], "background" if self._is_behind else "between"
        assert self.ways, "nothing can be"
        if operation == "open":
            assert line["mode"] == "resume", "there are rows of a common step"
            found = [[*way.process.rows.values()] for way in self.ways]
            self.ways = [way for way, rows in zip(self.ways, found, strict=True) if _are(rows, line["rows"])]
            assert self.ways, f"not one of {found}"
        if (names := line.get("names")) is not None:
            self.ways = [way for way in self.ways if way.fits(names, operation in REMOVES)]
            assert self.ways, "snapshots are missing, or others"
            for way in self.ways:
                way.have(names)

    def _go(self, run: Callable[[Replica], object]) -> None:
        self.ways = [made for way in self.ways for made in way.after(run)]

    def _expanded(self) -> list[Replica]:
        """The save in the background may have come to its end."""
        more = [made for way in self.ways if way.process.background for made in way.after(_finish)]
        return [*self.ways, *more] if self._is_behind else self.ways

    def killed(self) -> None:
        """The trainer was killed now."""
        self._removes |= self.inside in REMOVES
        found = list[Replica]()
        for way, number in product(self.ways, range(self.ranks)):
            way.process.draw = Always(number)
            runs = self._running or [lambda way: None]
            within = [made for run in runs for made in way.killed_within(run)]
            found += within
            if self._is_behind:
                found += [made for one in within if one.process.background for made in one.killed_within(_finish)]
                saved = [made for made in way.after(_finish) if way.process.background]
                found += [made for one in saved for run in runs for made in one.killed_within(run)]
        self.ways = found
        for way in self.ways:
            way.begin()
        self.ways = list({way.key(): way for way in self.ways}.values())
        self._running, self._is_behind = [], False

    def found(self, rows: Sequence[Sequence[float]], mode: str, names: Names) -> list[Rows]:
        """The rows that a restart has found, from the steps and the values of key 0. AssertionError."""
        options, fitting = list[Any](), list[Replica]()
        for way in self.ways:
            if not way.fits(names, self._removes):
                options.append("snapshots")
                continue
            (made,) = way.after(lambda way: way.have(names))
            is_mode = made.can_resume() == (mode == "resume")
            made.begin(is_lenient=mode == "mixed")
            try:
                vector = made.open()
            except Refused:
                vector = []
            options.append((is_mode, vector))
            if is_mode and _are(vector, rows):
                fitting.append(made)
        assert fitting, f"rows of {rows} by {mode}, with {names}, and not one of {options}"
        self.ways = list({way.key(): way for way in fitting}.values())
        self.inside, self._removes = "between", False
        return [*self.ways[0].process.rows.values()]

    def closed(self) -> None:
        """The process that found the rows has closed them."""
        for way in self.ways:
            way.close()
            way.begin()


class Always:
    """A draw that is known."""

    def __init__(self, number: int) -> None:
        self.number = number

    def randrange(self, count: int) -> int:
        return min(self.number, count - 1)


def _run(operation: str, more: Sequence[Any], way: Replica) -> None:
    getattr(way, "open_again" if operation == "open" else operation)(*more)


def _finish(way: Replica) -> None:
    way.process.finish_together()


def subsets(members: Iterable[str]) -> list[tuple[str, ...]]:
    members = list(members)
    return [some for count in range(len(members) + 1) for some in combinations(members, count)]


def _are(vector: Sequence[Rows], rows: Sequence[Sequence[float]]) -> bool:
    return len(vector) == len(rows) and all(map(_is, vector, rows))


def _is(steps: Rows, row: Sequence[float]) -> bool:
    return (len(steps), float(-sum(steps))) == (row[0], float(row[1]))


class ModelRounds:
    """Runs rounds below a folder. script: what trainers run first, for tests of the harness."""

    ranks = 1

    def __init__(self, folder: Path, script: str = "") -> None:
        self.folder, self.script = folder, script
        self._warm = Warm(run, SHIMMED)

    def close(self) -> None:
        """Let go of what is held."""

    def run(self, plan: ModelRound) -> Result:
        """Raises AssertionError if rows are not those of the latest moment that the log allows."""
        begin = time.perf_counter()
        place = self.folder / f"round-{plan.seed}"
        (place / "store" / "model").mkdir(parents=True)
        (place / "aside").mkdir()
        result, allowed = Result(), Allowed(len(plan.dims), self.ranks)
        for number, session in enumerate(plan.sessions):
            (place / "trace").write_text("")  # a trainer may be killed before it begins its own
            self._train(place, plan, session, number)
            lines = allowed.follow(place / "log")
            allowed.killed()
            result.kills[allowed.inside, "at an instant" if session.kill.inside is None else session.kill.when] += 1
            for line in lines:
                if line["at"] == "end" and line["op"] in SAVES:
                    result.saves[line["op"]] += 1
            if plan.power:
                disk = Disk(place / "store", (place / "trace").read_text())
                result.lost_in_cuts += disk.cut(random.Random(session.seed))
            if session.checked or session is plan.sessions[-1]:
                result.recovered += self._check(place / "store" / "model", plan, session, allowed)
                result.snapshots_checked += self._compare(place / "store" / "model", plan)
        result.seconds = time.perf_counter() - begin
        return result

    def _train(self, place: Path, plan: ModelRound, session: ModelSession, number: int) -> None:
        kill = session.kill
        after = [kill.events, kill.wait] if kill.inside is None else None
        orders = {"place": str(place), "plan": as_orders(plan, session, number), "script": self.script}
        answer = self._warm.order(orders, after)
        assert answer["signal"] == KILLED, f"the trainer ended by itself: {answer}"

    def _check(self, path: Path, plan: ModelRound, session: ModelSession, allowed: Allowed) -> int:
        """Open the members in a drawn order: their rows are of one moment, or there is none, and that is said."""
        chance = random.Random(session.seed + 1)
        mode = "resume"
        for mode in ("resume", "mixed"):
            model = Members(path, session.stores, plan.dims, open=mode, **plan.options(path))
            try:
                for one in chance.sample(model.all, len(model.all)):
                    one.size()
                break
            except StoreError as error:
                if mode == "mixed" or NO_STEP not in str(error):
                    raise
                for one in model.all:
                    one.close()
        found = model.read()
        names = names_in(path, len(plan.dims))
        vector = allowed.found([(step, rows.get(0, 0.0)) for step, rows in found], mode, names)
        for (_, rows), steps, dim in zip(found, vector, plan.dims, strict=True):
            assert rows == rows_after(steps, dim)
        for one in model.all:
            one.close()
        allowed.closed()
        return int(mode == "resume")

    def _compare(self, path: Path, plan: ModelRound) -> int:
        """Snapshots are whole, and nothing is left of those that were not finished. Returns how many there are."""
        count = 0
        for name in NAMES[: len(plan.dims)]:
            listing = list_snapshots(path / name / "snapshots")
            assert not listing.damaged
            count += len(listing.snapshots)
            left = [place.name for place in (path / name / "snapshots").glob(".tmp-*")]
            assert not left, f"leftovers of {name}: {left}"
        return count
