"""Processes that follow the rule of snapshots/store/recovery_rule.py, and their disk, for the model checker.

`Disk` has the folders and records. `Trainer` holds the group's lock, as snapshots/store/group.py does. Rows are the
tuple of the writes that made them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tierbed.snapshots.store.recovery_rule import (
    EMPTY_ID,
    FOREVER,
    NO_ENTRY,
    Entry,
    Interval,
    Record,
    SnapshotIds,
    StoreFiles,
    choose_entries,
    drop_lost_rows,
    find_needed_ids,
    find_newest_moment,
    make_next_record,
    merge_records,
)

Rows = tuple[int, ...]
HALF: Rows = (-1,)  # rows that a write has begun to change
Shards = list[tuple[str | None, Rows]]  # the version in its clean marker, and the rows


class Kill(Exception):
    """The process is killed before its next durable write."""


class Refused(Exception):
    """An error that the user sees. Nothing was changed."""


@dataclass(frozen=True)
class Forward:
    """Where a group went. The MARK of a store in a larger group is such a forward, too."""

    key: str


class Disk:
    """Folders and records. Each `write` is atomic and durable, and may be the one before which the kill comes."""

    def __init__(self, stores: str, ranks: int) -> None:
        self.names: dict[str, dict[str, str]] = {x: {} for x in stores}  # by store the ids of snapshots by folder name
        self.contents: dict[str, Rows] = {EMPTY_ID: ()}  # by id
        self.live: dict[str, Shards] = {x: [(None, ())] * ranks for x in stores}
        start = {x: Record({x: Entry(EMPTY_ID)}, {x: EMPTY_ID}, {x: EMPTY_ID}) for x in stores}
        self.files: dict[str, Record | Forward] = dict(start)  # by store its MARK, and the GROUP files
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
        file = self.files[key]
        assert isinstance(file, Record)
        return file

    def members(self, key: str) -> list[str]:
        """Membership is mutual: the record lists the store, and the store's MARK leads to the record."""
        record = self.record(key)
        members = [x for x in record.entries if self.leads_to(x) == key]
        if len(members) < len(record.entries) and not record.is_joining:
            raise Refused("a folder is from before it was trained with the others")
        return members

    def snapshots(self, store: str) -> list[str]:
        return [s for name, s in self.names[store].items() if not name.startswith(".tmp-")]

    def folder(self, store: str) -> StoreFiles:
        return StoreFiles([marker for marker, _ in self.live[store]], [*self.names[store].values()])

    def discard_live_rows(self, store: str) -> None:
        self.live[store] = [(None, HALF)] * len(self.live[store])

    def rows(self, store: str, entry: Entry) -> Rows:
        if entry.live_version:
            shards = {rows for _, rows in self.live[store]}
            return shards.pop() if len(shards) == 1 else HALF
        return HALF if entry.snapshot is None else self.contents[entry.snapshot]

    def target(self, key: str) -> dict[str, Entry]:
        chosen = choose_entries(self.record(key), {x: self.folder(x) for x in self.members(key)})
        if chosen is None:
            raise Refused("no moment has the rows of every store: lists the snapshots of each")
        return chosen


