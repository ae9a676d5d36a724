"""The stores of a group that this process has open: which durable rows equal theirs, and the writes of their record.

A store opens with its entry of the record, and takes no lock of the group. The first write, save or load takes it, and
the close of the last store releases it. In between the `Group` has the rows of each member, of closed ones as well.
A moment is a point between two steps at which rows were saved or loaded; the process counts them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from time import sleep
from typing import Any

from ...engine.errors import SnapshotError, StoreError
from ...engine.threads import POLL_SECONDS
from ..files.reader import list_snapshots
from .folder import StoreFolder
from .folder_state import FolderState
from .group_file import GroupFile, Shards, lock_file, lock_of_group, put, remove
from .lock import FileLock, InUseError
from .mark import Link, RanksRecord
from .old_stores import PREFIX
from .recovery_rule import EMPTY, FOREVER, NOTHING, Entry, Interval, Place, Record, newest_moment, next_record, union

log = logging.getLogger("tierbed")
OPEN_ATTEMPTS = 20  # while another process has the lock
LOADING = "its rows are being replaced by a load"
_groups: set[Group] = set()  # that have open stores
_changing = RLock()  # groups and their records, by one thread at a time


class Clock:
    """Counts the moments of this process: `now` is the last one."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> None:
        self.now += 1


clock = Clock()
os.register_at_fork(after_in_child=_groups.clear)


class Rows:
    """The rows of a store, open or closed, while this process has its group's lock.

    now: the durable rows that equal the present ones. first: the first moment at which the store had these. spans: the
    moments at which it had the rows of each snapshot, also of saves that have not ended.
    """

    def __init__(self, now: Entry = NOTHING) -> None:
        self.now, self.first, self.spans = now, 0, list[Interval]()

    def begin(self, now: Entry) -> None:
        """The process has taken the lock. Rows fit those of stores that join later at any moment until they change."""
        self.now = now
        self.spans = [Interval(now.snapshot, 0)] if now.snapshot else []

    def change(self, now: Entry = NOTHING) -> None:
        """The rows change: what snapshots have, and saves that have begun, are those of before."""
        for span in self.spans:
            span.end(clock.now)
        self.now = now

    def equal(self, now: Entry) -> None:
        """The record says that these durable rows are the present ones, or are about to be."""
        self.now = now

    def forget_before(self, moment: int) -> None:
        self.spans = [span for span in self.spans if span.last >= moment]

    def forget(self, snapshot: str) -> None:
        self.spans = [span for span in self.spans if span.snapshot != snapshot]


