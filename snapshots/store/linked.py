"""Links a snapshot into a second folder, without a copy of its rows if the file system allows it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...engine.durable import TEMPORARY, atomic_folder, check_regular, fsync_dir, fsync_file, remove_folder
from ...engine.errors import SnapshotError
from ..files.format import MANIFEST, ROCKSDB
from ..files.reader import Snapshot
from .folder_state import FolderState
from .group_file import GroupFile

REPLACED = "replaced-"  # prefix of a snapshot that a save has replaced, but recovery may need
OF_STATE = "state_dict-"  # prefix of a snapshot that a `state_dict()` has made


def link_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Make `folder` the same snapshot, by hard links, or by copies on another file system. Durable on return.

    Symbolic links are followed. Raises SnapshotError and then leaves no files.
    """
    try:
        with atomic_folder(folder) as place:
            for name in snapshot.manifest.files:
                _link(f"{snapshot.folder}/{name}", f"{place}/{name}")
            rocksdb = snapshot.manifest.rocksdb
            for name in () if rocksdb is None else rocksdb.files:
                (place / ROCKSDB / name).parent.mkdir(parents=True, exist_ok=True)
                _link(f"{snapshot.folder}/{ROCKSDB}/{name}", f"{place}/{ROCKSDB}/{name}")
            for inside in (*place.glob(f"{ROCKSDB}/*"), *place.glob(ROCKSDB)):
                fsync_dir(inside)
            _link(f"{snapshot.folder}/{MANIFEST}", f"{place}/{MANIFEST}")
    except OSError as error:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} was not linked into {str(folder.parent)!r}: {error}"
        ) from error


@contextlib.contextmanager
def linked(place: Path, store: FolderState) -> Iterator[Snapshot]:
    """The snapshot `place` in a store, where it is linked if the store does not have it.

    If the block fails, a snapshot that was linked is removed, unless it is the recovery snapshot by then.
    """
    snapshot, folder = Snapshot.open(place), store.snapshots / place.name
    new = not os.path.lexists(folder)
    if new:
        link_snapshot(snapshot, folder)
    try:
        yield Snapshot.open(folder)
    except Exception:
        if new and snapshot.manifest.id not in GroupFile(store).needed:
            remove_snapshot(folder)
        raise


def check_linked(snapshot: Snapshot, folder: Path) -> None:
    """Raises SnapshotError if `folder` exists and is not a sound copy of `snapshot`."""
    if not os.path.lexists(folder):
        return
    existing = Snapshot.open(folder)
    if existing.manifest != snapshot.manifest:
        raise SnapshotError(
            f"{str(folder)!r} and {str(snapshot.folder)!r} are different snapshots with one name; rename or "
            "remove the former"
        )
    if not os.path.samefile(folder / MANIFEST, snapshot.folder / MANIFEST):
        existing.verify()


def _link(file: str, to: str) -> None:
    check_regular(Path(file))
    try:
        os.link(os.path.realpath(file) if os.path.islink(file) else file, to)
    except OSError:  # another file system, or no hard links
        shutil.copyfile(file, to)
        fsync_file(Path(to))


def remove_snapshot(folder: Path) -> None:
    """Remove a snapshot if it exists. A kill leaves it complete or absent. Raises SnapshotError."""
    temporary = folder.parent / f"{TEMPORARY}.{folder.name}"  # not the temporary name of a save, which may be running
    try:
        remove_folder(temporary)
        if folder.is_dir():
            folder.rename(temporary)
            fsync_dir(folder.parent)
            remove_folder(temporary)
    except OSError as error:
        raise SnapshotError(f"snapshot {str(folder)!r} cannot be removed: {error}") from error
