"""Chooses the rows that a table opens, and makes the clean marker that the next open reads.

The training group's record contains an entry for each store. The entry says which rows the store opens: live rows, a
snapshot, or no rows. A clean shutdown writes the live rows and a clean marker. `plan_open` turns the entry into an
`OpenPlan`. The plan contains the clean marker if the store opens its live rows, and otherwise the snapshot. A store
that was not closed cleanly always loads a snapshot or starts empty. A warning then names the snapshot and the lost
steps. Recovery cannot use a snapshot if the group's other stores lack one from the same moment; the warning says so.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import StoreError, TierbedError
from ...engine.options.store_options import StoreOptions
from ...engine.store.rocksdb import RocksDB
from ...engine.store.table_counts import TABLE_ROWS
from ...engine.table.table import OpenTable
from ...snapshots.files.format import LIVE_FILES, LIVE_VERSION, SHARD_FIELD
from ...snapshots.files.read_errors import find_os_error
from ...snapshots.files.reader import Snapshot, find_snapshot, list_snapshots
from ...snapshots.store.changed_keys import write_changed_keys
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState, find_holder, locate_shard, read_last_step, read_shard_versions
from ...snapshots.store.group import Member
from ...snapshots.store.mark import read_live_version
from ...snapshots.store.recovery_rule import EMPTY_ID, make_snapshot_version


class LiveRowsState(Enum):
    """How an open table's live rows relate to its group's record."""

    RECORDED = auto()  # the record names the live rows, so the next change must be recorded first
    CHANGED = auto()  # the record says that the live rows have changed
    PLACEHOLDER = auto()  # empty until a load converts the stored rows; meanwhile the folder looks new


class FolderContents(NamedTuple):
    """The contents of a store folder before it is opened. `FolderState` explains the fields."""

    clean_marker: dict[str, Any] | None
    recorded_step: int | None
    has_rows_or_snapshots: bool
    had_live_rows: bool


class OpenPlan(NamedTuple):
    """The rows that a table opens. A table with neither a clean marker nor a snapshot starts empty."""

    clean_marker: dict[str, Any] | None = None  # the clean marker of the live rows, if the table opens them
    snapshot: Snapshot | None = None  # the snapshot to load, if there is one
    snapshot_id: str | None = None  # the id of the last snapshot, if it equals the live rows
    run_id: str = ""  # `run_id`, `num_writes` and `version` are for a shard's `RowsVersion`
    num_writes: int = 0
    version: str = ""
    unusable_reason: str = ""  # why ranks may not use the rows before a load; "" if ranks may use the rows
    log_entry: tuple[int, str] | None = None  # the level and text to log once the table is open
    on_verified: Callable[[], None] | None = None  # called once the snapshot's rows are verified


Planner = Callable[[FolderContents], OpenPlan]


def read_contents(folder: FolderState) -> FolderContents:
    """Read the contents of a store folder. Raises StoreError."""
    return FolderContents(folder.clean_marker, folder.recorded_step, folder.has_rows_or_snapshots, folder.had_live_rows)


def plan_open(folder: StoreFolder, contents: FolderContents, member: Member) -> OpenPlan:
    """Plan how to open a table whose rows are all in this process. Raises StoreError, SnapshotError."""
    live = read_live_version(contents.clean_marker)
    loaded = make_snapshot_version(member.entry.snapshot)  # the live rows' version if a kill interrupted a load
    if live is not None and live in (member.entry.live_version, loaded):
        parent = member.group.record.parents.get(member.id)  # another snapshot if a state_dict saved the last one
        return OpenPlan(contents.clean_marker, snapshot_id=parent if parent == member.entry.snapshot else None)
    ranks = folder.num_ranks
    step = read_last_step(folder.path, ranks) if ranks else contents.recorded_step
    snapshot, versions = choose_snapshot(folder, member, step), read_shard_versions(folder.path, ranks)
    return OpenPlan(snapshot=snapshot, log_entry=make_log_entry(folder, contents, member, snapshot, versions, step))


def choose_snapshot(folder: FolderState, member: Member, step: int | None) -> Snapshot | None:
    """Return the snapshot that a store's entry names, or None for no rows. `step` is the step of the live rows.

    Raises StoreError if the entry names only live rows. Only a run with the same number of ranks can open live rows.
    """
    if member.entry.snapshot is None:
        record, saved = member.group.record, list_snapshots(folder.snapshots_path).snapshots
        bases = (s for ids in (record.commit, record.previous_commit) for s in saved if s.manifest.id == ids[member.id])
        base, owner = next(bases, None), _describe_owner(folder)
        last = "there is none" if base is None else f"the last is {base.name!r}, from step {_read_step(base)}"
        raise StoreError(
            f"store folder {str(folder.path)!r} has live rows from step {step}, and no snapshot of these rows: {last}. "
            f"Only a run with {owner} can open the live rows. Start such a run, and save a snapshot. To discard the "
            'live rows instead, load a snapshot by `tierbed snapshot load`, or start empty with open="fresh"'
        )
    return None if member.entry.snapshot == EMPTY_ID else find_snapshot(folder.snapshots_path, member.entry.snapshot)


def make_log_entry(
    folder: FolderState,
    contents: FolderContents,
    member: Member,
    snapshot: Snapshot | None,
    live_versions: Mapping[int, str | None],
    live_step: int | None,
    ranks_prefix: str = "",
) -> tuple[int, str] | None:
    """Return the level and text to log if a store does not open its live rows. Return None for a new store.

    `live_versions` contains the versions of the live rows by rank; it is empty if the store is not sharded. `live_step`
    is the last step of the live rows, or None if unknown. `ranks_prefix` is text that names the ranks.
    """
    where, restored = f"store folder {folder.path}", "started empty, because it has no snapshot of its own"
    if snapshot is not None:
        restored = f"restored snapshot {snapshot.name!r}, of step {_read_step(snapshot)}"
    if not contents.has_rows_or_snapshots:
        return None
    if not contents.had_live_rows:
        return logging.INFO, f"{where} is new; {restored}"
    if member.entry.live_version is not None:
        return logging.INFO, f"{where} has rows of {_describe_owner(folder)}; {restored}"
    record, marker = member.group.record, contents.clean_marker
    is_unchanged = member.id not in record.changed_stores and member.entry == record.entries[member.id]
    if marker and not live_versions and is_unchanged:
        return logging.WARNING, f"{where} was being loaded when the last run was killed; {restored}"
    run = (record.entries[member.id].live_version or "").rpartition(":")[0]
    unclosed = [str(rank) for rank, live in sorted(live_versions.items()) if live is None or not live.startswith(run)]
    reason = "was not closed by its last run"
    if unclosed:
        reason = f"was not closed by rank{'s' * (len(unclosed) > 1)} {', '.join(unclosed)} (of {folder.num_ranks})"
    elif len({*live_versions.values()}) > 1:
        reason = "was closed by its ranks at different steps"
    elif len(record.entries) > 1 and (live_versions or marker):
        reason = "belongs to a training group in which other stores were not closed by their last run"
    lost, unused = describe_lost_steps(snapshot, live_step), _describe_unused_snapshot(folder, member, snapshot)
    return logging.WARNING, f"{where} {reason}; {ranks_prefix}{restored}; {lost}{unused}"


def _describe_unused_snapshot(folder: FolderState, member: Member, base: Snapshot | None) -> str:
    """Return text about the store's last snapshot if recovery uses `base`, an earlier snapshot; otherwise ""."""
    record = member.group.record
    saved = list_snapshots(folder.snapshots_path).snapshots if len(record.entries) > 1 else ()
    last = next((snapshot for snapshot in saved if snapshot.manifest.id == record.parents.get(member.id)), None)
    if last is None or (base is not None and last.manifest.sequence <= base.manifest.sequence):
        return ""
    return (
        f"; the later snapshot {last.name!r} (step {_read_step(last)}) was not used, because other embeddings of the "
        "same training group have no snapshot from that moment"
    )


