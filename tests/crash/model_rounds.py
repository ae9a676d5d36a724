"""One round of embeddings that are trained together: each kill leaves rows of the latest moment that the log allows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.killed import Warm
from support.warm import SHIMMED
from tierbed.engine.errors import StoreError
from tierbed.snapshots import list_snapshots

from .model_expected import Names, State, Steps, Vector, subsets
from .model_plan import NAMES, ModelRound, ModelSession, as_orders
from .model_trainer import NO_STEP, Members, names_in, rows_after, run
from .power import Disk
from .rounds import KILLED, Result

SAVES = ("save", "save_all", "background", "checkpoint", "overwrite", "over", "state", "live")


class Allowed:
    """What a log allows folders to have: one of `states`, of which the last is that after the operation."""

    def __init__(self, members: int) -> None:
        self.states = [State.begin(members)]
        self.kept: dict[str, Vector] = {}  # by the name of a checkpoint or a state
        self.dense: dict[str, float] = {}  # as kept
        self.inside, self.made = "between", ""  # the operation in flight, and the name that it gives
        self._mixed = False  # whether a trainer was killed while it accepted rows of no common moment
        self._behind: tuple[str, Vector] | None = None  # a save in the background, which goes on
        self._read = 0

    @property
    def state(self) -> State:
        return self.states[-1]

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
        more = line.get("more", ())
        if line["op"] in ("checkpoint", "state"):
            self.kept[more[0]], self.dense[more[0]] = tuple(self.state.now), line["dense"]
        self.inside = line["op"]
        self._mixed = self._mixed or line["op"] == "mixed"
        if line.get("first") or line["op"] == "mixed":  # the recovery of what the last trainer left
            return
        self.made = ""
        states = [state for before in self.states[-1:] for state in getattr(self, f"_{line['op']}")(before, *more)]
        if self._behind is not None and line["op"] == "step":
            self.made = self._behind[0]
            states = [*(made for state in states for made in self._saved_behind(state)), *states]
        self.states = states

    def _end(self, line: dict[str, Any]) -> None:
        if line["op"] in ("restore", "load_state"):
            assert line["dense"] == self.dense[line["more"][0]], "the dense part is another"
        if line["op"] == "background":
            self.states.append(self._saved_behind(self.state)[-1])
            self._behind = None
        if line.get("first"):
            self.found(line["rows"], line["mode"], line["names"])
            return
        if line["op"] == "open":
            found = tuple(self.state.now)
            assert line["mode"] == "resume", f"there are rows of {found}"
            assert all(_is(*both) for both in zip(found, line["rows"], strict=True)), f"not {found}"
        self.inside = "between"
        self.states = self.states[-1:]
        if self._behind is not None:
            self.made, self.states = self._behind[0], [*self._saved_behind(self.state), self.state]
            return
        if (names := line.get("names")) is not None:
            assert self.state.fits(names, self.made or None), "snapshots are missing, or others"
            before = self.state.targets()
            self.state.have(names)
            assert all(a & b for a, b in zip(before, self.state.targets(), strict=True)), "what recovery needs is gone"
        self.made = ""

    def _saved_behind(self, state: State) -> list[State]:
        assert self._behind is not None
        return _renamed(state, self._behind[0], state.all, self._behind[1])

    def _step(self, before: State, names: str, numbers: list[int]) -> list[State]:
        trained = [at for at in before.all if NAMES[at] in names]
        states = [before.written(some) for some in subsets(trained)]
        for at in trained:
            states[-1].now[at] = (*before.now[at], numbers[at])
        return states

    def _saves(self, before: State, name: str, members: Any) -> list[State]:
        """With the name or without it; MARKs may have a number already that is later than that of a load."""
        self.made = name
        begun = before.copy()
        for moment in begun.moments:
            moment.older -= set(members)
        return [before, begun, *_renamed(before, name, members, before.now)]

    def _save(self, before: State, member: str, name: str, kind: str = "") -> list[State]:
        return self._saves(before, name, [NAMES.index(member)])

    _overwrite = _save

    def _save_all(self, before: State, name: str, kind: str = "") -> list[State]:
        return self._saves(before, name, before.all)

    _checkpoint = _over = _save_all

    def _background(self, before: State, name: str, kind: str) -> list[State]:
        self.made, self._behind = name, (name, tuple(before.now))
        return [*self._saved_behind(before), before]

    def _state(self, before: State, name: str) -> list[State]:
        states = [before]
        for member in before.all:
            made, after = states[-1].copy(), states[-1].copy()
            made.save_for_state(member, noted=False)
            after.save_for_state(member)
            states += [made, after]
        return states

    def _load(self, before: State, member: str, name: str) -> list[State]:
        at = NAMES.index(member)
        after = before.copy()
        after.load_alone(at, before.saved[at][name])
        return [before, before.cleared([at]), after]

    def _load_all(self, before: State, name: str) -> list[State]:
        return self._loads(before, tuple(of[name] for of in before.saved))

    def _restore(self, before: State, name: str) -> list[State]:
        linked = before.copy()
        for saved, steps in zip(linked.saved, self.kept[name], strict=True):
            saved.setdefault(name, steps)
        return [before, *self._loads(linked, self.kept[name])]

    def _loads(self, before: State, vector: Vector) -> list[State]:
        after = before.copy()
        after.load(vector, before.all)
        return [*(before.cleared(some) for some in subsets(before.all)), after]

    def _load_state(self, before: State, name: str) -> list[State]:
        """Members that have the rows of the state already stay as they are."""
        vector, after = self.kept[name], before.copy()
        loaded = [at for at in before.all if before.now[at] != vector[at]]
        if not loaded:
            return [before]
        after.load(vector, loaded)
        after.moments[-1].unwritten, after.moments[-1].older = set(loaded), set(before.all) - set(loaded)
        return [*(before.cleared(some) for some in subsets(loaded)), after]

    def _prune(self, before: State, member: str = "") -> list[State]:
        return [before]

    _prune_all = _prune

    def _command(self, before: State, what: str, name: str) -> list[State]:
        if what == "load_all":
            after = before.copy()
            after.load(tuple(of[name] for of in before.saved), before.all, clean=True)
            return [before, after]
        return getattr(self, f"_{what}")(before, name)  # type: ignore[no-any-return]

    _live = _command

    def _reopen(self, before: State, member: str) -> list[State]:
        return [before, self._closed(before, [NAMES.index(member)])]

    def _open(self, before: State) -> list[State]:
        states = [self._closed(before, some) for some in subsets(before.all)]
        states[-1].note()
        states[-1].first = [True for _ in before.all]
        return states

    def _closed(self, before: State, members: Any) -> State:
        after = before.copy()
        for member in members:
            after.live[member] = after.now[member]
            if after.loaded[member] is not None:
                after.base[member], after.loaded[member] = after.now[member], None
        for moment in after.moments:
            moment.unwritten -= set(members)
        return after

    def found(self, rows: Sequence[Sequence[float]], mode: str, names: Names) -> Vector:
        """The vector of rows that a restart has found, of the steps and the values of key 0. AssertionError."""
        options = []
        for state in reversed(self.states):
            for unsure in (False, True):
                target = state.target(unsure)
                vector = state.accepted() if target is None else target
                options.append((mode == "mixed", vector))
                is_mode = (target is None) == (mode == "mixed") or (target is None and self._mixed)
                if is_mode and all(map(_is, vector, rows)) and state.fits(names, self.made or None):
                    self._go_on(state, vector, names)
                    return vector
        raise AssertionError(f"rows of {rows} by {mode}, with {names}, and not one of {options}")

    def _go_on(self, state: State, vector: Vector, names: Names) -> None:
        """The rows are those of a vector from here on, and are closed."""
        after = state.copy()
        after.have(names)
        for member, steps in enumerate(vector):
            if after.live[member] != steps:
                after.base[member] = steps
        after.now, after.live, after.loaded = list(vector), list(vector), [None] * len(vector)
        after.first = [True] * len(vector)
        for moment in after.moments:
            moment.unwritten.clear()
        after.note()
        self.states, self._behind, self.inside, self.made, self._mixed = [after], None, "between", "", False


def _renamed(before: State, name: str, members: Sequence[int], vector: Sequence[Steps]) -> list[State]:
    """The states after each of the renames of a save, which go from one member to the next."""
    states = []
    for count in range(1, len(members) + 1):
        states.append(before.copy())
        states[-1].save(name, members[:count], vector)
        for moment in states[-1].moments:
            moment.older -= set(members)
    return states


def _is(steps: Steps, row: Sequence[float]) -> bool:
    return (len(steps), float(-sum(steps))) == (row[0], float(row[1]))


class ModelRounds:
    """Runs rounds below a folder. script: what trainers run first, for tests of the harness."""

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
        result, allowed = Result(), Allowed(len(plan.dims))
        for number, session in enumerate(plan.sessions):
            (place / "trace").write_text("")  # a trainer may be killed before it begins its own
            self._train(place, plan, session, number)
            lines = allowed.follow(place / "log")
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
