"""Model checker for the recovery of stores that are trained together: random histories, killed before any durable write.

    PYTHONPATH=tests python -m crash.record_model --histories 20000 --seed 1

`record_rule` has the rule. `Disk` is what survives a kill, `Trainer` a process that holds the group's lock, and `Reader`
one that does not. Rows are the tuple of the writes that made them. `Checker` remembers every moment: the rows that all
stores had side by side. A recovery has to find one of these, none older than the newest that returned saves cover, and
exactly the last one after a clean end.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
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
Backup = tuple[dict[str, str], Shards, Record | Forward]  # the folder of a store: snapshots, live rows, MARK


class Kill(Exception):
    """The process is killed before its next durable write."""


class Violation(AssertionError):
    """The rule lost rows, mixed moments or served stale rows."""


# ---- what survives a kill ---------------------------------------------------------------------------------------------


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


# ---- processes --------------------------------------------------------------------------------------------------------


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
        name, snapshot, rows, span = self.background[store]
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


# ---- what has to hold -------------------------------------------------------------------------------------------------


class Checker:
    """Drives one history and compares it with every moment that existed. `log` has the operations."""

    def __init__(self, stores: str, ranks: int, draw: random.Random) -> None:
        self.stores, self.draw, self.disk = stores, draw, Disk(stores, ranks)
        self.ranks, self.count, self.trainer = ranks, 0, Trainer(self.disk, draw, 0)
        self.current: dict[str, Rows] = dict.fromkeys(stores, ())  # of closed stores, what an open finds
        self.moments: list[dict[str, Rows] | None] = [dict(self.current)]
        self.saved: dict[str, dict[str, int]] = {x: {EMPTY: 0} for x in stores}  # id: the first moment that it covers
        self.pending = dict[str, int]()  # the same of saves in the background
        self.changed = dict.fromkeys(stores, 0)  # the moment of the last change
        self.promised: dict[frozenset[str], int] = {}  # by group the newest moment that returned saves cover
        self.durable = dict.fromkeys(stores, True)  # nothing was written since the last save, load or close
        self.reader, self.lost, self.log = Reader(self.disk), False, list[tuple[object, ...]]()
        self.backups: dict[str, Backup] = {}
        self.past: dict[str, set[Rows]] = {x: {()} for x in stores}  # every store's rows, whatever the others had
        self.first = 0  # the moment at which the trainer began: no record has older ones that it completes
        self.before = 0, True  # the number of writes before the operation, and whether all rows were durable

    def do(self, operation: str, *details: object) -> None:
        """Note the operation, run it, and note the rows after it."""
        self.log.append((operation, *details))
        self.before = self.disk.writes, all(self.durable.values())
        getattr(self, operation)(*details)
        self.observe()

    def observe(self) -> None:
        trainer = self.trainer
        self.current.update(trainer.rows)
        for x, rows in self.current.items():
            self.past[x].add(rows)
        if not trainer.broken | trainer.diverged and self.current != self.moments[-1]:
            self.moments.append(dict(self.current))

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(message)

    def open(self, stores: str) -> None:
        self.trainer.open(stores)
        for x in stores:
            rows, right = self.trainer.rows[x], self.current[x]
            self.require(rows == right, f"open of {x}: {rows}, not {right}")

    def train_reader(self) -> None:
        """The reader begins to train. It may be refused, and never trains other rows than the store's."""
        reader, self.reader = self.reader, Reader(self.disk)
        self.trainer.open(list(reader.rows), reader)
        for x, rows in reader.rows.items():
            self.require(rows == self.current[x], f"a reader trains {rows} of {x}, not {self.current[x]}")

    def read(self, store: str) -> None:
        is_free = self.disk.leads_to(store) != self.trainer.group
        self.reader.open(store, is_free)
        rows, right = self.reader.rows[store], self.current[store]
        self.require(rows == right, f"a reader of {store} gets {rows}, not {right}")

    def step(self, stores: str, fails: bool = False, diverges: bool = False) -> None:
        self.count += 1
        self.durable.update(dict.fromkeys(stores, False))
        self.changed.update(dict.fromkeys(stores, len(self.moments)))
        self.trainer.step(stores, self.count, fails, diverges and self.ranks > 1)

    def save(self, stores: str, name: str) -> None:
        self.count += 1
        self.trainer.save(stores, name, f"{name}-{self.count}")
        self.durable.update(dict.fromkeys(stores, True))
        self.promise({x: f"{name}-{self.count}{x}" for x in stores})

    def promise(self, snapshots: Snapshots) -> None:
        for x, snapshot in snapshots.items():
            self.saved[x].setdefault(snapshot, self.changed[x])
        group = frozenset(self.trainer.at)
        saved = {x: [s for s in self.saved[x].items() if self.trainer.exists(x, s[0])] for x in group}
        for i in range(len(self.moments) - 1, max(self.first, self.promised.get(group, 0)) - 1, -1):
            moment = self.moments[i]
            if moment and all(
                any(first <= i and self.disk.contents[s] == moment[x] for s, first in saved[x]) for x in group
            ):
                self.promised[group] = i
                return

    def background(self, stores: str, name: str) -> None:
        self.count += 1
        self.trainer.begin_background(stores, name, f"{name}-{self.count}")
        for x in stores:
            self.pending[x] = self.changed[x]

    def finish(self, store: str) -> None:
        snapshot = self.trainer.background[store][1]
        self.trainer.finish_background(store)
        self.saved[store][snapshot] = self.pending[store]
        self.promise({})

    def load(self, snapshots: dict[str, str], fails_in: str = "") -> None:
        self.durable.update(dict.fromkeys(snapshots, False))
        self.changed.update(dict.fromkeys(snapshots, len(self.moments)))
        self.moments.append({**self.current, **{x: self.disk.contents[s] for x, s in snapshots.items()}})
        if self.trainer.broken - set(snapshots) or self.trainer.diverged - set(snapshots):
            self.moments[-1] = None
        self.trainer.load(snapshots, fails_in)
        if fails_in:
            self.moments[-1] = None
        else:
            self.durable.update(dict.fromkeys(snapshots, True))

    def prune(self, store: str) -> None:
        self.trainer.prune(store)

    def close(self, store: str) -> None:
        if store in self.trainer.background:
            self.finish(store)
        self.current[store] = self.trainer.rows[store]
        self.trainer.close(store)
        self.durable[store] = store not in self.trainer.broken | self.trainer.diverged

    def require_excuse(self, refused: Refused) -> None:
        excused = self.lost or self.log[-1][0] == "train_reader" or self.trainer.broken | self.trainer.diverged
        self.require(bool(excused), f"refused: {refused}")

    # between two trainers

    def close_reader(self) -> None:
        self.reader = Reader(self.disk)

    def must_refuse(self, stores: str) -> None:
        writes, trainer = self.disk.writes, Trainer(self.disk, self.draw, -1)
        try:
            trainer.open(stores)
        except Refused:
            self.require(self.disk.writes == writes, "an open that was refused wrote")
        else:
            raise Violation(f"{stores} opened with {trainer.rows}")

    def hide_group(self, store: str) -> None:
        """The GROUP file is missing or damaged: no member opens, until it is put back."""
        key = self.disk.leads_to(store)
        if key not in self.stores:
            file = self.disk.files.pop(key)
            self.must_refuse(store)
            self.disk.files[key] = file

    def hide_folder(self, store: str) -> None:
        """A member's folder is missing: no other member opens, until it is put back."""
        self.disk.absent = {store}
        for other in self.partners(store):
            self.must_refuse(other)
        self.disk.absent = set()

    def partners(self, store: str) -> list[str]:
        return [x for x in self.stores if x != store and self.disk.leads_to(x) == self.disk.leads_to(store)]

    def copy_folder(self, store: str) -> None:
        """A copy beside the original is trained and closed: the group finds what it would have found."""
        disk, path = self.disk, store + "-copy"
        self.put_folder(path, self.folder(store))
        trainer = Trainer(disk, self.draw, -1)
        trainer.open([path])
        self.require(trainer.rows[path] in self.past[store], f"a copy of {store} has {trainer.rows[path]}")
        trainer.step([path], 0)
        trainer.close(path)
        self.check(self.current)

    def folder(self, store: str) -> Backup:
        return dict(self.disk.names[store]), list(self.disk.live[store]), self.disk.files[store]

    def put_folder(self, path: str, folder: Backup) -> None:
        self.disk.names[path], self.disk.live[path], self.disk.files[path] = dict(folder[0]), list(folder[1]), folder[2]

    def back_up(self, store: str) -> None:
        self.backups[store] = self.folder(store)

    def restore_backup(self, store: str) -> None:
        """A user puts an older copy of the folder in its place. What saves promised is void; a torn model is not excused."""
        if store in self.backups:
            self.put_folder(store, self.backups[store])
            self.accept_loss()

    def delete_snapshot(self, store: str) -> None:
        if names := self.disk.names[store]:
            names.pop(self.draw.choice(sorted(names)))
            self.accept_loss()

    def accept_loss(self) -> None:
        self.lost = True
        self.promised.clear()
        self.current = self.check(None)

    def end(self, killed: bool) -> None:
        """Compare what the next process will find with the moments, then begin with a new trainer."""
        trainer, self.disk.budget = self.trainer, FOREVER
        clean = not killed and not trainer.broken | trainer.diverged
        untouched = killed and self.before == (self.disk.writes, True)
        recovered = self.check(dict(self.current) if clean or untouched else None)
        self.trainer = Trainer(self.disk, self.draw, trainer.run + 1)
        self.current, self.durable = recovered, dict.fromkeys(self.stores, True)
        self.moments.append(dict(recovered))
        self.first = len(self.moments) - 1

    def check(self, right: dict[str, Rows] | None) -> dict[str, Rows]:
        groups: dict[str, list[str]] = {}
        for x in self.stores:
            groups.setdefault(self.disk.leads_to(x), []).append(x)
        rows: dict[str, Rows] = {}
        for key in groups:
            for x, entry in self.disk.target(key).items():
                rows[x] = self.disk.rows(x, entry)
        self.require(right is None or rows == right, f"left with {right}, found {rows}")
        for group, first in self.promised.items():
            kept = any(m and all(m[x] == rows[x] for x in group) for m in self.moments[first:])
            self.require(kept, f"lost: {self.moments[first]} was saved, found {rows}")
        for key, members in groups.items():
            if not any(m and all(m[x] == rows[x] for x in members) for m in self.moments):
                self.check_pairs(rows, members)
        return rows

    def check_pairs(self, rows: dict[str, Rows], members: list[str]) -> None:
        """Groups that were just joined may meet at moments of their own, stores with joint writes may not."""
        for x, y in itertools.combinations(members, 2):
            past = [m for m in self.moments if m]
            joint = {w for m in past for w in m[x]} & {w for m in past for w in m[y]}
            apart = joint & (set(rows[x]) ^ set(rows[y]))
            side_by_side = any(m[x] == rows[x] and m[y] == rows[y] for m in past)
            self.require(not apart or side_by_side, f"torn: {x} {rows[x]}, {y} {rows[y]}")


