"""Takes a closed store out of its training group, for `tierbed store detach`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...engine.errors import SnapshotError, StoreError
from .folder import StoreFolder
from .group_file import GroupFile, RecordError, lock_group, remove_record, write_record
from .recovery_rule import NO_ENTRY, merge_records


class DetachResult(NamedTuple):
    """The result of `detach`. others: the names of the other stores in the group, as far as known."""

    others: list[str]
    problem: str | None = None  # what is wrong with the group's record, if it cannot be used


def detach(store: StoreFolder) -> DetachResult:
    """Take a store out of its group. The next open chooses the same rows as it would have chosen in the group.

    The group's record may be missing or damaged, or may not list this folder because the folder is a copy. The store
    then keeps its clean live rows; without clean live rows, it recovers its latest snapshot. If this call is killed,
    the store is either still in its group or completely out of it. Raises StoreError.
    """
    try:
        file = GroupFile(store)
    except StoreError as error:
        _write_own_record(store, GroupFile(store, is_alone=True))
        return DetachResult([], error.problem if isinstance(error, RecordError) else str(error))
    if file.path is None:
        return DetachResult([])
    lock = lock_group(file)
    try:
        locked = GroupFile(store)
        if locked.path == file.path:
            return _detach(store, locked)
    finally:
        lock.release()
    return detach(store)  # try again, because another process has joined the store's group to another group


def _detach(store: StoreFolder, file: GroupFile) -> DetachResult:
    """Take a store out of its group. The caller must have locked the group's record."""
    record, path, entries = file.record, file.path, file.record.entries
    assert path is not None
    names = sorted(location.name for other, location in record.locations.items() if other != file.store_id)
    if NO_ENTRY in entries.values():  # a run was killed, so this store must be recovered together with the group
        try:
            entries = file.choose_entries()
            record = replace(record, changed_stores=frozenset(entries))  # the next run then records skipped snapshots
        except (StoreError, SnapshotError):  # the other stores will raise this error when they open
            entries = {**record.entries, file.store_id: file.choose_newest()[file.store_id]}
    write_record(path, replace(record, is_joining=True).to_plain())  # the store leaves its group when MARK changes
    own = merge_records([record], {file.store_id: entries[file.store_id]})
    _write_own_record(store, file.copy_with(path=None, record=replace(own, locations={})))
    if others := {other: entry for other, entry in entries.items() if other != file.store_id}:
        write_record(path, merge_records([record], others).to_plain())
    else:
        remove_record(path)
    return DetachResult(names)


def _write_own_record(store: StoreFolder, file: GroupFile) -> None:
    """Write a store's own record into its MARK. Raises StoreError."""
    mark_folder = store.snapshot_store if store.num_ranks else store
    file.write_mark(mark_folder, file.store_id)
    for other in {store, store.snapshot_store} - {mark_folder}:
        if other.mark.link is not None:
            other.change(store_id="", record=None, link=None)
