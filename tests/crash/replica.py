"""What the folders of embeddings that are trained together may have after a log: what a process of the model left.

A `Replica` is one way in which the folders may be. It repeats each operation of the log by `record_processes`, whose
rule is that of the source and is checked by itself (`record_model`). What counts is what the record says after the last
write of it that returned, or after one that may have happened: a kill may have come before any durable write of an
operation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy

from tierbed.snapshots.store.recovery_rule import EMPTY_ID, NO_ENTRY, Entry, Interval, drop_lost_rows, find_needed_ids

from .record_processes import Disk, Kill, Refused, Rows, Trainer

Names = Sequence[Mapping[str, int]]  # the snapshots of each member, and their steps
MADE = ("state_dict-", "replaced-")  # what the names begin with that have an id, which the log does not know


def label(name: str) -> str:
    """The name by which the log knows a snapshot: those of checkpoints end with an id as well."""
    if name.startswith("kept-"):
        return "-".join(name.split("-")[:3])
    return next((begin for begin in MADE if name.startswith(begin)), name)


class Impossible(Exception):
    """The folders are not as in this replica."""


class Folders(Disk):
    """The folders of members, which refuse to begin empty when something was saved."""

    def target(self, key: str) -> dict[str, Entry]:
        chosen, record = super().target(key), self.record(key)
        was_saved = any(record.parents.get(x, EMPTY_ID) != EMPTY_ID for x in chosen)
        if was_saved and {*chosen.values()} == {Entry(EMPTY_ID)} and chosen != {x: record.entries[x] for x in chosen}:
            raise Refused("no moment has rows")
        return chosen

    def newest(self, key: str) -> dict[str, Entry]:
        """What each has by itself."""
        record, chosen, ids = self.record(key), dict[str, Entry](), list(self.contents)
        for x in self.members(key):
            own = (record.entries[x], Entry(record.parents.get(x, record.commit[x])))
            found = [entry for entry in (drop_lost_rows(one, self.folder(x)) for one in own) if entry != NO_ENTRY]
            latest = sorted(self.names[x].values(), key=ids.index)
            chosen[x] = found[0] if found else Entry(latest[-1] if latest else EMPTY_ID)
        return chosen


class Process(Trainer):
    """What the processes of the harness do besides."""

    disk: Folders
    is_lenient = False

    def choose_entry(self, store: str) -> Entry:
        key = self.disk.leads_to(store)
        return self.disk.newest(key)[store] if self.is_lenient and key != self.group else super().choose_entry(store)

    def targets(self, key: str) -> dict[str, Entry]:
        return self.disk.newest(key) if self.is_lenient else self.disk.target(key)

    def entry_now(self, store: str) -> Entry:
        return self.at[store] if self.disk.leads_to(store) == self.group else self.entries[store]

    def save_for_state(self, store: str, id: str) -> None:
        """A snapshot that no user saved, or a second name of one that has the rows."""
        snapshot = self.entry_now(store).snapshot
        if snapshot is not None:
            if snapshot != EMPTY_ID:
                self.link(store, f"state_dict-{snapshot}", snapshot)
            return
        self.lock()
        self.capture(store)
        self.publish(store, f"state_dict-{id}", id, self.rows[store])
        self.count_snapshot(store, id, Interval(id, self.since[store]))
        self.write_record()

    def finish_together(self) -> None:
        saved = dict(self.background)
        for x, (name, snapshot, rows, _) in saved.items():
            self.publish(x, name, snapshot, rows)
        for x, (_, snapshot, _, _) in saved.items():
            self.count_snapshot(x, snapshot, self.background.pop(x)[3])
        self.write_record({x: snapshot for x, (_, snapshot, _, _) in saved.items()})

    def link(self, store: str, name: str, snapshot: str) -> None:
        names = self.disk.names[store]
        if name not in names:
            self.disk.write(lambda: names.__setitem__(name, snapshot))


class Replica:
    """One way in which the folders of `members` may be, of which `process` has some open.

    ranks: that share the rows.
    """

    def __init__(self, members: str, ranks: int = 1) -> None:
        self.members, self.count = members, 0
        self.disk = Folders(members, ranks)
        self.process = Process(self.disk, random.Random(0), 0)
        self.kept: dict[str, dict[str, str]] = {}  # by the name of a checkpoint or a state the snapshots

    def new_id(self) -> str:
        self.count += 1
        return f"{self.count}"

    def after(self, operation: Callable[[Replica], object]) -> list[Replica]:
        """As it is after an operation; nothing if that cannot be."""
        made = deepcopy(self)
        with suppress(Impossible):
            operation(made)
            return [made]
        return []

    def killed_within(self, operation: Callable[[Replica], object]) -> list[Replica]:
        """As a kill before each durable write of an operation leaves the folders, or one after all of them."""
        found = []
        while True:
            made = deepcopy(self)
            made.disk.budget = made.disk.writes + len(found)
            found.append(made)
            try:
                operation(made)
            except Kill:
                continue
            except Impossible:
                found.pop()
            return found

    def begin(self, is_lenient: bool = False) -> None:
        """Another process begins, and has no store open."""
        self.disk.budget = 1 << 62
        for names in self.disk.names.values():
            for name in [name for name in names if name.startswith(".tmp-")]:
                names.pop(name)
        self.process = Process(self.disk, random.Random(0), self.process.run + 1)
        self.process.is_lenient = is_lenient

    def can_resume(self) -> bool:
        try:
            for key in {self.disk.leads_to(x) for x in self.members}:
                self.disk.target(key)
        except Refused:
            return False
        return True

    def open(self) -> list[Rows]:
        self.process.open(self.members)
        return [self.process.rows[x] for x in self.members]

    def close(self) -> None:
        for x in list(self.process.rows):
            self.process.close(x)

    # operations of the log

    def step(self, names: str, numbers: Sequence[int]) -> None:
        for x, number in zip(self.members, numbers, strict=False):
            if x in names:
                self.process.begin_write(x)
                self.process.rows[x] = (*self.process.rows[x], number)

    def save(self, member: str, name: str, kind: str = "") -> None:
        self.process.save(member, name, self.new_id())

    overwrite = save

    def save_all(self, name: str, kind: str = "") -> None:
        self.save(self.members, name)

    over = save_all

    def checkpoint(self, name: str) -> None:
        self.kept[name] = {x: f"{self.count + 1}{x}" for x in self.members}
        self.save_all(name)

    def background(self, name: str, kind: str) -> None:
        if name.startswith("kept-"):
            self.kept[name] = {x: f"{self.count + 1}{x}" for x in self.members}
        self.process.begin_background(self.members, name, self.new_id())

    def state(self, name: str) -> None:
        id = self.new_id()
        self.kept[name] = {x: self.process.entry_now(x).snapshot or f"{id}{x}" for x in self.members}
        for x in self.members:
            self.process.save_for_state(x, f"{id}{x}")

    def load(self, member: str, name: str) -> None:
        self.process.load({x: self.disk.names[x][name] for x in member})

    def load_all(self, name: str) -> None:
        self.load(self.members, name)

    def restore(self, name: str) -> None:
        for x, snapshot in self.kept[name].items():
            self.process.link(x, name, snapshot)
        self.process.load(self.kept[name])

    def load_state(self, name: str, stay: Collection[str] = ()) -> None:
        """stay: the members that have these rows, and are not loaded."""
        for x, snapshot in self.kept[name].items():
            if x not in stay:
                self.process.load({x: snapshot})
            elif self.process.rows[x] != self.disk.contents[snapshot]:
                raise Impossible

    def prune(self, *given: str) -> None:
        """`have` does it."""

    prune_all = prune

    def reopen(self, member: str) -> None:
        self.process.close(member)

    def open_again(self) -> None:
        self.close()
        self.open()

    def command(self, what: str, name: str) -> None:
        """By the shell, while all are closed."""
        if what != "prune_all":
            self.open()
            getattr(self, what)(name)
            for x in self.members:
                self.process.close(x) if what == "load_all" else self.process.leave(x)

    def live(self, what: str, name: str) -> None:
        """By the shell, while all are open."""
        getattr(self, what)(name)

    # the snapshots that are found

    def required(self, member: str) -> set[str]:
        record = self.disk.record(self.disk.leads_to(member))
        return {id for id in find_needed_ids(record, member) if id in self.disk.names[member].values()}

    def fits(self, names: Names, removes: bool) -> bool:
        """Whether the folders can have these snapshots. removes: whether some may have been removed just now."""
        for x, there in zip(self.members, names, strict=True):
            steps = {name: len(self.disk.contents[id]) for name, id in self.disk.names[x].items()}
            ours = {name: step for name, step in steps.items() if label(name) == name and name[0] != "."}
            theirs = {label(name): step for name, step in there.items() if label(name) not in MADE}
            if not theirs.items() <= ours.items() or not (removes or ours.keys() <= theirs.keys()):
                return False
            states = Counter(step for name, step in steps.items() if label(name) == MADE[0])
            if Counter(step for name, step in there.items() if label(name) == MADE[0]) - states:
                return False
            listed = {(label(name), step) for name, step in there.items()}
            for id in self.required(x):
                its_names = [name for name, one in self.disk.names[x].items() if one == id]
                if not any((label(name), steps[name]) in listed for name in its_names):
                    return False
        return True

    def have(self, names: Names) -> None:
        """Forget the snapshots that are not in the folders."""
        for x, there in zip(self.members, names, strict=True):
            counts = Counter((label(name), step) for name, step in there.items())
            ours, required = self.disk.names[x], self.required(x)
            for name in sorted(ours, key=lambda name: ours[name] in required, reverse=True):
                kind = label(name), len(self.disk.contents[ours[name]])
                counts[kind] -= 1
                if counts[kind] < 0 and not (kind[0] == "replaced-" and ours[name] in required):
                    del ours[name]

    def key(self) -> object:
        """What makes it differ from others."""
        disk, of_process = self.disk, ("rows", "at", "spans", "noted", "entries", "since", "background")
        return repr([disk.files, disk.names, disk.live, *(getattr(self.process, name) for name in of_process)])
