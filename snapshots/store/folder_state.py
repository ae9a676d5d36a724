"""What a store folder says of its live rows, read without holding it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import fsync_dir, make_folder, read_record, remedy_for, unseal, write_atomically
from ...engine.errors import StoreError
from ..files.format import OWN, SHARE, snapshot_id
from ..files.versions import AT, GROUP, At, GroupRecord

PLACES = ("live", "live-2")
LOCK = "LOCK"
RANKS = "ranks"  # the folder of ranks' store folders in a store folder
SNAPSHOTS = "snapshots"
_LED = ".live-rows-"  # begins the name of a file, beside snapshots, that names a store folder which leads to them


class RanksRecord(NamedTuple):
    """Whose the live rows are, where ranks share them.

    `run`: the id of the run in which they began, empty or from a snapshot. `saved`: how many operations of all ranks
    had written since, when `snapshot`, the one to go back to, was saved or loaded; "" is for none.
    """

    ranks: int
    run: str
    saved: int
    snapshot: str


class FolderState:
    """The folder of a store, which another process may hold. `StoreFolder` says what is in it."""

    remedy = "give <persistent_path>/<embedding name>, and run as a user that can"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshots = path / SNAPSHOTS
        self._mark = path / "MARK"

    @property
    def live(self) -> Path:
        """Where the live rows are."""
        place = self._read().get("place")
        return self.path / (place if place in PLACES else PLACES[0])

    def read_mark(self) -> dict[str, Any] | None:
        """What `set_mark` stored; None where live rows are scratch or absent, or the mark is damaged. StoreError."""
        content = self._read()
        return {field: value for field, value in content.items() if field not in OWN} if "live" in content else None

    @property
    def of_ranks(self) -> RanksRecord | None:
        """Whose the live rows are, where ranks share them; None for rows of one process. StoreError."""
        match self._read().get("ranks"):
            case [int(ranks), str(run), int(saved), str(snapshot)] if 0 < ranks <= 1024:
                return RanksRecord(ranks, run, saved, snapshot)
        return None

    @property
    def group(self) -> GroupRecord | None:
        """The embeddings that this one is trained together with; None for one that trains alone. StoreError."""
        return GroupRecord.parse(self._read().get(GROUP))

    @property
    def at(self) -> At | None:
        """The version of rows that were not written since a recovery or a load. StoreError."""
        return At.parse(self._read().get(AT))

    @property
    def keeper(self) -> FolderState:
        """The store folder that the snapshots are in: this one, or that which `snapshots` leads to."""
        there = Path(os.path.realpath(self.snapshots)).parent
        elsewhere = self.snapshots.is_symlink() and (there / LOCK).is_file()
        return FolderState(there) if elsewhere else self

    @property
    def noting(self) -> FolderState:
        """The folder whose mark names the snapshot to go back to: of rows that ranks share, that of the snapshots."""
        keeper = self.keeper
        return keeper if self.read_mark() is None and keeper.of_ranks is not None else self

    @property
    def all_noting(self) -> list[FolderState]:
        """The folders whose marks name snapshots among these to go back to, store folders that lead here included."""
        keeper = self.keeper
        with self._errors("read whose snapshots are in"):
            return [self.noting, keeper, *(FolderState(store) for store in stores_linked_to(keeper.snapshots))]

    @property
    def noted_step(self) -> int | None:
        """The last step of `note_step` since the live rows carried a mark; None where it is not known."""
        try:
            return int((self.path / "STEP").read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def base(self) -> str | None:
        """The snapshot that the live rows go back to, saved or loaded last: "" for none, None where it is unknown."""
        return next((name for name, replaced in self._bases() if self._is_there(name, replaced)), None)

    @property
    def replaced(self) -> set[str]:
        """Names of snapshots that a save replaces, or has replaced."""
        return {name for name, replaced in self._bases() if replaced is not None}

    def _bases(self) -> list[tuple[str, str | None]]:
        """Snapshots to go back to, of which the first that is there counts; each with the id it replaces, or None."""
        bases = self._read().get("base")
        found: list[tuple[str, str | None]] = []
        for base in bases if isinstance(bases, list) else []:
            match base:
                case str(name):
                    found.append((name, None))
                case [str(name), str(replaced)]:
                    found.append((name, replaced))
        return found

    def _is_there(self, name: str, replaced: str | None) -> bool:
        place = self.snapshots / name
        return not name or (place.is_dir() and (replaced is None or snapshot_id(place) != replaced))

    @property
    def begun(self) -> bool:
        """Whether a run has ever written rows in the folder. If none has, a folder without a mark is new."""
        with self._errors("list the snapshots of"):
            return self._mark.exists() or self.live.exists() or has_snapshots(self.snapshots)

    @property
    def was_open(self) -> bool:
        """Whether rows were ever live in the folder. If not, its snapshots came from elsewhere."""
        return self._mark.exists() or self.live.exists() or self.noted_step is not None

    @property
    def lacks_mark(self) -> bool:
        """Whether the file MARK is missing, or cannot be read. StoreError."""
        return not self._read()

    def _read(self) -> dict[str, Any]:
        with self._errors("read the mark of"):
            try:
                content = unseal(read_record(self._mark))
            except (FileNotFoundError, ValueError):
                return {}
        return content if isinstance(content, dict) else {}

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = remedy_for(error, self.remedy)
            raise StoreError(f"cannot {action} store folder {str(self.path)!r}: {error}: {remedy}") from error


def holder(path: Path) -> int | None:
    """The id of the process that has a store folder open, 0 where it is unknown; None for no process. StoreError."""
    try:
        with open(path / "LOCK", "rb") as lock:
            # the lock file of a holder that let go is blank; one of a killed process is locked here for an instant, as
            # a holder would lock it, and so is an empty one, which a full disk had no room for
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
    """The live rows of a share: their run, how many operations of all ranks wrote since it began, and their step."""

    run: str
    writes: int
    step: int


ShardVersions = Mapping[int, ShardVersion | None]  # by rank; None where the live rows carry no mark


def shard_folder(store: Path, rank: int, ranks: int) -> Path:
    """The store folder of a rank's share, in the store folder `store`."""
    return store / RANKS / f"{rank}-of-{ranks}"


