"""Recovery of stores that are trained together: chooses an instant of which all of them have the rows.

Each snapshot and each MARK of such a store has an instant: the versions of all of them at one moment (`versions.py`).
After an unclean shutdown, recovery takes the latest instant in the past of every store of which every store has the
rows: clean live rows, a snapshot, or none if no row was ever written. It only writes MARK files, each atomically, and
its choice depends only on the folders: after a kill, the next recovery has the same result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...engine.errors import SnapshotError, StoreError
from ..files.format import MANIFEST
from ..files.reader import Listing, Snapshot, list_snapshots
from ..files.versions import EMPTY, LIVE, At, GroupRecord, Instant, Rows, Saved, Version
from ..files.writer import Together
from .folder import StoreFolder
from .folder_state import (
    SNAPSHOTS,
    FolderState,
    ShardVersion,
    clean_markers,
    common_version,
    holder,
    live_of,
    shard_folder,
)

log = logging.getLogger("tierbed")

LiveVersions = Mapping[str, Rows]  # of stores that are open in this process, by their real paths
StoreShards = Mapping[str, Sequence[ShardVersion | None]]  # the versions of shards on all hosts, by the paths of stores

_UNKNOWN: Version = ("?", 0)  # of clean live rows of an older version of tierbed


class Member:
    """A store of a group, by its folder. `live`: the version of its rows if this process has it open.

    `apart`: the folder of its snapshots, if the store folder is lost and had them elsewhere.
    """

    def __init__(
        self, path: Path, live: LiveVersions, shards: StoreShards | None = None, apart: Path | None = None
    ) -> None:
        self.state, self.apart = FolderState(path), apart
        self.is_loaded = False  # whether others have an instant with the rows of a load of only this store
        self.path = path
        self.live = live.get(os.path.realpath(path))
        self._shards = None if shards is None else shards.get(str(path))

    @cached_property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def listing(self) -> Listing:
        return list_snapshots(self.apart or self.state.snapshots)

    @property
    def snapshots(self) -> list[Snapshot]:
        """From the oldest to the latest."""
        return self.listing.snapshots

    @cached_property
    def record(self) -> GroupRecord | None:
        """The group in MARK, or if that is lost, damaged or new, in the latest snapshot."""
        mark = self.state.recovery_folder.mark
        if mark.group is not None or mark.exists or not self.snapshots:
            return mark.group
        saved = self.snapshots[-1].manifest.instant
        return None if saved is None else GroupRecord(saved.id, saved.peers, number=saved.instant.number)

    def is_named(self, id: str) -> bool:
        """Whether this is the id of the store."""
        return self.record is not None and self.record.id == id

    @cached_property
    def number(self) -> int:
        """The largest number of an instant that the store knows: snapshots may have larger ones than MARK."""
        return max([0 if self.record is None else self.record.number, *(instant.number for instant in self.instants())])

    @cached_property
    def clean(self) -> Rows | None:
        """The version of its live rows, if they are clean."""
        marker, ranks = self.state.clean_marker, self.state.recovery_folder.mark.ranks
        if marker is not None:
            return Rows.parse(marker.get(LIVE)) or Rows(_UNKNOWN)
        if ranks is None:
            return None
        here = live_of(clean_markers(self.path, ranks.ranks), ranks.ranks).values()
        live = common_version(ranks, here if self._shards is None else self._shards)
        return None if live is None else rows_of_ranks(live, self.record, self.state.recovery_folder)

    @cached_property
    def at(self) -> At | None:
        return self.state.recovery_folder.mark.at

    @property
    def is_begun(self) -> bool:
        """Whether a run has ever written rows. Of ranks, the folder with the snapshots has their MARK."""
        return self.state.has_begun or self.state.recovery_folder.has_begun

    @property
    def is_at_rest(self) -> bool:
        """Whether it would open with the rows of its last close or of a recovery."""
        if self.at is not None and self.at.by == "load":
            return False
        return self.clean is not None or self.at is not None or not self.is_begun

    @property
    def present(self) -> Version | None:
        """The present version of its rows; None if unknown."""
        if self.live is not None:
            return self.live.now
        if self.clean is not None:
            return None if self.clean.now == _UNKNOWN else self.clean.now
        if self.at is not None:
            return self.at.version
        return None if self.is_begun else EMPTY

    @cached_property
    def recovery_snapshot(self) -> Snapshot | None:
        """The recovery snapshot: the one that was saved or loaded last."""
        recovery_snapshot = self.state.recovery_folder.recovery_snapshot
        if recovery_snapshot is None:
            return self.snapshots[-1] if self.snapshots else None
        return next((snapshot for snapshot in self.snapshots if snapshot.name == recovery_snapshot), None)

    @property
    def reached(self) -> int | None:
        """The step of its live rows, if known."""
        marker, ranks = self.state.clean_marker, self.state.recovery_folder.mark.ranks
        if marker is not None:
            return int(marker["step"])
        if ranks is None:
            return self.state.noted_step
        shards = (FolderState(shard_folder(self.path, rank, ranks.ranks)) for rank in range(ranks.ranks))
        found = [(shard.clean_marker or {}).get("step", shard.noted_step) for shard in shards]
        return max((step for step in found if step is not None), default=None)

    def rows(self, killed: bool) -> Rows:
        """The version and the past of its rows. killed: of those of the next run if all processes are killed now."""
        if self.live is not None and not killed:
            return self.live
        if (before := self._before) is not None:
            return before
        if self.clean is not None and not killed:
            return self.clean
        return Rows(EMPTY) if self.recovery_snapshot is None else rows_of(self.recovery_snapshot)

    @property
    def _before(self) -> Rows | None:
        """The rows before a load of only this store, after which nothing was written or saved."""
        before = None if self.at is None else self.at.before
        saved = None if self.recovery_snapshot is None else self.recovery_snapshot.manifest.instant
        if before is None or self.is_loaded or (saved is not None and saved.instant.number > before.number):
            return None
        return before.rows

    def has(self, killed: bool) -> set[Version]:
        """The versions whose rows the next run can have."""
        if self.live is not None and not killed:
            return {self.live.now}
        rows = self.rows(killed)
        saved = {rows_of(s).now for s in self.snapshots if rows.went_through(rows_of(s).now)}
        if not saved and rows.went_through(EMPTY):
            saved.add(EMPTY)
        return saved if killed or self.clean is None or self._before is not None else saved | {self.clean.now}

    def instants(self, rows: Rows | None = None) -> Iterator[Instant]:
        """Those of its MARK and its snapshots. rows: only snapshots whose versions these rows once had."""
        for snapshot in self.snapshots:
            saved = snapshot.manifest.instant
            if saved is not None and (rows is None or rows.went_through(saved.rows.now)):
                yield saved.instant
        if self.record is not None and self.record.instant is not None:
            yield self.record.instant

    def snapshot_of(self, version: Version) -> Snapshot | None:
        """The latest snapshot with these rows."""
        return next((snapshot for snapshot in reversed(self.snapshots) if rows_of(snapshot).now == version), None)


def rows_of(snapshot: Snapshot) -> Rows:
    """The version and the past of a snapshot's rows."""
    saved = snapshot.manifest.instant
    return Rows((snapshot.manifest.id, 0)) if saved is None else saved.rows


