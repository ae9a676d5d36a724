"""With which rows ranks open an embedding: their live rows where these are of one instant, else one snapshot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..embedding.recovery import (
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
from ..engine.errors import StoreError
from ..snapshots.files.format import HashShard
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.folder_state import RanksRecord, ShardVersion, clean_markers, common_version, live_in, live_of
from .agreement import all_gather_object, handshake
from .all_rows import check_all_rows, reading

if TYPE_CHECKING:
    from .home import SharedFolder
    from .rank_group import RankGroup


class ShardReport(NamedTuple):
    """What a rank found: the live rows and the noted step of its share, and shares of another number of ranks.

    Of rank 0 alone, what the store folder has of one process: the step and the number of its live rows where they are
    whole, whether it was open, and whether it holds anything.
    """

    live: ShardVersion | None
    noted: int | None
    others: dict[int, ShardVersion | None]
    alone: tuple[int, int] | None = None
    was_open: bool = False
    begun: bool = False


class RecoveryDecision:
    """The decision of all ranks with which rows to open.

    Every rank makes one, opens its share by `decide`, and calls `settle` then.
    """

    def __init__(self, world: RankGroup, op: str, home: SharedFolder, mode: str) -> None:
        """home: of this rank. mode: the option `open`. Raises StoreError on all ranks."""
        self._world, self._home = world, home
        self._op = f"{op}: its rows"
        self._fresh, self._refuses = mode == "fresh", mode == "error"
        self._asked = False  # whether this rank told the others what it found
        self._agreed = False  # whether the ranks came to a decision
        self._has_read = False  # whether this rank told the others how many rows of the base it read
        self._counted = False  # whether the ranks read all of them
        self.is_live = False
        self.base: RecoveryPoint | None = None
        first = all_gather_object(world, f"{op}: its store folder", self._introduced)[0]
        self._token: str = first["token"]
        self.run = self._token  # the id of a run that begins here
        self._record = None if first["record"] is None else RanksRecord(*first["record"])
        self._path = Path(first["path"])  # of rank 0

    def decide(self, found: FolderContents) -> OpenPlan:
        """How this rank opens its share. Raises StoreError and SnapshotError on all ranks, if the ranks disagree."""
        self._asked = True
        reports = [_read(one) for one in all_gather_object(self._world, self._op, lambda: self._report(found))]
        live = self._live(reports)
        if live is not None:
            self.run, self.is_live, self._agreed = live.run, True, True
            return OpenPlan(found.mark, run=live.run, writes=live.writes)
        said = None if self._fresh else self._go_back(reports)
        self._agreed = True
        if (
            self._home.folder is None or self._home.snapshot_store.at is not None
        ):  # it was said of all that train together
            said = None
        if self.base is None:
            return OpenPlan(run=self.run, said=said)
        part = HashShard(self._world.rank, self._world.size)
        snapshot = Snapshot.open(self._home.snapshots / self.base.name).of_shard(part)
        return OpenPlan(snapshot=snapshot, run=self.run, said=said, verified=lambda: self._count(snapshot))

    def settle(self, error: BaseException | None) -> None:
        """Join the other ranks, which wait for this one, where its share could not be opened. error: of that.

        Raises on all ranks where one of them has no rows to open with.
        """
        try:
            self._join(self._op, self._asked, self._agreed, error)
        finally:
            if self._home.folder is not None:
                self._home.remove_tokens()  # by now every rank has looked for it, or the group is at its end
        if self.base is not None:
            self._join(reading(self._op), self._has_read, self._counted, error)

    def _join(self, op: str, came: bool, passed: bool, error: BaseException | None) -> None:
        if passed:
            return
        if error is not None and came:
            raise error  # of the ranks' exchange, and so on all of them
        handshake(self._world, op, error)

    def _count(self, snapshot: Snapshot) -> None:
        """Raise SnapshotError on all ranks where they did not read all rows of the snapshot they go back to."""
        self._has_read = True
        check_all_rows(self._world, self._op, snapshot, lambda: snapshot.shard_rows)
        self._counted = True

    def _introduced(self) -> dict[str, Any]:
        home = self._home
        if home.folder is None:
            return {}
        return {"token": home.leave_token(), "record": home.snapshot_store.of_ranks, "path": str(home.path)}

    def _report(self, found: FolderContents) -> ShardReport:
        home, record = self._home, self._record
        home.find_token(self._token)
        others = {}
        if record is not None and record.ranks != self._world.size:
            check_shards_unlocked(home.path, record.ranks)
            others = dict(live_of(clean_markers(home.path, record.ranks), record.ranks))
        noted = found.noted_step if record is not None or home.folder is None else home.folder.noted_step
        report = ShardReport(live_in(found.mark, self._world.rank, self._world.size), noted, others)
        if home.folder is None:
            return report
        mark = home.folder.read_clean_marker()
        alone = None if mark is None else (mark["step"], mark["rows"])
        return report._replace(alone=alone, was_open=home.folder.was_open, begun=home.folder.has_begun)

    def _live(self, reports: list[ShardReport]) -> ShardVersion | None:
        """The live rows of this number of ranks, where all are of one instant and later than those of one process."""
        record = self._record
        if self._fresh or record is None or record.ranks != self._world.size or reports[0].alone is not None:
            return None
        return common_version(record, [report.live for report in reports])

    def _go_back(self, reports: list[ShardReport]) -> tuple[int, str] | None:
        """Find the snapshot to go back to. Returns the level and the text to log."""
        record, first = self._record, reports[0]
        if record is None or first.alone is not None:
            self.base = self._told_base(lambda: self._home.base_of_one())
            return self._leave_one(first)
        self.base = base = self._told_base(lambda: self._home.base_of_ranks())
        if record.ranks != self._world.size:
            shares: dict[int, ShardVersion | None] = {}
            for rank, live in (one for report in reports for one in report.others.items()):
                if rank not in shares or (live is not None and live.run == record.run):  # a host may have an older one
                    shares[rank] = live
            return recover_from_ranks(self._path, record, shares, base, self._refuses)
        if self._refuses:
            raise StoreError(unclean_shutdown_text(self._path))
        why = unclean_ranks_text(self._path, record, {rank: report.live for rank, report in enumerate(reports)})
        reached = max((report.noted for report in reports if report.noted is not None), default=None)
        return logging.WARNING, f"{why}; all ranks: {recovery_text(base)}; {lost_steps_text(base, reached)}"

    def _told_base(self, find: Callable[[], RecoveryPoint | None]) -> RecoveryPoint | None:
        found = all_gather_object(
            self._world, f"{self._op}: the snapshot", find if self._world.rank == 0 else lambda: None
        )[0]
        return None if found is None else RecoveryPoint(*found)

    def _leave_one(self, first: ShardReport) -> tuple[int, str] | None:
        """What is logged where ranks take over the folder of one process, or a new one. StoreError."""
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
