"""The stores that this process has open, and the records of their training groups.

Opening a store reads its entry in the record (explained in `recovery_rule`), but does not lock the group. The first
write, save or load locks the group. From then on only this process writes the record, and a `StoreGroup` keeps track of
all members, including closed stores. Closing the last open store unlocks the group. When stores of two groups begin to
train together, the groups are joined under a new record.

A moment is a point between two steps. This process counts only the moments that recovery can return to: `clock` grows
by 1 when a save begins or a load ends. `MemberRows` remembers at which moments a store had a snapshot's rows.
`StoreGroup.write` finds the newest moment that snapshots of all stores share, and records them as the commit.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from time import sleep
from typing import Any

from ...engine.errors import SnapshotError, StoreError, undo_on_error
from ...engine.threads import POLL_SECONDS
from ..files.reader import list_snapshots
from .folder import StoreFolder
from .folder_state import FolderState
from .group_file import GROUP_FILE_PREFIX, GroupFile, Shards, lock_group, make_lock_path, remove_record, write_record
from .lock import FileLock, InUseError
from .mark import Link
from .recovery_rule import (
    EMPTY_ID,
    FOREVER,
    NO_ENTRY,
    Entry,
    Interval,
    Location,
    Record,
    find_newest_moment,
    make_next_record,
    make_snapshot_version,
    merge_records,
)

log = logging.getLogger("tierbed")
OPEN_ATTEMPTS = 20  # how often to try to open a store whose group another process has locked
LOADING_REASON = "its rows are being replaced by a load"
_groups: set[StoreGroup] = set()  # the training groups that have open stores
_groups_lock = RLock()  # held while a thread changes groups and records


class Clock:
    moment = 0


clock = Clock()
os.register_at_fork(after_in_child=_groups.clear)


@dataclass(eq=False)
class MemberRows:
    """What this process knows about one store's rows. Closed stores are included if the process locks the group."""

    current_entry: Entry = NO_ENTRY  # durable rows that equal the current rows
    unchanged_since: int = 0  # the rows have not changed since this moment
    intervals: list[Interval] = field(default_factory=list)  # one per snapshot of the rows, and one per running save

    def mark_changed(self, entry: Entry = NO_ENTRY) -> None:
        """Called when the rows change. Ends all intervals, because these snapshots have the earlier rows."""
        for interval in self.intervals:
            interval.end(clock.moment)
        self.current_entry = entry


