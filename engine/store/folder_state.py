"""What a store folder says of its live rows, read without holding it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..durable import read_record, remedy_for, unseal
from ..errors import StoreError
from .snapshot_place import SNAPSHOTS, has_snapshots, led_to
from .versions import AT, GROUP, At, GroupRecord, Saved

PLACES = ("live", "live-2")
LOCK = "LOCK"
OWN = ("base", "place", GROUP, AT)  # fields of the mark that the folder itself keeps
MANIFEST = "manifest.msgpack"  # the manifest of a snapshot


INSTANT = "instant"  # the field of a manifest that `Saved` has


def saved_with(folder: Path) -> tuple[Saved | None, int]:
    """What a snapshot says of its store's group, and its sequence; (None, -1) where no snapshot can be read."""
    try:
        content = unseal(read_record(folder / MANIFEST))
        return Saved.parse(content.get(INSTANT)), int(content["sequence"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, -1


def snapshot_id(folder: Path) -> str:
    """The id of a snapshot; "" where there is no snapshot, or none that can be read.

    Raises StoreError where this process lacks descriptors or memory, since the id is unknown then.
    """
    try:
        content = unseal(read_record(folder / MANIFEST))
        return str(content["id"])
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            return ""
        remedy = remedy_for(error, "free memory")
        raise StoreError(f"it is unknown which snapshot {str(folder)!r} is: {error}: {remedy}") from error
    except (ValueError, TypeError, KeyError):
        return ""


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
            return [self.noting, keeper, *(FolderState(store) for store in led_to(keeper.snapshots))]

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