def rows_of_ranks(live: ShardVersion, record: GroupRecord | None, folder: FolderState) -> Rows:
    """The version and the past of live rows in shards. folder: the one whose MARK names the ranks."""
    ranks = folder.mark.ranks
    if ranks is not None and ranks.snapshot and live.writes == ranks.saved:
        with contextlib.suppress(SnapshotError):  # else they have their own version
            return rows_of(Snapshot.open(folder.snapshots / ranks.snapshot))
    began = None if record is None else record.began
    if began is None or live.writes > 0:
        return Rows((live.run, live.writes), () if began is None else (began.now, *began.past))
    return began


class Group:
    """The stores that are trained together with the one in `path`, which is included, by their ids.

    `missing`: the names of those whose folders are not found, by id. `first`: the id of the store in `path`, "" if it
    trains alone.
    """

    def __init__(
        self, path: Path, live: LiveVersions, shards: StoreShards | None = None, stores: Sequence[Path] = ()
    ) -> None:
        """stores: those that this process trains together with it, which may have been moved."""
        self.members: dict[str, Member] = {}
        self.missing: dict[str, str] = {}
        first = Member(Path(os.path.abspath(path)), live, shards)
        self.first = "" if first.record is None else first.record.id
        waiting = [first] if first.record is not None else []
        while waiting:
            member = waiting.pop()
            assert member.record is not None
            self.members[member.record.id] = member
            for id, peer in member.record.peers.items():
                if id in self.members or any(one.record and one.record.id == id for one in waiting):
                    continue
                moved = [place for place in stores if place.name == peer.name]
                places = [*moved, *peer.places(member.path)]
                existing = [Member(place, live, shards) for place in places if place.is_dir()]
                apart = member.state.snapshot_store.path.parent / peer.name / SNAPSHOTS  # as snapshot_path has them
                if not existing and member.state.snapshot_store.path != member.path and apart.is_dir():
                    existing = [Member(places[0], live, apart=apart)]
                found = next((one for one in existing if one.path in moved and one.is_named(id)), None)
                found = found or next((one for one in existing if _is_mutual(member, one, id)), None)
                if found is not None:
                    waiting.append(found)
                elif not existing:
                    self.missing[id] = peer.name
        self.missing = {id: name for id, name in self.missing.items() if id not in self.members}
        for id, member in self.members.items():
            at, others = member.at, [other for other in self.members.values() if other is not member]
            if at is not None and (before := at.before) is not None:
                noted = (instant for other in others for instant in other.instants() if instant.number > before.number)
                member.is_loaded = any(instant.versions.get(id) == at.version for instant in noted)

    @property
    def number(self) -> int:
        """The largest number of an instant that a store knows."""
        return max((member.number for member in self.members.values()), default=0)

    @property
    def is_at_rest(self) -> bool:
        return all(member.live is not None or member.is_at_rest for member in self.members.values())

    def target(self, killed: bool = False) -> Instant | None:
        """The instant that recovery chooses; None if there is none. killed: if all processes were killed now."""
        has = {id: member.has(killed) for id, member in self.members.items()} | {id: {EMPTY} for id in self.missing}
        loads = [member.at for member in self.members.values() if member.at is not None and member.at.all is not None]
        pending = max((load.all for load in loads if load.all is not None), key=lambda all_: all_.number, default=None)
        if pending is not None and any(
            m.record is None or m.record.number < pending.number for m in self.members.values()
        ):
            available = {
                id: has[id] if m.live is not None else has[id] | {EMPTY} | {rows_of(s).now for s in m.snapshots}
                for id, m in self.members.items()
            }
            if all(version in available.get(id, {EMPTY}) for id, version in pending.versions.items()):
                return pending  # finishes the load of several stores that a kill interrupted
        known = [instant for member in self.members.values() for instant in member.instants(member.rows(killed))]
        fit = [instant for instant in known if all(self._at(instant, id) in has[id] for id in has)]
        if fit:
            latest = max(fit, key=lambda instant: instant.number)
            return Instant(latest.number, {id: self._at(latest, id) for id in self.members})
        if not any(has[id] - {EMPTY} for id in has):
            return Instant(0, dict.fromkeys(self.members, EMPTY))
        return None

    def _at(self, instant: Instant, id: str) -> Version | None:
        """The version of a store at an instant, which may be before it joined."""
        if id in instant.versions:
            return instant.versions[id]
        member = self.members.get(id)
        return EMPTY if member is None or member.record is None else member.record.joined

    def needed(self, id: str) -> set[str]:
        """The names of the snapshots of a store that recovery may load."""
        member, targets = self.members[id], [self.target(killed) for killed in (True, False)]
        wanted = {target.versions.get(id) for target in targets if target is not None}
        wanted |= {one.at.all.versions.get(id) for one in self.members.values() if one.at is not None and one.at.all}
        names = {snapshot.name for snapshot in member.snapshots if rows_of(snapshot).now in wanted}
        if self.missing:  # their rows are unknown
            saved = ((snapshot.name, snapshot.manifest.instant) for snapshot in member.snapshots)
            names |= {name for name, said in saved if said is not None and self.missing.keys() & said.peers.keys()}
        return names


