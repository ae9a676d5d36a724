"""The same snapshot in a second folder, without a second copy of its rows where the file system allows it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ...engine.durable import check_regular, fsync_file, made_aside
from ...engine.errors import SnapshotError
from ..files.format import MANIFEST
from ..files.reader import Snapshot
from .retention import remove_snapshot


def link_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Make `folder` the same full snapshot, by hard links, or by copies on another file system. Durable on return.

    A symbolic link is followed. Raises SnapshotError, and nothing is left.
    """
    try:
        with made_aside(folder) as place:
            for name in [MANIFEST, *snapshot.manifest.files]:
                _link(snapshot.folder / name, place / name)
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
