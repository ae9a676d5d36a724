"""The stores of a group that this process has open: which durable rows equal theirs, and the writes of their record.

A store opens with its entry of the record, and takes no lock of the group. The first write, save or load takes it, and
the close of the last store releases it. In between `at` has the entry of each member, of those that are closed as well.
A moment is a point between two steps at which rows were saved or loaded; the process counts them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from time import sleep
from weakref import WeakSet

from ...engine.errors import SnapshotError, StoreError
from ...engine.threads import POLL_SECONDS
from ..files.reader import list_snapshots
from .folder import StoreFolder
from .folder_state import FolderState
from .group_file import PREFIX, GroupFile, Shards, lock_file, lock_of_group, put
from .lock import FileLock, InUseError
from .mark import Link, RanksRecord
from .record import (
    EMPTY,
    FOREVER,
    NOTHING,
    Entry,
    Interval,
    Place,
    Record,
    Snapshots,
    newest_moment,
    next_record,
    union,
)

log = logging.getLogger("tierbed")
OPEN_ATTEMPTS = 20  # while another process has the lock
_groups: dict[str, Group] = {}  # of open stores, by the key of their record
_changing = RLock()  # groups and their records, by one thread at a time


class Clock:
    """Counts the moments of this process: `now` is the last one."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now


clock = Clock()
os.register_at_fork(after_in_child=_groups.clear)


@dataclass(eq=False)
class Capture:
    """Rows of a store that are being saved, and the moments during which it has them."""

    member: Member
    first: int
    last: int = FOREVER


