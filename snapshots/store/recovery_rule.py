"""The record of a group, the stores that are trained together, and the rule that chooses what they open with.

A store is trained together with others if one process writes rows of both. A process that writes rows of a group holds
its lock. For each store the record has an *entry*, which names durable rows that were its present rows when the record
was written, and two sets of snapshots to use if an entry is missing: those of the newest moment of which every store
has a snapshot, and of the one before it. A *moment* lies between two changes of rows. Two functions decide everything:
`next_record` what a write of the record says, `choose` what the next process opens with. All are pure functions of
values; tests/crash/record_model.py checks them in random histories.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

EMPTY, FOREVER = "EMPTY", sys.maxsize
Snapshots = Mapping[str, str]  # by store the id of a snapshot, or EMPTY for no rows


class Entry(NamedTuple):
    """Durable rows that equal a store's present rows: a snapshot or EMPTY, live rows, both, or neither.

    live: the version in the clean marker of the live rows, of all shards.
    """

    snapshot: str | None = None
    live: str | None = None


NOTHING = Entry()


class Place(NamedTuple):
    """The name of a store, and its folder: relative to that of the record, and absolute.

    apart: the folder that has its snapshots, "" if it is the same.
    """

    name: str
    relative: str
    absolute: str
    apart: str = ""

    @classmethod
    def of(cls, store: Path, snapshot_store: Path, folder: Path) -> Place:
        """The place of a store, for a record in a folder."""
        apart = "" if snapshot_store == store else str(snapshot_store)
        return cls(store.name, os.path.relpath(store, folder), str(store), apart)

    def paths(self, folder: Path) -> list[Path]:
        """Where the store may be, named by something in a folder; last, if that is lost, where its snapshots are."""
        found = [Path(os.path.normpath(folder / self.relative)), Path(self.absolute)]
        return [*found, Path(self.apart)] if self.apart else found


@dataclass(frozen=True)
class Record:
    """The entries at the last write, and the snapshots of the newest moment that they cover, and of the one before it.

    places: of the stores; empty if the record is in the MARK of its only store. trained: the stores that a process has
    begun to write since it took the lock. parents: by store the snapshot that was saved or loaded last by the user's
    will. undone: by store the sequence numbers (low, high] of snapshots that the last recovery did not use. joining: a
    union of groups that do not all lead here yet, so a listed store that leads elsewhere is no member.
    """

    now: Mapping[str, Entry]
    commit: Snapshots
    before: Snapshots
    places: Mapping[str, Place] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    parents: Mapping[str, str] = field(default_factory=dict)
    undone: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    joining: bool = False

    @property
    def unchanged(self) -> dict[str, Entry]:
        """The snapshots of stores that nobody has begun to write since they were saved or loaded; NOTHING of others."""
        return {store: NOTHING if store in self.trained else Entry(one.snapshot) for store, one in self.now.items()}

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "trained": sorted(self.trained)}

    @classmethod
    def parse(cls, value: Any) -> Record:
        """From `plain`. ValueError, TypeError, KeyError, AttributeError if it is invalid."""
        now = {str(store): Entry(*entry) for store, entry in value["now"].items()}
        record = cls(
            now,
            {str(store): str(id) for store, id in value["commit"].items()},
            {str(store): str(id) for store, id in value["before"].items()},
            {str(store): Place(*map(str, place)) for store, place in value["places"].items()},
            frozenset(map(str, value["trained"])),
            {str(store): str(id) for store, id in value["parents"].items()},
            {str(store): (int(low), int(high)) for store, (low, high) in value["undone"].items()},
            bool(value["joining"]),
        )
        if not (now and now.keys() == record.commit.keys() == record.before.keys()):
            raise ValueError("its parts are of different stores")
        return record


NO_RECORD = Record({}, {}, {})  # of a process that does not write it


class Files(NamedTuple):
    """What recovery reads of a store: the version in the clean marker of each shard, and the ids of its snapshots."""

    live: Sequence[str | None]
    snapshots: Collection[str]

    @property
    def one_live(self) -> str | None:
        """The version that all shards have; None if there is none."""
        return self.live[0] if len({*self.live}) == 1 else None


@dataclass(eq=False)
class Interval:
    """The moments during which a store had a snapshot's rows. Known only to the process that holds the lock.

    snapshot: its id; "" until a save of the rows has ended.
    """

    snapshot: str
    first: int
    last: int = FOREVER

    def end(self, moment: int) -> None:
        """The rows are about to change after a moment."""
        self.last = min(self.last, moment)


def usable(entry: Entry, files: Files) -> Entry:
    """Drop the parts that the files do not have: a snapshot that is gone, live rows that a shard has not closed."""
    has_snapshot = entry.snapshot == EMPTY or entry.snapshot in files.snapshots
    has_live = entry.live is not None and all(live == entry.live for live in files.live)
    return Entry(entry.snapshot if has_snapshot else None, entry.live if has_live else None)


def choose(record: Record, files: Mapping[str, Files]) -> dict[str, Entry] | None:
    """What each member opens with if the lock is free: `now` if no entry is missing, else `commit`, else `before`.

    None if there is no moment of which durable rows of every store exist.
    """
    for entries in (record.now, *({x: Entry(ids[x]) for x in files} for ids in (record.commit, record.before))):
        chosen = {x: usable(entries[x], of_store) for x, of_store in files.items()}
        if NOTHING not in chosen.values():
            return chosen
    return None


def newest_moment(spans: Mapping[str, Sequence[Interval]], clock: int) -> tuple[int, Snapshots] | None:
    """The newest moment at which every store had a snapshot, and these."""
    for moment in sorted({min(span.last, clock) for store in spans.values() for span in store}, reverse=True):
        had = {
            x: next((s.snapshot for s in reversed(store) if s.snapshot and s.first <= moment <= s.last), "")
            for x, store in spans.items()
        }
        if all(had.values()):
            return moment, had
    return None


def union(records: Sequence[Record], at: Mapping[str, Entry]) -> Record:
    """What the records of groups say of the stores of `at`, which have these entries."""

    def of_all(name: str) -> dict[str, Any]:
        return {x: value for one in records for x, value in getattr(one, name).items() if x in at}

    trained = frozenset(x for one in records for x in one.trained if x in at)
    kept: dict[str, Any] = {name: of_all(name) for name in ("commit", "before", "places", "parents", "undone")}
    return Record(dict(at), trained=trained, **kept)


def next_record(record: Record, at: Mapping[str, Entry], moment: Snapshots | None) -> Record:
    """The record to write when the members' entries are `at` and `moment` is the newest that snapshots cover."""
    after = union([record], at)
    if moment is not None and moment != after.commit:
        after = replace(after, commit=dict(moment), before=after.commit)
    return after


def needed(record: Record, store: str) -> set[str]:
    """The snapshots of a store that may not be removed. Those of `before` serve only as long as they are kept."""
    ids = {record.now.get(store, NOTHING).snapshot, record.commit.get(store), record.parents.get(store)}
    return {id for id in ids if id not in (None, EMPTY)}