class Member(Rows):
    """A store that this process has open.

    store: its folder. home: the folder whose MARK has the record or leads to it, of the snapshots if ranks share the
    rows. entry: the durable rows that it opens with. broken: why rows may not be written or saved before a load; "" if
    they may. partners: returns the stores that this process trains together with it. expect_change: called when the
    next change of the rows has to be noted.
    """

    def __init__(self, store: StoreFolder, home: StoreFolder, id: str, group: Group, entry: Entry, broken: str) -> None:
        past = group.rows.get(id, Rows(entry))
        self.now, self.first, self.spans = NOTHING if broken else past.now, past.first, past.spans
        self.store, self.home, self.id, self.group, self.entry, self.broken = store, home, id, group, entry, broken
        self.partners: Callable[[], Iterable[Member]] = tuple
        self.expect_change: Callable[[], None] = lambda: None
        self._writes = 0  # how often rows were written here
        self._came_as = 0, entry.live or f"{entry.snapshot}:0"
        self._run = secrets.token_hex(8)  # names the writes among those of all processes, and of each time it is open

    def attach(self, expect_change: Callable[[], None], partners: Callable[[], Iterable[Member]]) -> None:
        """Call these from here on, as the class says."""
        self.expect_change, self.partners = expect_change, partners

    def tear(self, why: str) -> None:
        """Let the rows not be written or saved, or be marked clean, before a load."""
        self.broken = why
        self.expect_change()

    @property
    def version(self) -> str:
        """The version of the rows, which is known again in the next run."""
        since, version = self._came_as
        return version if self._writes == since else f"{self._run}:{self._writes}"

    def lock(self) -> None:
        """Take the lock of the group, and write what a recovery chooses. StoreError, SnapshotError."""
        with _changing:
            _locked(self)

    def check_whole(self) -> None:
        """Raises StoreError if the rows may not be written or saved."""
        if self.broken:
            raise StoreError(self.broken)

    def begin_change(self, replaces: bool = False) -> None:
        """Note, durably, that the rows are about to change. The caller has the table's lock. StoreError.

        replaces: whether all of them are replaced, whatever they are.
        """
        if not replaces:
            self.check_whole()
        with _changing:
            group = _locked(self)
            if self.id not in group.record.trained:  # else the record has no live part to clear, and a disk may be full
                group.warn_of_lone_saves(self)
                group.write({self.id: Entry(self.now.snapshot)}, trained=group.record.trained | {self.id})
            self.change()

    def write(self) -> None:
        """Count a write of rows, which `begin_change` has noted."""
        self._writes += 1
        self.first = clock.now + 1

    def capture(self) -> Capture:
        """Begin a save of the rows as they are now. The caller has the table's lock. StoreError."""
        self.check_whole()
        with _changing:
            _locked(self)
            clock.tick()
            capture = Capture("", self.first, member=self)
            self.spans.append(capture)
            self.expect_change()
            return capture

    def saved(self, snapshot: str) -> None:
        """The present rows have become a snapshot."""
        self._came_as = self._writes, f"{snapshot}:0"

    def begin_load(self) -> None:
        """The record is about to say which snapshot's rows the store is to have."""
        self.broken = LOADING

    def replaced(self, snapshot: str | None) -> None:
        """The rows were replaced: by those of a snapshot, as the record says already (`loading`), or by others."""
        with _changing:
            self.write()
            self.broken = ""
            self.change(Entry(snapshot))
            if snapshot is not None:
                self.spans.append(Interval(snapshot, self.first))
                self.saved(snapshot)
                self.expect_change()

    def end_failed_load(self, now: Entry, broken: str) -> None:
        """A load raised. now, broken: what they were before it. Replaced rows without the others' are of no moment."""
        if broken or self.broken != LOADING:
            self.change()
        else:
            self.equal(now)
        if self.broken == LOADING:
            self.broken = broken

    def closed(self, live: str) -> None:
        """The rows are live rows of a version, which have a clean marker. StoreError."""
        with _changing:
            try:
                group = _locked(self)
            except StoreError:
                if not self.group.is_locked:
                    return  # another process trains the group, and these rows are those that the record names
                raise
            group.write({self.id: Entry(self.now.snapshot, live)}, trained=group.record.trained - {self.id})

    def copy_to(self, home: StoreFolder, ranks: RanksRecord | None = None) -> None:
        """Let another MARK have the record or lead to it as well, as that of these ranks. StoreError."""
        self.group.file.lead(home, self.id, ranks=ranks)

    def move_to(self, home: StoreFolder, ranks: RanksRecord | None = None) -> None:
        """Let another MARK have the record or lead to it, as that of these ranks, or of one process. StoreError."""
        if home is not self.home:
            self.copy_to(home, ranks)
            self.home.change(store="", record=None, link=None, old={}, ranks=None)
            self.home = home
        elif home.mark.ranks != ranks:
            home.change(ranks=ranks)

    def join(self, group: Group) -> None:
        """Be of another group from here on, which has its rows."""
        self.group.leave(self)
        self.group = group
        group.enter(self)

    def leave(self) -> None:
        """The store is no longer open here."""
        with _changing:
            self.group.leave(self)


@dataclass(eq=False, kw_only=True)
class Capture(Interval):
    """Rows of a store that are being saved, and the moments during which it has them."""

    member: Member

    def name(self, snapshot: str) -> None:
        """The rows have become a snapshot, or none: ""."""
        self.snapshot = snapshot


def open_store(
    store: StoreFolder,
    mode: str,
    for_load: bool = False,
    shards: Shards | None = None,
    beside: Sequence[Path] = (),
) -> Member:
    """A store that this process opens, with the entry of its rows.

    mode: the store option `open`. for_load: whether its rows are about to be replaced: if no rows can be had, it is
    broken until then. shards, beside: as of `GroupFile`. Raises StoreError, SnapshotError.
    """
    with _changing:
        file = GroupFile(store, shards, beside)
        group = next((one for one in _groups if one.file.key == file.key), None) or Group(file)
        entry, broken = Entry(EMPTY), ""
        try:
            if mode == "fresh":
                broken = "its rows are about to be emptied"  # whatever they are, they settle nothing
            else:
                entry = group.entry_of(file, mode)
        except (StoreError, SnapshotError) as error:
            if not for_load:
                raise
            entry, broken = file.newest()[file.store], str(error)
        member = Member(store, store.snapshot_store if store.ranks else store, file.store, group, entry, broken)
        group.enter(member, mode)
        try:
            if mode == "fresh":
                with loading({member: EMPTY}):
                    member.replaced(EMPTY)
                member.group.write()
        except BaseException:
            member.leave()
            raise
        return member


