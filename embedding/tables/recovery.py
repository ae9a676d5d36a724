"""What a store folder holds before it is opened, and which rows a table opens with."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import StoreError, TierbedError
from ...engine.options.store_options import StoreOptions
from ...snapshots.files.read_errors import os_error_in
from ...snapshots.files.reader import Snapshot, list_snapshots, snapshot_by_id
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import (
    FolderState,
    holder,
    last_step,
    shard_folder,
    shard_versions,
)
from ...snapshots.store.group import Member
from ...snapshots.store.mark import live_version
from ...snapshots.store.recovery_rule import EMPTY


class FolderContents(NamedTuple):
    """What a store folder holds.

    The fields are those of `FolderState`, with `clean_marker` as it was read.
    """

    clean_marker: dict[str, Any] | None
    noted_step: int | None
    begun: bool
    was_open: bool


class OpenPlan(NamedTuple):
    """The rows that a table opens with: the live rows that `clean_marker` describes, or those of `snapshot`, or none.

    `run`, `writes`, `version`: of a shard, as `WriteEpoch` has them. `unsettled`: why ranks may not use the rows before
    a load. `log_entry`: the level and the text to log once it is open. `verified`: called once the rows of `snapshot`
    are verified, as of `TablePersistence.load`.
    """

    clean_marker: dict[str, Any] | None = None
    snapshot: Snapshot | None = None
    run: str = ""
    writes: int = 0
    version: str = ""
    unsettled: str = ""
    log_entry: tuple[int, str] | None = None
    verified: Callable[[], None] | None = None


Decide = Callable[[FolderContents], OpenPlan]


def contents_of(folder: FolderState) -> FolderContents:
    """What a store folder holds. Raises StoreError."""
    return FolderContents(folder.clean_marker, folder.noted_step, folder.has_begun, folder.was_open)


def plan_open(folder: StoreFolder, found: FolderContents, member: Member) -> OpenPlan:
    """How a table opens that has all its rows in this process, those of its entry. StoreError, SnapshotError."""
    live, of_snapshot = live_version(found.clean_marker), f"{member.entry.snapshot}:0"  # a load that was killed left it
    if live is not None and live in (member.entry.live, of_snapshot):
        return OpenPlan(found.clean_marker)
    ranks = folder.ranks
    shards, step = shard_versions(folder.path, ranks), last_step(folder.path, ranks) if ranks else found.noted_step
    snapshot = snapshot_to_open(folder, member, step)
    return OpenPlan(snapshot=snapshot, log_entry=log_entry_of(folder, found, member, snapshot, shards, step))


def snapshot_to_open(folder: FolderState, member: Member, step: int | None) -> Snapshot | None:
    """The snapshot of a store's entry; None for no rows. StoreError if it has live rows alone, which are not used.

    step: of these rows.
    """
    if member.entry.snapshot is None:
        record, saved = member.group.record, list_snapshots(folder.snapshots).snapshots
        found = (one for ids in (record.commit, record.before) for one in saved if one.manifest.id == ids[member.id])
        base, whose = next(found, None), _whose(folder)
        last = "it has none" if base is None else f"its last, {base.name!r}, is of step {_step_of(base)}"
        raise StoreError(
            f"store folder {str(folder.path)!r} has live rows of {whose}, of step {step}, and no snapshot of them, as "
            f"another number of ranks needs ({last}): open it with {whose} once more and save one. To do without these "
            'rows, `tierbed snapshot load` loads a snapshot, and open="fresh" starts empty'
        )
    return None if member.entry.snapshot == EMPTY else snapshot_by_id(folder.snapshots, member.entry.snapshot)


def log_entry_of(
    folder: FolderState,
    found: FolderContents,
    member: Member,
    snapshot: Snapshot | None,
    shards: Mapping[int, str | None],
    reached: int | None,
    who: str = "",
) -> tuple[int, str] | None:
    """What is logged of a store that opens with a snapshot, or empty, instead of its live rows.

    shards: the versions of these, if ranks have them. reached: their last step, if it is known. who: opens it.
    """
    where, restored = f"store folder {folder.path}", recovery_text(snapshot)
    if not found.begun:
        return None
    if not found.was_open:
        return logging.INFO, f"{where} is new; {restored}"
    if member.entry.live is not None:
        return logging.INFO, f"{where} has rows of {_whose(folder)}; {restored}"
    record = member.group.record
    if found.clean_marker and not shards and member.id not in record.trained and member.entry == record.now[member.id]:
        return logging.WARNING, f"{where} was being loaded when the last run was killed; {restored}"
    run = (record.now[member.id].live or "").rpartition(":")[0]
    unclosed = [str(rank) for rank, live in sorted(shards.items()) if live is None or not live.startswith(run)]
    why = "was not closed by its last run"
    if unclosed:
        why = f"was not closed by rank {', '.join(unclosed)} of its {folder.ranks}"
    elif len({*shards.values()}) > 1:
        why = "was closed by its ranks at different steps"
    elif len(record.now) > 1 and (shards or found.clean_marker is not None):
        why = "is trained together with others that were not closed by their last run"
    return logging.WARNING, f"{where} {why}; {who}{restored}; {lost_steps_text(snapshot, reached)}"


def _whose(folder: FolderState) -> str:
    return f"{folder.ranks} ranks" if folder.ranks else "one process"


def _step_of(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else int(snapshot.description["step"])


def recovery_text(base: Snapshot | None) -> str:
    """What a run begins with instead of the live rows, for the log."""
    if base is None:
        return "started empty: it has no snapshot of its own"
    return f"restored its last snapshot {base.name!r}, of step {_step_of(base)}"


def lost_steps_text(base: Snapshot | None, reached: int | None) -> str:
    """What an unclean shutdown lost, for the log: the steps after `base`, up to `reached` if that is known."""
    kept = _step_of(base)
    if reached is None or reached < kept:
        return "what was written since is lost"
    if reached == kept:
        return "no later step; rows put or deleted since are lost"
    return f"what was written since, steps {kept + 1} to {reached}, is lost"


def what_is_lost(folder: FolderState, member: Member | None, step: int) -> str:
    """What the next run would find if this run ended now, without a clean marker of its rows of a step, for the log."""
    if member is None:
        return "all ranks recover from the last snapshot in the next run"
    try:
        commit = member.group.record.commit[member.id]
        base = None if commit == EMPTY else snapshot_by_id(folder.snapshots, commit)
    except TierbedError as error:
        return f"the last snapshot, which the next run needs, cannot be read: {error}"
    if base is None:
        return "the next run starts empty: it has no snapshot of its own"
    lost = lost_steps_text(base, step)
    return f"the next run restores its last snapshot {base.name!r}, of step {_step_of(base)}; {lost}"


def lacks_space(error: TierbedError) -> bool:
    """Whether the disk has no room for what was tried."""
    cause = os_error_in(error)
    return cause is not None and cause.errno == errno.ENOSPC


def no_space_to_open(folder: FolderState, error: TierbedError) -> str:
    """The error for a disk that has no room for what opening writes."""
    cause = str(error).partition("; free space")[0]  # without RocksDB's advice, which is for a store that is open
    return (
        f"{cause}. Free space on the disk and open the embedding again; `tierbed snapshot prune` removes snapshots in "
        f"{str(folder.snapshots)!r} that recovery does not need"
    )


def check_shards_unlocked(path: Path, ranks: int) -> None:
    """Raises StoreError while a process has a shard of that many ranks open, as one that outlives its rank 0."""
    for rank in range(ranks):
        place = shard_folder(path, rank, ranks)
        if place.is_dir() and (process := holder(place)) is not None:
            raise StoreError(
                f"{str(place)!r}, the shard of rank {rank} of {ranks}, is in use by process {process or 'unknown'}: "
                "wait until that has closed it, or end that process"
            )


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


class WriteEpoch:
    """Which rows a shard has, for comparison with those of the other ranks.

    `run`: the id of the run in which these rows began, empty or from a snapshot. `writes`: how many operations of all
    ranks wrote since. `version`: names them as all ranks do, and the next run.
    """

    def __init__(self, shard: RankShard) -> None:
        self._shard = shard
        self.begin("", 0, "")

    def begin(self, run: str, writes: int, version: str) -> None:
        self.run, self.writes = run, writes
        self._came_as = writes, version

    def count(self, before: int | None = None) -> None:
        """Count a write. before: how many there were, if this shard may have missed some."""
        self.writes = 1 + (self.writes if before is None else before)

    def came_as(self, snapshot: str, writes: int) -> None:
        """The rows after that many writes are those of a snapshot."""
        if self.writes == writes:
            self._came_as = writes, f"{snapshot}:0"

    @property
    def version(self) -> str:
        writes, version = self._came_as
        return version if self.writes == writes else f"{self.run}:{self.writes}"

    def described(self) -> dict[str, Any]:
        """The field `share` of the clean marker of the shard's live rows."""
        return {"rank": self._shard.rank, "ranks": self._shard.ranks, "run": self.run, "writes": self.writes}
