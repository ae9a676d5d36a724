"""Takes a closed store out of its group, for `tierbed store detach`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...engine.errors import SnapshotError, StoreError
from .folder import StoreFolder
from .group_file import GroupFile, lock_of_group, put, remove
from .recovery_rule import NOTHING, union


class Detached(NamedTuple):
    """What a store was taken out of: the names of the other stores of its group, as far as they are known.

    problem: what is wrong with the record of the group, if anything.
    """

    others: list[str]
    problem: str | None = None


def detach(store: StoreFolder) -> Detached:
    """Take a store out of its group: it has a record of its own from here on, with the rows that it would open with.

    If the group's record is missing or damaged or does not list this folder, as with a copy, it keeps clean live rows,
    and recovers from its latest snapshot after a kill. A kill leaves it in its group, or out of it. Raises StoreError.
    """
    try:
        file = GroupFile(store)
    except StoreError as error:
        _separate(store, GroupFile(store, is_alone=True))
        return Detached([], str(error))
    if file.path is None:
        return Detached([])
    lock = lock_of_group(file)
    try:
        locked = GroupFile(store)
        if locked.path == file.path:
            return _detach(store, locked)
    finally:
        lock.release()
    return detach(store)  # it was joined with another group in between


def _detach(store: StoreFolder, file: GroupFile) -> Detached:
    """Take a store out of the group of a record that is locked."""
    record, path, entries = file.record, file.path, file.record.now
    assert path is not None
    names = sorted(place.name for other, place in record.places.items() if other != file.store)
    if NOTHING in entries.values():  # a run was killed: all go back, this one as well
        try:
            entries = file.target()
            record = replace(record, trained=frozenset(entries))  # the next run of each notes what it goes back over
        except (StoreError, SnapshotError):  # which the others raise when they open, or what is lost is back
            entries = {**record.now, file.store: file.newest()[file.store]}
    put(path, replace(record, joining=True).plain())  # from here on it is no member once it does not lead here
    own = union([record], {file.store: entries[file.store]})
    _separate(store, file.but(path=None, record=replace(own, places={})))
    if others := {other: entry for other, entry in entries.items() if other != file.store}:
        put(path, union([record], others).plain())
    else:
        remove(path)
    return Detached(names)


def _separate(store: StoreFolder, file: GroupFile) -> None:
    """Let a store have its own record. Raises StoreError."""
    home = store.snapshot_store if store.ranks else store
    file.lead(home, file.store)
    for other in {store, store.snapshot_store} - {home}:
        if other.mark.link is not None:
            other.change(store="", record=None, link=None)