class Member(MemberRows):
    """A store that this process has open."""

    def __init__(
        self, store: StoreFolder, folder: StoreFolder, id: str, group: StoreGroup, entry: Entry, unusable_reason: str
    ) -> None:
        rows = group.member_rows.get(id, MemberRows(entry))
        self.current_entry = NO_ENTRY if unusable_reason else rows.current_entry
        self.unchanged_since, self.intervals = rows.unchanged_since, rows.intervals
        self.store, self.id, self.group = store, id, group
        self.mark_folder = folder  # the folder whose MARK leads to the record; for ranks, the snapshots' folder
        self.entry = entry  # the durable rows that the store opens with
        self.unusable_reason = unusable_reason  # why rows must be loaded before a write or save; "" if they need not
        self.partners: Callable[[], Iterable[Member]] = tuple  # returns the stores trained together with this store
        self.expect_change: Callable[[], None] = lambda: None  # called when the next change must be recorded
        self._num_writes = 0  # the number of writes since the store was opened
        # the version of the rows; if the next run opens with these rows, it keeps the version
        self.version = entry.live_version or make_snapshot_version(entry.snapshot)
        self._run_id = secrets.token_hex(8)  # makes versions unique to this process and this opening of the store

    def attach(self, expect_change: Callable[[], None], partners: Callable[[], Iterable[Member]]) -> None:
        self.expect_change, self.partners = expect_change, partners

    def mark_broken(self, reason: str) -> None:
        """Forbid writes, saves and a clean close until rows are loaded again. reason: the text for errors."""
        self.unusable_reason = reason
        self.expect_change()

    def lock(self) -> StoreGroup:
        """Lock the groups of this store and its partners, and join them into one. Raises StoreError, SnapshotError."""
        with _groups_lock:
            groups = list(dict.fromkeys(member.group for member in (self, *self.partners())))
            for group in groups:
                group.lock()
            if len(groups) > 1:
                _join_groups(groups)
            return self.group

    def begin_change(self, replaces: bool = False) -> None:
        """Record durably that the store's rows are about to change. The caller must hold the table's lock.

        replaces: True if all rows will be replaced. Required while `unusable_reason` is set. Raises StoreError.
        """
        if self.unusable_reason and not replaces:
            raise StoreError(self.unusable_reason)
        with _groups_lock:
            group = self.lock()
            changed = group.record.changed_stores
            if self.id not in changed:  # else write nothing, because the disk may be full
                group.warn_of_lone_saves(self)
                group.write({self.id: Entry(self.current_entry.snapshot)}, changed_stores=changed | {self.id})
            self.mark_changed()

    def count_write(self) -> None:
        """Count a write of rows, after `begin_change` has recorded that rows will change."""
        self._num_writes += 1
        self.version = f"{self._run_id}:{self._num_writes}"
        self.unchanged_since = clock.moment + 1

    def capture(self) -> PendingSave:
        """Begin a save of the current rows. The caller must hold the table's lock. Raises StoreError."""
        if self.unusable_reason:
            raise StoreError(self.unusable_reason)
        with _groups_lock:
            self.lock()
            clock.moment += 1
            pending = PendingSave("", self.unchanged_since, member=self)
            self.intervals.append(pending)
            self.expect_change()
            return pending

    def mark_replaced(self, snapshot: str | None) -> None:
        """Called after all rows were replaced. snapshot: the id of the snapshot with these rows, or None."""
        with _groups_lock:
            self.count_write()
            self.unusable_reason = ""
            self.mark_changed(Entry(snapshot))
            if snapshot is not None:
                self.intervals.append(Interval(snapshot, self.unchanged_since))
                self.version = make_snapshot_version(snapshot)
                self.expect_change()

    def end_failed_load(self, entry: Entry, unusable_reason: str) -> None:
        """Restore the values from before a failed load. If it replaced rows, no durable rows are known to be equal."""
        if unusable_reason or self.unusable_reason != LOADING_REASON:
            self.mark_changed()
        else:
            self.current_entry = entry
        if self.unusable_reason == LOADING_REASON:
            self.unusable_reason = unusable_reason

    def mark_closed(self, version: str) -> None:
        """Record that the live rows are clean and have this `version`. Raises StoreError."""
        with _groups_lock:
            try:
                group = self.lock()
            except StoreError:
                if not self.group.is_locked:
                    return  # another process trains the group, and the record already names these unchanged rows
                raise
            entry = Entry(self.current_entry.snapshot, version)
            group.write({self.id: entry}, changed_stores=group.record.changed_stores - {self.id})

    def copy_to(self, mark_folder: StoreFolder, num_ranks: int = 0) -> None:
        """Copy the record, or the link to the record file, into another folder's MARK. Raises StoreError."""
        self.group.file.write_mark(mark_folder, self.id, num_ranks=num_ranks)

    def move_to(self, mark_folder: StoreFolder, num_ranks: int = 0) -> None:
        """Move the record, or the link to the record file, into another folder's MARK. Raises StoreError."""
        if mark_folder is not self.mark_folder:
            self.copy_to(mark_folder, num_ranks)
            self.mark_folder.change(store_id="", record=None, link=None, num_ranks=0)
            self.mark_folder = mark_folder
        elif mark_folder.mark.num_ranks != num_ranks:
            mark_folder.change(num_ranks=num_ranks)

    def leave(self) -> None:
        with _groups_lock:
            self.group.leave(self)


@dataclass(eq=False, kw_only=True)
class PendingSave(Interval):
    """A save in progress. The interval tells from when to when the store has the rows that are being saved."""

    member: Member


