"""Links a snapshot into a second folder with hard links, or copies its files if hard links are not possible."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...engine.durable import TEMPORARY_PREFIX, atomic_folder, check_regular, fsync_dir, remove_folder
from ...engine.errors import SnapshotError
from ..files.format import MANIFEST, ROCKSDB
from ..files.pipeline import sync_new_files
from ..files.reader import Snapshot
from .folder_state import FolderState
from .group_file import GroupFile
from .recovery_rule import find_needed_ids

BACKUP_PREFIX = "replaced-"  # name prefix of an overwritten snapshot that recovery may still need
STATE_PREFIX = "state_dict-"  # name prefix of a snapshot that `state_dict()` made


def link_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Hard-link the files of `snapshot` into `folder`, durably. Copies the files if hard links are not possible.

    Follows symbolic links. After a SnapshotError, no files are left in `folder`.
    """
    try:
        with atomic_folder(folder) as target:
            for name in snapshot.manifest.files:
                _link(f"{snapshot.folder}/{name}", f"{target}/{name}")
            rocksdb = snapshot.manifest.rocksdb
            for name in () if rocksdb is None else rocksdb.files:
                (target / ROCKSDB / name).parent.mkdir(parents=True, exist_ok=True)
                _link(f"{snapshot.folder}/{ROCKSDB}/{name}", f"{target}/{ROCKSDB}/{name}")
            _link(f"{snapshot.folder}/{MANIFEST}", f"{target}/{MANIFEST}")
            sync_new_files(target)
    except OSError as error:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} was not linked into {str(folder.parent)!r}: {error}"
        ) from error


@contextlib.contextmanager
def link_temporarily(original: Path, store: FolderState) -> Iterator[Snapshot]:
    """Yield the store's snapshot with the name of `original`. If there is none, first link `original` into the store.

    If the `with` block raises, removes the snapshot that was linked, unless recovery already needs it.
    """
    snapshot, folder = Snapshot.open(original), store.snapshots_path / original.name
    is_new = not os.path.lexists(folder)
    if is_new:
        link_snapshot(snapshot, folder)
    try:
        yield Snapshot.open(folder)
    except Exception:
        if is_new:
            file = GroupFile(store)
            if snapshot.manifest.id not in find_needed_ids(file.record, file.store_id):
                remove_snapshot(folder)
        raise


def check_linked(snapshot: Snapshot, folder: Path) -> None:
    """Raises SnapshotError if `folder` exists and is not an intact copy of `snapshot`."""
    if not os.path.lexists(folder):
        return
    existing = Snapshot.open(folder)
    if existing.manifest != snapshot.manifest:
        raise SnapshotError(
            f"{str(folder)!r} and {str(snapshot.folder)!r} are different snapshots with the same name; rename or "
            "remove the first"
        )
    if not os.path.samefile(folder / MANIFEST, snapshot.folder / MANIFEST):
        existing.verify()


def _link(file: str, to: str) -> None:
    check_regular(Path(file))
    try:
        os.link(os.path.realpath(file) if os.path.islink(file) else file, to)
    except OSError:  # `to` is on another file system, or hard links are not supported
        shutil.copyfile(file, to)


def remove_snapshot(folder: Path) -> None:
    """Remove a snapshot, if it exists. After a kill, the snapshot is complete or absent. Raises SnapshotError."""
    temporary = folder.parent / f"{TEMPORARY_PREFIX}.{folder.name}"  # a save in progress uses another name
    try:
        remove_folder(temporary)
        if folder.is_dir():
            folder.rename(temporary)
            fsync_dir(folder.parent)
            remove_folder(temporary)
    except OSError as error:
        raise SnapshotError(f"snapshot {str(folder)!r} cannot be removed: {error}") from error
