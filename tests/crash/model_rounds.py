"""One round of embeddings that are trained together: what is left of each kill is of one instant of the log."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from support.killed import Warm
from support.warm import SHIMMED
from tierbed.engine.errors import StoreError
from tierbed.snapshots import list_snapshots

from .model_plan import NAMES, ModelRound, ModelSession, as_orders
from .model_trainer import Members, Steps, rows_after, run
from .power import Disk
from .rounds import KILLED, Result

SAVES = ("save", "save_all", "background", "checkpoint", "overwrite", "state")
Vector = tuple[Steps, ...]  # of all members


class Allowed:
    """What a log allows the rows to be.

    `true`: the vectors that were true between two operations, in order. `bound`: the place among them of the latest
    that a save of all has kept; rows are of no earlier one. `clean`: that of the last close of all, until a step.
    `snapshots`: by member, what each snapshot holds.
    """

    def __init__(self, members: int) -> None:
        begin: Vector = ((),) * members
        self.now, self.true, self.bound = begin, [begin], -1
        self.snapshots: list[dict[str, Steps]] = [{} for _ in range(members)]
        self.kept: dict[str, Vector] = {}  # by the name of a checkpoint or a state
        self.dense: dict[str, float] = {}  # as kept
        self.unsure: set[str] = set()  # names of saves of all that a prune or a replacement has touched
        self.clean = -1
        self.inside = "between"
        self._read = 0

    def follow(self, log: Path) -> list[dict[str, Any]]:
        """Take the lines of a log that are new."""
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text[self._read :].splitlines() if line]
        self._read = len(text)
        self.closed: set[str] = set()
        for line in lines:
            self.inside = line["op"] if line["at"] == "begin" else "between"
            getattr(self, f"{line['at']}_{line['op']}", self._nothing)(*line.get("more", ()), **_named(line))
            if (line["at"], line["op"]) in (("begin", "checkpoint"), ("begin", "state")):
                self.dense[line["more"][0]] = line["dense"]
            if (line["at"], line["op"]) in (("end", "restore"), ("end", "load_state")):
                assert line["dense"] == self.dense[line["more"][0]], f"the dense part of {line}"
        return lines

    def _nothing(self, *more: Any, **named: Any) -> None:
        pass

    def _become(self, vector: Vector) -> None:
        self.now = vector
        self.true.append(vector)

    def begin_step(self, names: str, numbers: list[int]) -> None:
        self.closed, self.clean = set(), -1
        after = tuple((*steps, numbers[at]) if NAMES[at] in names else steps for at, steps in enumerate(self.now))
        self._become(after)

    def begin_save(self, member: str, name: str, kind: str) -> None:
        at = NAMES.index(member)
        self.snapshots[at][name] = self.now[at]

    def begin_overwrite(self, member: str, name: str) -> None:
        at = NAMES.index(member)
        self.snapshots[at][f"{name} {len(self.true)}"] = self.now[at]

    def begin_save_all(self, name: str, kind: str) -> None:
        for at, steps in enumerate(self.now):
            self.snapshots[at][name] = steps

    begin_background = begin_save_all

    def begin_checkpoint(self, name: str) -> None:
        self.kept[name] = self.now

    def end_save_all(self, name: str, kind: str) -> None:
        self.bound = max(self.bound, len(self.true) - 1)

    end_background = end_save_all

    def end_checkpoint(self, name: str) -> None:
        self.end_save_all(name, "")

    def begin_load(self, member: str, name: str) -> None:
        self.bound = self.clean = -1
        at = NAMES.index(member)
        options = [steps for key, steps in self.snapshots[at].items() if key == name or key.startswith(f"{name} ")]
        self.loading = at, options

    def end_load(self, member: str, name: str) -> None:
        at, options = self.loading  # of a name that was given several times, the last counts
        self._become((*self.now[:at], options[-1], *self.now[at + 1 :]))

    def begin_load_all(self, name: str) -> None:
        self._load(tuple(snapshots[name] for snapshots in self.snapshots))

    def begin_restore(self, name: str) -> None:
        self._load(self.kept[name])

    def _load(self, vector: Vector) -> None:
        self.bound = self.clean = -1
        self._become(vector)

    def begin_state(self, name: str) -> None:
        self.kept[name] = self.now

    def end_state(self, name: str, made: dict[str, str | None]) -> None:
        for member, snapshot in made.items():
            if snapshot is not None and snapshot.startswith("state_dict-"):  # rows never written may have another
                at = NAMES.index(member)
                self.snapshots[at][snapshot] = self.now[at]

    def begin_load_state(self, name: str) -> None:
        self._load(self.kept[name])

    def begin_prune(self, member: str) -> None:
        self.unsure |= set(self.snapshots[0])

    def begin_prune_all(self) -> None:
        self.unsure |= set(self.snapshots[0])

    def begin_command(self, what: str, name: str) -> None:
        if what == "save_all":
            self.begin_save_all(name, "")
        else:
            self.begin_prune_all()

    def end_command(self, what: str, name: str) -> None:
        if what == "save_all":
            self.end_save_all(name, "")

    def end_reopen(self, member: str) -> None:
        self.closed.add(member)
        if len(self.closed) == len(self.now):
            self.clean = len(self.true) - 1

    def end_open(self, mode: str, rows: list[list[float]]) -> None:
        """A trainer opened the rows: of which vector these are."""
        found = self.found([(int(step), total) for step, total in rows], mode)
        self.closed = set()
        self.begin_from(found)

    def begin_from(self, found: Vector) -> None:
        """The rows were found to be of this vector, and later ones are no more."""
        self._become(found)

    def found(self, rows: list[tuple[int, float]], mode: str) -> Vector:
        """The vector of rows by the step and the value of key 0 of each member. AssertionError for none that may be."""
        if mode == "mixed":
            assert max(self.bound, self.clean) < 0, f"there was a step of which all have the rows: {self.true[-4:]}"
            known = [
                {(): (), **{steps: steps for steps in snapshots.values()}, **{v[at]: v[at] for v in self.true}}
                for at, snapshots in enumerate(self.snapshots)
            ]
            return tuple(next(steps for steps in of if _is(steps, row)) for of, row in zip(known, rows, strict=True))
        places = [
            place for place, vector in enumerate(self.true) if all(_is(s, r) for s, r in zip(vector, rows, strict=True))
        ]
        assert places, f"rows of {rows}, which no instant had; the last were {self.true[-4:]}"
        kept = max(self.bound, self.clean)
        assert places[-1] >= kept, f"rows of {rows}, and those of {self.true[kept]} were kept"
        return self.true[places[-1]]


def _is(steps: Steps, row: tuple[int, float]) -> bool:
    return (len(steps), float(-sum(steps))) == (row[0], float(row[1]))


def _named(line: dict[str, Any]) -> dict[str, Any]:
    return {field: line[field] for field in ("mode", "rows", "made") if field in line}


class ModelRounds:
    """Runs rounds below a folder. script: what trainers run first, for tests of the harness."""

    def __init__(self, folder: Path, script: str = "") -> None:
        self.folder, self.script = folder, script
        self._warm = Warm(run, SHIMMED)

    def close(self) -> None:
        """Let go of what is held."""

    def run(self, plan: ModelRound) -> Result:
        """Raises AssertionError where rows are not those of an instant that the log allows."""
        begin = time.perf_counter()
        place = self.folder / f"round-{plan.seed}"
        (place / "store" / "model").mkdir(parents=True)
        (place / "aside").mkdir()
        result, allowed = Result(), Allowed(len(plan.dims))
        for number, session in enumerate(plan.sessions):
            self._train(place, plan, session, number)
            lines = allowed.follow(place / "log")
            result.kills[allowed.inside, "at an instant" if session.kill.inside is None else session.kill.when] += 1
            for line in lines:
                if line["at"] == "end" and line["op"] in SAVES:
                    result.saves[line["op"]] += 1
            if plan.power:
                disk = Disk(place / "store", (place / "trace").read_text() if (place / "trace").exists() else "")
                result.lost_in_cuts += disk.cut(random.Random(session.seed))
            result.recovered += self._check(place / "store" / "model", plan, session, allowed)
            result.snapshots_checked += self._compare(place / "store" / "model", plan, allowed)
        result.seconds = time.perf_counter() - begin
        return result

    def _train(self, place: Path, plan: ModelRound, session: ModelSession, number: int) -> None:
        kill = session.kill
        after = [kill.events, kill.wait] if kill.inside is None else None
        orders = {"place": str(place), "plan": as_orders(plan, session, number), "script": self.script}
        answer = self._warm.order(orders, after)
        assert answer["signal"] == KILLED, f"the trainer ended by itself: {answer}"

    def _check(self, path: Path, plan: ModelRound, session: ModelSession, allowed: Allowed) -> int:
        """Open the members in a drawn order: their rows are of one instant, or there is none, and that is said."""
        chance = random.Random(session.seed + 1)
        mode = "resume"
        for mode in ("resume", "mixed"):
            model = Members(path, session.stores, plan.dims, open=mode)
            try:
                for one in chance.sample(model.all, len(model.all)):
                    one.size()
                break
            except StoreError as error:
                if mode == "mixed" or "there is no step of which all have the rows" not in str(error):
                    raise
                for one in model.all:
                    one.close()
        found = model.read()
        vector = allowed.found([(step, rows.get(0, 0.0)) for step, rows in found], mode)
        for (_, rows), steps, dim in zip(found, vector, plan.dims, strict=True):
            assert rows == rows_after(steps, dim)
        allowed.begin_from(vector)
        allowed.bound = -1
        for one in model.all:
            one.close()
        allowed.clean = len(allowed.true) - 1
        return int(mode == "resume")

    def _compare(self, path: Path, plan: ModelRound, allowed: Allowed) -> int:
        """A save of all is in every folder or in none, and snapshots hold what the log says."""
        listings = [list_snapshots(path / name / "snapshots") for name in NAMES[: len(plan.dims)]]
        assert not any(listing.damaged for listing in listings)
        names = [{one.name for one in listing.snapshots} for listing in listings]
        for name in set.union(*names):
            if name.startswith("all-") and name not in allowed.unsure:
                assert all(name in of for of in names), f"{name} is not in all folders: {names}"
        count = 0
        for at, listing in enumerate(listings):
            for one in listing.snapshots:
                steps = allowed.snapshots[at].get(one.name)
                if steps is not None:
                    count += 1
                    assert one.description["step"] == len(steps), f"{one.name} of {NAMES[at]}"
            left = [place.name for place in (path / NAMES[at] / "snapshots").glob(".tmp-*")]
            assert not left, f"leftovers of {NAMES[at]}: {left}"
        return count