def open_store(
    store: StoreFolder, mode: str, for_load: bool = False, shards: Shards | None = None, siblings: Sequence[Path] = ()
) -> Member:
    """Open a store in this process, with the rows that its entry names. Raises StoreError, SnapshotError.

    mode: the store option `open`. for_load: True if a load will replace the rows. With for_load, if rows cannot be
    recovered, the store is unusable until the load, and no error is raised. shards, siblings: see `GroupFile`.
    """
    with _groups_lock:
        file = GroupFile(store, shards, siblings)
        group = next((group for group in _groups if group.file.identity == file.identity), None) or StoreGroup(file)
        if mode == "fresh":
            entry, unusable_reason = Entry(EMPTY_ID), "its rows are about to be emptied"  # so recovery is not needed
        else:
            try:
                entry, unusable_reason = group.choose_entry(file, mode), ""
            except (StoreError, SnapshotError) as error:
                if not for_load:
                    raise
                entry, unusable_reason = file.choose_newest()[file.store_id], str(error)
        mark_folder = store.snapshot_store if store.num_ranks else store
        member = Member(store, mark_folder, file.store_id, group, entry, unusable_reason)
        group.enter(member, mode)
        with undo_on_error(member.leave):
            if mode == "fresh":
                with record_load({member: EMPTY_ID}):
                    member.mark_replaced(EMPTY_ID)
                member.group.write()
        return member