class Trainer:
    """Opens stores without a lock, and takes that of their group before it first writes their record.

    `at` has an entry for every member from then on, open or closed. `clock` counts the moments: each begin of a save
    and end of a load is one, not each step. `spans` says during which of them a store had the rows of a snapshot. A
    store in `broken` has half-written rows until it is loaded; the shards of a store in `diverged` are at different
    steps, and no rank knows.
    """

    def __init__(self, disk: Disk, draw: random.Random, run: int) -> None:
        self.disk, self.draw, self.run, self.clock, self.group = disk, draw, run, 0, ""
        self.rows, self.entries, self.at = dict[str, Rows](), dict[str, Entry](), dict[str, Entry]()
        self.spans, self.since, self.writes = dict[str, list[Interval]](), dict[str, int](), 0
        self.background = dict[str, tuple[str, str, Rows, Interval]]()  # by store: name, id, rows, span
        self.broken, self.diverged = set[str](), set[str]()
        self.noted = set[str]()  # stores of which the record says that they are being written

    def open(self, stores: Collection[str]) -> None:
        for x in stores:
            self.entries[x] = self.choose_entry(x)
            self.rows[x] = self.disk.rows(x, self.entries[x])
            if not self.entries[x].live_version:
                self.disk.discard_live_rows(x)

    def choose_entry(self, store: str) -> Entry:
        """What a store opens with. One that was not closed cleanly beside others: the commit, if they are at that."""
        key = self.disk.leads_to(store)
        if key != self.group:
            return self.disk.target(key)[store]
        entry, commit = drop_lost_rows(self.at[store], self.disk.folder(store)), self.disk.record(key).commit
        if entry != NO_ENTRY:
            return entry
        if all(self.at[x].snapshot == snapshot for x, snapshot in commit.items() if x != store):
            return Entry(commit[store])
        raise Refused(f"{store} was not closed cleanly: close all stores, so that the next open recovers")

    def lock(self) -> None:
        """Take the locks of the groups of all open stores, recover, join."""
        groups = sorted({self.disk.leads_to(x) for x in self.rows} - {self.group})
        for key in groups:
            self.recover(key)
        keys = [*filter(None, [self.group]), *groups]
        if len(keys) > 1:
            self.join(keys)
        else:
            self.group = keys[0]

    def targets(self, key: str) -> dict[str, Entry]:
        return self.disk.target(key)

    def recover(self, key: str) -> None:
        record, target = self.disk.record(key), self.targets(key)
        whole = {x: entry.snapshot for x, entry in target.items() if entry.snapshot}
        recovered = make_next_record(record, target, whole if len(whole) == len(target) else None)
        if record.changed_stores:  # its process was killed
            recovered = replace(recovered, changed_stores=frozenset(), parents={**record.parents, **whole})
        if recovered != record:
            self.disk.put(key, recovered)
        for x, entry in target.items():
            # Groups that were never trained together fit at any moments, so these rows count from the process's first.
            self.at[x], self.since[x] = entry, 0
            self.spans[x] = [Interval(entry.snapshot, 0)] if entry.snapshot else []

    def join(self, keys: Sequence[str]) -> None:
        """One record for all, then each old one leads to it. A kill leaves each old group whole, here or there."""
        self.group = f"g{self.run}-{self.clock}-{self.disk.writes}"
        joined = replace(merge_records([self.disk.record(key) for key in keys], self.at), is_joining=True)
        self.disk.put(self.group, joined)
        for key in keys:
            self.disk.put(key, Forward(self.group))
        self.write_record()
        for x in self.at:  # forwards of forwards; a kill leaves both ways
            self.disk.put(x, Forward(self.group))
        for key in keys:
            if key not in self.at:
                self.disk.write(lambda key=key: self.disk.files.pop(key))

    def write_record(self, parents: SnapshotIds | None = None, trained: str = "", untrained: str = "") -> None:
        self.forget_removed()
        record, found = self.disk.record(self.group), find_newest_moment(self.spans, self.clock)
        moment, snapshots = found or (0, None)
        after = make_next_record(record, self.at, snapshots)
        now_trained = (after.changed_stores | {*trained.split()}) - {*untrained.split()}
        after = replace(after, changed_stores=now_trained, parents={**record.parents, **(parents or {})})
        if after != record:
            self.disk.put(self.group, after)
        if snapshots is not None and after.commit == snapshots:
            self.spans = {x: [span for span in spans if span.last >= moment] for x, spans in self.spans.items()}

    def forget_removed(self) -> None:
        for x, spans in self.spans.items():
            self.spans[x] = [span for span in spans if self.exists(x, span.snapshot)]

    def exists(self, store: str, snapshot: str) -> bool:
        return snapshot == EMPTY_ID or snapshot in self.disk.names[store].values()

    def clear_before_write(self, store: str) -> None:
        """Describe the moment before a write, without the live part that the write will change."""
        if store not in self.disk.record(self.group).changed_stores:
            self.at[store] = Entry(self.at[store].snapshot)
            self.write_record(trained=store)
        self.clear_markers(store)

    def clear_markers(self, store: str) -> None:
        for i, (marker, rows) in enumerate(self.disk.live[store]):
            if marker:
                self.disk.write(lambda i=i, rows=rows: self.disk.live[store].__setitem__(i, (None, rows)))

    def begin_write(self, store: str) -> None:
        if store not in self.noted:
            self.lock()
            self.clear_before_write(store)
            self.at[store] = NO_ENTRY
            self.noted.add(store)
        self.overwrite(store)

    def overwrite(self, store: str) -> None:
        """The first row changes: snapshots of the old rows end with the present moment."""
        self.disk.live[store] = [(marker, HALF) for marker, _ in self.disk.live[store]]
        self.end_spans(store)
        self.since[store] = self.clock + 1
        self.writes += 1

    def end_spans(self, store: str) -> None:
        for span in [*self.spans[store], *(self.background[x][3] for x in self.background if x == store)]:
            span.end(self.clock)

    def step(self, stores: Collection[str], write: int, fails: bool = False, diverges: bool = False) -> None:
        """A joint write, also a load of some rows. It may fail within a store, or at a rank that others do not miss."""
        for x in stores:
            self.begin_write(x)
        for x in stores:
            self.rows[x] = (*self.rows[x], write)
        self.broken |= set(stores) if fails else set()
        self.diverged |= {self.draw.choice(sorted(stores))} if diverges else set()

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
        if old in find_needed_ids(self.disk.record(self.disk.leads_to(store)), store):
            self.disk.write(lambda: self.disk.names[store].__setitem__(f"replaced-{old}", old))

    def count_snapshot(self, store: str, snapshot: str, span: Interval) -> None:
        self.spans[store].append(span)
        if span.last == FOREVER:
            self.at[store] = Entry(snapshot, self.at[store].live_version)

    def capture(self, store: str) -> None:
        """A save begins, at a moment of its own."""
        self.clock += 1
        self.noted.discard(store)

    def save(self, stores: Collection[str], name: str, snapshot: str) -> None:
        self.lock()
        for x in stores:
            self.capture(x)
        for x in stores:
            self.publish(x, name, snapshot + x, self.rows[x])
        for x in stores:
            self.count_snapshot(x, snapshot + x, Interval(snapshot + x, self.since[x]))
        self.write_record({x: snapshot + x for x in stores})
        for x in stores:
            self.sweep(x, self.disk.record(self.group))

    def begin_background(self, stores: Collection[str], name: str, snapshot: str) -> None:
        self.lock()
        for x in stores:
            self.capture(x)
            self.background[x] = name, snapshot + x, self.rows[x], Interval(snapshot + x, self.since[x])

    def finish_background(self, store: str) -> None:
        name, snapshot, rows, _ = self.background[store]
        self.publish(store, name, snapshot, rows)
        self.count_snapshot(store, snapshot, self.background.pop(store)[3])
        self.write_record({store: snapshot})

    def load(self, snapshots: SnapshotIds, fails_in: str = "") -> None:
        """The rows are verified. The record goes first, so a kill finishes the load; a failure takes it back.

        If it had replaced some rows, none of the stores may be written before it is loaded.
        """
        self.lock()
        previous, done = dict(self.at), list[str]()
        self.at.update({x: Entry(snapshot) for x, snapshot in snapshots.items()})
        self.write_record(snapshots)
        for x, snapshot in snapshots.items():
            self.clear_markers(x)
            self.overwrite(x)
            self.noted.discard(x)
            if x == fails_in:
                self.broken.update(snapshots if done else {x})
                for y in self.broken.intersection(snapshots):
                    self.end_spans(y)
                self.take_back({y: NO_ENTRY if y in self.broken else entry for y, entry in previous.items()})
                return
            self.rows[x] = self.disk.contents[snapshot]
            self.spans[x].append(Interval(snapshot, self.since[x]))
            done.append(x)
        self.broken.difference_update(snapshots)
        self.diverged.difference_update(snapshots)
        self.clock += 1

    def take_back(self, at: Mapping[str, Entry]) -> None:
        self.at = dict(at)
        self.write_record()

    def close(self, store: str) -> None:
        """Ranks close one by one, and rank 0 writes the record without waiting for the others."""
        marker = self.disk.live[store][0][0]
        record = self.disk.record(self.disk.leads_to(store))
        is_noted = marker is not None and marker == record.entries[store].live_version
        if store not in self.broken and not is_noted:
            self.lock()
            live, shards = marker or f"{self.run}:{self.writes}", self.disk.live[store]
            record_after = self.draw.randrange(len(shards))
            for i in range(len(shards)):
                late = store in self.diverged and i == len(shards) - 1 > 0
                shard = (f"{live}-before", HALF) if late else (live, self.rows[store])
                if shards[i] != shard:
                    self.disk.write(lambda i=i, shard=shard: shards.__setitem__(i, shard))
                if i == record_after:
                    self.at[store] = Entry(self.at[store].snapshot, live)
                    self.write_record(untrained=store)
        self.leave(store)

    def leave(self, store: str) -> None:
        """The store is no longer open."""
        del self.rows[store]
        self.noted.discard(store)
        if not self.rows:  # the lock is free
            self.group = ""
            self.at.clear()
            self.spans.clear()

    def sweep(self, store: str, record: Record) -> None:
        """Remove what a killed save left, and replaced snapshots that the record no longer needs."""
        names = self.disk.names[store]
        for name in [name for name in names if name.startswith(".tmp-")]:
            names.pop(name)
        self.remove(store, [name for name in names if name.startswith("replaced-")], record)

    def prune(self, store: str) -> None:
        self.remove(store, list(self.disk.names[store]), self.disk.record(self.disk.leads_to(store)))

    def remove(self, store: str, names: Iterable[str], record: Record) -> None:
        keep = find_needed_ids(record, store)
        for name in names:
            if self.disk.names[store][name] not in keep:
                self.disk.write(lambda name=name: self.disk.names[store].pop(name))
