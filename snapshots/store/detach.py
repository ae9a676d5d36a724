"""Takes a closed store out of its group, for `tierbed store detach`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...engine.errors import SnapshotError, StoreError
from .folder import StoreFolder
from .group_file import GroupFile, RecordError, lock_of_group, remove_record, write_record
from .recovery_rule import NOTHING, union


class Detached(NamedTuple):
    """The names of the other stores in the group that a store left, as far as they are known."""

    others: list[str]
    problem: str | None = None  # what is wrong with the group's record


def detach(store: StoreFolder) -> Detached:
    """Take a store out of its group. It gets its own record, with the rows that it would have opened with.

    If the group's record is missing or damaged, or does not list this folder because it is a copy, the store keeps
    its clean live rows, and after a kill it recovers its latest snapshot. If this call is killed, the store is still
    in its group, or out of it. Raises StoreError.
    """
    try:
        file = GroupFile(store)
    except StoreError as error:
        _write_own_record(store, GroupFile(store, is_alone=True))
        return Detached([], error.problem if isinstance(error, RecordError) else str(error))
    if file.path is None:
        return Detached([])
    lock = lock_of_group(file)
    try:
        locked = GroupFile(store)
        if locked.path == file.path:
            return _detach(store, locked)
    finally:
        lock.release()
    return detach(store)  # its group was joined with another one meanwhile


def _detach(store: StoreFolder, file: GroupFile) -> Detached:
    """Take a store out of the group whose record is locked."""
    record, path, entries = file.record, file.path, file.record.now
    assert path is not None
    names = sorted(location.name for other, location in record.places.items() if other != file.store)
    if NOTHING in entries.values():  # a run was killed: this store is recovered like the others
        try:
            entries = file.target()
            record = replace(record, trained=frozenset(entries))  # so the next run records what it undoes
        except (StoreError, SnapshotError):  # the others raise it when they open, unless it is repaired by then
            entries = {**record.now, file.store: file.newest()[file.store]}
    write_record(path, replace(record, joining=True).plain())  # it stops being a member when its MARK changes
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
