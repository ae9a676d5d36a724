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
from ..files.format import KINDS, HashShard, Manifest, RocksDBFiles, snapshot_id
from ..files.merging import changes_between
from ..files.reader import MAX_CHAIN, Snapshot, latest_snapshot, list_snapshots
from ..files.versions import GroupRecord
from ..files.writer import (
    Files,
    NewSnapshots,
    ProgressCallback,
    Together,
    check_free,
    check_parent,
    children_of,
    finish,
    write_changes,
    write_errors,
    write_rows,
)
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


def check_save(store: StoreFolder, name: str, kind: str, source: SaveSource, overwrite: bool) -> None:
    """Raise what a save as snapshot `name` of a store would raise, before it changes anything.

    OptionError for a kind that does not exist or does not fit this store. SnapshotError for an invalid or taken name,
    and with `overwrite` for a snapshot that cannot be replaced.
    """
    check_kind(kind)
    place = store.snapshots / name
    left = left_behind(store.path)
    if name not in left or not left.issuperset(children_of(place)):
        check_free(place, overwrite or name in left)
    if kind == "checkpoint" and source.rocksdb is None:
        raise OptionError("kind='checkpoint' needs RocksDB's files, which only cached_ssd stores have; give 'full'")


def begin_save(
    store: StoreFolder, name: str, kind: str, source: SaveSource, overwrite: bool, new: NewSnapshots
) -> tuple[Path, Snapshot | None]:
    """Begin a snapshot that `check_save` has checked. It becomes the recovery snapshot once it has its name.

    Returns its folder, still under a temporary name, and the parent of an incremental one. If its chain would be too
    long to read, it is full, and a warning is logged. Raises SnapshotError, StoreError.
    """
    place = store.snapshots / name
    parent = parent_for(store, name) if kind == "incremental" else None
    if parent is not None:
        check_parent(place, parent, source.description)
    clear_leftovers(store)
    drop_replaced(store)
    if name in left_behind(store.path):
        for other in reversed(list_snapshots(store.snapshots).snapshots):
            if any(one.name == name for one in other.chain[:-1]):
                remove_snapshot(other.folder)  # its parent was left behind, so it was as well
    if os.path.lexists(place) and name in needed_snapshots(store.path):
        keep_replaced(place)
    store.expect_recovery_snapshot(name, source.record)
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
            from ..files.rocksdb_checkpoint import write_rocksdb  # only with RocksDB

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
        fsync_dir(place)
        return Part(rows, files)


def save_snapshot_of(
    store: StoreFolder,
    name: str,
    kind: str,
    source: SaveSource,
    new: NewSnapshots,
    progress: ProgressCallback | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the live rows of a store as its snapshot `name`, to which `new` gives its name.

    Raises as `check_save` and `begin_save`.
    """
    check_save(store, name, kind, source, overwrite)
    folder, parent = begin_save(store, name, kind, source, overwrite, new)
    part = write_part(folder, kind, source, parent, progress)
    if source.record is not None:
        new.then(lambda: drop_replaced(store))
    return finish(
        temporary_path(folder),
        source.description,
        part.rows,
        files=part.files,
        rocksdb=part.rocksdb,
        parent=parent,
        together=source.together,
    )


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
