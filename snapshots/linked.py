"""The same snapshot in a second folder, without a second copy of its rows where the file system allows it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..engine.errors import SnapshotError
from ..engine.store.durable import fsync_dir, fsync_file, make_folder, remove_folder
from .format import TEMPORARY
from .reader import Snapshot


def link_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Make `folder` the same snapshot, by hard links, or copies on another file system; durable when it returns.

    Raises SnapshotError, and nothing is left.
    """
    temporary = folder.parent / f"{TEMPORARY}{folder.name}"
    try:
        make_folder(folder.parent)
        remove_folder(temporary)
        temporary.mkdir()
        for file in snapshot.folder.iterdir():
            _link(file, temporary / file.name)
        fsync_dir(temporary)
        temporary.rename(folder)
        fsync_dir(folder.parent)
    except OSError as error:
        raise SnapshotError(f"snapshot {snapshot.name!r} was not put into {str(folder.parent)!r}: {error}") from error
    finally:
        remove_folder(temporary)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, to)
        fsync_file(to)