class Group:
    """The stores that share a record. file: of one of them.

    rows: of all members while it is locked, open or closed; else of those that are open.
    """

    def __init__(self, file: GroupFile, rows: Mapping[str, Rows] | None = None, lock: FileLock | None = None) -> None:
        """rows, lock: if it is locked already."""
        self.file, self.rows, self._lock, self.is_locked = file, dict(rows or {}), lock, lock is not None
        self.members: dict[str, Member] = {}  # that are open here
        self.mode = "resume"  # how the last one was opened before it was locked

    @property
    def record(self) -> Record:
        return self.file.record

    @property
    def accepts_loss(self) -> bool:
        """Whether stores whose folder is missing, or is another one, are left out."""
        return self.mode in ("mixed", "fresh")

    def enter(self, member: Member, mode: str = "") -> None:
        if not self.is_locked and self.mode != "mixed":
            self.mode = mode
        self.members[member.id] = self.rows[member.id] = member
        _groups.add(self)

    def leave(self, member: Member) -> None:
        if self.members.get(member.id) is member:  # else it was left before, and is open again
            del self.members[member.id]
        if not self.members:
            _groups.discard(self)
            self._release()
        if not self.is_locked and self.rows.get(member.id) is member:
            del self.rows[member.id]

    def _release(self) -> None:
        lock, self._lock, self.is_locked = self._lock, None, False
        if lock is not None:
            lock.release()

    def entry_of(self, file: GroupFile, mode: str) -> Entry:
        """What a store opens with. StoreError, SnapshotError."""
        if self.is_locked:
            return self._entry_beside(file)
        self.file = file
        with ExitStack() as guard:
            for number in range(OPEN_ATTEMPTS if file.path is not None else 0):
                assert file.path is not None
                try:  # nobody may change the record, or clear a clean marker, while this reads them
                    lock = FileLock(lock_file(file.path), f"the open of {file.folder.path.name!r}")
                    guard.callback(lock.release)
                    break
                except InUseError as error:
                    if (entry := file.own_entry()) != NOTHING:
                        return entry
                    if number == OPEN_ATTEMPTS - 1:
                        raise StoreError(
                            f"{str(file.folder.path)!r} was not closed cleanly, and process {error.holder} trains "
                            "embeddings of its group: end that process, so that the next open recovers them together"
                        ) from None
                    sleep(POLL_SECONDS)  # it may only be opening one of them
                    self.file = file = file.read_again()
            self.file = file = file.read_again()
            if mode == "error":
                file.check_closed()
            return file.newest()[file.store] if mode == "mixed" else file.target()[file.store]

    def _entry_beside(self, file: GroupFile) -> Entry:
        """What a store opens with beside others that are open here. StoreError."""
        rows, commit = self.rows.get(file.store, Rows()), self.record.commit
        if rows.now != NOTHING:
            return rows.now
        if all(self.rows[x].now.snapshot == id for x, id in commit.items() if x != file.store):
            return Entry(commit[file.store])  # the others have not changed since
        names = ", ".join(sorted(repr(one.store.path.name) for one in self.members.values()))
        raise StoreError(
            f"{str(file.folder.path)!r} was not closed cleanly, and what is trained together with it is open here: "
            f"close {names}, so that the next open recovers all of them together"
        )

    def lock(self) -> None:
        """Take the lock, and write what a recovery chooses. Raises StoreError, SnapshotError."""
        if self.is_locked:
            return
        try:
            if self.file.path is not None:
                self._lock = lock_of_group(self.file)
                store = next(iter(self.members.values())).store
                file = GroupFile(store, self.file.shards, self.file.beside)
                if file.key != self.file.key:  # another process let it join others, or took it out
                    raise StoreError(_changed_text(store))
                self.file = file
            self._recover()
        except BaseException:
            self._release()
            raise

    def _recover(self) -> None:
        if self.file.path is None:
            target = {id: member.entry for id, member in self.members.items()}
        elif self.mode == "mixed":
            target = self.file.newest()
        else:
            try:
                target = self.file.target()
            except (StoreError, SnapshotError):
                if not any(member.broken for member in self.members.values()):
                    raise
                target = self.record.unchanged  # the others are loaded before they are used
        for id, member in self.members.items():
            if not member.broken and not _is_same(member.entry, target[id]):
                raise StoreError(_changed_text(member.store))
        self.rows = {id: self.members.get(id) or Rows() for id in target}
        for id, entry in target.items():
            self.rows[id].begin(NOTHING if id in self.members and self.members[id].broken else entry)
        self.is_locked = True
        known = {id: entry for id, entry in target.items() if entry != NOTHING}
        if self.record.trained or any(not _is_same(self.record.now[id], entry) for id, entry in known.items()):
            folders = self.file.members(lenient=True)
            undone = {id: _undone(folders[id], entry) for id, entry in known.items() if id in folders}
            parents = {id: entry.snapshot for id, entry in known.items() if entry.snapshot}
            self.write(
                trained=self.record.trained & (self.rows.keys() - known.keys()),
                parents={**self.record.parents, **parents},
                undone={**self.record.undone, **undone},
            )
        elif self.record.now != self.at:
            self.write()

    @property
    def at(self) -> dict[str, Entry]:
        """The durable rows that equal the present ones of each store."""
        return {id: rows.now for id, rows in self.rows.items()}

    def write(self, now: Mapping[str, Entry] | None = None, **fields: Any) -> None:
        """Write the record of now, if it says something new. StoreError.

        now: the entries that change. fields: others of the record that do.
        """
        now, path = now or {}, self.file.path
        moment, snapshots = self._newest_moment() or (0, None)
        record = replace(next_record(self.record, {**self.at, **now}, snapshots), **fields)
        if path is not None:
            open_here = [(one.id, one.store.path, one.store.snapshot_store.path) for one in self.members.values()]
            places = {id: Place.of(store, snapshots_of, path.parent) for id, store, snapshots_of in open_here}
            record = replace(record, places={**record.places, **places})
            if record != self.record:
                put(path, record.plain())
        file = self.file.but(record=record)
        for one in self.members.values():
            homes = {one.home, one.store.snapshot_store}  # the second one leads here if the store folder is lost
            for home in homes if path is not None else {one.home}:
                file.lead(home, one.id)
        self.file = file
        for id, entry in now.items():
            self.rows[id].equal(entry)
        if snapshots is not None and record.commit == snapshots:
            for rows in self.rows.values():
                rows.forget_before(moment)

    def warn_of_lone_saves(self, member: Member) -> None:
        """The first change of a store since its last close, with whose rows saves and loads of others alone counted."""
        now, commit = self.record.now, self.record.commit
        alone = [id for id, one in now.items() if id != member.id and one.snapshot not in (None, commit[id])]
        if alone and member.now.snapshot is None and NOTHING not in now.values():
            log.warning(
                "embedding %r is trained from here on, and no snapshot has the rows that it had, so a kill takes back "
                "what was saved or loaded of %s alone: save a snapshot of all of them",
                member.store.path.name,
                ", ".join(sorted(repr(self.record.places[id].name) for id in alone)),
            )

    def _newest_moment(self) -> tuple[int, Mapping[str, str]] | None:
        """The newest moment that snapshots cover, and these. Those that were removed since are forgotten."""
        while found := newest_moment({id: rows.spans for id, rows in self.rows.items()}, clock.now):
            snapshots = found[1]
            if snapshots == self.record.commit:
                break
            there = {id: self.file.files(folder).snapshots for id, folder in self.file.members(lenient=True).items()}
            gone = [id for id, one in snapshots.items() if one != EMPTY and one not in there.get(id, ())]
            if not gone:
                break
            for id in gone:
                self.rows[id].forget(snapshots[id])
        return found


