"""Reads the state of a store folder without its lock."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ...engine.durable import fsync_dir, make_folder, read_record, remedy_for, write_atomically
from ...engine.errors import StoreError
from ..files.format import SHARE
from .mark import Mark, live_version

LOCK = "LOCK"
RANKS = "ranks"  # the folder of the shards in a store folder
SNAPSHOTS = "snapshots"
_LINKED_FROM = ".live-rows-"  # prefix of a file next to `snapshots` that names a linking store


class FolderState:
    """The folder of a store, which another process may have locked. `StoreFolder` describes its files."""

    remedy = "give <persistent_path>/<embedding name>, and run as a user that can"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshots = path / SNAPSHOTS
        self._mark_file = path / "MARK"

    @cached_property
    def mark(self) -> Mark:
        """What MARK said when this object first read it. Raises StoreError."""
        with self._errors("read MARK of"):
            try:
                return Mark.parse(read_record(self._mark_file))
            except (FileNotFoundError, ValueError):
                return Mark(exists=False)

    @property
    def live(self) -> Path:
        """The folder of the live rows."""
        return self.path / self.mark.live

    @property
    def clean_marker(self) -> dict[str, Any] | None:
        """The clean marker; None if live rows are not clean or absent, or if MARK is damaged. Raises StoreError."""
        return self.mark.clean_marker

    @cached_property
    def snapshot_store(self) -> FolderState:
        """The store folder that has the snapshots: this one, or the one that `snapshots` links to."""
        target = Path(os.path.realpath(self.snapshots)).parent
        is_linked = self.snapshots.is_symlink() and (target / LOCK).is_file()
        return FolderState(target) if is_linked else self

    @property
    def recovery_folder(self) -> FolderState:
        """The store folder whose MARK has the record or leads to it: of ranks, the one with the snapshots."""
        is_lost = not self.mark.exists and self.snapshot_store.mark.link is not None
        return self.snapshot_store if self.ranks or is_lost else self

    @property
    def ranks(self) -> int:
        """The number of ranks that have the live rows as shards; 0 if one process has them."""
        record = self.snapshot_store.mark.ranks
        return 0 if record is None or self.mark.clean_marker is not None else record.ranks

    @property
    def sharing(self) -> list[FolderState]:
        """The store folders on this host that have the same snapshots, this one first."""
        found, place = [self], self.snapshot_store.snapshots
        with self._errors("read which stores have their snapshots in"):
            for store in stores_recorded_for(place):
                with contextlib.suppress(OSError):
                    if os.path.samefile(store / SNAPSHOTS, place) and not os.path.samefile(store, self.path):
                        found.append(FolderState(store))
        return found

    @property
    def noted_step(self) -> int | None:
        """The last step of `note_step` since the last clean marker; None if unknown."""
        try:
            return int((self.path / "STEP").read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def has_begun(self) -> bool:
        """Whether a run has ever written rows here. If not, a folder without a clean marker is new."""
        with self._errors("list the snapshots of"):
            return self._mark_file.exists() or self.live.exists() or has_snapshots(self.snapshots)

    @property
    def was_open(self) -> bool:
        """Whether the folder ever had live rows. If not, its snapshots were copied here."""
        return self._mark_file.exists() or self.live.exists() or self.noted_step is not None

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = remedy_for(error, self.remedy)
            raise StoreError(f"cannot {action} store folder {str(self.path)!r}: {error}: {remedy}") from error


def holder(path: Path) -> int | None:
    """The id of the process that has a store folder open, 0 if unknown; None for no process. Raises StoreError."""
    content = b""
    try:
        with open(path / LOCK, "rb") as file:
            # a released lock file is blank. That of a killed process, and an empty one, for which a full disk had no
            # space, are locked here for a moment
            content = file.read(20)
            if not content.isspace():
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        return int(content) if content.strip().isdigit() else 0
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read store folder {str(path)!r}: {error}; {FolderState.remedy}") from error


def shard_folder(store: Path, rank: int, ranks: int) -> Path:
    """The store folder of a rank's shard, in the store folder `store`."""
    return store / RANKS / f"{rank}-of-{ranks}"


