"""Chooses the rows to open for an embedding sharded across ranks. All ranks open rows from the same moment.

Each rank's shard is on the rank's own disk, with a clean marker after a clean close. Only rank 0 reads the training
group's record. The ranks decide together:

1. Rank 0 tells all ranks which of the group's stores are sharded, and leaves a token file next to the snapshots.
2. Each rank looks for the token, to check that all ranks see the same folder, and reports its shards' versions.
3. Rank 0 compares the versions with the record. If the record names the live rows of all shards, each rank opens its
   own shard. Otherwise all ranks load their shards of one snapshot, or start empty.
4. After loading a snapshot, the ranks add up their row counts: the sum must be the snapshot's row count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...distributed.world import World
from ...engine.errors import StoreError
from ...snapshots.files.format import HashShard
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.folder_state import FolderState, read_last_step, read_shard_versions
from ...snapshots.store.group import Member, open_store
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.recovery_rule import EMPTY_ID, make_snapshot_version
from .recovery import FolderContents, OpenPlan, check_shards_unlocked, choose_snapshot, make_log_entry, read_contents
from .shared_folder import SharedFolder


class _Decision(NamedTuple):
    """Rank 0's decision about which rows to open."""

    live_version: str | None  # the version of the live rows; None if the ranks do not open live rows
    snapshot_id: str | None  # a snapshot of these rows, if there is one; EMPTY_ID if there are no rows
    snapshot_name: str  # the name of the snapshot to load; "" if the ranks load no snapshot
    unusable_reason: str  # why the rows may not be used before a load; "" if the rows may be used
    log_level: int  # the level of the log message
    log_text: str  # the log message; "" if nothing is logged