class Member:
    """A store that this process has open.

    store: its folder. home: the folder whose MARK has the record or leads to it, of the snapshots if ranks share the
    rows. entry: the durable rows that it opens with. writes: how often rows were written here. changed: the first
    moment after the last of these writes. broken: why rows may not be written or saved before a load; "" if they may.
    partners: returns the stores that this process trains together with it. expect_change: called when the next change
    of the rows has to be noted.
    """

    def __init__(self, store: StoreFolder, home: StoreFolder, id: str, group: Group, entry: Entry) -> None:
        self.store, self.home, self.id, self.group, self.entry = store, home, id, group, entry
        self.writes, self.changed, self.broken = 0, group.changed.get(id, 0), ""
        self.captures = WeakSet[Capture]()  # of saves that have not ended
        self.is_loading = False  # whether it is in a block of `loading`
        self.partners: Callable[[], Iterable[Member]] = tuple
        self.expect_change: Callable[[], None] = lambda: None
        self._came_as = 0, entry.live or f"{entry.snapshot}:0"
        self._run = secrets.token_hex(8)  # names the writes among those of all processes, and of each time it is open

    def attach(self, expect_change: Callable[[], None], partners: Callable[[], Iterable[Member]]) -> None:
        """Call these from here on, as the class says."""
        self.expect_change, self.partners = expect_change, partners

    def tear(self, why: str) -> None:
        """Let the rows neither be written nor saved before a load."""
        self.broken = why
        self.expect_change()

    @property
    def version(self) -> str:
        """The version of the rows, which is known again in the next run."""
        since, version = self._came_as
        return version if self.writes == since else f"{self._run}:{self.writes}"

    @property
    def now(self) -> Entry:
        """The durable rows that equal the present ones, as far as this process knows."""
        if self.group.is_locked:
            return self.group.at[self.id]
        return self.entry if self.writes == self._came_as[0] else NOTHING

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
                with _or_as_before([group]):
                    group.at[self.id] = Entry(group.at[self.id].snapshot)
                    group.write(trained={self.id})
            group.end_spans(self)
            group.at[self.id] = NOTHING

    def came_as(self, snapshot: str) -> None:
        """The present rows are those of a snapshot."""
        self._came_as = self.writes, f"{snapshot}:0"

    def write(self) -> None:
        """Count a write of rows, which `begin_change` has noted."""
        self.writes += 1
        self.changed = clock.now + 1

    def capture(self) -> Capture:
        """Begin a save of the rows as they are now. The caller has the table's lock. StoreError."""
        self.check_whole()
        with _changing:
            _locked(self)
            clock.tick()
            capture = Capture(self, self.changed)
            self.captures.add(capture)
            self.expect_change()
            return capture

    def replaced(self, snapshot: str | None) -> None:
        """The rows were replaced: by those of a snapshot, as the record says already (`loading`), or by others."""
        with _changing:
            self.group.end_spans(self)
            self.write()
            self.broken = ""
            if snapshot is not None:
                self.came_as(snapshot)
                self.group.at[self.id] = Entry(snapshot)
                self.group.spans[self.id].append(Interval(snapshot, self.changed))
                self.expect_change()

    def closed(self, live: str) -> None:
        """The rows are live rows of a version, which have a clean marker. StoreError."""
        with _changing:
            try:
                group = _locked(self)
            except StoreError:
                if self.writes == self._came_as[0] and not self.group.is_locked:
                    return  # another process trains the group, and these rows are those that the record names
                raise
            with _or_as_before([group]):
                group.at[self.id] = Entry(group.at[self.id].snapshot, live)
                group.write(untrained={self.id})

    def copy_to(self, home: StoreFolder, ranks: RanksRecord | None = None) -> None:
        """Let another MARK have the record or lead to it as well, as that of these ranks. StoreError."""
        path = self.group.file.path
        record, link = (self.group.record, None) if path is None else (None, Link.to(path, home.path))
        home.change(store=self.id, record=record, link=link, candidates=None, group=None, ranks=ranks)

    def move_to(self, home: StoreFolder, ranks: RanksRecord | None = None) -> None:
        """Let another MARK have the record or lead to it, as that of these ranks, or of one process. StoreError."""
        if home is not self.home:
            self.copy_to(home, ranks)
            self.home.change(store="", record=None, link=None, candidates=None, group=None, ranks=None)
            self.home = home
        elif home.mark.ranks != ranks:
            home.change(ranks=ranks)

    def leave(self) -> None:
        """The store is no longer open here."""
        with _changing:
            self.group.leave(self)


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
        file = GroupFile(store, shards, beside, {**_open_stores(), os.path.realpath(store.path): store})
        group = _groups.get(file.key) or Group(file)
        entry, broken = Entry(EMPTY), ""
        try:
            if mode != "fresh":
                entry = group.entry_of(file, mode)
        except (StoreError, SnapshotError) as error:
            if not for_load:
                raise
            entry, broken = file.newest()[file.store], str(error)
        member = Member(store, store.snapshot_store if store.ranks else store, file.store, group, entry)
        member.broken = broken
        group.enter(member)
        try:
            if mode == "fresh":
                member.broken = "its rows are about to be emptied"  # whatever they are, they settle nothing
                group = _locked(member)
                member.broken = ""
                with _or_as_before([group]):
                    group.end_spans(member)
                    member.changed = clock.tick()
                    group.at[member.id] = Entry(EMPTY)
                    group.spans[member.id].append(Interval(EMPTY, member.changed))
                    group.write(parents={member.id: EMPTY})
        except BaseException:
            group.leave(member)
            raise
        return member


