"""The rule that decides which rows stores open with after a kill, and the record it reads.

Embeddings that one process trains together must also be recovered together: a step that updated users and items may
not survive for users only. Live rows change with every step, so after a kill only snapshots can be trusted, and live
rows that were closed cleanly.

A *moment* is a point between two steps. A small file, the *record*, contains an *entry* for each store: durable rows
that were the store's present rows when the record was written. Saves, loads and closes write the record. A step does
not, except the first one: it removes live rows from the entry, because they are about to change. The record also
names two sets of snapshots: the *commit*, for the newest moment that all stores have saved, and `before`, for the
moment before that.

On the next start, `choose` takes the entries. If an entry is empty or its rows are gone, that store was not saved at
the moment of the entries, so all stores go back to the commit, or to `before` if a snapshot of the commit is gone.
`next_record` says what a save, load or close writes. All functions here are pure; tests/crash/record_model.py checks
them on random histories.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

EMPTY, FOREVER = "EMPTY", sys.maxsize
SnapshotIds = Mapping[str, str]  # from store to the id of a snapshot, or EMPTY for no rows


class Entry(NamedTuple):
    """Durable rows that equal a store's present rows: a snapshot or EMPTY, live rows, both, or neither."""

    snapshot: str | None = None
    live: str | None = None  # the version in the live rows' clean marker; equal for all shards


NOTHING = Entry()


def version_of_snapshot(id: str | None) -> str:
    """The version of live rows that equal a snapshot's, or EMPTY's, and were not written since."""
    return f"{id}:0"


class Location(NamedTuple):
    """A store's name and its folder: the path relative to the record's folder, and the absolute path."""

    name: str
    relative: str
    absolute: str
    snapshots: str = ""  # the store folder with its snapshots, if that is another one

    @classmethod
    def of(cls, store: Path, snapshot_store: Path, folder: Path) -> Location:
        """Describe where a store is, for a record in `folder`."""
        snapshots = "" if snapshot_store == store else str(snapshot_store)
        return cls(store.name, os.path.relpath(store, folder), str(store), snapshots)

    def paths(self, folder: Path) -> list[Path]:
        """Returns where the store may be, for a record in `folder`; last, where its snapshots are."""
        paths = [Path(os.path.normpath(folder / self.relative)), Path(self.absolute)]
        return [*paths, Path(self.snapshots)] if self.snapshots else paths


@dataclass(frozen=True)
class Record:
    """What the record says. The maps are by store."""

    now: Mapping[str, Entry]  # at its last write
    commit: SnapshotIds  # for the newest moment that all stores have saved
    before: SnapshotIds  # for the moment before that
    places: Mapping[str, Location] = field(default_factory=dict)  # empty if the record is in its only store's MARK
    trained: frozenset[str] = frozenset()  # the stores written since a process took the lock
    parents: Mapping[str, str] = field(default_factory=dict)  # the snapshots that the user last saved or loaded
    undone: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # sequences (low, high] that recovery skipped
    joining: bool = False  # while groups are united: a listed store whose MARK leads elsewhere is not a member yet

    @property
    def unchanged(self) -> dict[str, Entry]:
        """The entries without live rows. A store that was written since its last save or load has NOTHING."""
        return {store: NOTHING if store in self.trained else Entry(entry.snapshot) for store, entry in self.now.items()}

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "trained": sorted(self.trained)}

    @classmethod
    def parse(cls, value: Any) -> Record:
        """Read what `plain` wrote. Raises ValueError, TypeError, KeyError or AttributeError if it is invalid."""
        now = {str(store): Entry(*entry) for store, entry in value["now"].items()}
        record = cls(
            now,
            {str(store): str(id) for store, id in value["commit"].items()},
            {str(store): str(id) for store, id in value["before"].items()},
            {str(store): Location(*map(str, location)) for store, location in value["places"].items()},
            frozenset(map(str, value["trained"])),
            {str(store): str(id) for store, id in value["parents"].items()},
            {str(store): (int(low), int(high)) for store, (low, high) in value["undone"].items()},
            bool(value["joining"]),
        )
        if not (now and now.keys() == record.commit.keys() == record.before.keys()):
            raise ValueError("now, commit and before list different stores")
        return record


NO_RECORD = Record({}, {}, {})  # for a process that does not write the record


class Files(NamedTuple):
    """What recovery reads from a store: each shard's version in its clean marker, and the ids of its snapshots."""

    live: Sequence[str | None]
    snapshots: Collection[str]

    @property
    def one_live(self) -> str | None:
        """The version that all shards have; None if they differ or have none."""
        return self.live[0] if len({*self.live}) == 1 else None


@dataclass(eq=False)
class Interval:
    """From moment `first` to `last`, a store had a snapshot's rows. Only the lock holder knows this."""

    snapshot: str  # its id; "" until the save has ended
    first: int
    last: int = FOREVER

    def end(self, moment: int) -> None:
        """End the interval at `moment`, because the rows are about to change."""
        self.last = min(self.last, moment)


def usable(entry: Entry, files: Files) -> Entry:
    """Drop what an entry names but the disk lacks: a missing snapshot, live rows that some shard did not close."""
    has_snapshot = entry.snapshot == EMPTY or entry.snapshot in files.snapshots
    has_live = entry.live is not None and all(live == entry.live for live in files.live)
    return Entry(entry.snapshot if has_snapshot else None, entry.live if has_live else None)


def choose(record: Record, files: Mapping[str, Files]) -> dict[str, Entry] | None:
    """Choose what each member opens with if no process holds the lock. Returns None if nothing complete is left."""
    for entries in (record.now, *({x: Entry(ids[x]) for x in files} for ids in (record.commit, record.before))):
        chosen = {x: usable(entries[x], store_files) for x, store_files in files.items()}
        if NOTHING not in chosen.values():
            return chosen
    return None


def newest_moment(spans: Mapping[str, Sequence[Interval]], clock: int) -> tuple[int, SnapshotIds] | None:
    """Find the newest moment at which every store's rows are in a snapshot. Returns it with these snapshots."""
    for moment in sorted({min(span.last, clock) for store in spans.values() for span in store}, reverse=True):
        snapshots = {
            x: next((s.snapshot for s in reversed(store) if s.snapshot and s.first <= moment <= s.last), "")
            for x, store in spans.items()
        }
        if all(snapshots.values()):
            return moment, snapshots
    return None


def union(records: Sequence[Record], at: Mapping[str, Entry]) -> Record:
    """Combine groups' records for the stores in `at`, whose entries it contains."""
    fields: dict[str, Any] = {
        name: {x: value for record in records for x, value in getattr(record, name).items() if x in at}
        for name in ("commit", "before", "places", "parents", "undone")
    }
    return Record(dict(at), trained=frozenset(x for record in records for x in record.trained if x in at), **fields)


def next_record(record: Record, at: Mapping[str, Entry], moment: SnapshotIds | None) -> Record:
    """Returns the record to write. at: the members' entries. moment: the newest moment's snapshots, if there is one."""
    following = union([record], at)
    if moment is not None and moment != following.commit:
        following = replace(following, commit=dict(moment), before=following.commit)
    return following


def needed(record: Record, store: str) -> set[str]:
    """A store's snapshots that must not be removed. Those in `before` may be; recovery then cannot use them."""
    ids = {record.now.get(store, NOTHING).snapshot, record.commit.get(store), record.parents.get(store)}
    return {id for id in ids if id not in (None, EMPTY)}
