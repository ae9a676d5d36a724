"""Decides which rows an embedding opens with on all ranks.

If the live rows of all ranks come from the same run and step they are used, else every rank recovers from one snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..distributed.world import World
from ..engine.errors import StoreError
from ..snapshots.files.format import HashShard
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.folder_state import ShardVersion, clean_markers, common_version, live_in, live_of
from ..snapshots.store.mark import RanksRecord
from .recovery import (
    FolderContents,
    OpenPlan,
    RecoveryPoint,
    check_shards_unlocked,
    lost_steps_text,
    recover_from_ranks,
    recovery_text,
    unclean_ranks_text,
    unclean_shutdown_text,
    unsaved_rows_text,
)
from .shared_folder import SharedFolder


class ShardReport(NamedTuple):
    """What a rank found: the live rows and the noted step of its shard, and shards of another number of ranks.

    Of rank 0 alone, what the store folder has of one process: the step and the number of its live rows if they have a
    clean marker, whether it was open, and whether it holds anything.
    """

    live: ShardVersion | None
    noted: int | None
    others: dict[int, ShardVersion | None]
    alone: tuple[int, int] | None = None
    was_open: bool = False
    begun: bool = False


class RecoveryDecision:
    """The decision of all ranks which rows to open with.

    Every rank makes one, opens its shard by `decide`, and then calls `finish`.
    """

    def __init__(self, world: World, op: str, home: SharedFolder, mode: str) -> None:
        """home: of this rank. mode: the option `open`. Raises StoreError on all ranks."""
        self._world, self._home = world, home
        self._op = f"{op}: its rows"
        self._fresh, self._refuses = mode == "fresh", mode == "error"
        self._has_reported = False  # whether this rank sent the others what it found
        self._agreed = False  # whether the ranks came to a decision
        self._has_read = False  # whether this rank sent the others how many rows of the snapshot it read
        self._counted = False  # whether the ranks read all of them
        self.is_live = False
        self.base: RecoveryPoint | None = None
        first = world.call_on_rank_0(f"{op}: its store folder", self._introduced)
        self._token: str = first["token"]
        self.run = self._token  # the id of a run that begins here
        self._record = None if first["record"] is None else RanksRecord(*first["record"])
        self._path = Path(first["path"])  # of rank 0

    def decide(self, found: FolderContents) -> OpenPlan:
        """How this rank opens its share. Raises StoreError and SnapshotError on all ranks, if the ranks disagree."""
        self._has_reported = True
        reports = [_read(one) for one in self._world.all_gather_object(self._op, lambda: self._report(found))]
        live = self._live(reports)
        if live is not None:
            self.run, self.is_live, self._agreed = live.run, True, True
            return OpenPlan(found.clean_marker, run=live.run, writes=live.writes)
        entry = None if self._fresh else self._recover(reports)
        self._agreed = True
        if (
            self._home.folder is None or self._home.snapshot_store.mark.at is not None
        ):  # the log has it of all that train together
            entry = None
        if self.base is None:
            return OpenPlan(run=self.run, log_entry=entry)
        part = HashShard(self._world.rank, self._world.size)
        snapshot = Snapshot.open(self._home.snapshots / self.base.name).of_shard(part)
        return OpenPlan(snapshot=snapshot, run=self.run, log_entry=entry, verified=lambda: self._count(snapshot))

    def finish(self, error: BaseException | None) -> None:
        """Join the collectives that the other ranks wait in, if this shard could not be opened. error: of that.

        Raises on all ranks if one of them has no rows to open with.
        """
        try:
            self._join(self._op, self._has_reported, self._agreed, error)
        finally:
            if self._home.folder is not None:
                self._home.remove_tokens()  # by now every rank has checked for it, or the group has ended
        if self.base is not None:
            self._join(row_count_op(self._op), self._has_read, self._counted, error)

    def _join(self, op: str, has_joined: bool, passed: bool, error: BaseException | None) -> None:
        if passed:
            return
        if error is not None and has_joined:
            raise error  # of the collective, and so raised on all of them
        self._world.handshake(op, error)

    def _count(self, snapshot: Snapshot) -> None:
        """Raise SnapshotError on all ranks if they did not read all rows of the recovery snapshot."""
        self._has_read = True
        check_row_count(self._world, self._op, snapshot, lambda: snapshot.shard_rows)
        self._counted = True

    def _introduced(self) -> dict[str, Any]:
        home = self._home
        return {"token": home.leave_token(), "record": home.snapshot_store.mark.ranks, "path": str(home.path)}

    def _report(self, found: FolderContents) -> ShardReport:
        home, record = self._home, self._record
        home.find_token(self._token)
        others = {}
        if record is not None and record.ranks != self._world.size:
            check_shards_unlocked(home.path, record.ranks)
            others = dict(live_of(clean_markers(home.path, record.ranks), record.ranks))
        noted = found.noted_step if record is not None or home.folder is None else home.folder.noted_step
        report = ShardReport(live_in(found.clean_marker, self._world.rank, self._world.size), noted, others)
        if home.folder is None:
            return report
        marker = home.folder.clean_marker
        alone = None if marker is None else (marker["step"], marker["rows"])
        return report._replace(alone=alone, was_open=home.folder.was_open, begun=home.folder.has_begun)

    def _live(self, reports: list[ShardReport]) -> ShardVersion | None:
        """The live rows of this number of ranks, if all are from the same step and later than those of one process."""
        record = self._record
        if self._fresh or record is None or record.ranks != self._world.size or reports[0].alone is not None:
            return None
        return common_version(record, [report.live for report in reports])

    def _recover(self, reports: list[ShardReport]) -> tuple[int, str] | None:
        """Find the recovery snapshot. Returns the level and the text to log."""
        record, first = self._record, reports[0]
        if record is None or first.alone is not None:
            self.base = self._base_of_rank_0(lambda: self._home.base_of_one())
            return self._take_over(first)
        self.base = base = self._base_of_rank_0(lambda: self._home.base_of_ranks())
        if record.ranks != self._world.size:
            shards: dict[int, ShardVersion | None] = {}
            for rank, live in (one for report in reports for one in report.others.items()):
                if rank not in shards or (live is not None and live.run == record.run):  # a host may have an older one
                    shards[rank] = live
            return recover_from_ranks(self._path, record, shards, base, self._refuses)
        if self._refuses:
            raise StoreError(unclean_shutdown_text(self._path))
        why = unclean_ranks_text(self._path, record, {rank: report.live for rank, report in enumerate(reports)})
        reached = max((report.noted for report in reports if report.noted is not None), default=None)
        return logging.WARNING, f"{why}; all ranks: {recovery_text(base)}; {lost_steps_text(base, reached)}"

    def _base_of_rank_0(self, find: Callable[[], RecoveryPoint | None]) -> RecoveryPoint | None:
        found = self._world.call_on_rank_0(f"{self._op}: the snapshot", find)
        return None if found is None else RecoveryPoint(*found)

    def _take_over(self, first: ShardReport) -> tuple[int, str] | None:
        """What is logged when ranks take over the folder of one process, or a new one. StoreError."""
        path, base = self._path, self.base
        if first.alone is not None:
            step, rows = first.alone
            if rows and (base is None or (base.step, base.rows) != (step, rows)):
                raise StoreError(unsaved_rows_text(path, "one process", step, base))
            return logging.INFO, f"store folder {path} has rows of one process; {recovery_text(base)}"
        if not first.begun:
            return None
        if not first.was_open:
            return logging.INFO, f"store folder {path} is new; {recovery_text(base)}"
        if self._refuses:
            raise StoreError(unclean_shutdown_text(path))
        why = f"store folder {path} was not closed by its last run"
        return logging.WARNING, f"{why}; {recovery_text(base)}; {lost_steps_text(base, first.noted)}"


def _read(report: list[Any]) -> ShardReport:
    live, noted, others, alone, was_open, begun = report
    others = {rank: _live(one) for rank, one in others.items()}
    return ShardReport(_live(live), noted, others, None if alone is None else tuple(alone), was_open, begun)


def _live(found: list[Any] | None) -> ShardVersion | None:
    return None if found is None else ShardVersion(*found)


def row_count_op(op: str) -> str:
    """The operation in which ranks compare how many rows they have read."""
    return f"{op}: its rows"


def check_row_count(world: World, op: str, snapshot: Snapshot, read: Callable[[], dict[str, int]]) -> None:
    """Raise SnapshotError on all ranks if their shards are not all rows of each snapshot in the chain. Collective.

    read: returns how many rows this rank has read of each of these, by name. What it raises is raised on all ranks.
    """
    found = world.all_gather_object(row_count_op(op), read)
    if snapshot.shard is None:
        return  # `read` has compared the counts

    def check() -> None:
        for link in snapshot.chain:
            link.check_count(sum(counts.get(link.name, 0) for counts in found))

    world.call_on_all_ranks(f"{op}: counts", check)
