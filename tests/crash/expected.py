"""What may be found in a store folder, from the log that its trainers wrote ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Saved(NamedTuple):
    """A snapshot: the step of its rows, its kind, and what it is based on."""

    step: int
    kind: str
    parent: str | None = None


class Expected:
    """The state after each line of the log.

    `saved`: snapshots that must be there, in the order in which they were saved; of `begun` ones each may be there, in
    the place of one of `saved` where that has its name, and `going` ones may be gone. Live rows are of a step of
    `clean`, if they have a clean marker, or may have none if `dirty`, and then a run recovers from a snapshot of
    `bases`, "" for none.
    """

    def __init__(self) -> None:
        self.saved: dict[str, Saved] = {}
        self.begun: dict[str, Saved] = {}
        self.aside: set[str] = set()  # of the begun ones those that will not be the base
        self.backups: dict[str, Saved] = {}  # what was overwritten while the record may have named it
        self.merged: dict[str, str] = {}  # from what each was merged, which has the same id: either may be the parent
        self.loading: str | None = None
        self.going: set[str] = set()
        self.bases = {""}
        self.clean = {0}
        self.dirty = True
        self.step: int | None = None  # of an open embedding
        self.inside = "between"  # the operation that has not returned

    def follow(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Further lines of the log. A kill comes after them."""
        self.inside = "between"
        for line in lines:
            more = dict(line)
            at, operation = more.pop("at"), more.pop("op")
            getattr(self, f"{at}_{operation}")(**more)
            is_running = at == "begin" and operation != "background"
            self.inside = operation if is_running else "background" if self.begun else "between"

    def found(self, snapshots: Mapping[str, Saved], backups: Mapping[str, Saved] = MappingProxyType({})) -> None:
        """After a kill these snapshots are listed, the oldest first. Those in flight exist or not from here on."""
        self.backups = {**backups}
        names, self.step = snapshots.keys(), None
        missing = self.saved.keys() - self.going - names
        foreign = names - self.saved.keys() - self.begun.keys()
        assert not missing, f"lost: {missing}"
        assert not foreign, f"never saved: {foreign}"
        self._note_folds(snapshots)
        for name in list(self.begun):
            if name in names and name in self.saved and snapshots[name] == self.saved[name]:
                if self.begun[name] == self.saved[name]:  # either
                    self.bases.add(name)
            elif name in names:  # it counts if the record was written after it had its name
                bases, old = self.bases, self.saved.get(name)
                if name in bases:  # where the record still names what this replaced
                    bases = bases | {backup for backup, saved in backups.items() if saved == old}
                self._add(name)
                self.bases |= bases | ({self.loading} - {None})
            else:
                self.bases.discard(name)
        self.saved = {name: self.saved[name] for name in snapshots if name in self.saved}  # in the order of their saves
        self.bases = {
            base for base in self.bases if base in self.saved or base in backups or not base
        }  # no prune removes the real one
        self.begun, self.aside, self.going, self.loading = {}, set(), set(), None

    def note_open(self, step: int, recovered: bool) -> None:
        """A run began at this step; `recovered` where it found no clean marker."""
        if recovered:
            assert self.dirty, f"step {self.clean} was closed, and a run went back to {step}"
            self.bases = {base for base in self.bases if self._step_of(base) == step}
            assert self.bases, f"a run went back to step {step}, no base's"
        else:
            assert step in self.clean, f"live rows of step {step} were marked, not of {self.clean}"
        self.clean, self.step = {step}, step
        self.dirty = any(self._step_of(base) == step for base in self.bases)

    def _step_of(self, base: str) -> int:
        return (self.begun.get(base) or self.saved.get(base) or self.backups[base]).step if base else 0

    def begin_open(self, store: str, fresh: bool) -> None:
        if self.dirty:  # its rows may be marked before it returns
            self.clean = self.clean | {self._step_of(base) for base in self.bases}
        if fresh:
            self.clean, self.bases, self.dirty = self.clean | {0}, self.bases | {""}, True

    def end_open(self, store: str, fresh: bool, step: int, recovered: bool) -> None:
        if fresh:
            assert step == 0
            self.clean, self.bases, self.dirty, self.step = {0}, {""}, True, 0
        else:
            self.note_open(step, recovered)

    def allow_recovery_of_same_step(self) -> None:
        """The next run may take closed rows from a snapshot, if that has the same step."""
        self.dirty |= any(self._step_of(base) in self.clean for base in self.bases)

    def begin_step(self, step: int) -> None:
        assert self.step == step - 1
        self.dirty = True

    def end_step(self, step: int) -> None:
        self.clean, self.step = set(), step

    def begin_close(self) -> None:
        assert self.step is not None
        self.clean = self.clean | {self.step}

    def end_close(self) -> None:
        assert self.step is not None
        self.clean, self.dirty, self.step = {self.step}, False, None

    def begin_save(self, name: str, kind: str, step: int, parent: str | None = None) -> None:
        bases = {self._source(base) for base in self.bases}
        assert parent is None or self._source(parent) in bases, f"{name} is based on {parent}, not {self.bases}"
        self.begun[name] = Saved(step, kind, parent)
        self.aside.discard(name)  # one that a merge wrote, and this replaces

    def end_save(self, name: str, **line: Any) -> None:
        self._add(name)

    end_background = end_save

    def begin_background(self, name: str, step: int) -> None:
        self.begin_save(name, "full", step)

    def _nothing(self, **line: Any) -> None:
        """An operation that changes no rows and no snapshots."""

    begin_drop = begin_short = end_short = begin_compact = end_compact = _nothing

    def end_drop(self, name: str) -> None:
        del self.begun[name]

    def _source(self, name: str) -> str:
        """The snapshot that one was merged from, or itself."""
        return self._source(self.merged[name]) if name in self.merged else name

    def begin_merge(self, name: str, new: str) -> None:
        self.merged.pop(new, None)
        if new != self._source(name):
            self.merged[new] = name
        self.begun[new] = Saved(self._step_of(name), "full")
        self.aside.add(new)

    def end_merge(self, name: str, new: str) -> None:
        self._add(new)

    def _add(self, name: str) -> None:
        self.going.discard(name)
        self.saved.pop(name, None)
        self.saved[name] = self.begun.pop(name)
        if name not in self.aside:
            self.bases = {name}
            self.merged.pop(name, None)

    def begin_load(self, name: str) -> None:
        self.loading = name
        self.clean, self.bases = self.clean | {self._step_of(name)}, self.bases | {name}
        self.dirty |= self.step is not None

    def end_load(self, name: str) -> None:
        step = self._step_of(name)
        self.loading, self.aside = None, self.aside | self.begun.keys()
        self.clean, self.bases, self.dirty = {step}, {name}, True
        if self.step is not None:
            self.step = step

    def begin_prune(self, keep_last: int, keep_every: int | None) -> None:
        self.going |= set().union(*(gone | let_go for gone, let_go in self._pruned(keep_last, keep_every)))

    def end_prune(self, keep_last: int, keep_every: int | None, left: Mapping[str, Sequence[Any]]) -> None:
        """left: the snapshots after it, by name: step, kind and parent."""
        pruned, gone = self._pruned(keep_last, keep_every), self.saved.keys() - left.keys()
        must = set.intersection(*(removed for removed, _ in pruned))
        assert must <= gone <= self.going, f"a prune removed {gone}, not {must}, and at most {self.going}"
        self._note_folds({name: Saved(*saved) for name, saved in left.items()})
        copies = self._find_copies(self.bases) - gone
        self.bases = (self.bases - gone) | (copies if self.bases & gone else set())
        self.saved = {name: saved for name, saved in self.saved.items() if name not in gone}
        self.going &= self.saved.keys()

    def _find_copies(self, names: set[str]) -> set[str]:
        """The snapshots that have the id of one of `names`, because they were merged from it: a prune keeps one."""
        sources = {self._source(name) for name in names}
        return {name for name in self.saved if self._source(name) in sources}

    def _note_folds(self, there: Mapping[str, Saved]) -> None:
        """Snapshots over which a prune let some go may be based on what was below these."""
        for name, saved in [*self.saved.items()]:
            if (now := there.get(name, saved)) == saved or name in self.begun:
                continue
            parent = saved.parent
            while parent != now.parent:
                assert parent in self.going, f"{name} was folded over {parent}, which a prune has to keep: {now}"
                parent = self.saved[parent].parent
            assert now._replace(kind=saved.kind, parent=saved.parent) == saved
            assert now.kind == ("full" if now.parent is None else "incremental")
            self.saved[name] = now

    def _pruned(self, keep_last: int, keep_every: int | None) -> list[tuple[set[str], set[str]]]:
        """What a prune does, for each state that it may find: of the base, of snapshots that are begun or going."""
        bases = self.bases | (self.begun.keys() - self.aside)
        bases |= self._find_copies(bases)
        left = {name: saved for name, saved in self.saved.items() if name not in self.begun}
        states = [self.saved, {**left, **self.begun}]
        # of those that an earlier prune may have removed, none or all are gone
        states += [{name: saved for name, saved in state.items() if name not in self.going} for state in states]
        return [_pruned(state, keep_last, keep_every, base) for base in bases for state in states]


def _pruned(
    snapshots: dict[str, Saved], keep_last: int, keep_every: int | None, base: str
) -> tuple[set[str], set[str]]:
    """What it removes, and what it may fold.

    The first are neither the latest, nor the first to reach a multiple of steps, nor the base, nor what one of these is
    based on. The last are only what one of these is based on.
    """
    chosen, reached = {base, *list(snapshots)[-keep_last:]}, -1
    for name, saved in snapshots.items():
        if keep_every is not None and saved.step // keep_every > reached:
            reached = saved.step // keep_every
            chosen.add(name)
    kept = set(chosen)
    for name, saved in reversed(snapshots.items()):
        if name in kept and saved.parent is not None:
            kept.add(saved.parent)
    return snapshots.keys() - kept, kept - chosen