def _is_mutual(member: Member, other: Member, id: str) -> bool:
    """Whether `member` and `other`, its peer `id`, name each other."""
    if other.record is None or not other.is_named(id) or member.record is None:
        return False
    back = other.record.peers.get(member.record.id)
    mine = os.path.realpath(member.path)
    theirs = [] if back is None else [FolderState(place) for place in back.places(other.path)]
    return any(mine in (os.path.realpath(one.path), os.path.realpath(one.snapshot_store.path)) for one in theirs)


def with_same_rows(snapshot: Snapshot) -> Together | None:
    """The group for another snapshot of the same rows."""
    saved = snapshot.manifest.instant
    return None if saved is None else Together(secrets.token_hex(16), saved)


class ClosedStore:
    """A closed store and those that it is trained together with. `record`: None if it trains alone."""

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder
        self._group = Group(folder.path, {})
        self._member = self._group.members.get(self._group.first)
        self.record = None if self._member is None else self._member.record

    def saved(self, id: str) -> Saved | None:
        """The field `instant` of a snapshot of its live rows with that id."""
        if self.record is None or self._member is None:
            return None
        rows = self._member.clean
        if rows is None or rows.now == _UNKNOWN:
            rows = Rows((id, 0))
        versions = {**self._versions(), self.record.id: rows.now}
        return Saved(self.record.id, rows, self._next(versions), self.record.peers)

    def _versions(self) -> dict[str, Version | None]:
        return {id: member.present for id, member in self._group.members.items()}

    def loaded(self, rows: Rows, all_: Instant | None = None) -> dict[str, Any]:
        """Fields of MARK for live rows that are replaced by rows of this version.

        all_: for a load of several stores, until `finish_load`.
        """
        if self.record is None:
            return {}
        instant = self._next({**self._versions(), self.record.id: rows.now}) if all_ is None else all_
        self.record = replace(self.record, instant=instant, number=max(self.record.number, instant.number), began=None)
        return {"group": self.record, "at": None if all_ is None else At(rows.now, "load", all_)}

    def written(self) -> Rows:
        """A new version for live rows that are written, such as by a load of a part of a snapshot."""
        before = Rows(EMPTY) if self._member is None else self._member.rows(killed=False)
        return Rows((secrets.token_hex(8), 1), before.began([]))

    def finish_load(self) -> None:
        """Called after a load of several stores, when each has its rows."""
        if self.record is not None:
            self.folder.change(group=self.record, at=None)

    def _next(self, versions: dict[str, Version | None]) -> Instant:
        number = self._group.number + 1
        if self.record is not None:
            self.record = replace(self.record, number=number)
        return Instant(number, versions)


