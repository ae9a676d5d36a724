"""Processes that follow the rule of `record_rule`, and the disk that survives them, for the model checker.

`Disk` has the folders and records. `Trainer` holds the group's lock, `Reader` does not. Rows are the tuple of the
writes that made them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .record_rule import (
    EMPTY,
    FOREVER,
    NOTHING,
    Entry,
    Folder,
    Forward,
    Live,
    Record,
    Refused,
    Snapshots,
    Span,
    choose,
    needed,
    newest_moment,
    next_record,
    union,
    usable,
)

Rows = tuple[int, ...]
HALF: Rows = (-1,)  # rows that a write has begun to change
Shards = list[tuple[Live | None, Rows]]


class Kill(Exception):
    """The process is killed before its next durable write."""


# ---- what survives a kill ------------------------------------------------------------------------------------------


class Disk:
    """Folders and records. Each `write` is atomic and durable, and may be the one before which the kill comes."""

    def __init__(self, stores: str, ranks: int) -> None:
        self.names: dict[str, dict[str, str]] = {x: {} for x in stores}  # by store the ids of snapshots by folder name
        self.contents: dict[str, Rows] = {EMPTY: ()}  # by id
        self.live: dict[str, Shards] = {x: [(None, ())] * ranks for x in stores}
        start = {x: Record({x: Entry(EMPTY)}, {x: EMPTY}, {x: EMPTY}) for x in stores}
        self.files: dict[str, Record | Forward] = dict(start)  # by store its MARK, and the GROUP files
        self.absent: set[str] = set()  # stores whose folder is missing
        self.writes, self.budget = 0, FOREVER

    def write(self, change: Callable[[], object]) -> None:
        if self.writes >= self.budget:
            raise Kill
        self.writes += 1
        change()

    def put(self, key: str, file: Record | Forward) -> None:
        self.write(lambda: self.files.__setitem__(key, file))

    def leads_to(self, key: str) -> str:
        while isinstance(file := self.files.get(key), Forward):
            key = file.key
        return key

    def record(self, key: str) -> Record:
        file = self.files.get(key)
        if not isinstance(file, Record):
            raise Refused("the GROUP file is missing or damaged: lists the snapshots of each store")
        return file

    def members(self, key: str) -> list[str]:
        """Membership is mutual: the record lists the store, and the store's MARK leads to the record."""
        record = self.record(key)
        if missing := self.absent & set(record.now):
            raise Refused(f"put the folders of {missing} back")
        members = [x for x in record.now if self.leads_to(x) == key]
        if len(members) < len(record.now) and not record.joining:
            raise Refused("a folder is from before it was trained with the others")
        return members

    def snapshots(self, store: str) -> list[str]:
        return [s for name, s in self.names[store].items() if not name.startswith(".tmp-")]

    def folder(self, store: str) -> Folder:
        return Folder([marker for marker, _ in self.live[store]], self.names[store].values())

    def rows(self, store: str, entry: Entry) -> Rows:
        if entry.live:
            shards = {rows for _, rows in self.live[store]}
            return shards.pop() if len(shards) == 1 else HALF
        return HALF if entry.snapshot is None else self.contents[entry.snapshot]

    def target(self, key: str) -> dict[str, Entry]:
        return choose(self.record(key), {x: self.folder(x) for x in self.members(key)})


# ---- processes -----------------------------------------------------------------------------------------------------