def shards_in(store: Path, ranks: int, of: Iterable[int] | None = None) -> dict[int, FolderState]:
    """The folders of the shards of `ranks` ranks that this host has, by rank. of: ranks, by default all."""
    folders = ((rank, shard_folder(store, rank, ranks)) for rank in (range(ranks) if of is None else of))
    return {rank: FolderState(folder) for rank, folder in folders if folder.is_dir()}


def clean_markers(store: Path, ranks: int, of: Iterable[int] | None = None) -> dict[int, dict[str, Any] | None]:
    """The clean markers of `shards_in`; None for a shard that is not clean, or is of another rank. StoreError."""
    markers: dict[int, dict[str, Any] | None] = {}
    for rank, shard in shards_in(store, ranks, of).items():
        marker = shard.clean_marker
        match None if marker is None else marker.get(SHARE):
            case {"rank": owner, "ranks": owners} if (owner, owners) == (rank, ranks):
                markers[rank] = marker
            case _:
                markers[rank] = None
    return markers


def shard_versions(store: Path, ranks: int, of: Iterable[int] | None = None) -> dict[int, str | None]:
    """The versions in `clean_markers`."""
    return {rank: live_version(marker) for rank, marker in clean_markers(store, ranks, of).items()}


def last_step(store: Path, ranks: int) -> int | None:
    """The last step of the shards of `ranks` ranks on this host, clean or not; None if unknown."""
    shards = shards_in(store, ranks).values()
    steps = (one.noted_step if one.clean_marker is None else one.clean_marker["step"] for one in shards)
    return max((step for step in steps if step is not None), default=None)


def remove_other_shares(store: Path, ranks: int) -> None:
    """Remove the shards of other numbers of ranks, which no run uses again, as far as possible."""
    for place in (store / RANKS).glob("*-of-*"):
        if not place.name.endswith(f"-of-{ranks}"):
            shutil.rmtree(place, ignore_errors=True)


def snapshot_folder_of(snapshot_path: str | os.PathLike[str] | None, name: str) -> Path | None:
    """The folder of the snapshots of embedding `name` by the store option; None for that in the store folder."""
    return None if snapshot_path is None else Path(os.path.abspath(snapshot_path)) / name / SNAPSHOTS


def link_to(link: Path, place: Path) -> None:
    """Make `link`, the snapshots of a store folder, a durable link to the folder `place`. Both are created if missing.

    Raises StoreError if the store folder has other snapshots, OSError.
    """
    make_folder(place)
    path = os.fsencode(os.path.realpath(link.parent))
    note = place.parent / f"{_LINKED_FROM}{hashlib.sha256(path).hexdigest()[:16]}"
    if not note.exists():
        with contextlib.suppress(OSError):  # on a full disk, rows can still be read
            write_atomically(note, path)
    if os.path.exists(link) and os.path.samefile(link, place):
        return
    if has_snapshots(link):
        raise StoreError(
            f"{str(link.parent)!r} has its snapshots in {os.path.realpath(link)!r}, but snapshot_path is "
            f"{str(place)!r}: move them there, or leave snapshot_path as it was"
        )
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        link.rmdir()
    link.symlink_to(place)
    fsync_dir(link.parent)


def stores_recorded_for(place: Path) -> list[Path]:
    """The store folders that were ever linked to the snapshots in `place`. Raises OSError."""
    return [Path(os.fsdecode(note.read_bytes())) for note in sorted(place.parent.glob(f"{_LINKED_FROM}*"))]


def has_snapshots(folder: Path) -> bool:
    """Whether a folder of snapshots has anything except remains of killed saves. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except FileNotFoundError:
        return False