class RecoveryNegotiation:
    """One rank's part in a joint decision: all ranks decide together which rows to open.

    Every rank creates a RecoveryNegotiation, opens its shard with `decide`, and then calls `end`. The constructor
    raises StoreError on all ranks. After `decide`, rank 0 finds the store's `Member` in `member`.

    Args:
        shared_folder: the store folder as this rank sees it.
        mode, for_load: as in `open_store`.
        group: the embedding's `TrainingGroup`.
    """

    def __init__(
        self, world: World, op: str, shared_folder: SharedFolder, mode: str, for_load: bool, group: Any
    ) -> None:
        self._folders = () if group is None else group.list_folders()
        self._world, self._shared_folder, self._mode, self._for_load = world, shared_folder, mode, for_load
        self._op = f"{op}: its rows"
        self._has_reported = False  # True once this rank has sent its report
        self._has_agreed = False  # True once the ranks have decided
        self._has_read = False  # True once this rank has sent its row count
        self._has_counted = False  # True once the row counts have been compared
        self.member: Member | None = None
        self.snapshot_id: str | None = None  # the snapshot to open with; EMPTY_ID: no rows; None: live rows
        self.has_live_rows = False  # True if each rank opens its own live rows
        self._recorded_versions: dict[str, str | None] = {}  # on rank 0: the version in the record, by store path
        first = world.call_on_rank_0(f"{op}: its store folder", self._prepare)
        self._token: str = first["token"]  # the token, and the id of a run that starts here
        self._stores: list[tuple[str, int]] = [(path, ranks) for path, ranks in first["stores"]]

    def _prepare(self) -> dict[str, Any]:
        """Write a token file, and list the group's sharded stores as (relative path, rank count). On rank 0."""
        shared_folder = self._shared_folder
        assert shared_folder.folder is not None
        folders: list[FolderState] = []
        with suppress(StoreError):  # if the error matters, `open_store` raises it again
            file = GroupFile(shared_folder.folder, siblings=self._folders)
            for store_id, folder in file.find_members(lenient=True).items():
                if folder.num_ranks:
                    folders.append(folder)
                    self._recorded_versions[str(folder.path)] = file.record.entries[store_id].live_version
        stores = [(os.path.relpath(folder.path, shared_folder.path), folder.num_ranks) for folder in folders]
        return {"token": shared_folder.write_token(), "stores": stores}

    def decide(self, contents: FolderContents) -> OpenPlan:
        """Return how this rank opens its shard. Any rank's StoreError or SnapshotError is raised on all ranks."""
        self._has_reported = True
        reports = self._world.all_gather_object(self._op, lambda: self._report(contents))
        decision = _Decision(*self._world.call_on_rank_0(f"{self._op}: chosen", lambda: self._choose(reports)))
        self._has_agreed = True
        id, live_version = decision.snapshot_id, decision.live_version
        version = live_version or "" if id is None else make_snapshot_version(id)
        log_entry = (decision.log_level, decision.log_text) if decision.log_text else None
        if live_version is not None:
            run_id, _, num_writes = live_version.rpartition(":")
            self.has_live_rows = True
            reason = decision.unusable_reason
            return OpenPlan(contents.clean_marker, None, id, run_id, int(num_writes), version, reason)
        self.snapshot_id, reason = id, decision.unusable_reason
        plan = OpenPlan(run_id=self._token, version=version, unusable_reason=reason, log_entry=log_entry)
        if self.snapshot_id == EMPTY_ID:
            return plan
        whole = Snapshot.open(self._shared_folder.snapshots_path / decision.snapshot_name)
        snapshot = whole.restrict_to_shard(HashShard(self._world.rank, self._world.size))
        return plan._replace(snapshot=snapshot, on_verified=lambda: self._check_row_count(snapshot))

    def _report(self, contents: FolderContents) -> tuple[list[dict[int, str | None]], int | None]:
        """Return (versions, step). `step` is the last step of this embedding's store, as far as this host knows.

        `versions` has one dict {rank: version} per sharded store in the group. Each dict lists the shards on this host.
        """
        self._shared_folder.check_token(self._token)
        versions, step = [], contents.recorded_step
        for relative, ranks in self._stores:
            path, is_same = Path(os.path.normpath(self._shared_folder.path / relative)), ranks == self._world.size
            if relative == "." and not is_same:
                check_shards_unlocked(path, ranks)
                step = read_last_step(path, ranks)
            versions.append(read_shard_versions(path, ranks, [self._world.rank] if is_same else None))
            if is_same:
                versions[-1].setdefault(self._world.rank, None)
        return versions, step

    def _choose(self, reports: list[Any]) -> _Decision:
        """Decide from the reports of all ranks. On rank 0."""
        shared_folder = self._shared_folder
        assert shared_folder.folder is not None
        by_store = zip(*(versions for versions, _ in reports), strict=True)
        versions = {
            path: _merge_versions(reported, recorded)
            for reported, (path, recorded) in zip(by_store, self._recorded_versions.items(), strict=True)
        }
        contents = read_contents(shared_folder.folder)
        ranks = shared_folder.folder.num_ranks
        self.member = member = open_store(shared_folder.folder, self._mode, self._for_load, versions, self._folders)
        if member.entry.live_version is not None and ranks == self._world.size:
            return _Decision(member.entry.live_version, member.entry.snapshot, "", member.unusable_reason, 0, "")
        steps = [step for _, step in reports] if ranks else [contents.recorded_step]
        if contents.clean_marker is not None:
            steps = [contents.clean_marker["step"]]
        step = max((s for s in steps if s is not None), default=None)
        snapshot = choose_snapshot(shared_folder.folder, member, step)
        log_entry = None
        if self._mode != "fresh":
            own, prefix = versions.get(str(shared_folder.path), {}), "all ranks: " if ranks == self._world.size else ""
            log_entry = make_log_entry(shared_folder.folder, contents, member, snapshot, own, step, prefix)
        name, id = ("", EMPTY_ID) if snapshot is None else (snapshot.name, snapshot.manifest.id)
        return _Decision(None, id, name, member.unusable_reason, *(log_entry or (0, "")))

    def end(self, error: BaseException | None) -> None:
        """Join the remaining collectives, where other ranks may wait. One rank's `error` is raised on all ranks."""
        try:
            self._join(self._op, self._has_reported, self._has_agreed, error)
        finally:
            if self._shared_folder.folder is not None:
                self._shared_folder.remove_tokens()  # every rank has looked for the token, or the world has ended
        if self.snapshot_id not in (None, EMPTY_ID):
            self._join(f"{self._op}: its rows", self._has_read, self._has_counted, error)  # as in `check_row_count`

    def leave(self) -> None:
        """Leave the store's group, if the store is not opened after all. On rank 0."""
        if self.member is not None:
            self.member.leave()

    def _join(self, op: str, has_joined: bool, is_complete: bool, error: BaseException | None) -> None:
        if is_complete:
            return
        if error is not None and has_joined:
            raise error  # the collective has raised this error on all ranks
        self._world.handshake(op, error)

    def _check_row_count(self, snapshot: Snapshot) -> None:
        """Raise SnapshotError on all ranks if the ranks together did not read all rows of the snapshot."""
        self._has_read = True
        check_row_count(self._world, self._op, snapshot, lambda: snapshot.shard_rows)
        self._has_counted = True


def _merge_versions(reports: Iterable[dict[int, str | None]], recorded: str | None) -> dict[int, str | None]:
    """Merge all hosts' reports on a store's shards. If a shard is on several hosts, prefer the recorded version."""
    merged: dict[int, str | None] = {}
    for report in reports:
        for rank, version in report.items():
            if merged.get(rank) is None or (version is not None and version == recorded):
                merged[rank] = version
    return merged


def check_row_count(world: World, op: str, snapshot: Snapshot, read: Callable[[], dict[str, int]]) -> None:
    """Check that the ranks together read all rows of each snapshot in the chain. If not, all ranks raise SnapshotError.

    Collective. read: returns this rank's row counts by snapshot. An error of `read` is raised on all ranks.
    """
    counts_by_rank = world.all_gather_object(f"{op}: its rows", read)
    if snapshot.shard is None:
        return  # `read` has already compared the counts of a whole snapshot

    def check() -> None:
        for link in snapshot.chain:
            link.check_count(sum(counts.get(link.name, 0) for counts in counts_by_rank))

    world.call_on_all_ranks(f"{op}: counts", check)
