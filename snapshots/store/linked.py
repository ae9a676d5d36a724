"""The same snapshot in a second folder, without a second copy of its rows where the file system allows it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ...engine.durable import TEMPORARY, atomic_folder, check_regular, fsync_dir, fsync_file, remove_folder
from ...engine.errors import SnapshotError
from ..files.format import MANIFEST, ROCKSDB
from ..files.reader import Snapshot

REPLACED = "replaced-"  # begins the name of a snapshot that a save has replaced, and recovery may need
OF_STATE = "state_dict-"  # begins the name of a snapshot that a `state_dict()` has made


def link_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Make `folder` the same snapshot, by hard links, or by copies on another file system. Durable on return.

    A symbolic link is followed. Raises SnapshotError, and nothing is left.
    """
    try:
        with atomic_folder(folder) as place:
            for name in snapshot.manifest.files:
                _link(snapshot.folder / name, place / name)
            held = snapshot.manifest.rocksdb
            for name in () if held is None else held.files:
                (place / ROCKSDB / name).parent.mkdir(parents=True, exist_ok=True)
                _link(snapshot.folder / ROCKSDB / name, place / ROCKSDB / name)
            for inside in (*place.glob(f"{ROCKSDB}/*"), *place.glob(ROCKSDB), place):
                fsync_dir(inside)
            _link(snapshot.folder / MANIFEST, place / MANIFEST)  # last: a folder that has it has all
    except OSError as error:
        raise SnapshotError(f"snapshot {snapshot.name!r} was not put into {str(folder.parent)!r}: {error}") from error


@contextlib.contextmanager
def linked(snapshot: Snapshot, folder: Path, is_needed: Callable[[], bool]) -> Iterator[Snapshot]:
    """The snapshot `folder`, linked from another where it is not there.

    Where the block fails, a snapshot that was linked is removed, unless it `is_needed`.
    """
    new = not os.path.lexists(folder)
    if new:
        link_snapshot(snapshot, folder)
    try:
        yield Snapshot.open(folder)
    except Exception:
        if new and not is_needed():
            remove_snapshot(folder)
        raise


def check_linked(snapshot: Snapshot, folder: Path) -> None:
    """Raises SnapshotError where `folder` is there, and is not a sound copy of `snapshot`."""
    if not os.path.lexists(folder):
        return
    held = Snapshot.open(folder)
    if held.manifest != snapshot.manifest:
        raise SnapshotError(
            f"{str(folder)!r} and {str(snapshot.folder)!r} are two snapshots of one name; give the former another, or "
            "remove it"
        )
    if not os.path.samefile(folder / MANIFEST, snapshot.folder / MANIFEST):
        held.verify()


def _link(file: Path, to: Path) -> None:
    check_regular(file)
    try:
        os.link(file.resolve(), to)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, to)
        fsync_file(to)


def remove_snapshot(folder: Path) -> None:
    """Remove a snapshot, if it is there, so that a kill leaves it whole or not at all. Raises SnapshotError."""
    temporary = folder.parent / f"{TEMPORARY}.{folder.name}"  # not the name of a save, which may be under way
    try:
        remove_folder(temporary)
        if folder.is_dir():
            folder.rename(temporary)
            fsync_dir(folder.parent)
            remove_folder(temporary)
    except OSError as error:
        raise SnapshotError(f"snapshot {str(folder)!r} cannot be removed: {error}") from error
