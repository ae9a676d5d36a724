"""Which snapshots of a store are kept, and the removal of the rest."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ...engine.checks import int_option
from ...engine.errors import SnapshotError
from ..files.format import snapshot_id
from ..files.reader import Snapshot, list_snapshots
from ..files.versions import Version
from ..files.writer import children_of
from .folder import StoreFolder
from .folder_state import FolderState
from .instants import needed_snapshots, rows_of
from .linked import OF_STATE, REPLACED, link_snapshot, remove_snapshot

log = logging.getLogger("tierbed")


class PrunePlan(NamedTuple):
    """The snapshots that a prune keeps and removes, each from the oldest to the latest.

    for_live_rows: of those kept, the ones that nothing but live rows, which go back to them, needs.
    """

    kept: list[Snapshot]
    removed: list[Snapshot]
    for_live_rows: list[Snapshot]


def plan_prune(
    snapshots: list[Snapshot],
    keep_last: int,
    keep_every: int | None = None,
    bases: Collection[str | None] = (),
    replaced: Collection[str] = (),
    of_states: Collection[str] = (),
) -> PrunePlan:
    """Which of `snapshots`, from the oldest to the latest, a prune keeps.

    keep_last: how many of the latest are kept, at least 1. keep_every: of each so many steps, the first snapshot that
    reached them is kept. bases: the snapshots that live rows go back to after a kill. replaced: snapshots whose names
    others may take at any instant. of_states: those that saved states name, which do not count. These, and all that a
    kept snapshot goes over, are kept as well.
    Raises OptionError, and SnapshotError where a kept snapshot lacks a parent.
    """
    keep_last = int_option("keep_last", keep_last, "a whole number from 1", 1)
    if keep_every is not None:
        keep_every = int_option("keep_every", keep_every, "a whole number from 1", 1)
    asked_for = [s for s in snapshots if s.name not in of_states]
    wanted = {s.name for s in asked_for[-keep_last:]}.union(replaced, of_states)
    reached = -1
    for snapshot in asked_for:
        if keep_every is not None and (multiple := snapshot.description["step"] // keep_every) > reached:
            reached = multiple
            wanted.add(snapshot.name)
    asked = {held.name for snapshot in snapshots if snapshot.name in wanted for held in snapshot.chain}
    kept = asked.union(held.name for snapshot in snapshots if snapshot.name in bases for held in snapshot.chain)
    return PrunePlan(
        [s for s in snapshots if s.name in kept],
        [s for s in snapshots if s.name not in kept],
        [s for s in snapshots if s.name in kept - asked],
    )


def plan_for(store: FolderState, keep_last: int, keep_every: int | None = None) -> PrunePlan:
    """What `prune` would do. Raises what it raises."""
    noting = store.all_noting
    replaced = {name for state in noting for name in state.replaced}
    needed = {name for state in noting for name in needed_snapshots(state.path)}
    bases = [*needed, *(state.base for state in noting)]
    snapshots = all_in(store.snapshots)
    return plan_prune(snapshots, keep_last, keep_every, bases, replaced, [s.name for s in snapshots if is_of_state(s)])


def state_snapshot(store: StoreFolder, now: Version, keep: int | None) -> Path | None:
    """The snapshot that a state of rows of this version names, linked if another one has them. SnapshotError.

    None if no snapshot has them. Before there is a new one, all of states but the latest `keep` are removed.
    """
    made = next((one for one in list_snapshots(store.snapshots).snapshots if rows_of(one).now == now), None)
    place = None if made is None else store.snapshots / (OF_STATE + made.manifest.id)
    if keep is not None and (place is None or not place.is_dir()):
        _prune_states(store, keep)
    if made is not None and place is not None and not place.is_dir():
        link_snapshot(made, place)
    return place


def is_of_state(snapshot: Snapshot) -> bool:
    """Whether a `state_dict()` has made the snapshot: it is named by its own id."""
    return snapshot.name == OF_STATE + snapshot.manifest.id


def _prune_states(store: StoreFolder, keep: int) -> None:
    """Remove snapshots of states but the latest `keep`, and those that recovery or others need. SnapshotError."""
    of_states = [snapshot for snapshot in list_snapshots(store.snapshots).snapshots if is_of_state(snapshot)]
    of_states.sort(key=lambda one: one.folder.stat().st_mtime_ns)  # a link of an old snapshot may be new
    before = of_states[:-keep]
    needed = {state.base for state in store.all_noting} | set(needed_snapshots(store.path)) if before else set()
    for snapshot in before:
        if snapshot.name in needed or children_of(snapshot.folder):
            continue
        remove_snapshot(snapshot.folder)
        log.info(
            "state_dict_snapshots=%d: removed snapshot %r; the state_dict of step %d that names it can no longer load",
            keep,
            snapshot.name,
            snapshot.description["step"],
        )


def keep_replaced(folder: Path) -> None:
    """Give a snapshot that a save is about to replace a second name, as recovery may go back to it. SnapshotError."""
    snapshot = Snapshot.open(folder)
    place = folder.with_name(f"{REPLACED}{snapshot.manifest.id}")
    if not place.is_dir():  # a save that failed left it
        link_snapshot(snapshot, place)


def drop_replaced(store: StoreFolder) -> None:
    """Remove what `keep_replaced` has kept, where recovery does not need it any more. Raises SnapshotError."""
    kept = [place for place in store.snapshots.glob(f"{REPLACED}*/") if is_replaced(place)]
    if kept:
        needed = needed_snapshots(store.path)
        for place in kept:
            if place.name not in needed and not children_of(place):
                remove_snapshot(place)


def is_replaced(folder: Path) -> bool:
    """Whether a snapshot has the name that `keep_replaced` gave it."""
    return folder.name == f"{REPLACED}{snapshot_id(folder)}"


def all_in(folder: Path) -> list[Snapshot]:
    """The snapshots in a folder for `plan_prune`. Raises SnapshotError where a manifest is damaged."""
    listing = list_snapshots(folder)
    for error in listing.damaged.values():
        raise SnapshotError(f"nothing is pruned while a snapshot cannot be read: {error}") from error
    return listing.snapshots


def prune(store: StoreFolder, keep_last: int, keep_every: int | None = None) -> PrunePlan:
    """Remove the snapshots of a store that `plan_prune` does not keep. Returns what was kept and removed.

    Snapshots are removed one after the other, the latest first. So at any instant, a kill included, every remaining
    snapshot has all that it goes over. Raises SnapshotError, and removes nothing, where a manifest is damaged: what
    that snapshot goes over is unknown then.
    """
    drop_replaced(store)
    plan = plan_for(store, keep_last, keep_every)
    for snapshot in reversed(plan.removed):
        remove_snapshot(snapshot.folder)
    return plan


def remove_if_unreferenced(store: StoreFolder, saved: Snapshot) -> None:
    """Remove a snapshot that nobody asked to keep, unless live rows or other snapshots go back to it. SnapshotError.

    Another one that has its name by now stays.
    """
    place = store.snapshots / saved.name
    bases = {state.base for state in (store, *store.all_noting)}
    if snapshot_id(place) == saved.manifest.id and saved.name not in bases and not children_of(place):
        remove_snapshot(place)
