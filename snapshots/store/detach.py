"""Takes a closed store out of its group, for `tierbed store detach`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...engine.errors import SnapshotError, StoreError
from .folder import StoreFolder
from .group_file import GroupFile, RecordError, lock_group, remove_record, write_record
from .recovery_rule import NOTHING, union


class Detached(NamedTuple):
    """The result of `detach`. others: the known names of the other stores in the group that the store left."""

    others: list[str]
    problem: str | None = None  # what is wrong with the group's record


def detach(store: StoreFolder) -> Detached:
    """Take a store out of its group. The store gets its own record, with the rows that it would have opened with.

    The group's record may be missing or damaged, or may not list this folder because it is a copy. The store then keeps
    its clean live rows, or recovers its latest snapshot if it was killed. If this call is killed, the store is either
    still in its group or completely out of it. Raises StoreError.
    """
    try:
        file = GroupFile(store)
    except StoreError as error:
        _write_own_record(store, GroupFile(store, is_alone=True))
        return Detached([], error.problem if isinstance(error, RecordError) else str(error))
    if file.path is None:
        return Detached([])
    lock = lock_group(file)
    try:
        locked = GroupFile(store)
        if locked.path == file.path:
            return _detach(store, locked)
    finally:
        lock.release()
    return detach(store)  # try again: another process has joined the store's group with another group


def _detach(store: StoreFolder, file: GroupFile) -> Detached:
    """Take a store out of its group, whose record the caller has locked."""
    record, path, entries = file.record, file.path, file.record.now
    assert path is not None
    names = sorted(location.name for other, location in record.places.items() if other != file.store)
    if NOTHING in entries.values():  # a run was killed, so this store is recovered together with the others
        try:
            entries = file.target()
            record = replace(record, trained=frozenset(entries))  # so the next run records which snapshots it skips
        except (StoreError, SnapshotError):  # the other stores raise this error again when they open
            entries = {**record.now, file.store: file.newest()[file.store]}
    write_record(path, replace(record, joining=True).plain())  # the change of its MARK ends the membership
    own = union([record], {file.store: entries[file.store]})
    _write_own_record(store, file.copy_with(path=None, record=replace(own, places={})))
    if others := {other: entry for other, entry in entries.items() if other != file.store}:
        write_record(path, union([record], others).plain())
    else:
        remove_record(path)
    return Detached(names)


def _write_own_record(store: StoreFolder, file: GroupFile) -> None:
    """Give a store its own record. Raises StoreError."""
    mark_folder = store.snapshot_store if store.ranks else store
    file.write_mark(mark_folder, file.store)
    for other in {store, store.snapshot_store} - {mark_folder}:
        if other.mark.link is not None:
            other.change(store="", record=None, link=None)
