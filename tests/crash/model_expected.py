"""What the folders of embeddings that are trained together have, by a log, and to which moment recovery has to go.

It is the rule of docs/snapshots.md, made again from steps in place of versions: each step of a member has a number of
its own, so the numbers of the steps that rows went through name these rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import combinations

Steps = tuple[int, ...]  # the numbers of the steps that a member has taken
Vector = tuple[Steps, ...]  # of all members
Names = Sequence[Mapping[str, int]]  # the snapshots of each member, and their steps
SURE, MAYBE, NO = 2, 1, 0


def plain(name: str) -> str:
    """The name by which the log knows a snapshot: those of checkpoints end with an id."""
    return "-".join(name.split("-")[:3]) if name.startswith("kept-") else name


@dataclass
class Moment:
    """A vector that was noted: by snapshots, as pairs of member and name, and in a MARK surely, maybe or not.

    Of a load of a state: the members that have loaded it and were not written, and those that had its rows already.
    While there are both, all go to it, whatever the recovery snapshots are.
    """

    vector: Vector
    snapshots: set[tuple[int, str]]
    clean: int = NO
    unwritten: set[int] = field(default_factory=set)
    older: set[int] = field(default_factory=set)


@dataclass
class State:
    """Of each member the rows, those of its recovery snapshot, its clean live rows if any, and its snapshots.

    loaded: the rows of a load of this member alone, until a moment with them is noted: a kill before that forgets it.
    formed: the vector after the last such load, and its place among the moments. first: whether the next write to a
    member is the first after an open or a load, which notes that vector.
    """

    now: list[Steps]
    base: list[Steps]
    live: list[Steps | None]
    saved: list[dict[str, Steps]]
    loaded: list[Steps | None]
    first: list[bool]
    formed: tuple[int, Vector] = (0, ())
    moments: list[Moment] = field(default_factory=list)
    count: int = 0  # of snapshots that have no name in the log yet

    @classmethod
    def begin(cls, members: int) -> State:
        return cls(
            [()] * members,
            [()] * members,
            [()] * members,
            [{} for _ in range(members)],
            [None] * members,
            [True] * members,
        )

    @property
    def all(self) -> range:
        return range(len(self.now))

    def copy(self) -> State:
        return deepcopy(self)

    def past(self, member: int, killed: bool = False) -> Steps:
        live = self.live[member]
        return self.base[member] if live is None or killed else live

    def has(self, member: int, killed: bool = False) -> set[Steps]:
        past, live = self.past(member, killed), self.live[member]
        found = {steps for steps in self.saved[member].values() if steps == past[: len(steps)]} or {()}
        return found if live is None or killed else found | {live}

    def target(self, unsure: bool, killed: bool = False) -> Vector | None:
        """To which rows all go; None if they have none in common. unsure: whether MARKs have what they may have.

        killed: if all clean live rows were lost now.
        """
        if not killed and None not in self.live:
            return tuple(steps for steps in self.live if steps is not None)
        has = [self.has(member, killed) for member in self.all]
        for moment in reversed(self.moments):
            in_snapshots = any(
                (steps := self.saved[m].get(name)) is not None and steps == self.past(m, killed)[: len(steps)]
                for m, name in moment.snapshots
            )
            is_noted = in_snapshots or moment.clean == SURE or (unsure and moment.clean == MAYBE)
            half = moment.unwritten and moment.older
            rows = [of | {(), *saved.values()} for of, saved in zip(has, self.saved, strict=True)] if half else has
            if is_noted and all(steps in of for steps, of in zip(moment.vector, rows, strict=True)):
                return moment.vector
        return None if any(one - {()} for one in has) else ((),) * len(has)

    def targets(self) -> list[set[Vector | None]]:
        return [{self.target(unsure, killed) for unsure in (False, True)} for killed in (False, True)]

    def accepted(self) -> Vector:
        """What each has by itself."""
        return tuple(self.past(m) if self.loaded[m] is None else self.loaded[m] or () for m in self.all)

    def cleared(self, members: Collection[int]) -> State:
        """The same without the clean live rows of these members."""
        made = self.copy()
        for member in members:
            made.live[member] = None
        for moment in made.moments:
            moment.unwritten -= set(members)
        return made

    def written(self, members: Collection[int]) -> State:
        """The same after a write to these members."""
        made = self.cleared(members)
        if any(made.first[member] for member in members) and made.loaded != [None] * len(made.loaded):
            place, vector = made.formed
            made._weaken()
            made.moments.insert(place, Moment(vector, set(), SURE))
            made._noted(vector)
        for member in members:
            made.first[member] = False
        return made

    def _noted(self, vector: Vector) -> None:
        """A moment of these rows is noted: those that were loaded alone are not forgotten from here on."""
        for member, steps in enumerate(self.loaded):
            if steps is not None and steps == vector[member]:
                self.base[member], self.loaded[member] = steps, None

    def note(self, snapshots: Iterable[tuple[int, str]] = (), vector: Vector | None = None) -> None:
        """The moment of now, by new snapshots, or without any in a MARK."""
        found = set(snapshots)
        if not found:
            self._weaken()
        self.moments.append(Moment(vector or tuple(self.now), found, NO if found else SURE))
        if found:
            self._noted(self.moments[-1].vector)

    def _weaken(self) -> None:
        """A MARK is written: it may have been the one that had an earlier moment."""
        for moment in self.moments:
            moment.clean = min(moment.clean, MAYBE)

    def save(self, name: str, members: Collection[int], vector: Sequence[Steps]) -> None:
        is_loaded = any(self.loaded[member] is not None for member in members)
        for member in members:
            if name in self.saved[member]:
                self.rename(member, name, self.unnamed("replaced"))
            self.saved[member][name] = self.base[member] = vector[member]
            self.loaded[member] = None
        if is_loaded:  # the first write notes it, later
            self.moments.insert(self.formed[0], Moment(self.formed[1], set(), MAYBE))
        for moment in self.moments:
            moment.older -= set(members)
        self.note(((member, name) for member in members), tuple(vector))

    def unnamed(self, begin: str) -> str:
        self.count += 1
        return f"{begin} {self.count}"

    def rename(self, member: int, name: str, new: str) -> None:
        self.saved[member][new] = self.saved[member].pop(name)
        for moment in self.moments:
            if (member, name) in moment.snapshots:
                moment.snapshots ^= {(member, name), (member, new)}

    def save_for_state(self, member: int, noted: bool = True) -> None:
        """A snapshot of a state, or a link if another has the same rows. Rows go back to it once the store notes it."""
        now, name = self.now[member], self.unnamed("state_dict")
        same = next((one for one, steps in self.saved[member].items() if steps == now), None)
        if now == ():
            return
        self.saved[member][name] = now
        if not noted:
            return
        if self.loaded[member] is None:
            self.base[member] = now
        if same is None:
            self.note([(member, name)])
        else:
            for moment in self.moments:
                if (member, same) in moment.snapshots:
                    moment.snapshots.add((member, name))

    def load(self, vector: Sequence[Steps], members: Iterable[int], clean: bool = False) -> None:
        for member in members:
            self.now[member] = self.base[member] = vector[member]
            self.live[member] = vector[member] if clean else None
            self.loaded[member], self.first[member] = None, True
        self.note()

    def load_alone(self, member: int, steps: Steps) -> None:
        self.now[member], self.live[member], self.loaded[member] = steps, None, steps
        self.first[member] = True
        self.formed = len(self.moments), tuple(self.now)

    def have(self, names: Names) -> None:
        """The snapshots that are in the folders now; those without a name in the log get theirs."""
        for member, there in enumerate(names):
            saved = self.saved[member]
            for name, step in there.items():
                if plain(name) not in saved and (unnamed := self._unnamed_of(member, name, step)):
                    self.rename(member, unnamed, name)
            for name in saved.keys() - {plain(name) for name in there}:
                del saved[name]

    def _unnamed_of(self, member: int, name: str, step: int) -> str | None:
        begin = name.split("-")[0]
        saved = self.saved[member].items()
        return next((one for one, steps in saved if one.startswith(f"{begin} ") and len(steps) == step), None)

    def fits(self, names: Names, made: str | None) -> bool:
        """Whether the folders can have these snapshots. made: the name of those that may have come to be."""
        for member, there in enumerate(names):
            saved, steps_of = self.saved[member], {plain(name): step for name, step in there.items()}
            if made is not None and (made in saved) != (made in steps_of):
                return False
            for name, step in steps_of.items():
                known = name in saved or name.startswith("replaced-") or self._unnamed_of(member, name, step)
                if not known:
                    return False
                if name in saved and len(saved[name]) != step:
                    return False
        return True


def subsets(members: Iterable[int]) -> list[tuple[int, ...]]:
    members = list(members)
    return [some for count in range(len(members) + 1) for some in combinations(members, count)]
