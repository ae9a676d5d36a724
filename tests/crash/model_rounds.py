"""One round of embeddings that are trained together: each kill leaves rows of the latest moment that the log allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.ranks import run_ranks
from tierbed.distributed import World
from tierbed.snapshots import list_snapshots

from .model_trainer import Members, names_in, opened, rows_after, run
from .plan import NAMES, ModelRound
from .record_processes import Refused, Rows
from .replica import Names, Replica
from .rounds import Result, Rounds, train_ranks

REMOVES = ("prune", "prune_all", "command", "live", "overwrite", "over")


class Allowed:
    """What a log allows the folders of members to be: as in one of `ways`."""

    def __init__(self, members: int, ranks: int = 1) -> None:
        self.ways, self.ranks = [Replica(NAMES[:members], ranks)], ranks
        self.dense: dict[str, float] = {}  # by the name of a checkpoint or a state
        self.inside = "between"  # the operation in flight
        self._running: list[Callable[[Replica], object]] = []  # the ways in which that may go
        self._is_behind = False  # whether a save in the background goes on
        self._removes = False  # whether a kill was in an operation that removes snapshots

    def follow(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take further lines of the log. A kill comes after them."""
        for line in lines:
            try:
                getattr(self, f"_{line['at']}")(line)
            except AssertionError as error:
                raise AssertionError(f"{error}, at {line}") from error
        self._killed()

    def _begin(self, line: dict[str, Any]) -> None:
        operation, more = line["op"], line.get("more", ())
        self.inside = operation
        if operation in ("checkpoint", "state", "background"):
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

    def _killed(self) -> None:
        self._removes |= self.inside in REMOVES
        found = list[Replica]()
        for way, number in product(self.ways, range(self.ranks)):
            way.process.draw = SimpleNamespace(randrange=partial(_at_most, number))  # a draw that is known
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


def _run(operation: str, more: Sequence[Any], way: Replica) -> None:
    getattr(way, "open_again" if operation == "open" else operation)(*more)


def _at_most(number: int, count: int) -> int:
    return min(number, count - 1)


def _finish(way: Replica) -> None:
    way.process.finish_together()


def subsets(members: Iterable[str]) -> list[tuple[str, ...]]:
    members = list(members)
    return [some for count in range(len(members) + 1) for some in combinations(members, count)]


def _are(vector: Sequence[Rows], rows: Sequence[Sequence[float]]) -> bool:
    return len(vector) == len(rows) and all(map(_is, vector, rows))


def _is(steps: Rows, row: Sequence[float]) -> bool:
    return (len(steps), float(-sum(steps))) == (row[0], float(row[1]))


class ModelRounds(Rounds):
    """Rounds of members, whose rows have to be of the latest moment that the log allows."""

    runs = staticmethod(run)
    ranks = 1

    def expected(self, plan: ModelRound) -> Allowed:
        return Allowed(len(plan.dims), self.ranks)

    def check(self, path: Path, plan: ModelRound, number: int, allowed: Allowed, result: Result) -> None:
        """Rows are of one moment, or there is none, and that is said. Snapshots are whole, and leave nothing over."""
        session, path = plan.sessions[number], path / "model"
        if not session.checked and session is not plan.sessions[-1]:
            return
        order = random.Random(session.seed + 1).sample(range(len(plan.dims)), len(plan.dims))
        found = self.found(path, asdict(plan), session.stores, order)
        mode, firsts, _ = found[0]
        vector = allowed.found(firsts, mode, names_in(path, len(plan.dims)))
        for at, (steps, dim) in enumerate(zip(vector, plan.dims, strict=True)):
            assert {key: value for *_, rows in found for key, value in rows[at].items()} == rows_after(steps, dim)
        allowed.closed()
        result.recovered += mode == "resume"
        for name in NAMES[: len(plan.dims)]:
            listing = list_snapshots(path / name / "snapshots")
            assert not listing.damaged
            result.snapshots_checked += len(listing.snapshots)
            left = [place.name for place in (path / name / "snapshots").glob(".tmp-*")]
            assert not left, f"leftovers of {name}: {left}"

    def found(self, *given: Any) -> list[Any]:
        """What `checked` returns, by rank."""
        return [checked(None, *given)]


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
        return run_ranks(self.ranks, checked, *given)


def checked(
    world: World | None, path: Path, plan: dict[str, Any], stores: list[str], order: list[int]
) -> tuple[str, list[tuple[int, float]], list[dict[int, float]]]:
    """How a process could open the members, their first values, and the rows of each that it has."""
    mode, model = opened(lambda mode: Members(path, plan, mode, stores, world=world), order, lambda: None)
    found = mode, model.firsts(), model.rows()
    model.close()
    return found