def live_in(mark: Mapping[str, Any] | None, rank: int, ranks: int) -> ShardVersion | None:
    """The live rows that the mark of a rank's share describes; None without a mark, or for that of another share."""
    match None if mark is None else (mark.get(SHARE), mark.get("step")):
        case ({"rank": of, "ranks": all_, "run": str(run), "writes": int(writes)}, int(step)) if (of, all_) == (
            rank,
            ranks,
        ):
            return ShardVersion(run, writes, step)
    return None


def clean_markers(store: Path, ranks: int) -> dict[int, dict[str, Any] | None]:
    """The marks of shares of so many ranks that are in a store folder; other hosts may have the rest. StoreError."""
    places = {rank: shard_folder(store, rank, ranks) for rank in range(ranks)}
    return {rank: FolderState(place).read_mark() for rank, place in places.items() if place.is_dir()}


def live_of(marks: Mapping[int, Mapping[str, Any] | None], ranks: int) -> ShardVersions:
    """The live rows that the marks of shares of so many ranks describe."""
    return {rank: live_in(mark, rank, ranks) for rank, mark in marks.items()}


def common_version(record: RanksRecord, shares: Iterable[ShardVersion | None]) -> ShardVersion | None:
    """The live rows of the shares that are there; None where these are not whole, or not of one instant."""
    there = {*shares}
    live = there.pop() if len(there) == 1 else None
    return live if live is not None and live.run == record.run else None


def remove_other_shares(store: Path, ranks: int) -> None:
    """Remove the shares of other than so many ranks, which no run uses again, as far as they can be removed."""
    for place in (store / RANKS).glob("*-of-*"):
        if not place.name.endswith(f"-of-{ranks}"):
            shutil.rmtree(place, ignore_errors=True)


def snapshot_folder_of(snapshot_path: str | os.PathLike[str] | None, name: str) -> Path | None:
    """The folder of the snapshots of embedding `name`, by the store option; None for the store folder's own."""
    return None if snapshot_path is None else Path(os.path.abspath(snapshot_path)) / name / SNAPSHOTS


def link_to(link: Path, place: Path) -> None:
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


def stores_recorded_for(place: Path) -> list[Path]:
    """The store folders that led to `place`, a folder in another one, for their snapshots. OSError."""
    return [Path(os.fsdecode(note.read_bytes())) for note in sorted(place.parent.glob(f"{_LED}*"))]


def stores_linked_to(place: Path) -> list[Path]:
    """Those of `stores_recorded_for` that lead there now, and are on this host. OSError."""
    found = []
    for store in stores_recorded_for(place):
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