class Group:
    """The stores that share a record. file: of one of them."""

    def __init__(self, file: GroupFile) -> None:
        self.file = file
        self.members: dict[str, Member] = {}  # that are open here
        self.at: dict[str, Entry] = {}  # of all members, while it is locked
        self.spans: dict[str, list[Interval]] = {}
        self.changed: dict[str, int] = {}  # the moment of the last change of each, for when it opens again
        self.is_locked = False
        self.is_lenient = False  # whether members without rows of a common step, or without a folder, are accepted
        self._lock: FileLock | None = None
        self._committed = 0  # the moment of the record's commit

    @property
    def record(self) -> Record:
        return self.file.record

    def enter(self, member: Member) -> None:
        self.members[member.id] = member
        _groups[self.file.key] = self
        if self.is_locked and member.broken:
            self.at[member.id] = NOTHING

    def leave(self, member: Member) -> None:
        self.members.pop(member.id, None)
        self.changed[member.id] = member.changed
        if not self.members:
            _groups.pop(self.file.key, None)
            self._release()

    def _release(self) -> None:
        lock, self._lock, self.is_locked = self._lock, None, False
        if lock is not None:
            lock.release()

    def entry_of(self, file: GroupFile, mode: str) -> Entry:
        """What a store opens with. StoreError, SnapshotError."""
        if self.is_locked:
            entry = self.at.get(file.store, NOTHING)
            if entry != NOTHING:
                return entry
            if all(self.at[x].snapshot == id for x, id in self.record.commit.items() if x != file.store):
                return Entry(self.record.commit[file.store])  # the others have not changed since
            names = ", ".join(sorted(repr(one.store.path.name) for one in self.members.values()))
            raise StoreError(
                f"{str(file.folder.path)!r} was not closed cleanly, and what is trained together with it is open here: "
                f"close {names}, so that the next open recovers all of them together"
            )
        self.file = file
        guard: FileLock | None = None
        for number in range(OPEN_ATTEMPTS):
            if file.path is None:
                break
            try:  # nobody may change the record, or clear a clean marker, while this reads them
                guard = FileLock(lock_file(file.path), f"the open of {file.folder.path.name!r}")
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
                file.read_again()
        try:
            file.read_again()
            if mode == "error" and (unclean := file.unclean()):
                raise StoreError(_unclean_text(file, unclean.values()))
            self.is_lenient = mode == "mixed"
            return file.newest()[file.store] if self.is_lenient else file.target()[file.store]
        finally:
            if guard is not None:
                guard.release()

    def lock(self) -> None:
        """Take the lock, and write what a recovery chooses. Raises StoreError, SnapshotError."""
        if self.is_locked:
            return
        if self.file.path is not None:
            self._lock = lock_of_group(self.file.path, self.file)
        try:
            if self.file.path is not None:
                store = next(iter(self.members.values())).store
                self.file = GroupFile(store, self.file.shards, self.file.beside, _open_stores())
            self._recover()
        except BaseException:
            self._release()
            raise

    def _recover(self) -> None:
        broken = {id for id, member in self.members.items() if member.broken}
        if self.file.path is None:
            target = {id: member.entry for id, member in self.members.items()}
        elif self.is_lenient:
            target = self.file.newest()
        else:
            try:
                target = self.file.target()
            except (StoreError, SnapshotError):
                if not broken:
                    raise
                target = dict.fromkeys(self.record.now, NOTHING)  # each is loaded before it is used
        for id, member in self.members.items():
            if id not in broken and not _is_same(member.entry, target[id]):
                raise StoreError(
                    f"{str(member.store.path)!r} was recovered or trained by another process since it was opened here: "
                    "make the embedding again"
                )
        self.at = {id: NOTHING if id in broken else entry for id, entry in target.items()}
        self.spans = {id: [Interval(entry.snapshot, 0)] if entry.snapshot else [] for id, entry in self.at.items()}
        self.is_locked = True
        known = {id: entry for id, entry in target.items() if entry != NOTHING}
        if self.record.trained or any(not _is_same(self.record.now[id], entry) for id, entry in known.items()):
            folders = self.file.members(lenient=True)
            undone = {id: _undone(folders[id], entry) for id, entry in known.items() if id in folders}
            parents = {id: entry.snapshot for id, entry in known.items() if entry.snapshot}
            self.write(untrained=known, parents=parents, undone=undone)
        elif self.record.now != self.at:
            self.write()

    def end_spans(self, member: Member) -> None:
        """The rows are about to change: they were those of snapshots, and of saves that have begun, until now."""
        for capture in member.captures:
            capture.last = min(capture.last, clock.now)
        spans = (span._replace(last=min(span.last, clock.now)) for span in self.spans[member.id])
        self.spans[member.id] = [span for span in spans if span.last >= self._committed]

    def _newest_moment(self) -> Snapshots | None:
        """The snapshots of the newest moment that they cover. Those that were removed since are forgotten."""
        while True:
            moment = newest_moment(self.spans, clock.now)
            if moment is None or moment == self.record.commit:
                return moment
            there = {id: self.file.files(folder).snapshots for id, folder in self.file.members(lenient=True).items()}
            gone = {id for id, snapshot in moment.items() if snapshot != EMPTY and snapshot not in there.get(id, ())}
            if not gone:
                return moment
            for id in gone:
                self.spans[id] = [span for span in self.spans[id] if span.snapshot != moment[id]]

    def write(
        self,
        *,
        trained: Collection[str] = (),
        untrained: Collection[str] = (),
        parents: Mapping[str, str] | None = None,
        undone: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Write the record of now, if it says something new. StoreError."""
        moment = self._newest_moment()
        record = next_record(self.record, self.at, moment)
        record = replace(
            record,
            trained=(record.trained | {*trained}) - {*untrained},
            parents={**record.parents, **(parents or {})},
            undone={**record.undone, **(undone or {})},
        )
        path = self.file.path
        if path is None:
            (only,) = self.members.values()
            if record != self.record or only.home.mark.record is None:
                only.home.change(store=only.id, record=record, link=None, candidates=None, group=None)
        else:
            places = {
                one.id: Place.of(one.store.path, one.store.snapshot_store.path, path.parent)
                for one in self.members.values()
            }
            record = replace(
                record, places={id: one for id, one in {**record.places, **places}.items() if id in self.at}
            )
            if record != self.record:
                put(path, record.plain())
            for one in self.members.values():  # a forward or an earlier version has led here
                for home in {one.home, one.store.snapshot_store}:  # which leads here if the store folder is lost
                    link = Link.to(path, home.path)
                    if home.mark.link != link:
                        home.change(store=one.id, record=None, link=link, candidates=None, group=None)
        self.file.record = record
        if moment is not None and record.commit == moment:
            self._committed = max(self._committed, _moment_of(self.spans, moment))


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
    folders = {id: folder for group in groups for id, folder in group.file.members(group.is_lenient).items()}
    places = {id: Place.of(one.path, one.snapshot_store.path, path.parent) for id, one in folders.items()}
    at = {id: entry for group in groups for id, entry in group.at.items()}
    for one in members:
        if at[one.id].snapshot is None:
            others = ", ".join(repr(place.name) for id, place in places.items() if id != one.id)
            log.warning(
                "embedding %r is trained together with %s from here on, and no snapshot has its rows: save a snapshot "
                "of all of them, since after a kill they have no step in common before that",
                one.store.path.name,
                others,
            )
    record = replace(union([group.record for group in groups], at), places=places)
    put(path, record.plain())
    for group in groups:
        if group.file.path is None:
            (only,) = group.members.values()
            only.home.change(
                store=only.id, record=None, link=Link.to(path, only.home.path), candidates=None, group=None
            )
        else:
            put(group.file.path, {"forward": Link.to(path, group.file.path.parent)})
    put(path, replace(record, joining=False).plain())
    joined = Group(GroupFile(members[0].store, here=_open_stores()))
    joined.at, joined.is_locked, joined._lock = at, True, lock
    joined.changed = {id: change for group in groups for id, change in group.changed.items()}
    joined.spans = {id: spans for group in groups for id, spans in group.spans.items()}
    for group in groups:
        for one in list(group.members.values()):
            group.leave(one)
            one.group = joined
            joined.enter(one)
    joined.write()


@contextmanager
def _or_as_before(groups: Iterable[Group]) -> Iterator[None]:
    """A block that changes the entries and writes them: if that fails, they are as they were."""
    before = [(one, dict(one.at), {id: [*spans] for id, spans in one.spans.items()}) for one in groups]
    try:
        yield
    except BaseException:
        for one, at, spans in before:
            one.at, one.spans = at, spans
        raise


@contextmanager
def loading(snapshots: Mapping[Member, str]) -> Iterator[None]:
    """A block that replaces the rows of stores by those of snapshots, and calls `Member.replaced` for each.

    The rows are verified. The record says the snapshots first, so that a kill finishes the load; if the block raises,
    it says what each store has. Raises StoreError.
    """
    if all(member.is_loading for member in snapshots):  # by a block around this one, of several stores
        yield
        return
    with _changing:
        groups = {id(group): group for group in map(_locked, snapshots)}
        before = {member: (member.group.at[member.id], member.writes) for member in snapshots}
        with _or_as_before(groups.values()):
            for member, snapshot in snapshots.items():
                member.group.at[member.id] = Entry(snapshot)
            for group in groups.values():
                group.write(parents={one.id: snapshot for one, snapshot in snapshots.items() if one.group is group})
    try:
        for member in snapshots:
            member.is_loading = True
        yield
        clock.tick()
    except BaseException:
        with _changing, suppress(StoreError):
            for member, (entry, writes) in before.items():
                if member.broken or member.writes > writes:  # without what the others have it is of no moment
                    member.group.end_spans(member)
                    entry = NOTHING
                member.group.at[member.id] = entry
            for group in groups.values():
                group.write()
        raise
    finally:
        for member in snapshots:
            member.is_loading = False


def saved(snapshots: Mapping[Capture, str], is_parent: bool = True) -> None:
    """Snapshots of captured rows have their names: they count from here on. StoreError.

    is_parent: whether the next incremental snapshots are based on them.
    """
    with _changing:
        groups = {id(capture.member.group): capture.member.group for capture in snapshots}
        with _or_as_before(groups.values()):
            for capture, snapshot in snapshots.items():
                group, store = capture.member.group, capture.member.id
                group.spans[store].append(Interval(snapshot, capture.first, capture.last))
                if capture.last == FOREVER:
                    group.at[store] = Entry(snapshot, group.at[store].live)
            for group in groups.values():
                ids = {one.member.id: id for one, id in snapshots.items() if one.member.group is group}
                group.write(parents=ids if is_parent else {})
        for capture, snapshot in snapshots.items():
            capture.member.captures.discard(capture)
            if capture.last == FOREVER:
                capture.member.came_as(snapshot)


def _open_stores() -> dict[str, FolderState]:
    """The stores that this process has open, by their real paths."""
    members = [member for group in _groups.values() for member in group.members.values()]
    return {os.path.realpath(member.store.path): member.store for member in members}


def file_of(store: FolderState) -> GroupFile:
    """The record of a store's group, as it is read, or as this process knows it that has the group locked."""
    for group in list(_groups.values()):
        for member in list(group.members.values()):
            if group.is_locked and os.path.realpath(member.store.path) == os.path.realpath(store.path):
                file = copy(group.file)
                file.folder, file.store = store, member.id
                return file
    return GroupFile(store)


def _is_same(one: Entry, other: Entry) -> bool:
    return bool(one.live and one.live == other.live) or bool(one.snapshot and one.snapshot == other.snapshot)


def _moment_of(spans: Mapping[str, Iterable[Interval]], snapshots: Mapping[str, str]) -> int:
    """The newest moment at which the stores had these snapshots, which `newest_moment` has found."""
    theirs = [[span for span in spans[x] if span.snapshot == snapshots[x]] for x in spans]
    lasts = {min(span.last, clock.now) for of_store in theirs for span in of_store}
    return max(m for m in lasts if all(any(span.first <= m <= span.last for span in one) for one in theirs))


def _undone(folder: FolderState, entry: Entry) -> tuple[int, int]:
    """The sequence numbers of the snapshots of a store that a recovery does not use."""
    sequences = {one.manifest.id: one.manifest.sequence for one in list_snapshots(folder.snapshots).snapshots}
    high = max(sequences.values(), default=0)
    return sequences.get(entry.snapshot or "", high if entry.live else 0), high


def _unclean_text(file: GroupFile, unclean: Iterable[FolderState]) -> str:
    """The error of open="error"."""
    if file.path is None:
        return (
            f"store folder {str(file.folder.path)!r} was not closed by its last run, so its live rows cannot be used; "
            'open="resume" restores the last snapshot or starts empty'
        )
    paths = ", ".join(sorted(repr(str(one.path)) for one in unclean))
    return (
        f"{paths} of the store folders that are trained together were not closed by their last run, so their live "
        'rows cannot be used; open="resume" recovers the last step of which all have the rows'
    )