def _locked(member: Member) -> Group:
    """The group of a store whose rows are about to change or be saved, locked, and joined with its partners'."""
    groups = {id(one.group): one.group for one in (member, *member.partners())}
    for group in groups.values():
        group.lock()
    if len(groups) > 1:
        _join(list(groups.values()))
    return member.group


def _join(groups: Sequence[Group]) -> None:
    """One record for all, to which each old one leads. A kill leaves each old group whole, here or there."""
    members = sorted((one for group in groups for one in group.members.values()), key=lambda one: one.store.path.name)
    path = members[0].store.snapshot_store.path.parent / f"{PREFIX}{secrets.token_hex(8)}"
    lock = FileLock(lock_file(path), f"the group of {members[0].store.path.name!r}")
    folders = {id: one for group in groups for id, one in group.file.members(group.accepts_loss).items()}
    places = {id: Place.of(one.path, one.snapshot_store.path, path.parent) for id, one in folders.items()}
    rows = {id: one for group in groups for id, one in group.rows.items() if id in folders}
    for one in members:
        if one.now.snapshot is None and one.group.mode != "mixed":
            others = ", ".join(repr(place.name) for id, place in places.items() if id != one.id)
            log.warning(
                "embedding %r is trained together with %s from here on, and no snapshot has its rows: save a snapshot "
                "of all of them, since after a kill they have no step in common before that",
                one.store.path.name,
                others,
            )
    record = union([group.record for group in groups], {id: one.now for id, one in rows.items()})
    file = groups[0].file.but(path=path, record=replace(record, places=places, joining=True))
    put(path, file.record.plain())
    for group in groups:
        if group.file.path is not None:
            put(group.file.path, {"forward": Link.to(path, group.file.path.parent)})
        for one in group.members.values() if group.file.path is None else ():
            file.lead(one.home, one.id)
    joined = Group(file, rows, lock)
    for one in members:
        one.join(joined)
    joined.write()  # by which the union is complete
    for group in groups:
        if group.file.path is not None and not group.rows.keys() - joined.members.keys():
            remove(group.file.path)  # nothing leads there any more


