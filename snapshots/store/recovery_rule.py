"""Chooses the rows that each store gets after a kill. The choice is based on a record, also defined here.

Embeddings that one process trains together must also be recovered together. For example, a step that updated users and
items must not survive for users only. After a kill, only snapshots and cleanly closed live rows can be trusted, because
other live rows may contain half of a step.

A *moment* is a point between two steps. The *record* is a small file with an *entry* for each store. An entry names
durable rows, such as a snapshot. When the record was written, the store's rows were equal to these durable rows. Saves,
loads and closes write the record. The first step after the group is locked also writes the record. That first step is
about to change the live rows, so it removes them from the entry. Later steps write nothing. The record also names two
sets of snapshots. The *commit* is one snapshot per store, all of the newest common moment; `previous_commit` is older.

On the next start, `choose_entries` uses the entries if each entry names rows that still exist. Otherwise all stores go
back to the commit. If a snapshot of the commit was removed, all stores go back to `previous_commit` instead.
`make_next_record` makes the next record. All functions are pure; tests/crash/record_model.py checks random histories.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

EMPTY_ID, FOREVER = "EMPTY", sys.maxsize
SnapshotIds = Mapping[str, str]  # maps a store's id to a snapshot's id, or to EMPTY_ID for no rows


class Entry(NamedTuple):
    """Names the durable rows equal to a store's current rows: a snapshot (or EMPTY_ID), live rows, both, or none."""

    snapshot: str | None = None  # a snapshot's id, or EMPTY_ID
    live_version: str | None = None  # the version in the live rows' clean marker, the same for all shards


NO_ENTRY = Entry()


def make_snapshot_version(id: str | None) -> str:
    """Returns the version of live rows that equal the snapshot `id`. The id EMPTY_ID stands for no rows."""
    return f"{id}:0"


class Location(NamedTuple):
    """A store's name and two paths of its folder: a path relative to the record's folder, and an absolute path."""

    name: str
    relative: str
    absolute: str
    snapshots: str = ""  # the store folder that contains the snapshots, if it is another one

    @classmethod
    def make(cls, store: Path, snapshot_store: Path, folder: Path) -> Location:
        """Returns the location of `store`. folder: the folder that contains the record."""
        snapshots = "" if snapshot_store == store else str(snapshot_store)
        return cls(store.name, os.path.relpath(store, folder), str(store), snapshots)

    def list_paths(self, folder: Path) -> list[Path]:
        """Returns paths where the store may be, in the order to try them. folder: the folder with the record."""
        paths = [Path(os.path.normpath(folder / self.relative)), Path(self.absolute)]
        return [*paths, Path(self.snapshots)] if self.snapshots else paths


@dataclass(frozen=True)
class Record:
    """The content of a record. The keys of all maps are store ids."""

    entries: Mapping[str, Entry]  # the entries when the record was last written
    commit: SnapshotIds  # one snapshot of each store, all of the same moment, as new as possible
    previous_commit: SnapshotIds
    locations: Mapping[str, Location] = field(default_factory=dict)  # empty if the file MARK contains the record
    changed_stores: frozenset[str] = frozenset()  # stores written since a process locked the group
    parents: Mapping[str, str] = field(default_factory=dict)  # the snapshots that the user last saved or loaded
    # for each store, the range (low, high] of sequence numbers of the snapshots that recovery skipped
    skipped_sequences: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    is_joining: bool = False  # groups are being joined or split: only stores whose MARK names this record are members

    @property
    def unchanged_entries(self) -> dict[str, Entry]:
        """The snapshots that the entries name. Stores in `changed_stores` get NO_ENTRY: their rows may have changed."""
        return {x: NO_ENTRY if x in self.changed_stores else Entry(e.snapshot) for x, e in self.entries.items()}

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "changed_stores": sorted(self.changed_stores)}

    @classmethod
    def parse(cls, value: Any) -> Record:
        """Parse the result of `to_plain`. Raises ValueError, TypeError, KeyError, AttributeError for invalid input."""
        entries = {str(store): Entry(*entry) for store, entry in value["entries"].items()}
        record = cls(
            entries,
            {str(store): str(id) for store, id in value["commit"].items()},
            {str(store): str(id) for store, id in value["previous_commit"].items()},
            {str(store): Location(*map(str, location)) for store, location in value["locations"].items()},
            frozenset(map(str, value["changed_stores"])),
            {str(store): str(id) for store, id in value["parents"].items()},
            {str(store): (int(low), int(high)) for store, (low, high) in value["skipped_sequences"].items()},
            bool(value["is_joining"]),
        )
        if not (entries and entries.keys() == record.commit.keys() == record.previous_commit.keys()):
            raise ValueError("the maps 'entries', 'commit' and 'previous_commit' list different stores")
        return record