class StoreGroup:
    """The stores that share a record. rows, lock: given only if this process has already locked the group."""

    def __init__(
        self, file: GroupFile, rows: Mapping[str, MemberRows] | None = None, lock: FileLock | None = None
    ) -> None:
        self.file = file  # the record, as read through one of the stores
        self.member_rows = dict(rows or {})  # by store id: all stores if the group is locked, else only open stores
        self._lock, self.is_locked = lock, lock is not None
        self.members: dict[str, Member] = {}  # the stores that are open in this process
        # The `open` option of the store that was opened last. Once the mode is "mixed", it stays "mixed". The mode does
        # not change while the group is locked.
        self.open_mode = "resume"

    @property
    def record(self) -> Record:
        return self.file.record

    def enter(self, member: Member, mode: str = "") -> None:
        if not self.is_locked and self.open_mode != "mixed":
            self.open_mode = mode
        self.members[member.id] = self.member_rows[member.id] = member
        _groups.add(self)

    def leave(self, member: Member) -> None:
        if self.members.get(member.id) is member:  # else the store was opened again after this member left
            del self.members[member.id]
        if not self.members:
            _groups.discard(self)
            self._unlock()
        if not self.is_locked and self.member_rows.get(member.id) is member:
            del self.member_rows[member.id]

    def _unlock(self) -> None:
        lock, self._lock, self.is_locked = self._lock, None, False
        if lock is not None:
            lock.release()

    def choose_entry(self, file: GroupFile, mode: str) -> Entry:
        """Choose the rows that a store opens with. Raises StoreError, SnapshotError."""
        if self.is_locked:
            return self._choose_entry_while_locked(file)
        self.file = file
        with ExitStack() as guard:
            for attempt in range(OPEN_ATTEMPTS if file.path is not None else 0):
                assert file.path is not None
                try:  # lock the group, so that no process changes the record or a clean marker meanwhile
                    lock = FileLock(make_lock_path(file.path), f"the open of {file.folder.path.name!r}")
                    guard.callback(lock.release)
                    break
                except InUseError as error:
                    if (entry := file.choose_own_entry()) != NO_ENTRY:
                        return entry
                    if attempt == OPEN_ATTEMPTS - 1:
                        raise StoreError(
                            f"{str(file.folder.path)!r} was not closed cleanly, and process {error.holder} trains "
                            "embeddings of its group: end that process; the next open recovers all of them together"
                        ) from None
                    sleep(POLL_SECONDS)  # the other process may be opening a store, and unlock the group soon
                    self.file = file = file.read_again()
            self.file = file = file.read_again()
            if mode == "error":
                file.check_closed()
            return file.choose_newest()[file.store_id] if mode == "mixed" else file.choose_entries()[file.store_id]

    def _choose_entry_while_locked(self, file: GroupFile) -> Entry:
        """Choose the rows that a store opens with if this process has locked its group. Raises StoreError."""
        rows, commit = self.member_rows.get(file.store_id, MemberRows()), self.record.commit
        if rows.current_entry != NO_ENTRY:
            return rows.current_entry
        if all(self.member_rows[x].current_entry.snapshot == id for x, id in commit.items() if x != file.store_id):
            return Entry(commit[file.store_id])  # all other stores still have the commit's rows
        names = ", ".join(sorted(repr(member.store.path.name) for member in self.members.values()))
        raise StoreError(
            f"{str(file.folder.path)!r} was not closed cleanly, and embeddings that are trained together with it are "
            f"open in this process: close {names}; the next open recovers all of them together"
        )

    def lock(self) -> None:
        """Lock the group, and record the rows that recovery chooses. Raises StoreError, SnapshotError."""
        if self.is_locked:
            return
        with undo_on_error(self._unlock):
            if self.file.path is not None:
                self._lock = lock_group(self.file)
                store = next(iter(self.members.values())).store
                file = GroupFile(store, self.file.shards, self.file.siblings)
                if file.identity != self.file.identity:  # another process changed the groups
                    raise StoreError(_describe_change(store))
                self.file = file
            self._recover()

    def _recover(self) -> None:
        if self.file.path is None:
            target = {id: member.entry for id, member in self.members.items()}
        elif self.open_mode == "mixed":
            target = self.file.choose_newest()
        else:
            try:
                target = self.file.choose_entries()
            except (StoreError, SnapshotError):
                if not any(member.unusable_reason for member in self.members.values()):
                    raise
                target = self.record.unchanged_entries  # an unusable store's rows are not used before a load
        for id, member in self.members.items():
            if not member.unusable_reason and not _have_common_rows(member.entry, target[id]):
                raise StoreError(_describe_change(member.store))
        self.member_rows = {id: self.members.get(id) or MemberRows() for id in target}
        for id, rows in self.member_rows.items():
            rows.current_entry = NO_ENTRY if id in self.members and self.members[id].unusable_reason else target[id]
            snapshot = rows.current_entry.snapshot
            rows.intervals = [Interval(snapshot, 0)] if snapshot else []  # 0 is the first moment
        self.is_locked = True
        known = {id: entry for id, entry in target.items() if entry != NO_ENTRY}
        if self.record.changed_stores or any(not _have_common_rows(self.record.entries[id], known[id]) for id in known):
            folders = self.file.find_members(lenient=True)
            skipped = {id: _find_skipped_range(folders[id], entry) for id, entry in known.items() if id in folders}
            parents = {id: entry.snapshot for id, entry in known.items() if entry.snapshot}
            self.write(
                changed_stores=self.record.changed_stores & (self.member_rows.keys() - known.keys()),
                parents={**self.record.parents, **parents},
                skipped_sequences={**self.record.skipped_sequences, **skipped},
            )
        elif self.record.entries != self.current_entries:
            self.write()

    @property
    def current_entries(self) -> dict[str, Entry]:
        """The durable rows that equal the current rows, for each store."""
        return {id: rows.current_entry for id, rows in self.member_rows.items()}

    def write(self, entries: Mapping[str, Entry] | None = None, **fields: Any) -> None:
        """Replace `entries` and fields of the record, and write it if anything changed. Raises StoreError."""
        entries, path = entries or {}, self.file.path
        moment, snapshots = self._find_newest_moment() or (0, None)
        record = replace(make_next_record(self.record, {**self.current_entries, **entries}, snapshots), **fields)
        if path is not None:
            stores = {id: member.store for id, member in self.members.items()}
            locations = {id: Location.make(f.path, f.snapshot_store.path, path.parent) for id, f in stores.items()}
            record = replace(record, locations={**record.locations, **locations})
            if record != self.record:
                write_record(path, record.to_plain())
        file = self.file.copy_with(record=record)
        for member in self.members.values():
            # the snapshots' folder also stores the record's path, in case the store folder is lost
            mark_folders = {member.mark_folder, member.store.snapshot_store}
            for mark_folder in mark_folders if path is not None else {member.mark_folder}:
                file.write_mark(mark_folder, member.id)
        self.file = file
        for id, entry in entries.items():
            self.member_rows[id].current_entry = entry
        if snapshots is not None and record.commit == snapshots:
            for rows in self.member_rows.values():
                rows.intervals = [interval for interval in rows.intervals if interval.last >= moment]

    def warn_of_lone_saves(self, member: Member) -> None:
        """Warn that no snapshot has the rows that will change. A kill would then undo the other stores' saves."""
        entries, commit = self.record.entries, self.record.commit
        alone = [id for id, entry in entries.items() if id != member.id and entry.snapshot not in (None, commit[id])]
        if alone and member.current_entry.snapshot is None and NO_ENTRY not in entries.values():
            log.warning(
                "the rows of embedding %r are about to change, and no snapshot contains the rows from its last close. "
                "If this run is killed, recovery returns all embeddings of the group to an older common snapshot, and "
                "undoes later saves and loads of only %s. To prevent this, save a snapshot of all embeddings now",
                member.store.path.name,
                ", ".join(sorted(repr(self.record.locations[id].name) for id in alone)),
            )

    def _find_newest_moment(self) -> tuple[int, Mapping[str, str]] | None:
        """Find the newest moment that snapshots of all stores share. Forgets snapshots that no longer exist."""
        while newest := find_newest_moment({id: rows.intervals for id, rows in self.member_rows.items()}, clock.moment):
            snapshots = newest[1]
            if snapshots == self.record.commit:
                break
            folders = self.file.find_members(lenient=True)
            present_ids = {id: self.file.read_files(folder).snapshot_ids for id, folder in folders.items()}
            missing = [x for x, id in snapshots.items() if id != EMPTY_ID and id not in present_ids.get(x, ())]
            if not missing:
                break
            for x in missing:
                self.member_rows[x].intervals = [i for i in self.member_rows[x].intervals if i.snapshot != snapshots[x]]
        return newest


