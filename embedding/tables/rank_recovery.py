"""Decides which rows an embedding opens with on all ranks.

Rank 0 reads the record. All ranks use their live rows if it names those of all of them, else one snapshot.
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
from ...snapshots.store.folder_state import FolderState, last_step, shard_versions
from ...snapshots.store.group import Member, open_store
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.recovery_rule import EMPTY
from .recovery import (
    FolderContents,
    OpenPlan,
    check_shards_unlocked,
    contents_of,
    log_entry_of,
    snapshot_to_open,
)
from .shared_folder import SharedFolder


class _Decision(NamedTuple):
    """What rank 0 decides.

    live: the version of the live rows, if they are used. id, name: of the snapshot that has the rows; EMPTY for no
    rows, None if live rows alone have them. unsettled: why they may not be used before a load. level, text: of the log.
    """

    live: str | None
    id: str | None
    name: str
    unsettled: str
    level: int
    text: str


class RecoveryDecision:
    """The decision of all ranks which rows to open with.

    Every rank makes one, opens its shard by `decide`, and then calls `finish`. On rank 0, `member` is the store.
    """

    def __init__(self, world: World, op: str, home: SharedFolder, mode: str, for_load: bool, group: Any) -> None:
        """home: of this rank. mode, for_load: as of `open_store`. group: the `TrainingGroup`.

        Raises StoreError on all ranks.
        """
        self._beside = () if group is None else group.folders()
        self._world, self._home, self._mode, self._for_load = world, home, mode, for_load
        self._op = f"{op}: its rows"
        self._has_reported = False  # whether this rank sent the others what it found
        self._agreed = False  # whether the ranks came to a decision
        self._has_read = False  # whether this rank sent the others how many rows of the snapshot it read
        self._counted = False  # whether the ranks read all of them
        self.member: Member | None = None
        self.base: str | None = None  # the id of the snapshot that they open with, EMPTY for no rows; None for live
        self.is_live = False  # whether the ranks open with their live rows
        self._last: dict[str, str | None] = {}  # on rank 0, by path of a store the version that the record names
        first = world.call_on_rank_0(f"{op}: its store folder", self._introduced)
        self._token: str = first["token"]  # and the id of a run that begins here
        self._stores: list[tuple[str, int]] = [(path, ranks) for path, ranks in first["stores"]]

    def _introduced(self) -> dict[str, Any]:
        """On rank 0: the stores of the group whose rows ranks share, by their paths from this one, and their ranks."""
        home = self._home
        assert home.folder is not None
        folders: list[FolderState] = []
        with suppress(StoreError):  # `open_store` raises it, if it has to
            file = GroupFile(home.folder, beside=self._beside)
            for store, folder in file.members(lenient=True).items():
                if folder.ranks:
                    folders.append(folder)
                    self._last[str(folder.path)] = file.record.now[store].live
        stores = [(os.path.relpath(one.path, home.path), one.ranks) for one in folders]
        return {"token": home.leave_token(), "stores": stores}

    def decide(self, found: FolderContents) -> OpenPlan:
        """How this rank opens its share. Raises StoreError and SnapshotError on all ranks, if the ranks disagree."""
        self._has_reported = True
        reports = self._world.all_gather_object(self._op, lambda: self._report(found))
        decision = _Decision(*self._world.call_on_rank_0(f"{self._op}: chosen", lambda: self._choose(reports)))
        self._agreed = True
        version = decision.live or "" if decision.id is None else f"{decision.id}:0"
        log_entry = (decision.level, decision.text) if decision.text else None
        if decision.live is not None:
            run, _, writes = decision.live.rpartition(":")
            self.is_live = True
            return OpenPlan(found.clean_marker, None, run, int(writes), version, decision.unsettled)
        self.base = decision.id
        plan = OpenPlan(run=self._token, version=version, unsettled=decision.unsettled, log_entry=log_entry)
        if self.base == EMPTY:
            return plan
        whole = Snapshot.open(self._home.snapshots / decision.name)
        snapshot = whole.of_shard(HashShard(self._world.rank, self._world.size))
        return plan._replace(snapshot=snapshot, verified=lambda: self._count(snapshot))

    def _report(self, found: FolderContents) -> tuple[list[dict[int, str | None]], int | None]:
        """What this host has: the versions of the shards of each store, by rank, and the last step of this one."""
        self._home.find_token(self._token)
        versions, reached = [], found.noted_step
        for relative, ranks in self._stores:
            path, is_same = Path(os.path.normpath(self._home.path / relative)), ranks == self._world.size
            if relative == "." and not is_same:
                check_shards_unlocked(path, ranks)
                reached = last_step(path, ranks)
            versions.append(shard_versions(path, ranks, [self._world.rank] if is_same else None))
            if is_same:
                versions[-1].setdefault(self._world.rank, None)
        return versions, reached

    def _choose(self, reports: list[Any]) -> _Decision:
        """On rank 0."""
        home = self._home
        assert home.folder is not None
        by_store = zip(*(versions for versions, _ in reports), strict=True)
        shards = {path: _merged(of, last) for of, (path, last) in zip(by_store, self._last.items(), strict=True)}
        found = contents_of(home.folder)
        own = home.folder.ranks
        self.member = member = open_store(home.folder, self._mode, self._for_load, shards, self._beside)
        if member.entry.live is not None and own == self._world.size:
            return _Decision(member.entry.live, member.entry.snapshot, "", member.broken, 0, "")
        steps = [step for _, step in reports] if own else [found.noted_step]
        if found.clean_marker is not None:
            steps = [found.clean_marker["step"]]
        reached = max((step for step in steps if step is not None), default=None)
        snapshot = snapshot_to_open(home.folder, member, reached)
        logged = None
        if self._mode != "fresh":
            of_all, who = shards.get(str(home.path), {}), "all ranks: " if own == self._world.size else ""
            logged = log_entry_of(home.folder, found, member, snapshot, of_all, reached, who)
        name, id = ("", EMPTY) if snapshot is None else (snapshot.name, snapshot.manifest.id)
        return _Decision(None, id, name, member.broken, *(logged or (0, "")))

    def finish(self, error: BaseException | None) -> None:
        """Join the collectives that the other ranks wait in, if this shard could not be opened. error: of that.

        Raises on all ranks if one of them has no rows to open with.
        """
        try:
            self._join(self._op, self._has_reported, self._agreed, error)
        finally:
            if self._home.folder is not None:
                self._home.remove_tokens()  # by now every rank has checked for it, or the group has ended
        if self.base not in (None, EMPTY):
            self._join(row_count_op(self._op), self._has_read, self._counted, error)

    def leave(self) -> None:
        """On rank 0: the store is not opened after all."""
        if self.member is not None:
            self.member.leave()

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


def _merged(reports: Iterable[dict[int, str | None]], last: str | None) -> dict[int, str | None]:
    """The versions of the shards of a store by what hosts have: `last` where one of them has it.

    A host that had a shard in an earlier run may still have it.
    """
    merged: dict[int, str | None] = {}
    for report in reports:
        for rank, version in report.items():
            if merged.get(rank) is None or (version is not None and version == last):
                merged[rank] = version
    return merged


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