@contextmanager
def loading(snapshots: Mapping[Member, str]) -> Iterator[None]:
    """A block that replaces the rows of stores by those of snapshots, and calls `Member.replaced` for each.

    The rows are verified. The record says the snapshots first, so that a kill finishes the load; if the block raises,
    it says what each store has. Raises StoreError.
    """
    if all(member.broken == LOADING for member in snapshots):  # by a block around this one, of several stores
        yield
        return
    before = {}
    try:
        with _changing:
            for member in snapshots:
                _locked(member)
            before = {member: (member.now, member.broken) for member in snapshots}
            for member in snapshots:
                member.begin_load()
            for group, ids in _by_group(snapshots):
                loaded = {id: Entry(snapshot) for id, snapshot in ids.items()}
                group.write(loaded, parents={**group.record.parents, **ids})
        yield
        clock.tick()
    except BaseException:
        with _changing, suppress(StoreError):
            for member, (now, broken) in before.items():
                member.end_failed_load(now, broken)
            for group, _ in _by_group(before):
                group.write()
        raise


def saved(snapshots: Mapping[Capture, str], is_parent: bool = True) -> None:
    """Snapshots of captured rows have their names: they count from here on. StoreError.

    is_parent: whether the next incremental snapshots are based on them.
    """
    with _changing:
        present = {capture.member: id for capture, id in snapshots.items() if capture.last == FOREVER}
        groups = _by_group({capture.member: id for capture, id in snapshots.items()})
        before = [(group, {**vars(group.record), "now": group.at}) for group, _ in groups]
        try:
            for capture, snapshot in snapshots.items():
                capture.name(snapshot)
            for group, ids in groups:
                now = {one.id: Entry(id, one.now.live) for one, id in present.items() if one.group is group}
                group.write(now, parents={**group.record.parents, **(ids if is_parent else {})})
        except BaseException:
            for capture in snapshots:
                capture.name("")
            for group, fields in before:
                with suppress(StoreError):
                    group.write(**fields)
            raise
        for member, snapshot in present.items():
            member.saved(snapshot)


def _by_group(snapshots: Mapping[Member, Any]) -> list[tuple[Group, dict[str, Any]]]:
    """The groups of stores, and by the ids of the stores of each what is given for them."""
    groups = {one.group for one in snapshots}
    return [(group, {one.id: given for one, given in snapshots.items() if one.group is group}) for group in groups]


def file_of(store: FolderState) -> GroupFile:
    """The record of a store's group, as it is read, or as this process knows it that has the group locked."""
    here = [one for group in list(_groups) if group.is_locked for one in list(group.members.values())]
    path = os.path.realpath(store.path)
    member = next((one for one in here if os.path.realpath(one.store.path) == path), None)
    return GroupFile(store) if member is None else member.group.file.but(folder=store, store=member.id)


def _is_same(one: Entry, other: Entry) -> bool:
    return bool(one.live and one.live == other.live) or bool(one.snapshot and one.snapshot == other.snapshot)


def _undone(folder: FolderState, entry: Entry) -> tuple[int, int]:
    """The sequence numbers of the snapshots of a store that a recovery does not use."""
    sequences = {one.manifest.id: one.manifest.sequence for one in list_snapshots(folder.snapshots).snapshots}
    high = max(sequences.values(), default=0)
    return sequences.get(entry.snapshot or "", high if entry.live else 0), high


def _changed_text(store: FolderState) -> str:
    return (
        f"{str(store.path)!r} was recovered or trained by another process since it was opened here: make the embedding "
        "again"
    )
