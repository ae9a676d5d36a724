"""Retention: which snapshots of a store to keep, and removal of the others."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ...engine.checks import int_option
from ...engine.errors import SnapshotError
from ..files.format import snapshot_id
from ..files.reader import Snapshot, list_snapshots, snapshot_by_id
from ..files.writer import children_of
from .folder import StoreFolder
from .folder_state import FolderState
from .group import file_of
from .linked import OF_STATE, REPLACED, link_snapshot, remove_snapshot
from .recovery_rule import Record, needed

log = logging.getLogger("tierbed")


class PrunePlan(NamedTuple):
    """The snapshots that a prune keeps and removes, each from the oldest to the latest.

    kept_for_recovery: those of `kept` that only recovery needs.
    """

    kept: list[Snapshot]
    removed: list[Snapshot]
    kept_for_recovery: list[Snapshot]


def plan_prune(
    snapshots: list[Snapshot],
    keep_last: int,
    keep_every: int | None = None,
    recovery_snapshots: Collection[str] = (),
    of_states: Collection[str] = (),
) -> PrunePlan:
    """Which of `snapshots`, from the oldest to the latest, a prune keeps.

    keep_last: how many of the latest to keep, at least 1. keep_every: also keep the first snapshot that reached each
    multiple of this many steps. recovery_snapshots: those that recovery may load. of_states: those that saved states
    name, which are not counted in keep_last. These are kept, and so are the parents of all kept snapshots. Raises
    OptionError, and SnapshotError if a parent is missing.
    """
    keep_last = int_option("keep_last", keep_last, "a whole number from 1", 1)
    if keep_every is not None:
        keep_every = int_option("keep_every", keep_every, "a whole number from 1", 1)
    counted = [s for s in snapshots if s.name not in of_states]
    wanted = {s.name for s in counted[-keep_last:]}.union(of_states)
    reached = -1
    for snapshot in counted:
        if keep_every is not None and (multiple := snapshot.description["step"] // keep_every) > reached:
            reached = multiple
            wanted.add(snapshot.name)
    required, for_recovery = (
        {one.name for snapshot in snapshots if snapshot.name in names for one in snapshot.chain}
        for names in (wanted, recovery_snapshots)
    )
    kept = required | for_recovery
    return PrunePlan(
        [s for s in snapshots if s.name in kept],
        [s for s in snapshots if s.name not in kept],
        [s for s in snapshots if s.name in kept - required],
    )


def plan_for(store: FolderState, keep_last: int, keep_every: int | None = None) -> PrunePlan:
    """What `prune` would do. Raises what `prune` raises."""
    snapshots, damaged = list_snapshots(store.snapshots)
    for error in damaged.values():
        raise SnapshotError(f"nothing is pruned while a snapshot cannot be read: {error}") from error
    of_states = [snapshot.name for snapshot in snapshots if is_of_state(snapshot)]
    return plan_prune(snapshots, keep_last, keep_every, needed_names(store), of_states)


def needed_names(store: FolderState) -> set[str]:
    """The names of the snapshots that recovery of any store with these snapshots may load, or that are parents.

    Raises SnapshotError, StoreError.
    """
    ids = {id for one in store.sharing for id in file_of(one).needed}
    snapshots = list_snapshots(store.snapshots).snapshots
    return {snapshot_by_id(store.snapshots, id).name for id in ids & {one.manifest.id for one in snapshots}}


def undone_names(snapshots: Path, record: Record, store: str) -> set[str]:
    """The names of the snapshots of a store that a recovery has undone, so that a run may save these names again."""
    low, high = record.undone.get(store, (0, 0))
    kept = needed(record, store)
    return {
        one.name
        for one in (list_snapshots(snapshots).snapshots if high > low else ())
        if low < one.manifest.sequence <= high and one.manifest.id not in kept
    }


def state_snapshot(store: StoreFolder, id: str | None, keep: int | None) -> Path | None:
    """The snapshot for a `state_dict()` of the rows of snapshot `id`: a link to it. Raises SnapshotError.

    None if no snapshot has them. Before a new one is linked, all but the latest `keep` snapshots of states are removed.
    """
    made = None if id is None else snapshot_by_id(store.snapshots, id)
    place = None if made is None else store.snapshots / (OF_STATE + made.manifest.id)
    if keep is not None and (place is None or not place.is_dir()):
        _prune_states(store, keep)
    if made is not None and place is not None and not place.is_dir():
        link_snapshot(made, place)
    return place


def is_of_state(snapshot: Snapshot) -> bool:
    """Whether a `state_dict()` made the snapshot: its name has its id."""
    return snapshot.name == OF_STATE + snapshot.manifest.id


def _prune_states(store: StoreFolder, keep: int) -> None:
    """Remove snapshots of states, except the latest `keep` and those that recovery or children need. SnapshotError."""
    of_states = [snapshot for snapshot in list_snapshots(store.snapshots).snapshots if is_of_state(snapshot)]
    of_states.sort(key=lambda one: one.folder.stat().st_mtime_ns)  # the link to an old snapshot may be new
    before = of_states[:-keep]
    kept = needed_names(store) if before else set()
    for snapshot in before:
        if snapshot.name in kept or children_of(snapshot.folder):
            continue
        remove_snapshot(snapshot.folder)
        log.info(
            "state_dict_snapshots=%d: removed snapshot %r; a state_dict at step %d names it and cannot be loaded",
            keep,
            snapshot.name,
            snapshot.description["step"],
        )


def keep_replaced(folder: Path) -> None:
    """Give a snapshot that a save is about to replace a second name, as recovery may need it. SnapshotError."""
    snapshot = Snapshot.open(folder)
    place = folder.with_name(f"{REPLACED}{snapshot.manifest.id}")
    if not place.is_dir():  # else a failed save left it
        link_snapshot(snapshot, place)


def drop_replaced(store: StoreFolder) -> None:
    """Remove snapshots of `keep_replaced` that recovery does not need any more. Raises SnapshotError."""
    try:
        kept = [place for place in store.snapshots.glob(f"{REPLACED}*/") if is_replaced(place)]
    except OSError as error:
        raise SnapshotError(f"the snapshots in {str(store.snapshots)!r} cannot be listed: {error}") from error
    if kept:
        needed_now = needed_names(store)
        for place in kept:
            if place.name not in needed_now and not children_of(place):
                remove_snapshot(place)


def is_replaced(folder: Path) -> bool:
    """Whether a snapshot has a name of `keep_replaced`."""
    return folder.name == f"{REPLACED}{snapshot_id(folder)}"


def prune(store: StoreFolder, keep_last: int, keep_every: int | None = None) -> PrunePlan:
    """Remove the snapshots of a store that `plan_prune` does not keep. Returns what was kept and removed.

    Snapshots are removed one by one, the latest first, so that every remaining snapshot has its parents at any time,
    also after a kill. Raises SnapshotError and removes nothing if a manifest is damaged, since the parent of that
    snapshot is unknown.
    """
    drop_replaced(store)
    plan = plan_for(store, keep_last, keep_every)
    for snapshot in reversed(plan.removed):
        remove_snapshot(snapshot.folder)
    return plan


def remove_if_unreferenced(store: StoreFolder, saved: Snapshot) -> None:
    """Remove a snapshot, unless recovery or a child needs it, or another has replaced it. Raises SnapshotError."""
    place = store.snapshots / saved.name
    if snapshot_id(place) == saved.manifest.id and saved.name not in needed_names(store) and not children_of(place):
        remove_snapshot(place)
