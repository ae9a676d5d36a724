"""Saves the rows of an open or closed store as a full or incremental snapshot, or as a RocksDB checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.checks import check_choice
from ...engine.durable import fsync_dir, make_temporary_path
from ...engine.errors import OptionError, SnapshotError
from ...engine.row_format import Change, Chunks
from ...engine.store.merging import find_changes, merge_sorted
from ..files.format import KINDS, HashShard, RocksDBFiles, read_snapshot_id
from ..files.reader import MAX_CHAIN, Snapshot, find_snapshot, list_snapshots
from ..files.writer import (
    NewSnapshots,
    ProgressCallback,
    RowFiles,
    check_name_free,
    check_parent,
    convert_write_errors,
    write_changes,
    write_parts,
)
from .folder import StoreFolder
from .folding import MAX_UNFOLDED
from .linking import remove_snapshot
from .recovery_rule import EMPTY_ID, Record, find_needed_ids
from .retention import find_reusable_names, is_state_snapshot, link_backup, remove_backups

if TYPE_CHECKING:
    from ...engine.store.rocksdb import RocksDB

log = logging.getLogger("tierbed")


class SaveInputs(NamedTuple):
    """The rows to save, how to read them, and the group's record."""

    description: dict[str, Any]
    num_rows: int
    scan: Callable[[], Chunks]  # yields all rows
    record: Record  # the record of the store's group
    store_id: str
    rocksdb: RocksDB | None = None  # the database that contains all rows after its `flush`
    changes: Callable[[str], Iterator[Change] | None] = lambda since: None  # returns the changes since a given snapshot
    id: str | None = None  # the new snapshot's id
    table_rows: list[int] | None = None  # the number of rows in each table, if known

    @property
    def parent(self) -> str:
        """The id of the snapshot that an incremental save continues, or EMPTY_ID if there is none."""
        return self.record.parents.get(self.store_id, EMPTY_ID)


def check_save(store: StoreFolder, name: str, kind: str, inputs: SaveInputs, overwrite: bool) -> None:
    """Raises OptionError or SnapshotError if rows cannot be saved as snapshot `name`. Writes nothing."""
    check_choice("kind", kind, KINDS)
    remove_backups(store)  # otherwise a replaced snapshot that depends on `name` could prevent the overwrite
    folder = store.snapshots_path / name
    if name not in find_reusable_names(store.snapshots_path, inputs.record, inputs.store_id):
        check_name_free(folder, overwrite)
    if kind == "checkpoint" and inputs.rocksdb is None:
        raise OptionError("kind='checkpoint' needs RocksDB's files, which only cached_ssd stores have; give 'full'")


def begin_save(
    store: StoreFolder, name: str, kind: str, inputs: SaveInputs, overwrite: bool, new: NewSnapshots
) -> tuple[Path, Snapshot | None]:
    """Begin a save that `check_save` has checked. Raises SnapshotError, StoreError.

    Returns (final folder, parent). The save creates the folder at its end. Only incremental snapshots have a parent.
    """
    folder = store.snapshots_path / name
    parent = find_parent(store, name, inputs) if kind == "incremental" else None
    if parent is not None:
        check_parent(folder, parent, inputs.description)
    store.clear_snapshots()
    if name in find_reusable_names(store.snapshots_path, inputs.record, inputs.store_id):
        for other in reversed(list_snapshots(store.snapshots_path).snapshots):
            if any(ancestor.name == name for ancestor in other.chain[:-1]):
                remove_snapshot(other.folder)  # recovery skipped this snapshot too, because it skipped the ancestor
    if os.path.lexists(folder) and read_snapshot_id(folder) in find_needed_ids(inputs.record, inputs.store_id):
        link_backup(folder)
    new.begin(folder, inputs.description, overwrite or os.path.lexists(folder))
    return folder, parent


class WrittenFiles(NamedTuple):
    """The files that one rank or process wrote. num_rows: the number of rows in the table, or in the writer's shard."""

    num_rows: int
    files: RowFiles
    rocksdb: RocksDBFiles | None = None


def write_files(
    folder: Path,
    kind: str,
    inputs: SaveInputs,
    parent: Snapshot | None,
    progress: ProgressCallback | None = None,
    shard: HashShard | None = None,
    parts: Sequence[Chunks] = (),
    changes: Iterator[Change] | None = None,
) -> WrittenFiles:
    """Write rows durably into the snapshot `folder` that `begin_save` began.

    parent: from `begin_save`, restricted to `shard`. shard: the shard to write if each rank writes its own shard.
    parts: all rows, divided by bucket. Default: a scan. changes: the rows' changes since `parent`, if known. Raises
    SnapshotError, StoreError.
    """
    temporary = make_temporary_path(folder)
    with convert_write_errors(folder, shard):
        if kind == "checkpoint":
            from ..files.rocksdb_files import write_rocksdb  # needs RocksDB

            assert inputs.rocksdb is not None
            rocksdb = write_rocksdb(temporary, folder.name, inputs.num_rows, inputs.rocksdb, progress)
            return WrittenFiles(inputs.num_rows, {}, rocksdb)
        if parent is not None:
            if changes is None and not parts:
                changes = inputs.changes(parent.manifest.id)
            if changes is None:
                changes = find_changes(parent.chunks(), merge_sorted(parts or [inputs.scan()]))
            num_rows, files = inputs.num_rows, write_changes(temporary, inputs.description, changes, progress, shard)
        else:
            files = write_parts(temporary, inputs.description, parts or [inputs.scan()], progress, shard)
            num_rows = sum(file.rows for file in files.values())
        if shard is not None:  # another process, perhaps on another host, renames the folder
            fsync_dir(temporary)
        return WrittenFiles(num_rows, files)


def find_parent(store: StoreFolder, name: str, inputs: SaveInputs) -> Snapshot | None:
    """Returns the parent for an incremental save: the snapshot that was saved or loaded last. Raises SnapshotError.

    Returns None, and logs a warning, if the chain would be too long or if `state_dict()` made the parent.
    """
    if inputs.parent == EMPTY_ID:
        raise SnapshotError(
            f"kind='incremental' needs a parent, and the rows in {str(store.path)!r} have no snapshot: save a snapshot "
            "with kind='full' first"
        )
    parent = find_snapshot(store.snapshots_path, inputs.parent)
    if is_state_snapshot(parent):
        reason = "the rows were loaded from it, and a state_dict made it"
    elif len(parent.chain) >= MAX_CHAIN:
        reason = (
            f"it has a chain of {MAX_CHAIN - 1} parents, and at most that many can be read; a prune after each save, "
            f"with keep_last below {MAX_CHAIN - 1 - MAX_UNFOLDED}, keeps the chain short"
        )
    else:
        return parent
    log.warning("snapshot %r is full, not incremental with parent %r: %s", name, parent.name, reason)
    return None
