"""What rank 0 notes of the stores whose rows ranks share, and that are trained together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..distributed.world import World
from ..snapshots.files.versions import Instant, Rows, Versions
from ..snapshots.store.folder_state import FolderState, ShardVersion, live_in, shard_folder
from ..snapshots.store.instants import Group, settle
from .shared_folder import SharedFolder
from .table_handle import LocalTableHandle
from .training_group import Membership, TrainingGroup, open_rows


class SharedVersions(Versions):
    """The versions of rows that ranks share: their run, and how many operations of all ranks wrote since it began."""

    def __init__(self, opened: Rows, began: tuple[Any, ...], own: LocalTableHandle) -> None:
        self._rows_at_open, self._began, self._own, self._from = opened, began, own, own.life.writes

    @property
    def writes(self) -> int:  # type: ignore[override]
        return self._own.life.writes - self._from

    @property
    def rows(self) -> Rows:
        return (
            self._rows_at_open if self.writes == 0 else Rows((self._own.life.run, self._own.life.writes), self._began)
        )


class RankMembership(Membership):
    """The membership of a store whose rows ranks share, on rank 0. own: the rows of this rank."""

    def __init__(self, home: SharedFolder, group: TrainingGroup | None, own: LocalTableHandle) -> None:
        assert home.folder is not None
        super().__init__(home.snapshot_store, group, home.path)
        self._own = own

    def opened_with(self, rows: Rows, is_live: bool) -> None:
        """As `note_open`, of live rows, or of those that a run begins with."""
        self._is_live = is_live
        if self.record is not None and not is_live:
            self.record = replace(self.record, began=rows)
            self.folder.change(group=self.record)
        self.note_open(rows)

    def first_write_noted(self) -> None:
        """Let MARK know of the first write of a run, or after a load, before ranks agree to it. StoreError."""
        record = self.first_write()
        if record is not None:
            self.folder.change(group=record, at=None)

    def _begin(self, rows: Rows) -> Versions:
        began = None if self.record is None else self.record.began
        past = rows.began(self._epochs()) if began is None else (began.now, *began.past)
        return SharedVersions(rows, past, self._own)

    def _note_unwritten(self, rows: Rows) -> None:
        if self._is_live:  # it is clean by the markers of the shards
            self.folder.change(group=self.record)
        else:
            assert self.record is not None
            self.record = replace(self.record, began=rows)
            super()._note_unwritten(rows)

    def loaded(self, snapshot_rows: Rows, by: str, all_: Instant | None = None) -> dict[str, Any]:
        if self.record is not None:
            self.record = replace(self.record, began=snapshot_rows)
        return super().loaded(snapshot_rows, by, all_)


def settle_ranks(
    world: World, op: str, home: SharedFolder, group: TrainingGroup | None, mode: str, for_load: bool
) -> str:
    """Do `settle` on rank 0, with what the ranks on all hosts have. Raises on all ranks, or returns what it returns."""
    op = f"{op}: those that are trained together"
    stores = [] if group is None else [place for _, place in group.stores().values() if place != home.path]

    def shared() -> list[str]:
        known = Group(home.path, open_rows(), stores=stores)
        found = [member.path for member in known.members.values() if member.live is None]
        ours = [
            path
            for path in found
            if (r := FolderState(path).snapshot_store.mark.ranks) is not None and r.ranks == world.size
        ]
        return [str(path) for path in ours] if len(known.members) + len(known.missing) > 1 else []

    paths: list[str] = world.call_on_rank_0(op, shared)
    shards: dict[str, list[ShardVersion | None]] = {}
    if paths:
        every = world.all_gather_object(op, lambda: [_share(Path(path), world.rank, world.size) for path in paths])
        shards = {path: [one[at] and ShardVersion(*one[at]) for one in every] for at, path in enumerate(paths)}

    def settled() -> str:
        assert home.folder is not None
        return settle(home.folder, mode, open_rows(), for_load, shards, stores)

    return str(world.call_on_rank_0(op, settled))


def _share(path: Path, rank: int, ranks: int) -> ShardVersion | None:
    place = shard_folder(path, rank, ranks)
    return live_in(FolderState(place).clean_marker, rank, ranks) if place.is_dir() else None