def _join_groups(groups: Sequence[StoreGroup]) -> None:
    """Atomically join groups under a new record. Each old record file then contains only a link to the new file."""
    members = [member for group in groups for member in group.members.values()]
    members.sort(key=lambda member: member.store.path.name)
    path = members[0].store.snapshot_store.path.parent / f"{GROUP_FILE_PREFIX}{secrets.token_hex(8)}"
    lock = FileLock(make_lock_path(path), f"the group of {members[0].store.path.name!r}")
    folders = dict[str, FolderState]()
    for group in groups:
        folders |= group.file.find_members(lenient=group.open_mode in ("mixed", "fresh"))
    locations = {id: Location.make(f.path, f.snapshot_store.path, path.parent) for id, f in folders.items()}
    rows = {id: rows for group in groups for id, rows in group.member_rows.items() if id in folders}
    for member in members:
        if member.current_entry.snapshot is None and member.group.open_mode != "mixed":
            others = ", ".join(repr(location.name) for id, location in locations.items() if id != member.id)
            log.warning(
                "embedding %r is trained together with %s from now on, and no snapshot has its rows. Save a snapshot "
                "of all these embeddings: until then, a kill leaves them without a common saved step",
                member.store.path.name,
                others,
            )
    record = merge_records([group.record for group in groups], {id: m.current_entry for id, m in rows.items()})
    file = groups[0].file.copy_with(path=path, record=replace(record, locations=locations, is_joining=True))
    write_record(path, file.record.to_plain())
    for group in groups:
        if group.file.path is not None:
            write_record(group.file.path, {"forward": Link.make(path, group.file.path.parent)})
        for member in group.members.values() if group.file.path is None else ():
            file.write_mark(member.mark_folder, member.id)
    joined = StoreGroup(file, rows, lock)
    for member in members:
        member.group.leave(member)
        member.group = joined
        joined.enter(member)
    joined.write()  # clears `is_joining`: the join is complete
    for group in groups:
        if group.file.path is not None and not group.member_rows.keys() - joined.members.keys():
            remove_record(group.file.path)  # no store's MARK names this record any more