def check_one_instant(names: Sequence[str], snapshots: Sequence[Snapshot]) -> None:
    """Raises SnapshotError if the snapshots of embeddings of these names are from different instants."""
    if len({snapshot.manifest.id[:16] for snapshot in snapshots}) == 1:
        return  # one save made them
    versions = {s.manifest.instant.id: rows_of(s).now for s in snapshots if s.manifest.instant is not None}
    for snapshot in snapshots:
        saved = snapshot.manifest.instant
        if saved is not None and any(saved.instant.versions.get(id, now) != now for id, now in versions.items()):
            both = zip(names, snapshots, strict=True)
            steps = ", ".join(f"{name!r} at step {one.description['step']}" for name, one in both)
            raise SnapshotError(
                f"the snapshots {snapshot.name!r} were not saved together, and have rows of different steps: {steps}. "
                "Load each by itself, or the name of a save of all of them"
            )


def needed_snapshots(path: Path) -> set[str]:
    """The names of the snapshots of a store that its group needs after a kill; empty for a store that trains alone."""
    group = Group(path, {})
    if len(group.members) + len(group.missing) < 2:
        return set()
    return group.needed(group.first)


def left_behind(path: Path) -> set[str]:
    """The names of the snapshots of a store that a recovery has undone, so that a run may save these names again."""
    member = Member(Path(os.path.abspath(path)), {})
    if member.record is None:
        return set()
    (low, high), rows = member.record.cut, member.rows(killed=False)
    saved = ((snapshot.name, snapshot.manifest.instant) for snapshot in member.snapshots)
    return {
        name
        for name, one in saved
        if one is not None and low < one.instant.number <= high and not rows.went_through(one.rows.now)
    }


