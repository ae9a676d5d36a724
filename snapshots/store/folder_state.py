"""Reads the state of a store folder without locking the folder."""

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

from ...engine.durable import choose_remedy, fsync_dir, make_folder, write_atomically
from ...engine.errors import StoreError
from ..files.format import SHARD_FIELD
from .mark import PARSE_ERRORS, Mark, read_live_version, read_store_file

Marker = dict[str, Any]  # a clean marker
LOCK, SNAPSHOTS = "LOCK", "snapshots"
RANKS = "ranks"  # the store folder's subfolder that contains the ranks' shards
_LINKED_FROM = ".live-rows-"  # a file with this name prefix contains the path of a store that links to `snapshots`


class FolderState:
    """A store's folder, read without locking. The subclass `StoreFolder` also locks the folder."""

    remedy = "give <persistent_path>/<embedding name>, and run as a user that can"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshots_path = path / SNAPSHOTS
        self._mark_file = path / "MARK"

    @cached_property
    def mark(self) -> Mark:
        """The content of MARK, read once, at the first use. Raises StoreError."""
        with self._convert_errors("read MARK of"):
            try:
                return Mark.parse(read_store_file(self._mark_file))
            except (FileNotFoundError, *PARSE_ERRORS):
                return Mark(exists=False)

    @property
    def live_path(self) -> Path:
        return self.path / self.mark.live_folder_name

    @property
    def clean_marker(self) -> Marker | None:
        """The live rows' clean marker; None if there are no clean live rows, or MARK is damaged. Raises StoreError."""
        return self.mark.clean_marker

    @cached_property
    def snapshot_store(self) -> FolderState:
        """The store folder that contains the snapshots. This is another store folder if `snapshots` is a link."""
        target = Path(os.path.realpath(self.snapshots_path)).parent
        is_linked = self.snapshots_path.is_symlink() and (target / LOCK).is_file()
        return FolderState(target) if is_linked else self

    @property
    def recovery_folder(self) -> FolderState:
        """The store folder whose MARK leads to the group's record. For ranks, this is `snapshot_store`."""
        is_lost = not self.mark.exists and self.snapshot_store.mark.link is not None
        return self.snapshot_store if self.num_ranks or is_lost else self

    @property
    def num_ranks(self) -> int:
        """How many ranks divide the live rows into shards, or 0 if a single process has all rows."""
        return self.snapshot_store.mark.num_ranks if self.mark.clean_marker is None else 0

    @property
    def sharing_stores(self) -> list[FolderState]:
        """All store folders on this host that share this store's snapshots, beginning with this folder."""
        stores, folder = [self], self.snapshot_store.snapshots_path
        with self._convert_errors("read which stores have their snapshots in"):
            for store in read_linked_stores(folder):
                with contextlib.suppress(OSError):
                    if os.path.samefile(store / SNAPSHOTS, folder) and not os.path.samefile(store, self.path):
                        stores.append(FolderState(store))
        return stores

    @property
    def recorded_step(self) -> int | None:
        """The step that `store_step` stored last, or None if a clean marker was written since, or if unknown."""
        try:
            return int((self.path / "STEP").read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def has_rows_or_snapshots(self) -> bool:
        """True if a run ever wrote rows or snapshots in this folder. If False, the store is new."""
        with self._convert_errors("list the snapshots of"):
            return self._mark_file.exists() or self.live_path.exists() or has_snapshots(self.snapshots_path)

    @property
    def had_live_rows(self) -> bool:
        """True if the folder ever had live rows. If False, any snapshots in the folder are copies."""
        return self._mark_file.exists() or self.live_path.exists() or self.recorded_step is not None

    @contextlib.contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = choose_remedy(error, self.remedy)
            raise StoreError(f"cannot {action} store folder {str(self.path)!r}: {error}: {remedy}") from error


def find_holder(path: Path) -> int | None:
    """Returns the id of the process that locks a store folder, 0 if unknown, None without one. Raises StoreError."""
    content = b""
    try:
        with open(path / LOCK, "rb") as file:
            # A released lock file contains only spaces. After a kill, the file still contains a process id, and after
            # a failed write it is empty. In both cases, trying to lock the file shows if another process has locked it.
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


def locate_shard(store: Path, rank: int, num_ranks: int) -> Path:
    """Returns the folder of a rank's shard, inside the store folder `store`."""
    return store / RANKS / f"{rank}-of-{num_ranks}"


def find_shards(store: Path, num_ranks: int, ranks: Iterable[int] | None = None) -> dict[int, FolderState]:
    """Returns the shard folders on this host, by rank. ranks: the ranks to look for. Default: all ranks."""
    paths = ((rank, locate_shard(store, rank, num_ranks)) for rank in (range(num_ranks) if ranks is None else ranks))
    return {rank: FolderState(path) for rank, path in paths if path.is_dir()}


def read_clean_markers(store: Path, num_ranks: int, ranks: Iterable[int] | None = None) -> dict[int, Marker | None]:
    """Returns {rank: clean marker} for this host's shards; None for unclean or misplaced ones. Raises StoreError."""
    markers: dict[int, Marker | None] = {}
    for rank, shard in find_shards(store, num_ranks, ranks).items():
        share = (shard.clean_marker or {}).get(SHARD_FIELD)
        is_own = isinstance(share, dict) and (share.get("rank"), share.get("ranks")) == (rank, num_ranks)
        markers[rank] = shard.clean_marker if is_own else None
    return markers


def read_shard_versions(store: Path, num_ranks: int, ranks: Iterable[int] | None = None) -> dict[int, str | None]:
    """Returns {rank: live rows' version} for the shards on this host; None for an unclean or misplaced shard."""
    return {rank: read_live_version(marker) for rank, marker in read_clean_markers(store, num_ranks, ranks).items()}


def read_last_step(store: Path, num_ranks: int) -> int | None:
    """Returns the latest step of the shards on this host, clean or unclean, or None if unknown."""
    shards = find_shards(store, num_ranks).values()
    steps = (shard.recorded_step if shard.clean_marker is None else shard.clean_marker["step"] for shard in shards)
    return max((step for step in steps if step is not None), default=None)


def remove_other_shards(store: Path, num_ranks: int) -> None:
    """Remove shards that runs with another number of ranks wrote. No later run uses these shards. Ignores errors."""
    for folder in (store / RANKS).glob("*-of-*"):
        if not folder.name.endswith(f"-of-{num_ranks}"):
            shutil.rmtree(folder, ignore_errors=True)


def locate_snapshots(snapshot_path: str | os.PathLike[str] | None, name: str) -> Path | None:
    """Returns where the option `snapshot_path` puts snapshots of embedding `name`; None if the option is not set."""
    return None if snapshot_path is None else Path(os.path.abspath(snapshot_path)) / name / SNAPSHOTS


def symlink_snapshots(link: Path, folder: Path) -> None:
    """Durably replace the path `link` by a symbolic link to `folder`. Creates `folder` if it is missing.

    link: a store folder's `snapshots`. Raises StoreError if it already contains other snapshots. Raises OSError.
    """
    make_folder(folder)
    path = os.fsencode(os.path.realpath(link.parent))
    path_file = folder.parent / f"{_LINKED_FROM}{hashlib.sha256(path).hexdigest()[:16]}"
    if not path_file.exists():
        with contextlib.suppress(OSError):  # a full disk must not prevent reading rows
            write_atomically(path_file, path)
    if os.path.exists(link) and os.path.samefile(link, folder):
        return
    if has_snapshots(link):
        raise StoreError(
            f"{str(link.parent)!r} has its snapshots in {os.path.realpath(link)!r}, but snapshot_path now leads to "
            f"{str(folder)!r}. Move the snapshots to the new folder, or restore the old snapshot_path"
        )
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        link.rmdir()
    link.symlink_to(folder)
    fsync_dir(link.parent)


def read_linked_stores(folder: Path) -> list[Path]:
    """Returns all store folders that were ever linked to the `snapshots` folder `folder`. Raises OSError."""
    return [Path(os.fsdecode(file.read_bytes())) for file in sorted(folder.parent.glob(f"{_LINKED_FROM}*"))]


def has_snapshots(folder: Path) -> bool:
    """True if a `snapshots` folder contains anything besides files that killed saves left. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except FileNotFoundError:
        return False