class Trainer:
    """Holds the lock of a group. `at` has an entry for every member from the lock on, open or closed.

    `clock` counts changes of rows; a moment is its value between two of them. `spans` says when a store had the rows of
    a snapshot. A store in `broken` has half-written rows until it is loaded; the shards of a store in `diverged` are at
    different steps, and no rank knows.
    """

    def __init__(self, disk: Disk, draw: random.Random, run: int) -> None:
        self.disk, self.draw, self.run, self.clock, self.group = disk, draw, run, 0, ""
        self.rows, self.at = dict[str, Rows](), dict[str, Entry]()
        self.spans, self.since = dict[str, list[Span]](), dict[str, int]()
        self.background = dict[str, tuple[str, str, Rows, Span]]()  # by store: name, id, rows, span
        self.broken, self.diverged = set[str](), set[str]()

    def open(self, stores: Collection[str], reader: Reader | None = None) -> None:
        """Take the locks, recover, join; a reader that begins to train passes its stores."""
        for x in stores:
            self.separate_copy(x)
        groups = sorted({self.disk.leads_to(x) for x in stores} - {self.group})
        for key in groups:
            self.lock(key)
        keys = [*filter(None, [self.group]), *groups]
        if len(keys) > 1:
            self.join(keys)
        else:
            self.group = keys[0]
        for x in stores:
            if usable(self.at[x], self.disk.folder(x)) == NOTHING:
                raise Refused(f"{x} was not closed cleanly: close all stores, so that the next open recovers")
            if reader and not self.is_current(x, reader.entries[x]):
                raise Refused(f"{x} was recovered meanwhile: open it again")
            self.rows[x] = reader.rows[x] if reader else self.disk.rows(x, self.at[x])

    def is_current(self, store: str, entry: Entry) -> bool:
        return self.at[store] == entry

    def separate_copy(self, path: str) -> None:
        """A folder whose record lists another path for the store is a copy: it becomes a store alone."""
        record = self.disk.record(self.disk.leads_to(path))
        if path not in record.now:
            entry = choose(record, {path[0]: self.disk.folder(path)})[path[0]]
            snapshots = {path: entry.snapshot or EMPTY}
            self.disk.put(path, Record({path: entry}, snapshots, snapshots))

    def lock(self, key: str) -> None:
        record, target = self.disk.record(key), self.disk.target(key)
        whole = {x: entry.snapshot for x, entry in target.items() if entry.snapshot}
        recovered = next_record(record, target, whole if len(whole) == len(target) else None)
        if recovered != record:
            self.disk.put(key, recovered)
        for x, entry in target.items():
            # Groups that were never trained together fit at any moments, so these rows count from the process's first.
            self.at[x], self.since[x] = entry, 0
            self.spans[x] = [Span(entry.snapshot, 0)] if entry.snapshot else []
            self.sweep(x, recovered)

    def join(self, keys: Sequence[str]) -> None:
        """One record for all, then each old one leads to it. A kill leaves each old group whole, here or there."""
        self.group = f"g{self.run}-{self.clock}-{self.disk.writes}"
        joined = union([self.disk.record(key) for key in keys], self.at)
        self.disk.put(self.group, joined)
        for key in keys:
            self.disk.put(key, Forward(self.group))
        self.disk.put(self.group, replace(joined, joining=False))
        for x in self.at:  # forwards of forwards; a kill leaves both ways
            self.disk.put(x, Forward(self.group))
        for key in keys:
            if key not in self.at:
                self.disk.write(lambda key=key: self.disk.files.pop(key))

    def write_record(self) -> None:
        record = self.disk.record(self.group)
        spans = {x: [s for s in self.spans[x] if self.exists(x, s.snapshot)] for x in self.at}
        after = next_record(record, self.at, newest_moment(spans, self.clock))
        if after != record:
            self.disk.put(self.group, after)

    def exists(self, store: str, snapshot: str) -> bool:
        return snapshot == EMPTY or snapshot in self.disk.names[store].values()

    def clear_live_entry(self, store: str) -> None:
        """Describe the moment before a write, without the live part that the write will change."""
        if self.disk.record(self.group).now[store].live:
            self.at[store] = Entry(self.at[store].snapshot)
            self.write_record()

    def clear_markers(self, store: str) -> None:
        for i, (marker, rows) in enumerate(self.disk.live[store]):
            if marker:
                self.disk.write(lambda i=i, rows=rows: self.disk.live[store].__setitem__(i, (None, rows)))

    def begin_write(self, store: str) -> None:
        self.clear_live_entry(store)
        self.clear_markers(store)
        self.at[store] = NOTHING
        self.overwrite(store)

    def overwrite(self, store: str) -> None:
        """The first row changes: snapshots of the old rows end with the present moment."""
        self.disk.live[store] = [(marker, HALF) for marker, _ in self.disk.live[store]]
        self.spans[store] = [s._replace(last=min(s.last, self.clock)) for s in self.spans[store]]
        if store in self.background:
            name, snapshot, rows, span = self.background[store]
            self.background[store] = name, snapshot, rows, span._replace(last=min(span.last, self.clock))
        self.since[store] = self.clock + 1

    def step(self, stores: Collection[str], write: int, fails: bool = False, diverges: bool = False) -> None:
        """A joint write, also a load of some rows. It may fail within a store, or at a rank that others do not miss."""
        for x in stores:
            self.begin_write(x)
        for x in stores:
            self.rows[x] = (*self.rows[x], write)
        self.broken |= set(stores) if fails else set()
        self.diverged |= {self.draw.choice(sorted(stores))} if diverges else set()
        self.clock += 1

    def publish(self, store: str, name: str, snapshot: str, rows: Rows) -> None:
        """Write a temporary folder and rename it, or exchange it with the old snapshot of that name."""
        names, temporary = self.disk.names[store], f".tmp-{name}"
        self.disk.contents[snapshot] = rows
        self.disk.write(lambda: names.__setitem__(temporary, snapshot))
        if old := names.get(name):
            self.retain_replaced(store, old)
        self.disk.write(lambda: names.update({name: snapshot, temporary: old or snapshot}))
        names.pop(temporary)

    def retain_replaced(self, store: str, old: str) -> None:
        """Link the old snapshot under its id first: after the exchange a kill leaves it in a temporary folder."""
        if old in needed(self.disk.record(self.group), self.at, store):
            self.disk.write(lambda: self.disk.names[store].__setitem__(f"replaced-{old}", old))

    def count_snapshot(self, store: str, snapshot: str, span: Span) -> None:
        self.spans[store].append(span)
        if span.last == FOREVER:
            self.at[store] = Entry(snapshot, self.at[store].live)

    def save(self, stores: Collection[str], name: str, snapshot: str) -> None:
        for x in stores:
            self.publish(x, name, snapshot + x, self.rows[x])
        for x in stores:
            self.count_snapshot(x, snapshot + x, Span(snapshot + x, self.since[x]))
        self.write_record()
        for x in stores:
            self.sweep(x, self.disk.record(self.group))

    def begin_background(self, stores: Collection[str], name: str, snapshot: str) -> None:
        for x in stores:
            self.background[x] = name, snapshot + x, self.rows[x], Span(snapshot + x, self.since[x])

    def finish_background(self, store: str) -> None:
        name, snapshot, rows, _ = self.background[store]
        self.publish(store, name, snapshot, rows)
        self.count_snapshot(store, snapshot, self.background.pop(store)[3])
        self.write_record()

    def load(self, snapshots: Snapshots, fails_in: str = "") -> None:
        """The rows are verified. The record goes first, so a kill finishes the load; a failure takes it back."""
        previous = dict(self.at)
        self.at.update({x: Entry(snapshot) for x, snapshot in snapshots.items()})
        self.write_record()
        for x, snapshot in snapshots.items():
            self.clear_markers(x)
            self.overwrite(x)
            previous[x] = NOTHING
            if x == fails_in:
                self.broken.add(x)
                self.clock += 1
                self.take_back(previous)
                return
            self.rows[x] = self.disk.contents[snapshot]
            previous[x] = Entry(snapshot)
            self.spans[x].append(Span(snapshot, self.since[x]))
            self.broken.discard(x)
            self.diverged.discard(x)
        self.clock += 1

    def take_back(self, at: Mapping[str, Entry]) -> None:
        self.at = dict(at)
        self.write_record()

    def close(self, store: str) -> None:
        """Ranks close one by one, and rank 0 writes the record without waiting for the others."""
        rows = self.rows.pop(store)
        if store in self.broken or self.at[store].live:
            return
        live, shards = (self.run, self.since[store]), self.disk.live[store]
        record_after = self.draw.randrange(len(shards))
        for i in range(len(shards)):
            late = store in self.diverged and i == len(shards) - 1 > 0
            shard = ((self.run, live[1] - 1), HALF) if late else (live, rows)
            self.disk.write(lambda i=i, shard=shard: shards.__setitem__(i, shard))
            if i == record_after:
                self.at[store] = Entry(self.at[store].snapshot, live)
                self.write_record()

    def sweep(self, store: str, record: Record) -> None:
        """Remove what a killed save left, and replaced snapshots that the record no longer needs."""
        names = self.disk.names[store]
        for name in [name for name in names if name.startswith(".tmp-")]:
            names.pop(name)
        self.remove(store, [name for name in names if name.startswith("replaced-")], record)

    def prune(self, store: str) -> None:
        self.remove(store, list(self.disk.names[store]), self.disk.record(self.group))

    def remove(self, store: str, names: Iterable[str], record: Record) -> None:
        keep = needed(record, self.at, store)
        for name in names:
            if self.disk.names[store][name] not in keep:
                self.disk.write(lambda name=name: self.disk.names[store].pop(name))


@dataclass
class Reader:
    """A process that opened stores without the group's lock."""

    disk: Disk
    entries: dict[str, Entry] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)

    def open(self, store: str, lock_is_free: bool) -> None:
        key = self.disk.leads_to(store)
        if lock_is_free:  # a member without an entry was killed: read what recovery will give, and write no record
            entry = self.disk.target(key)[store]
        else:
            entry = usable(self.disk.record(key).now[store], self.disk.folder(store))
        if entry == NOTHING:
            raise Refused(f"{store} was not closed cleanly")
        self.entries[store], self.rows[store] = entry, self.disk.rows(store, entry)
        if lock_is_free and not entry.live:  # rows of a snapshot may replace the live rows
            self.disk.live[store] = [(None, HALF)] * len(self.disk.live[store])
