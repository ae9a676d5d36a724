"""The folder of a store's snapshots, where it is not in the store folder: a link there leads to it, and a note back."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ..durable import fsync_dir, make_folder, write_atomically
from ..errors import StoreError

SNAPSHOTS = "snapshots"
_LED = ".live-rows-"  # begins the name of a file, beside snapshots, that names a store folder which leads to them


def place_of(snapshot_path: str | os.PathLike[str] | None, name: str) -> Path | None:
    """The folder of the snapshots of embedding `name`, by the store option; None for the store folder's own."""
    return None if snapshot_path is None else Path(os.path.abspath(snapshot_path)) / name / SNAPSHOTS


def lead_to(link: Path, place: Path) -> None:
    """Let `link`, the snapshots of a store folder, lead to the folder `place`, durably. Both are made where missing.

    Raises StoreError where other snapshots are there, OSError.
    """
    make_folder(place)
    _note(link.parent, place)
    if os.path.exists(link) and os.path.samefile(link, place):
        return
    if has_snapshots(link):
        raise StoreError(
            f"{str(link.parent)!r} has its snapshots in {os.path.realpath(link)!r}, and snapshot_path asks for "
            f"{str(place)!r}: move them there, or leave snapshot_path as it was"
        )
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        link.rmdir()
    link.symlink_to(place)
    fsync_dir(link.parent)


def _note(store: Path, place: Path) -> None:
    path = os.fsencode(os.path.realpath(store))
    note = place.parent / f"{_LED}{hashlib.sha256(path).hexdigest()[:16]}"
    if not note.exists():
        with contextlib.suppress(OSError):  # on a full disk, rows can still be read
            write_atomically(note, path)


def noted(place: Path) -> list[Path]:
    """The store folders that led to `place`, a folder in another one, for their snapshots. OSError."""
    return [Path(os.fsdecode(note.read_bytes())) for note in sorted(place.parent.glob(f"{_LED}*"))]


def led_to(place: Path) -> list[Path]:
    """Those of `noted` that lead there now, and are on this host. OSError."""
    found = []
    for store in noted(place):
        with contextlib.suppress(OSError):
            if os.path.samefile(store / SNAPSHOTS, place):
                found.append(store)
    return found


def has_snapshots(folder: Path) -> bool:
    """Whether anything but what a killed save left is in a folder of snapshots. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except FileNotFoundError:
        return False