def settle(
    first: StoreFolder,
    mode: str,
    live: LiveVersions,
    for_load: bool = False,
    shards: StoreShards | None = None,
    stores: Sequence[Path] = (),
) -> str:
    """Recover the stores that are trained together with `first` to one instant, if a run ended uncleanly.

    first: locked, about to be opened. mode: its option `open`. live: the versions of stores that this process has open.
    for_load: whether its rows are about to be replaced. If there is no such instant, the error is then returned, to be
    raised if the store is used without that load; else "" is returned. shares: the versions of shards of ranks.
    stores: as for `Group`. Raises StoreError if there is no such instant, if a store is missing or locked by another
    process, and with `open="error"`.
    """
    if mode not in ("fresh", "mixed"):
        _check_not_lost(first, live, stores)
    group = Group(first.path, live, shards, stores)
    if mode == "fresh" or len(group.members) + len(group.missing) < 2 or group.is_at_rest:
        return ""
    running = [member for member in group.members.values() if member.live is None and not member.is_at_rest]
    if group.members[group.first].is_at_rest and all(holder(member.path) is not None for member in running):
        return ""  # other processes train the others
    if mode == "error":
        unclean = [repr(str(m.path)) for m in running]
        raise StoreError(
            f"{', '.join(unclean)} of the store folders that are trained together were not closed by their last run, "
            'so their live rows cannot be used; open="resume" recovers the last step of which all have the rows'
        )
    with ExitStack() as locks:
        folders: dict[str, StoreFolder] = {}
        for id, member in sorted(group.members.items()):
            if member.live is None:
                own = os.path.realpath(member.path) == os.path.realpath(first.path)
                folders[id] = first if own else locks.enter_context(_lock_member(member, first))
        group = Group(first.path, live, shards, stores)  # again: now no other process changes them
        for member in () if for_load else group.members.values():
            for name, error in member.listing.damaged.items():
                is_snapshot = os.path.lexists((member.apart or member.state.snapshots) / name / MANIFEST)
                if is_snapshot and (mode != "mixed" or name == member.state.recovery_folder.recovery_snapshot):
                    raise SnapshotError(f"it is unknown which step is the latest: {error}") from error
        target = group.target()
        if target is None and mode == "mixed":
            target = _accepted(group)
        if target is None and for_load:
            return no_instant(group)
        if target is None:
            raise StoreError(no_instant(group))
        _move(group, folders, target)
    return ""


def _check_not_lost(first: StoreFolder, live: LiveVersions, stores: Sequence[Path]) -> None:
    """Raises StoreError if a store that this process trains has lost its folder, but another store knows its rows."""
    members = {os.path.realpath(path): Member(path, live) for path in (first.path, *stores)}
    new = {place for place, one in members.items() if one.record is None and not one.state.has_begun}
    for member in members.values():
        for id, peer in () if member.record is None else member.record.peers.items():
            here = [*(one.path for one in members.values() if one.path.name == peer.name), *peer.places(member.path)]
            known = max(member.instants(member.rows(killed=False)), key=lambda instant: instant.number, default=None)
            if known is None or known.versions.get(id, EMPTY) == EMPTY:
                continue
            apart = member.state.snapshot_store.path.parent / peer.name / SNAPSHOTS  # as snapshot_path has them
            has_apart = member.state.snapshot_store.path != member.path and apart.is_dir()
            if not has_apart and any(os.path.realpath(place) in new for place in here):
                raise StoreError(
                    f"the rows of embedding {peer.name!r}, which was trained together with {member.name!r}, are lost: "
                    f'{str(here[0])!r} is new. Put its folder back; or start over with the store option open="fresh" '
                    f'in {peer.name!r}; or accept it without rows with open="mixed" in both'
                )


def _lock_member(member: Member, first: StoreFolder) -> StoreFolder:
    try:
        return StoreFolder(member.path, f"the recovery of {first.user}", member.apart)
    except StoreError as error:
        raise StoreError(
            f"{first.user} was trained together with embedding {member.name!r}, a run of theirs was not closed, and "
            f"recovery needs both: {error}"
        ) from error


