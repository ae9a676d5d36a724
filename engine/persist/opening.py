"""What a store folder holds before it is opened, and with which rows a table opens in it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ...snapshots.files.reader import Snapshot
from ...snapshots.files.unread import cause_of
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState
from ...snapshots.store.saving import base_of
from ..errors import StoreError, TierbedError


class Found(NamedTuple):
    """What a store folder holds. The fields are those of `FolderState`, with `mark` as `read_mark` returns it."""

    mark: dict[str, Any] | None
    noted_step: int | None
    begun: bool
    was_open: bool


class Base(NamedTuple):
    """A snapshot to go back to: its name, step, and number of rows."""

    name: str
    step: int
    rows: int

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> Base | None:
        if snapshot is None:
            return None
        return cls(snapshot.name, int(snapshot.description["step"]), snapshot.manifest.rows)


class Opening(NamedTuple):
    """The rows that a table opens with: the live rows that `mark` describes, or those of `snapshot`, or none.

    `run`, `writes`: of a rank's share, as `Life` has them. `said`: the level and the text to log when it is open.
    `verified`: called when the rows of `snapshot` are, as of `TablePersistence.load`.
    """

    mark: dict[str, Any] | None = None
    snapshot: Snapshot | None = None
    run: str = ""
    writes: int = 0
    said: tuple[int, str] | None = None
    verified: Callable[[], None] | None = None


Decide = Callable[[Found], Opening]


def found_in(folder: FolderState) -> Found:
    """What a store folder holds. Raises StoreError."""
    return Found(folder.read_mark(), folder.noted_step, folder.begun, folder.was_open)


def own_decision(folder: StoreFolder, found: Found, fresh: bool, refuses: bool) -> Opening:
    """How a table opens whose rows this process alone has.

    fresh: whether it starts empty in any case. refuses: whether a folder that was not closed is an error. StoreError.
    """
    if fresh:
        return Opening()
    if found.mark is not None:
        return Opening(found.mark)
    if not found.begun:
        return Opening()
    where = f"store folder {folder.path}"
    if refuses and found.was_open:
        raise StoreError(not_closed(folder.path))
    snapshot = base_of(folder)
    base = Base.of(snapshot)
    if not found.was_open:
        return Opening(snapshot=snapshot, said=(logging.INFO, f"{where} is new; {restored(base)}"))
    said = f"{where} was not closed by its last run; {restored(base)}; {lost(base, found.noted_step)}"
    return Opening(snapshot=snapshot, said=(logging.WARNING, said))


def not_closed(path: Path) -> str:
    """The error of open="error"."""
    return (
        f"store folder {str(path)!r} was not closed by its last run, so its live rows cannot be used; "
        'open="resume" restores the last snapshot or starts empty'
    )


def restored(base: Base | None) -> str:
    """What a run begins with in place of the live rows, for the log."""
    if base is None:
        return "started empty: it has no snapshot of its own"
    return f"restored its last snapshot {base.name!r}, of step {base.step}"


def lost(base: Base | None, reached: int | None) -> str:
    """What an unclean end lost, for the log: the steps after `base`, up to `reached` where that is known."""
    kept = 0 if base is None else base.step
    if reached is None or reached < kept:
        return "what was written since is lost"
    if reached == kept:
        return "no later step; rows put or deleted since are lost"
    return f"what was written since, steps {kept + 1} to {reached}, is lost"


def lacks_space(error: TierbedError) -> bool:
    """Whether the disk has no room for what was tried."""
    cause = cause_of(error)
    return cause is not None and cause.errno == errno.ENOSPC


def no_space_to_open(folder: FolderState, error: TierbedError) -> str:
    """The error for a disk that has no room for what opening writes."""
    cause = str(error).partition("; free space")[0]  # without RocksDB's advice, which is for a store that is open
    base = folder.base
    spared = f" but {base!r}, the one to go back to" if base else ""
    return (
        f"{cause}. Free space on the disk and open the embedding again; snapshots in {str(folder.snapshots)!r} that "
        f"are no longer needed may be deleted{spared}"
    )
