"""Whether a new snapshot may take the place of an old one."""

from __future__ import annotations

import os
from pathlib import Path

from ...engine.durable import check_exchange
from ...engine.errors import SnapshotError
from ..files.format import snapshot_id
from .format import MANIFEST
from .reader import list_snapshots


def check_replaceable(folder: Path) -> None:
    """Raises SnapshotError where `folder` is no snapshot, or others go over it, or it cannot be exchanged."""
    if not os.path.lexists(folder / MANIFEST):
        raise SnapshotError(f"{str(folder)!r} is no snapshot, and nothing else is overwritten: choose another name")
    over = ", ".join(map(repr, going_over(folder)))
    if over:
        raise SnapshotError(
            f"snapshot {str(folder)!r} cannot be overwritten: {over} would lack what it goes over. Choose another "
            f"name, or remove {over} first"
        )
    try:
        check_exchange(folder)
    except OSError as error:
        raise SnapshotError(f"snapshot {str(folder)!r} cannot be overwritten: {error}. Choose another name") from error


def going_over(folder: Path) -> list[str]:
    """Names of the snapshots beside `folder` that go over it. SnapshotError where a snapshot there cannot be read."""
    held, listing = snapshot_id(folder), list_snapshots(folder.parent)
    for name, error in listing.damaged.items():
        if name != folder.name and os.path.lexists(folder.parent / name / MANIFEST):
            raise SnapshotError(f"it is unknown whether {name!r} goes over {folder.name!r}: {error}") from error
    parents = ((snapshot.name, snapshot.manifest.parent) for snapshot in listing.snapshots)
    return [name for name, over in parents if over and over.name == folder.name and held in ("", over.id)]