def _accepted(group: Group) -> Instant:
    """The versions to which each store would recover by itself."""
    versions: dict[str, Version | None] = {}
    for id, member in group.members.items():
        loaded = None if member.at is None or member.at.before is None else member.at.version
        versions[id] = member.live.now if member.live is not None else loaded or member.rows(killed=False).now
    return Instant(group.number, versions)


def _move(group: Group, folders: Mapping[str, StoreFolder], target: Instant) -> None:
    """Move every store that is not open to its rows of the instant, one atomic write after the other."""
    number = max(group.number, target.number)
    moving: list[str] = []
    staying: list[str] = []
    said = []
    for id in folders:
        member, version = group.members[id], target.versions[id]
        assert version is not None
        stays = (member.clean is not None and member.clean.now == version) or (
            member.at is not None and member.at.by == "recovery" and member.at.version == version
        )
        (staying if stays else moving).append(id)
        said.append(_describe_move(member, version, stays))
    for id in moving:  # all before the first is moved, so that half of a recovery never looks complete
        member, folder = group.members[id], folders[id]
        if member.clean is not None or (member.at is not None and member.at.by == "recovery"):
            _recovery_folder(folder).drop_clean_markers()
    loaded = [id for id in staying if (at := group.members[id].at) is not None and (at.all or at.by == "load")]
    for id in sorted(
        [*moving, *loaded], key=lambda id: (at := group.members[id].at) is not None and at.all is not None
    ):
        member, version = group.members[id], target.versions[id]
        assert member.record is not None
        assert version is not None
        record = replace(member.record, number=number)
        at = At(version, "recovery")
        if id in moving:
            snapshot = member.snapshot_of(version)
            record = replace(record, instant=target, cut=(target.number, number))
            name = "" if snapshot is None else snapshot.name
            _recovery_folder(folders[id]).set_recovery_snapshot(name, group=record, at=at)
        else:
            _recovery_folder(folders[id]).change(group=record, at=at)
    log.warning("embeddings that are trained together were not closed by their last run: %s", "; ".join(sorted(said)))


def _recovery_folder(folder: StoreFolder) -> StoreFolder:
    """The folder, locked as well, whose MARK has the group."""
    return (
        folder.snapshot_store
        if folder.clean_marker is None and folder.snapshot_store.mark.ranks is not None
        else folder
    )


def _describe_move(member: Member, version: Version, stays: bool) -> str:
    """Where a store is moved, and what is lost, for the log."""
    reached = member.reached
    if stays and member.clean is not None:
        return f"{member.name!r} stays at step {reached}"
    snapshot = member.snapshot_of(version)
    step = 0 if snapshot is None else int(snapshot.description["step"])
    to = "starts empty" if snapshot is None else f"rolls back to snapshot {snapshot.name!r}, at step {step}"
    if reached is None or reached < step:
        return f"{member.name!r} {to}, and loses all later writes"
    lost = f"step {reached} is" if reached == step + 1 else f"steps {step + 1} to {reached} are"
    return f"{member.name!r} {to}" + (f", and {lost} lost" if reached > step else "")


def no_instant(group: Group) -> str:
    """The error if there is no instant of which all stores have the rows."""
    has = []
    for member in group.members.values():
        marker = member.state.clean_marker
        if member.live is not None:
            has.append(f"{member.name!r} is open")
        elif marker is not None:
            has.append(f"{member.name!r} has live rows at step {marker['step']}")
        elif member.recovery_snapshot is None:
            has.append(f"{member.name!r} has no snapshot")
        else:
            snapshot = member.recovery_snapshot
            has.append(f"{member.name!r} has snapshot {snapshot.name!r}, at step {snapshot.description['step']}")
    has += [f"the folder of {name!r} is missing" for name in group.missing.values()]
    return (
        f"embeddings that are trained together were not closed by their last run, and there is no step of which all "
        f"have the rows: {', '.join(has)}. Load a checkpoint by graph.load or load_checkpoint; or a snapshot into each "
        'by load_snapshot, or `tierbed snapshot load`; or start over with the store option open="fresh" in each; or '
        'accept these rows as they are with open="mixed"'
    )
