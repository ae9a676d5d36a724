"""What a store folder holds before it is opened, and which rows a table opens with."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.errors import StoreError, TierbedError
from ..engine.options.store_options import StoreOptions
from ..snapshots.files.read_errors import os_error_in
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.folder import StoreFolder
from ..snapshots.store.folder_state import (
    FolderState,
    ShardVersions,
    clean_markers,
    common_version,
    holder,
    live_of,
    remove_other_shares,
    shard_folder,
)
from ..snapshots.store.mark import RanksRecord
from ..snapshots.store.save import recovery_snapshot_of


class FolderContents(NamedTuple):
    """What a store folder holds.

    The fields are those of `FolderState`, with `clean_marker` as it was read.
    """

    clean_marker: dict[str, Any] | None
    noted_step: int | None
    begun: bool
    was_open: bool


class RecoveryPoint(NamedTuple):
    """A recovery snapshot: its name, step, and number of rows."""

    name: str
    step: int
    rows: int

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> RecoveryPoint | None:
        if snapshot is None:
            return None
        return cls(snapshot.name, int(snapshot.description["step"]), snapshot.manifest.rows)


class OpenPlan(NamedTuple):
    """The rows that a table opens with: the live rows that `clean_marker` describes, or those of `snapshot`, or none.

    `run`, `writes`: of a shard, as `WriteEpoch` has them. `log_entry`: the level and the text to log once it is open.
    `verified`: called once the rows of `snapshot` are verified, as of `TablePersistence.load`.
    """

    clean_marker: dict[str, Any] | None = None
    snapshot: Snapshot | None = None
    run: str = ""
    writes: int = 0
    log_entry: tuple[int, str] | None = None
    verified: Callable[[], None] | None = None


Decide = Callable[[FolderContents], OpenPlan]


def contents_of(folder: FolderState) -> FolderContents:
    """What a store folder holds. Raises StoreError."""
    return FolderContents(folder.clean_marker, folder.noted_step, folder.has_begun, folder.was_open)


def plan_open_local(folder: StoreFolder, found: FolderContents, fresh: bool, refuses: bool) -> OpenPlan:
    """How a table opens that has all its rows in this process.

    fresh: whether it starts empty in any case. refuses: whether a folder that was not closed is an error. StoreError.
    """
    if fresh:
        return OpenPlan()
    if found.clean_marker is not None:
        return OpenPlan(found.clean_marker)
    if not found.begun:
        return OpenPlan()
    where = f"store folder {folder.path}"
    if refuses and found.was_open:
        raise StoreError(unclean_shutdown_text(folder.path))
    snapshot = recovery_snapshot_of(folder)
    base = RecoveryPoint.of(snapshot)
    if not found.was_open:
        return OpenPlan(snapshot=snapshot, log_entry=(logging.INFO, f"{where} is new; {recovery_text(base)}"))
    text = f"{where} was not closed by its last run; {recovery_text(base)}; {lost_steps_text(base, found.noted_step)}"
    return OpenPlan(snapshot=snapshot, log_entry=(logging.WARNING, text))


def unclean_shutdown_text(path: Path) -> str:
    """The error of open="error"."""
    return (
        f"store folder {str(path)!r} was not closed by its last run, so its live rows cannot be used; "
        'open="resume" restores the last snapshot or starts empty'
    )


def recovery_text(base: RecoveryPoint | None) -> str:
    """What a run begins with instead of the live rows, for the log."""
    if base is None:
        return "started empty: it has no snapshot of its own"
    return f"restored its last snapshot {base.name!r}, of step {base.step}"


def lost_steps_text(base: RecoveryPoint | None, reached: int | None) -> str:
    """What an unclean shutdown lost, for the log: the steps after `base`, up to `reached` if that is known."""
    kept = 0 if base is None else base.step
    if reached is None or reached < kept:
        return "what was written since is lost"
    if reached == kept:
        return "no later step; rows put or deleted since are lost"
    return f"what was written since, steps {kept + 1} to {reached}, is lost"


def lacks_space(error: TierbedError) -> bool:
    """Whether the disk has no room for what was tried."""
    cause = os_error_in(error)
    return cause is not None and cause.errno == errno.ENOSPC


def no_space_to_open(folder: FolderState, error: TierbedError) -> str:
    """The error for a disk that has no room for what opening writes."""
    cause = str(error).partition("; free space")[0]  # without RocksDB's advice, which is for a store that is open
    base = folder.recovery_snapshot
    spared = f" but {base!r}, the recovery snapshot" if base else ""
    return (
        f"{cause}. Free space on the disk and open the embedding again; snapshots in {str(folder.snapshots)!r} that "
        f"are no longer needed may be deleted{spared}"
    )


def recover_from_ranks(
    path: Path, record: RanksRecord, shards: ShardVersions, base: RecoveryPoint | None, refuses: bool
) -> tuple[int, str]:
    """The level and text to log when rows of another number of ranks are dropped for those of `base`, or for none.

    Raises StoreError if this would lose clean rows, or if they are lost and open="error".
    """
    live = common_version(record, shards.values())
    if live is None:
        if refuses:
            raise StoreError(unclean_shutdown_text(path))
        return (
            logging.WARNING,
            f"{unclean_ranks_text(path, record, shards)}; {recovery_text(base)}; {lost_steps_text(base, None)}",
        )
    name, step, _ = base or ("", 0, 0)
    if (live.writes, record.snapshot, live.step) != (record.saved, name, step):
        raise StoreError(unsaved_rows_text(path, f"{record.ranks} ranks", live.step, base))
    return logging.INFO, f"store folder {path} has rows of {record.ranks} ranks; {recovery_text(base)}"


def check_shards_unlocked(path: Path, ranks: int) -> None:
    """Raises StoreError while a process has a shard of that many ranks open, as one that outlives its rank 0."""
    for rank in range(ranks):
        place = shard_folder(path, rank, ranks)
        if place.is_dir() and (process := holder(place)) is not None:
            raise StoreError(
                f"{str(place)!r}, the shard of rank {rank} of {ranks}, is in use by process {process or 'unknown'}: "
                "wait until that has closed it, or end that process"
            )


def unsaved_rows_text(path: Path, whose: str, step: int, base: RecoveryPoint | None) -> str:
    """The error for live rows that no snapshot has, with the remedy."""
    last = "it has none" if base is None else f"its last, {base.name!r}, is of step {base.step}"
    return (
        f"store folder {str(path)!r} has live rows of {whose}, of step {step}, and no snapshot of them, as another "
        "number of ranks needs "
        f"({last}): open it with {whose} once more and save one. To do without these rows, `tierbed snapshot load` "
        'loads a snapshot, and open="fresh" starts empty'
    )


def unclean_ranks_text(path: Path, record: RanksRecord, shards: ShardVersions) -> str:
    """Why the live rows of ranks cannot be used, for the log."""
    unclosed = [rank for rank in range(record.ranks) if (live := shards.get(rank)) is None or live.run != record.run]
    if not unclosed:
        return f"store folder {path} was closed by its ranks at different steps"
    return f"store folder {path} was not closed by rank {', '.join(map(str, unclosed))} of its {record.ranks}"


def plan_open(folder: StoreFolder, found: FolderContents, fresh: bool, refuses: bool) -> OpenPlan:
    """As `plan_open_local`, also where the live rows are of ranks. StoreError where these may be on other hosts."""
    record = folder.snapshot_store.mark.ranks
    if record is not None:
        check_shards_unlocked(folder.path, record.ranks)
    if record is None or found.clean_marker is not None or fresh:
        return plan_open_local(folder, found, fresh, refuses)
    snapshot = recovery_snapshot_of(folder.snapshot_store)
    shards = live_of(clean_markers(folder.path, record.ranks), record.ranks)
    if not shards:
        raise StoreError(
            f"store folder {str(folder.path)!r} has live rows of {record.ranks} ranks, and none of their shards is "
            f"here: open it where they are, with {record.ranks} ranks, and save a snapshot. To do without these rows, "
            '`tierbed snapshot load` loads a snapshot, and open="fresh" starts empty'
        )
    return OpenPlan(
        snapshot=snapshot,
        log_entry=recover_from_ranks(folder.path, record, shards, RecoveryPoint.of(snapshot), refuses),
    )


def take_over_from_ranks(folder: StoreFolder) -> None:
    """Let the live rows be this process's alone, and remove those of ranks. Raises StoreError."""
    folder.snapshot_store.end_ranks()
    remove_other_shares(folder.path, 1)


@dataclasses.dataclass(frozen=True)
class RankShard:
    """The shard of rank `rank` of `ranks` of a table's rows. on_host: how many ranks divide this host's memory."""

    rank: int
    ranks: int
    on_host: int = 1

    def folder(self, store: Path) -> Path:
        """The store folder of the shard, in that of the table."""
        return shard_folder(store, self.rank, self.ranks)

    def options(self, options: StoreOptions) -> StoreOptions:
        """The options of the shard's table: an evicting one has its part of `capacity`, rounded up."""
        if options.capacity is None or options.eviction == "none":
            return options
        return dataclasses.replace(options, capacity=-(-options.capacity // self.ranks))


@dataclasses.dataclass
class WriteEpoch:
    """Which rows a shard has, for comparison with those of the other ranks.

    `run`: the id of the run in which these rows began, empty or from a snapshot. `writes`: how many operations of all
    ranks wrote since.
    """

    share: RankShard
    run: str = ""
    writes: int = 0

    def described(self) -> dict[str, Any]:
        """The field `share` of the clean marker of the shard's live rows."""
        return {"rank": self.share.rank, "ranks": self.share.ranks, "run": self.run, "writes": self.writes}