@contextmanager
def record_load(snapshots: Mapping[Member, str]) -> Iterator[None]:
    """Wrap a block that loads verified snapshots' rows and calls `Member.mark_replaced` for each store.

    The record names the snapshots before the block runs, so recovery completes the load after a kill. If the block
    raises, the record is rewritten to name the rows that each store then has. Raises StoreError.
    """
    if all(member.unusable_reason == LOADING_REASON for member in snapshots):  # in an outer `record_load`
        yield
        return
    before = {}
    try:
        with _groups_lock:
            for member in snapshots:
                member.lock()
            before = {member: (member.current_entry, member.unusable_reason) for member in snapshots}
            for member in snapshots:
                member.unusable_reason = LOADING_REASON
            for group, ids in _split_by_group(snapshots):
                loaded = {id: Entry(snapshot) for id, snapshot in ids.items()}
                group.write(loaded, parents={**group.record.parents, **ids})
        yield
        clock.moment += 1
    except BaseException:
        with _groups_lock, suppress(StoreError):
            for member, (entry, unusable_reason) in before.items():
                member.end_failed_load(entry, unusable_reason)
            for group, _ in _split_by_group(before):
                group.write()
        raise


def is_changing_groups() -> bool:
    """True if this thread is in the middle of a change of groups and records. It must then not wait for a save."""
    return bool(_groups_lock._is_owned())  # type: ignore[attr-defined]


def record_save(snapshots: Mapping[PendingSave, str], is_parent: bool = True) -> None:
    """Record that rows were saved, after their snapshots got their final names. Raises StoreError.

    snapshots: {save: snapshot id}. is_parent: True if these snapshots become parents of the next incremental ones.
    """
    with _groups_lock:
        present = {pending.member: id for pending, id in snapshots.items() if pending.last == FOREVER}
        groups = _split_by_group({pending.member: id for pending, id in snapshots.items()})
        before = [(group, {**vars(group.record), "entries": group.current_entries}) for group, _ in groups]
        try:
            for pending, snapshot in snapshots.items():
                pending.snapshot = snapshot
            for group, ids in groups:
                own = {member: id for member, id in present.items() if member.group is group}
                entries = {m.id: Entry(id, m.current_entry.live_version) for m, id in own.items()}
                group.write(entries, parents={**group.record.parents, **(ids if is_parent else {})})
        except BaseException:
            for pending in snapshots:
                pending.snapshot = ""
            for group, fields in before:
                with suppress(StoreError):
                    group.write(**fields)
            raise
        for member, snapshot in present.items():
            member.version = make_snapshot_version(snapshot)


def _split_by_group(snapshots: Mapping[Member, Any]) -> list[tuple[StoreGroup, dict[str, Any]]]:
    """Collect the values of each training group's members. Returns (group, {store id: value}) pairs."""
    groups = {member.group for member in snapshots}
    return [(group, {m.id: value for m, value in snapshots.items() if m.group is group}) for group in groups]


def find_group_file(store: FolderState) -> GroupFile:
    """Returns the record of a store's group: from memory if this process has locked the group, otherwise from disk."""
    locked = [group for group in list(_groups) if group.is_locked]
    members = [member for group in locked for member in list(group.members.values())]
    path = os.path.realpath(store.path)
    member = next((member for member in members if os.path.realpath(member.store.path) == path), None)
    return GroupFile(store) if member is None else member.group.file.copy_with(folder=store, store_id=member.id)


def _have_common_rows(entry: Entry, other: Entry) -> bool:
    return any(a and a == b for a, b in zip(entry, other, strict=True))


def _find_skipped_range(folder: FolderState, entry: Entry) -> tuple[int, int]:
    """Returns the sequence numbers, as (low, high], of the snapshots that recovery skips when it restores `entry`."""
    manifests = [snapshot.manifest for snapshot in list_snapshots(folder.snapshots_path).snapshots]
    sequences = {manifest.id: manifest.sequence for manifest in manifests}
    high = max(sequences.values(), default=0)
    return sequences.get(entry.snapshot or "", high if entry.live_version else 0), high


def _describe_change(store: FolderState) -> str:
    problem = "was recovered or trained by another process since it was opened here"
    return f"{str(store.path)!r} {problem}: create the embedding again"
