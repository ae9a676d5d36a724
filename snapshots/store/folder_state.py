"""Reads the state of a store folder without its lock."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import fsync_dir, make_folder, read_record, remedy_for, write_atomically
from ...engine.errors import StoreError
from ..files.format import SHARE, snapshot_id
from .mark import Mark, RanksRecord, RecoveryCandidate

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
        """The store folder whose MARK names the recovery snapshot: for shards of ranks, the one with the snapshots."""
        snapshot_store = self.snapshot_store
        return snapshot_store if self.mark.clean_marker is None and snapshot_store.mark.ranks is not None else self

    @property
    def recovery_folders(self) -> list[FolderState]:
        """The store folders whose MARK may name a recovery snapshot among these: also those that link to them."""
        snapshot_store = self.snapshot_store
        with self._errors("read which stores have their snapshots in"):
            return [
                self.recovery_folder,
                snapshot_store,
                *(FolderState(store) for store in stores_linked_to(snapshot_store.snapshots)),
            ]

    @property
    def noted_step(self) -> int | None:
        """The last step of `note_step` since the last clean marker; None if unknown."""
        try:
            return int((self.path / "STEP").read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def recovery_snapshot(self) -> str | None:
        """The recovery snapshot, saved or loaded last: "" for none, None if unknown."""
        return next((one.name for one in self.mark.candidates or () if self._exists(one)), None)

    @property
    def parent_snapshot(self) -> str | None:
        """The snapshot that a user saved or loaded last. A later one of a `state_dict()` is for recovery alone."""
        own = (one for one in self.mark.candidates or () if not one.of_state)
        return next((one.name for one in own if self._exists(one)), None)

    @property
    def recovery_snapshots(self) -> set[str | None]:
        """The names that no prune may remove."""
        return {self.recovery_snapshot, self.parent_snapshot}

    @property
    def replaced(self) -> set[str]:
        """Names of snapshots that a save is replacing, or has replaced."""
        return {one.name for one in self.mark.candidates or () if one.replaced is not None}

    def _exists(self, one: RecoveryCandidate) -> bool:
        folder = self.snapshots / one.name
        return not one.name or (folder.is_dir() and (one.replaced is None or snapshot_id(folder) != one.replaced))

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
    try:
        with open(path / "LOCK", "rb") as lock:
            # a released lock file is blank. That of a killed process, and an empty one, for which a full disk had no
            # space, are locked here for a moment
            content = lock.read(20)
            if content.isspace():
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(content) if content.strip().isdigit() else 0
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read store folder {str(path)!r}: {error}; {FolderState.remedy}") from error
    return None


class ShardVersion(NamedTuple):
    """The version of a shard: its run, the number of collective writes since the run began, and its step."""

    run: str
    writes: int
    step: int


ShardVersions = Mapping[int, ShardVersion | None]  # by rank; None without a clean marker


def shard_folder(store: Path, rank: int, ranks: int) -> Path:
    """The store folder of a rank's shard, in the store folder `store`."""
    return store / RANKS / f"{rank}-of-{ranks}"


def live_in(marker: Mapping[str, Any] | None, rank: int, ranks: int) -> ShardVersion | None:
    """The version in the clean marker of a rank's shard; None without a marker, or for the marker of another shard."""
    match None if marker is None else (marker.get(SHARE), marker.get("step")):
        case ({"rank": of, "ranks": all_, "run": str(run), "writes": int(writes)}, int(step)) if (of, all_) == (
            rank,
            ranks,
        ):
            return ShardVersion(run, writes, step)
    return None


def clean_markers(store: Path, ranks: int) -> dict[int, dict[str, Any] | None]:
    """The clean markers of the shards of `ranks` ranks on this host, by rank. Raises StoreError."""
    folders = {rank: shard_folder(store, rank, ranks) for rank in range(ranks)}
    return {rank: FolderState(folder).clean_marker for rank, folder in folders.items() if folder.is_dir()}


def live_of(markers: Mapping[int, Mapping[str, Any] | None], ranks: int) -> ShardVersions:
    """The versions in the clean markers of the shards of `ranks` ranks."""
    return {rank: live_in(marker, rank, ranks) for rank, marker in markers.items()}


def common_version(record: RanksRecord, shards: Iterable[ShardVersion | None]) -> ShardVersion | None:
    """The version that all shards have; None if they are not all clean or not from the same step."""
    versions = {*shards}
    live = versions.pop() if len(versions) == 1 else None
    return live if live is not None and live.run == record.run else None


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
    _record_link(link.parent, place)
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


def _record_link(store: Path, place: Path) -> None:
    path = os.fsencode(os.path.realpath(store))
    note = place.parent / f"{_LINKED_FROM}{hashlib.sha256(path).hexdigest()[:16]}"
    if not note.exists():
        with contextlib.suppress(OSError):  # on a full disk, rows can still be read
            write_atomically(note, path)


def stores_recorded_for(place: Path) -> list[Path]:
    """The store folders that were ever linked to the snapshots in `place`. Raises OSError."""
    return [Path(os.fsdecode(note.read_bytes())) for note in sorted(place.parent.glob(f"{_LINKED_FROM}*"))]


def stores_linked_to(place: Path) -> list[Path]:
    """Those of `stores_recorded_for` that are linked now and on this host. Raises OSError."""
    found = []
    for store in stores_recorded_for(place):
        with contextlib.suppress(OSError):
            if os.path.samefile(store / SNAPSHOTS, place):
                found.append(store)
    return found


def has_snapshots(folder: Path) -> bool:
    """Whether a folder of snapshots has anything except remains of killed saves. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except FileNotFoundError:
        return False