# ---- random histories -------------------------------------------------------------------------------------------------

OPERATIONS = {"step": 6, "fail": 0.4, "diverge": 0.3, "save": 3, "background": 1, "finish": 2, "load": 1.5, "fail_load": 0.5}
OPERATIONS |= {"prune": 1.5, "close": 1, "open": 1, "read": 0.5}


class History:
    """Draws one history from its seed and runs it."""

    def __init__(self, seed: int) -> None:
        self.draw, self.kills = random.Random(seed), 0
        stores = "abc"[: self.draw.choice([2, 2, 3])]
        self.checker = Checker(stores, self.draw.choice([1, 1, 2]), self.draw)

    def some(self, stores: Collection[str]) -> str:
        few = self.draw.sample(sorted(stores), self.draw.randint(1, len(stores)))
        return "".join(sorted(stores if self.draw.random() < 0.5 else few))

    def run(self) -> int:
        """Returns the number of kills."""
        checker, draw = self.checker, self.draw
        for _ in range(draw.randint(2, 6)):
            killed = True
            checker.disk.budget = FOREVER if draw.random() < 0.3 else checker.disk.writes + draw.randint(0, 25)
            try:
                self.train()
                killed = False
            except Kill:
                self.kills += 1
            except Refused as refused:
                checker.require_excuse(refused)
            checker.log.append(("kill" if killed else "end",))
            try:
                checker.end(killed)
                self.between()
            except Refused as refused:
                checker.require(checker.lost, f"refused, though no folder was touched: {refused}")
                break
        return self.kills

    def train(self) -> None:
        checker, draw, trainer = self.checker, self.draw, self.checker.trainer
        free = set(checker.stores) - checker.reader.rows.keys()
        if checker.reader.rows and (not free or draw.random() < 0.5):
            checker.do("train_reader")
        else:
            checker.do("open", self.some(free))
        for operation in draw.choices(list(OPERATIONS), list(OPERATIONS.values()), k=draw.randint(1, 14)):
            self.draw_operation(operation, sorted(trainer.rows.keys() - trainer.broken - trainer.diverged))
        for x in sorted(trainer.rows):
            checker.do("close", x)

    def draw_operation(self, operation: str, sound: list[str]) -> None:
        """Run an operation on some open stores, if there are any for it."""
        checker, draw, trainer = self.checker, self.draw, self.checker.trainer
        closed = set(checker.stores) - trainer.rows.keys() - checker.reader.rows.keys() - trainer.broken
        name = draw.choice(["daily", "weekly", f"once-{checker.count}"])
        if operation in ("step", "fail", "diverge") and sound:
            checker.do("step", self.some(sound), operation == "fail", operation == "diverge")
        elif operation in ("save", "background") and (idle := set(sound) - trainer.background.keys()):
            checker.do(operation, self.some(idle), name)
        elif operation == "finish" and trainer.background:
            checker.do("finish", draw.choice(sorted(trainer.background)))
        elif operation in ("load", "fail_load") and trainer.rows:
            for x in sorted(trainer.background):
                checker.do("finish", x)
            choice = {x: [EMPTY, *checker.disk.snapshots(x), *checker.disk.snapshots(x)] for x in trainer.rows}
            snapshots = {x: draw.choice(choice[x]) for x in self.some(trainer.rows)}
            checker.do("load", snapshots, draw.choice(sorted(snapshots)) if operation == "fail_load" else "")
        elif operation in ("prune", "close") and trainer.rows:
            checker.do(operation, draw.choice(sorted(trainer.rows)))
        elif operation in ("open", "read") and closed:
            checker.do(operation, draw.choice(sorted(closed)))

    def between(self) -> None:
        """What readers and users do while no trainer runs."""
        checker, draw = self.checker, self.draw
        x = draw.choice(checker.stores)
        if draw.random() < 0.3 and x not in checker.reader.rows:
            checker.do("read", x)
        elif draw.random() < 0.3:
            checker.do("close_reader")
        if draw.random() < 0.15:
            checker.do(draw.choice(["hide_group", "hide_folder", "copy_folder"]), x)
        if draw.random() < 0.2:
            checker.do("back_up", x)
        if draw.random() < 0.08 and not checker.reader.rows:
            checker.do(draw.choice(["restore_backup", "delete_snapshot"]), x)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m crash.record_model", description=__doc__.split("\n")[0])
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the next one's is one more")
    arguments = parser.parse_args()
    kills, operations = 0, Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        history = History(seed)
        try:
            kills += history.run()
        except Violation as violation:
            print(f"seed {seed}: {violation}", *history.checker.log, sep="\n  ")
            return 1
        operations.update(str(entry[0]) for entry in history.checker.log)
    print(f"{arguments.histories} histories, {kills} kills, none wrong; {dict(operations.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