EMPTY_RECORD = Record({}, {}, {})  # for a process that writes no record


class StoreFiles(NamedTuple):
    """What recovery needs to know about a store's files."""

    live_versions: Sequence[str | None]  # the version in each shard's clean marker
    snapshot_ids: Sequence[str]  # from oldest to newest

    @property
    def common_version(self) -> str | None:
        """The live rows' version if it is the same for all shards; None if versions differ or are missing."""
        return self.live_versions[0] if len({*self.live_versions}) == 1 else None


@dataclass(eq=False)
class Interval:
    """The moments from `first` to `last`, both included, at which a store's rows equalled one snapshot."""

    snapshot: str  # the snapshot's id; "" until the save has ended
    first: int
    last: int = FOREVER

    def end(self, moment: int) -> None:
        """End the interval at `moment`, because the store's rows are about to change."""
        self.last = min(self.last, moment)


def drop_lost_rows(entry: Entry, files: StoreFiles) -> Entry:
    """Returns the entry without unusable rows, that is, a missing snapshot, or live rows that some shard lacks."""
    has_snapshot = entry.snapshot == EMPTY_ID or entry.snapshot in files.snapshot_ids
    has_live = entry.live_version is not None and all(version == entry.live_version for version in files.live_versions)
    return Entry(entry.snapshot if has_snapshot else None, entry.live_version if has_live else None)


def choose_entries(record: Record, files: Mapping[str, StoreFiles]) -> dict[str, Entry] | None:
    """Choose rows for each member of a group that no process locks. Returns None if a member's rows are missing."""
    commits = record.commit, record.previous_commit
    for entries in (record.entries, *({x: Entry(ids[x]) for x in files} for ids in commits)):
        chosen = {x: drop_lost_rows(entries[x], store_files) for x, store_files in files.items()}
        if NO_ENTRY not in chosen.values():
            return chosen
    return None


def find_newest_moment(intervals: Mapping[str, Sequence[Interval]], clock: int) -> tuple[int, SnapshotIds] | None:
    """Find the newest moment, up to the current moment `clock`, that snapshots of all stores share. Returns both."""
    for moment in sorted({min(interval.last, clock) for x in intervals for interval in intervals[x]}, reverse=True):
        snapshots = {
            x: next((s.snapshot for s in reversed(store) if s.snapshot and s.first <= moment <= s.last), "")
            for x, store in intervals.items()
        }
        if all(snapshots.values()):
            return moment, snapshots
    return None


def merge_records(records: Sequence[Record], entries: Mapping[str, Entry]) -> Record:
    """Combine several groups' records. entries: the entries of the stores to include."""
    fields: dict[str, Any] = {
        name: {x: value for record in records for x, value in getattr(record, name).items() if x in entries}
        for name in ("commit", "previous_commit", "locations", "parents", "skipped_sequences")
    }
    fields["changed_stores"] = frozenset(x for record in records for x in record.changed_stores if x in entries)
    return Record(dict(entries), **fields)


def make_next_record(record: Record, entries: Mapping[str, Entry], snapshots: SnapshotIds | None) -> Record:
    """Returns the record to write. entries: the members' entries. snapshots: the new commit; None keeps the old one."""
    result = merge_records([record], entries)
    if snapshots is not None and snapshots != result.commit:
        result = replace(result, commit=dict(snapshots), previous_commit=result.commit)
    return result


def find_needed_ids(record: Record, store_id: str) -> set[str]:
    """Returns the ids of a store's snapshots that must not be removed. Those in `previous_commit` need not be kept."""
    ids = {record.entries.get(store_id, NO_ENTRY).snapshot, record.commit.get(store_id), record.parents.get(store_id)}
    return {id for id in ids if id not in (None, EMPTY_ID)}
