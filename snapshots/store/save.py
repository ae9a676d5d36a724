"""Saving the rows of a store as one of its snapshots, of any kind, for a running table and for the CLI."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.errors import OptionError, SnapshotError
from ...engine.row_format import Change, Chunks
from ..files.format import KINDS, Manifest
from ..files.merging import changes_between
from ..files.reader import LONGEST_CHAIN, Snapshot, latest_snapshot, list_snapshots
from ..files.versions import GroupRecord
from ..files.writer import Progress, Together, check_free, children_of, write_incremental, write_snapshot
from .folder import StoreFolder
from .instants import left_behind, needed_snapshots
from .linked import remove_snapshot
from .retention import drop_replaced, is_of_state, keep_replaced

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

log = logging.getLogger("tierbed")


class SaveSource(NamedTuple):
    """Rows to save.

    `scan`: yields all rows. `rocksdb`: the database that has all rows, at the latest after `flush`, or None. `changes`:
    what changed since the snapshot with a given id; None where that is not known. `together`, `record`: of a store that
    is trained together with others, what the snapshot and MARK note of them.
    """

    description: dict[str, Any]
    rows: int
    scan: Callable[[], Chunks]
    rocksdb: RocksDB | None = None
    changes: Callable[[str], Iterator[Change] | None] = lambda since: None
    together: Together | None = None
    record: GroupRecord | None = None


def check_save(store: StoreFolder, name: str, kind: str, held: SaveSource, overwrite: bool) -> Path:
    """The folder for the live rows of a store as its snapshot `name`.

    Raises OptionError for a kind that does not exist, or not for this store. Raises SnapshotError for a name that
    cannot be used or is taken, and with `overwrite` for a snapshot that cannot be replaced.
    """
    check_kind(kind)
    place = store.snapshots / name
    left = left_behind(store.path)
    if name not in left or not left.issuperset(children_of(place)):
        check_free(place, overwrite or name in left)
    if kind == "checkpoint" and held.rocksdb is None:
        raise OptionError("kind='checkpoint' is of RocksDB's files, for cached_ssd stores alone; give 'full'")
    return place


def begin_save(store: StoreFolder, name: str, kind: str, held: SaveSource, overwrite: bool = False) -> Path:
    """Do `check_save`, and let live rows go back to the snapshot after a kill, once it is there. StoreError too."""
    place = check_save(store, name, kind, held, overwrite)
    clear_leftovers(store)
    drop_replaced(store)
    if name in left_behind(store.path):
        for other in reversed(list_snapshots(store.snapshots).snapshots):
            if any(one.name == name for one in other.chain[:-1]):
                remove_snapshot(other.folder)  # left behind as well
    if os.path.lexists(place) and name in needed_snapshots(store.path):
        keep_replaced(place)
    store.expect_base(name, held.record)
    return place


def save_snapshot_of(
    store: StoreFolder,
    name: str,
    kind: str,
    held: SaveSource,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the live rows of a store as its snapshot `name`. Raises as `begin_save`.

    Where an incremental snapshot would make a chain that is too long to read, a full one is written, and logged.
    """
    parent = parent_for(store, name) if kind == "incremental" else None
    kind = "full" if kind == "incremental" and parent is None else kind
    place = begin_save(store, name, kind, held, overwrite)
    overwrite = overwrite or os.path.lexists(place)
    if parent is not None:
        changed = held.changes(parent.manifest.id)
        if changed is None:
            changed = changes_between(parent.chunks(), held.scan())
        rows = held.rows
        made = write_incremental(place, parent, held.description, rows, changed, progress, overwrite, held.together)
    elif kind == "checkpoint":
        from ..files.rocksdb_checkpoint import write_checkpoint  # only where there is RocksDB

        assert held.rocksdb is not None
        made = write_checkpoint(place, held.description, held.rows, held.rocksdb, progress, overwrite, held.together)
    else:
        made = write_snapshot(place, held.description, held.scan(), progress, overwrite, held.together)
    if held.together is not None:
        drop_replaced(store)
    return made


def check_kind(kind: str) -> None:
    """Raises OptionError for an unknown kind of snapshot."""
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r}: give one of {', '.join(map(repr, KINDS))}")


def base_of(store: StoreFolder) -> Snapshot | None:
    """The snapshot that live rows without a mark go back to. Raises SnapshotError."""
    base = store.base
    if base:
        return Snapshot.open(store.snapshots / base)
    return None if base == "" else latest_snapshot(store.snapshots)


def parent_for(store: StoreFolder, name: str) -> Snapshot | None:
    """The parent of the incremental snapshot `name`. Raises as `parent_of`.

    None, logged, if the chain would be too long, or if a `state_dict()` made that parent.
    """
    parent = parent_of(store)
    if is_of_state(parent):
        why = "the rows were loaded from it, and a state_dict made it"
    elif len(parent.chain) >= LONGEST_CHAIN:
        why = f"it has a chain of {LONGEST_CHAIN - 1} parents, and no more are read as one table"
    else:
        return parent
    log.warning("snapshot %r is full, not incremental upon %r: %s", name, parent.name, why)
    return None


def parent_of(store: StoreFolder) -> Snapshot:
    """The snapshot that the next incremental one goes over, saved or loaded last. SnapshotError, StoreError."""
    base = base_of(store)
    if base is None:
        raise SnapshotError(
            f"kind='incremental' goes over an earlier snapshot, and the rows in {str(store.path)!r} have none: save "
            "one with kind='full' first"
        )
    return base


def clear_leftovers(store: StoreFolder) -> None:
    """Do `StoreFolder.clear_snapshots` before a save, while nothing is being written. SnapshotError."""
    try:
        store.clear_snapshots()
    except OSError as error:
        raise SnapshotError(f"{str(store.snapshots)!r} cannot be cleared of unfinished snapshots: {error}") from error
