"""Saves rows as a snapshot of a store, of any kind, for open tables and for the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.checks import choice_option
from ...engine.errors import OptionError, SnapshotError
from ...engine.row_format import Change, Chunks
from ..files.format import KINDS, Manifest, snapshot_id
from ..files.merging import changes_between
from ..files.reader import MAX_CHAIN, Snapshot, latest_snapshot, list_snapshots
from ..files.versions import GroupRecord
from ..files.writer import ProgressCallback, Together, check_free, children_of, write_incremental, write_snapshot
from .folder import StoreFolder
from .instants import left_behind, needed_snapshots
from .linked import remove_snapshot
from .retention import drop_replaced, is_of_state, keep_replaced

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

log = logging.getLogger("tierbed")


class SaveSource(NamedTuple):
    """Rows to save.

    `scan`: yields all rows. `rocksdb`: the database that has all rows after `flush`, or None. `changes`: returns the
    changes since the snapshot with a given id, None if they are unknown. `together`, `record`: for a store that is
    trained together with others, what the snapshot and MARK store about them.
    """

    description: dict[str, Any]
    rows: int
    scan: Callable[[], Chunks]
    rocksdb: RocksDB | None = None
    changes: Callable[[str], Iterator[Change] | None] = lambda since: None
    together: Together | None = None
    record: GroupRecord | None = None


def check_save(store: StoreFolder, name: str, kind: str, source: SaveSource, overwrite: bool) -> Path:
    """The folder of the new snapshot `name` of a store.

    Raises OptionError for a kind that does not exist or does not fit this store. Raises SnapshotError for an invalid or
    taken name, and with `overwrite` for a snapshot that cannot be replaced.
    """
    check_kind(kind)
    place = store.snapshots / name
    left = left_behind(store.path)
    if name not in left or not left.issuperset(children_of(place)):
        check_free(place, overwrite or name in left)
    if kind == "checkpoint" and source.rocksdb is None:
        raise OptionError("kind='checkpoint' needs RocksDB's files, which only cached_ssd stores have; give 'full'")
    return place


def begin_save(store: StoreFolder, name: str, kind: str, source: SaveSource, overwrite: bool = False) -> Path:
    """`check_save`, and make the snapshot the recovery snapshot once it exists. Also raises StoreError."""
    place = check_save(store, name, kind, source, overwrite)
    clear_leftovers(store)
    drop_replaced(store)
    if name in left_behind(store.path):
        for other in reversed(list_snapshots(store.snapshots).snapshots):
            if any(one.name == name for one in other.chain[:-1]):
                remove_snapshot(other.folder)  # its parent was left behind, so it was as well
    if os.path.lexists(place) and name in needed_snapshots(store.path):
        keep_replaced(place)
    store.expect_recovery_snapshot(name, source.record)
    return place


def save_snapshot_of(
    store: StoreFolder,
    name: str,
    kind: str,
    source: SaveSource,
    progress: ProgressCallback | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the live rows of a store as its snapshot `name`. Raises as `begin_save`.

    If an incremental snapshot would make the chain too long to read, a full one is written, and a warning is logged.
    """
    parent = parent_for(store, name) if kind == "incremental" else None
    kind = "full" if kind == "incremental" and parent is None else kind
    place = begin_save(store, name, kind, source, overwrite)
    overwrite = overwrite or os.path.lexists(place)
    if parent is not None:
        changed = source.changes(parent.manifest.id)
        if changed is None:
            changed = changes_between(parent.chunks(), source.scan())
        rows = source.rows
        made = write_incremental(place, parent, source.description, rows, changed, progress, overwrite, source.together)
    elif kind == "checkpoint":
        from ..files.rocksdb_checkpoint import write_checkpoint  # only with RocksDB

        assert source.rocksdb is not None
        made = write_checkpoint(
            place, source.description, source.rows, source.rocksdb, progress, overwrite, source.together
        )
    else:
        made = write_snapshot(place, source.description, source.scan(), progress, overwrite, source.together)
    if source.together is not None:
        drop_replaced(store)
    return made


def check_kind(kind: str) -> None:
    """Raises OptionError for an unknown kind of snapshot."""
    choice_option("kind", kind, KINDS)


def recovery_snapshot_of(store: StoreFolder) -> Snapshot | None:
    """The recovery snapshot. Raises SnapshotError."""
    return _snapshot_of(store, store.recovery_snapshot)


def _snapshot_of(store: StoreFolder, name: str | None) -> Snapshot | None:
    if name:
        return Snapshot.open(store.snapshots / name)
    return None if name == "" else latest_snapshot(store.snapshots)


def note_state(store: StoreFolder, place: Path) -> bool:
    """Let recovery load the rows of a state from here on, and return True; False if its snapshot has these rows."""
    found = store.recovery_snapshot
    if found and snapshot_id(store.snapshots / found) == snapshot_id(place):
        return False
    store.note_state(place.name)
    return True


def parent_for(store: StoreFolder, name: str) -> Snapshot | None:
    """The parent of the incremental snapshot `name`. Raises as `parent_of`.

    None, with a warning, if the chain would be too long or if a `state_dict()` made that parent.
    """
    parent = parent_of(store)
    if is_of_state(parent):
        why = "the rows were loaded from it, and a state_dict made it"
    elif len(parent.chain) >= MAX_CHAIN:
        why = f"it has a chain of {MAX_CHAIN - 1} parents, and at most that many can be read"
    else:
        return parent
    log.warning("snapshot %r is full, not incremental with parent %r: %s", name, parent.name, why)
    return None


def parent_of(store: StoreFolder) -> Snapshot:
    """The parent of the next incremental snapshot: the one saved or loaded last. Raises SnapshotError, StoreError."""
    parent = _snapshot_of(store, store.parent_snapshot)
    if parent is None:
        raise SnapshotError(
            f"kind='incremental' needs a parent, and the rows in {str(store.path)!r} have no snapshot: save one with "
            "kind='full' first"
        )
    return parent


def clear_leftovers(store: StoreFolder) -> None:
    """`StoreFolder.clear_snapshots` before a save, while nothing is being written. Raises SnapshotError."""
    try:
        store.clear_snapshots()
    except OSError as error:
        raise SnapshotError(f"{str(store.snapshots)!r} cannot be cleared of unfinished snapshots: {error}") from error