def _describe_owner(folder: FolderState) -> str:
    return f"{folder.num_ranks} ranks" if folder.num_ranks else "one process"


def _read_step(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else int(snapshot.description["step"])


def describe_lost_steps(base: Snapshot | None, live_step: int | None) -> str:
    """Return log text about the writes after `base` that are lost. The last lost step is `live_step`, if known."""
    base_step, writes = _read_step(base), "earlier writes" if base is None else "writes after the snapshot"
    if live_step is None or live_step < base_step:
        return f"all {writes} are lost"
    if live_step == base_step:
        return f"no training step is lost, but {writes} by put or delete are lost"
    return f"all {writes} are lost (steps {base_step + 1} to {live_step})"


def describe_failed_close(folder: FolderState | None, member: Member | None, step: int) -> str:
    """Return the log text for a close that failed at `step`. The text names the rows that the next run would open."""
    if folder is None or folder.clean_marker is not None:
        return "no stored row is lost by it"
    if member is None:
        return "all ranks recover from a snapshot in the next run"
    try:
        commit = member.group.record.commit[member.id]
        base = None if commit == EMPTY_ID else find_snapshot(folder.snapshots_path, commit)
    except TierbedError as error:
        return f"the snapshot that the next run needs cannot be read: {error}"
    if base is None:
        return "the next run starts empty, because the embedding has no snapshot of its own"
    lost = describe_lost_steps(base, step)
    return f"the next run restores snapshot {base.name!r}, of step {_read_step(base)}; {lost}"


def is_disk_full(error: TierbedError) -> bool:
    """True if the error's cause is a full disk."""
    cause = find_os_error(error)
    return cause is not None and cause.errno == errno.ENOSPC


def describe_full_disk(folder: FolderState, error: TierbedError) -> str:
    """Return the error text for a store that cannot be opened because the disk is full."""
    cause = str(error).partition("; free space")[0]  # leave out RocksDB's advice: it is for open stores
    return (
        f"{cause}. Free space on the disk and open the embedding again; `tierbed snapshot prune` removes snapshots in "
        f"{str(folder.snapshots_path)!r} that recovery does not need"
    )


def check_shards_unlocked(path: Path, num_ranks: int) -> None:
    """Raise StoreError if a process, such as a rank that outlives rank 0, has one of the ranks' shards open."""
    for rank in range(num_ranks):
        shard = locate_shard(path, rank, num_ranks)
        if shard.is_dir() and (process := find_holder(shard)) is not None:
            raise StoreError(
                f"{str(shard)!r}, the shard of rank {rank} of {num_ranks}, is in use by process "
                f"{process or 'unknown'}: wait until that process has closed the shard, or end that process"
            )


@dataclasses.dataclass(frozen=True)
class RankShard:
    """Identifies the shard of one rank."""

    rank: int
    num_ranks: int
    num_ranks_on_host: int = 1  # how many ranks share the host

    def make_options(self, options: StoreOptions) -> StoreOptions:
        """Return the shard's store options. With eviction, `capacity` is divided by the ranks and rounded up."""
        if options.capacity is None or options.eviction == "none":
            return options
        return dataclasses.replace(options, capacity=-(-options.capacity // self.num_ranks))


class RowsVersion:
    """Counts the collective writes to a shard, so that ranks can compare the versions of their shards.

    Attributes:
        run_id: the id of the run that started with no rows or with a snapshot.
        num_writes: the number of collective writes since that start.
        version: identifies the rows; equal on all ranks and in the next run.
    """

    def __init__(self, shard: RankShard) -> None:
        self._shard = shard
        self.begin("", 0, "")

    def begin(self, run_id: str, num_writes: int, version: str) -> None:
        self.run_id, self.num_writes = run_id, num_writes
        self._version_at_writes = num_writes, version

    def count_write(self, num_earlier: int | None = None) -> None:
        """Count a write that came after `num_earlier` writes. Default: this shard's number of writes."""
        self.num_writes = 1 + (self.num_writes if num_earlier is None else num_earlier)

    def set_snapshot(self, snapshot_id: str, num_writes: int) -> None:
        """Use the version of a snapshot with the same rows. Ignored if more than `num_writes` writes were made."""
        if self.num_writes == num_writes:
            self._version_at_writes = num_writes, make_snapshot_version(snapshot_id)

    @property
    def version(self) -> str:
        num_writes, version = self._version_at_writes
        return version if self.num_writes == num_writes else f"{self.run_id}:{self.num_writes}"

    def make_marker_fields(self) -> dict[str, Any]:
        return {"rank": self._shard.rank, "ranks": self._shard.num_ranks, "run": self.run_id, "writes": self.num_writes}


def make_clean_marker(
    table: OpenTable, folder: StoreFolder | None, member: Member | None, rows_version: RowsVersion | None
) -> dict[str, Any]:
    """Return the clean marker for the rows of `table`, after writing the keys of changed rows.

    The marker describes the rows, and says that the live rows are complete and durable.
    """
    assert table.stack is not None
    bottom = table.stack.bottom
    fields: dict[str, Any] = {"live": "rows"}
    if isinstance(bottom, RocksDB):
        fields = {"live": "rocksdb", "shards": bottom.shards, LIVE_FILES: bottom.read_versions()}
    fields["rows"] = table.counts.num_rows
    if (counts := table.counts.known_table_counts) is not None:
        fields[TABLE_ROWS] = counts.tolist()
    if rows_version is not None:
        fields[SHARD_FIELD] = rows_version.make_marker_fields()
    elif member is not None:
        fields[LIVE_VERSION] = member.version
    changed = table.observers.list_changed_keys()
    if folder is not None and changed is not None and len(changed[1]):  # if no row changed, the record names a snapshot
        fields |= write_changed_keys(folder, *changed)
    return {**table.describe(), **fields}
