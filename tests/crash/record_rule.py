"""The recovery rule for stores that are trained together, as pure functions on frozen values.

The stores of a group share one record. An `Entry` says which durable rows are a store's present rows; a `Record` has
the entries of its last write, and two sets of snapshots to use when an entry is missing. Two functions decide
everything: `next_record` what a write of the record says, `choose` what the next process opens with.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

EMPTY, FOREVER = "EMPTY", sys.maxsize
Live = tuple[int, int]  # run and number of writes, as in a clean marker
Snapshots = Mapping[str, str]  # store: snapshot id, or EMPTY


class Refused(Exception):
    """An error that the user sees. Nothing was changed."""


@dataclass(frozen=True)
class Entry:
    """Durable rows that equal a store's present rows: a snapshot, live rows, both, or neither."""

    snapshot: str | None = None
    live: Live | None = None


NOTHING = Entry()


@dataclass(frozen=True)
class Record:
    """The entries at the last write; the newest moment that all snapshots cover; the one before that.

    joining: a union of groups that do not all lead here yet, so a listed store that leads elsewhere is no member.
    """

    now: Mapping[str, Entry]
    commit: Snapshots
    before: Snapshots
    joining: bool = False


@dataclass(frozen=True)
class Forward:
    """Where a group went. The MARK of a store in a larger group is such a forward, too."""

    key: str


class Folder(NamedTuple):
    """What recovery reads of a store: the clean marker of each shard, and the snapshots."""

    markers: Sequence[Live | None]
    snapshots: Collection[str]


class Span(NamedTuple):
    """The moments during which a store had a snapshot's rows. Known only to the process that holds the lock."""

    snapshot: str
    first: int
    last: int = FOREVER


def usable(entry: Entry, folder: Folder) -> Entry:
    """Drop the parts that the folder does not have: a snapshot that is gone, live rows that a shard has not closed."""
    has_snapshot = entry.snapshot == EMPTY or entry.snapshot in folder.snapshots
    has_live = all(marker == entry.live for marker in folder.markers)
    return Entry(entry.snapshot if has_snapshot else None, entry.live if has_live else None)


def choose(record: Record, folders: Mapping[str, Folder]) -> dict[str, Entry]:
    """What each member opens with if the lock is free: `now` if no entry is missing, else `commit`, else `before`."""
    for entries in (record.now, *({x: Entry(s[x]) for x in folders} for s in (record.commit, record.before))):
        chosen = {x: usable(entries[x], folder) for x, folder in folders.items()}
        if NOTHING not in chosen.values():
            return chosen
    raise Refused("no moment has the rows of every store: lists the snapshots of each")


def newest_moment(spans: Mapping[str, Iterable[Span]], clock: int) -> Snapshots | None:
    """The snapshots of the newest moment at which every store had one."""
    for moment in sorted({min(span.last, clock) for store in spans.values() for span in store}, reverse=True):
        at_moment = {
            x: next((span.snapshot for span in store if span.first <= moment <= span.last), None)
            for x, store in spans.items()
        }
        if None not in at_moment.values():
            return {x: snapshot for x, snapshot in at_moment.items() if snapshot}
    return None


def next_record(record: Record, at: Mapping[str, Entry], moment: Snapshots | None) -> Record:
    """The record to write when the members' entries are `at` and `moment` is the newest that snapshots cover."""
    commit, before = ({x: old[x] for x in at} for old in (record.commit, record.before))
    if moment is not None and moment != commit:
        commit, before = dict(moment), commit
    return Record(dict(at), commit, before)


def needed(record: Record, at: Mapping[str, Entry], store: str) -> set[str | None]:
    """The snapshots of a store that may not be removed."""
    entries = {e[store].snapshot for e in (record.now, at) if store in e}
    return entries | {s[store] for s in (record.commit, record.before)}


def union(records: Iterable[Record], at: Mapping[str, Entry]) -> Record:
    """The record of groups that are trained together for the first time."""
    commit, before = dict[str, str](), dict[str, str]()
    for record in records:
        commit.update({x: s for x, s in record.commit.items() if x in at})
        before.update({x: s for x, s in record.before.items() if x in at})
    return Record(dict(at), commit, before, joining=True)
