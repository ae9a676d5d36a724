"""Saves rows as a snapshot of a store, of any kind, for open tables and for the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.checks import choice_option
from ...engine.durable import fsync_dir, temporary_path
from ...engine.errors import OptionError, SnapshotError
from ...engine.row_format import Change, Chunks
from ..files.format import KINDS, HashShard, RocksDBFiles, snapshot_id
from ..files.merging import changes_between
from ..files.reader import MAX_CHAIN, Snapshot, list_snapshots, snapshot_by_id
from ..files.writer import (
    Files,
    NewSnapshots,
    ProgressCallback,
    check_free,
    check_parent,
    children_of,
    write_changes,
    write_errors,
    write_rows,
)
from .folder import StoreFolder
from .linked import remove_snapshot
from .recovery_rule import EMPTY, Record, needed
from .retention import drop_replaced, is_of_state, keep_replaced, undone_names

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

log = logging.getLogger("tierbed")


class SaveSource(NamedTuple):
    """Rows to save.

    `scan`: yields all rows. `rocksdb`: the database that has all rows after `flush`, or None. `changes`: returns the
    changes since the snapshot with a given id, None if they are unknown. `id`: of the new snapshot. `record`, `store`:
    the record of the store's group, and its id there.
    """

    description: dict[str, Any]
    rows: int
    scan: Callable[[], Chunks]
    record: Record
    store: str
    rocksdb: RocksDB | None = None
    changes: Callable[[str], Iterator[Change] | None] = lambda since: None
    id: str | None = None

    @property
    def parent(self) -> str:
        """The id of the parent of an incremental snapshot; EMPTY for none."""
        return self.record.parents.get(self.store, EMPTY)


def check_save(store: StoreFolder, name: str, kind: str, source: SaveSource, overwrite: bool) -> None:
    """Raise the OptionError or SnapshotError of a save as snapshot `name`, before it changes anything."""
    check_kind(kind)
    drop_replaced(store)  # they may be children of the snapshot that this one replaces
    place = store.snapshots / name
    left = undone_names(store.snapshots, source.record, source.store)
    if name not in left or not left.issuperset(children_of(place)):
        check_free(place, overwrite or name in left)
    if kind == "checkpoint" and source.rocksdb is None:
        raise OptionError("kind='checkpoint' needs RocksDB's files, which only cached_ssd stores have; give 'full'")


def begin_save(
    store: StoreFolder, name: str, kind: str, source: SaveSource, overwrite: bool, new: NewSnapshots
) -> tuple[Path, Snapshot | None]:
    """Begin a snapshot that `check_save` has checked. Raises SnapshotError, StoreError.

    Returns its folder, still under a temporary name, and the parent of an incremental one as of `parent_for`.
    """
    place = store.snapshots / name
    parent = parent_for(store, name, source) if kind == "incremental" else None
    if parent is not None:
        check_parent(place, parent, source.description)
    store.clear_snapshots()
    if name in undone_names(store.snapshots, source.record, source.store):
        for other in reversed(list_snapshots(store.snapshots).snapshots):
            if any(one.name == name for one in other.chain[:-1]):
                remove_snapshot(other.folder)  # its parent was left behind, so it was as well
    if os.path.lexists(place) and snapshot_id(place) in needed(source.record, source.store):
        keep_replaced(place)
    new.begin(place, source.description, overwrite or os.path.lexists(place))
    return place, parent


class Part(NamedTuple):
    """What one writer has written of a snapshot: `rows`, as many as its part of the table has, and its files."""

    rows: int
    files: Files
    rocksdb: RocksDBFiles | None = None


def write_part(
    folder: Path,
    kind: str,
    source: SaveSource,
    parent: Snapshot | None,
    progress: ProgressCallback | None = None,
    shard: HashShard | None = None,
    chunks: Chunks | None = None,
) -> Part:
    """Write a source's rows durably as part of the snapshot `folder`, which has begun. SnapshotError, StoreError.

    parent: what `begin_save` returned, or this shard of it. shard: if others write rows as well. chunks: the rows,
    instead of a scan.
    """
    place = temporary_path(folder)
    with write_errors(folder, shard):
        if kind == "checkpoint":
            from ..files.rocksdb_files import write_rocksdb  # only with RocksDB

            assert source.rocksdb is not None
            return Part(source.rows, {}, write_rocksdb(place, folder.name, source.rows, source.rocksdb, progress))
        if parent is not None:
            changed = source.changes(parent.manifest.id)
            if changed is None:
                changed = changes_between(parent.chunks(), source.scan())
            files = write_changes(place, source.description, changed, progress, shard)
            rows = source.rows
        else:
            rows_of_all = source.scan() if chunks is None else chunks
            files = write_rows(place, source.description, rows_of_all, progress, shard)
            rows = sum(file.rows for file in files.values())
        if shard is not None:  # another process puts the snapshot in place, maybe on another host
            fsync_dir(place)
        return Part(rows, files)


def check_kind(kind: str) -> None:
    """Raises OptionError for an unknown kind of snapshot."""
    choice_option("kind", kind, KINDS)


def parent_for(store: StoreFolder, name: str, source: SaveSource) -> Snapshot | None:
    """The parent of the incremental snapshot `name`: the one saved or loaded last. Raises SnapshotError.

    None, with a warning, if the chain would be too long or if a `state_dict()` made that parent.
    """
    if source.parent == EMPTY:
        raise SnapshotError(
            f"kind='incremental' needs a parent, and the rows in {str(store.path)!r} have no snapshot: save one with "
            "kind='full' first"
        )
    parent = snapshot_by_id(store.snapshots, source.parent)
    if is_of_state(parent):
        why = "the rows were loaded from it, and a state_dict made it"
    elif len(parent.chain) >= MAX_CHAIN:
        why = f"it has a chain of {MAX_CHAIN - 1} parents, and at most that many can be read"
    else:
        return parent
    log.warning("snapshot %r is full, not incremental with parent %r: %s", name, parent.name, why)
    return None
