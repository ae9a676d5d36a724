"""Decides which snapshots of a store to keep, removes the other snapshots, and folds those that only others need."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ...engine.checks import check_int
from ...engine.errors import SnapshotError
from ..files.format import read_snapshot_id
from ..files.reader import Snapshot, find_snapshot, list_snapshots
from ..files.writer import ProgressCallback, find_children
from . import folding
from .folder import StoreFolder
from .folder_state import FolderState
from .group import find_group_file
from .linking import BACKUP_PREFIX, STATE_PREFIX, link_snapshot, remove_snapshot
from .recovery_rule import Record, find_needed_ids

log = logging.getLogger("tierbed")


class PrunePlan(NamedTuple):
    """The snapshots that a prune keeps and removes. Each list is sorted from oldest to latest."""

    retained: list[Snapshot]  # includes the snapshots to fold
    removed: list[Snapshot]
    retained_for_recovery: list[Snapshot]  # the part of `retained` that only recovery needs
    folds: list[folding.Run]  # the parts of `retained` that are each merged into their last snapshot

    @property
    def folded(self) -> list[Snapshot]:
        """The part of `retained` that is removed once it is merged into later snapshots."""
        return [snapshot for run in self.folds for snapshot in run[:-1]]


def plan_prune(
    snapshots: list[Snapshot],
    keep_last: int,
    keep_every: int | None = None,
    recovery_snapshots: Collection[str] = (),
    state_snapshots: Collection[str] = (),
) -> PrunePlan:
    """Decide which snapshots a prune keeps, including their parents, and which it folds.

    Raises OptionError, SnapshotError.

    Args:
        snapshots: All snapshots, from oldest to latest.
        keep_last: The number of latest snapshots to keep.
        keep_every: A number of steps, or None. Also keeps the first snapshot at or after each multiple of this number.
        recovery_snapshots: Names of snapshots that recovery may load. They are kept.
        state_snapshots: Names of snapshots that `state_dict()` made. They are kept, and not counted in `keep_last`.
    """
    keep_last = check_int("keep_last", keep_last, "a whole number from 1", 1)
    if keep_every is not None:
        keep_every = check_int("keep_every", keep_every, "a whole number from 1", 1)
    counted = [snapshot for snapshot in snapshots if snapshot.name not in state_snapshots]
    latest_names = {snapshot.name for snapshot in counted[-keep_last:]}
    selected_names = latest_names.union(state_snapshots)
    last_multiple = -1
    for snapshot in counted:
        if keep_every is not None and (multiple := snapshot.description["step"] // keep_every) > last_multiple:
            last_multiple = multiple
            selected_names.add(snapshot.name)
    required_names, recovery_names = (
        {ancestor.name for snapshot in snapshots if snapshot.name in names for ancestor in snapshot.chain}
        for names in (selected_names, recovery_snapshots)
    )
    retained_names = required_names | recovery_names
    retained = [snapshot for snapshot in snapshots if snapshot.name in retained_names]
    final_names = selected_names.difference(latest_names, state_snapshots)  # those that `keep_every` keeps
    return PrunePlan(
        retained,
        [snapshot for snapshot in snapshots if snapshot.name not in retained_names],
        [snapshot for snapshot in snapshots if snapshot.name in retained_names - required_names],
        folding.plan_folds(retained, selected_names.union(recovery_snapshots), final_names),
    )


def plan_store_prune(store: FolderState, keep_last: int, keep_every: int | None = None) -> PrunePlan:
    """Returns the plan of a `prune` with these arguments. Raises the same errors as `prune`."""
    snapshots, damaged = list_snapshots(store.snapshots_path)
    for error in damaged.values():
        raise SnapshotError(f"nothing is pruned while a snapshot cannot be read: {error}") from error
    state_snapshots = [snapshot.name for snapshot in snapshots if is_state_snapshot(snapshot)]
    return plan_prune(snapshots, keep_last, keep_every, list_needed_names(store), state_snapshots)


def list_needed_names(store: FolderState) -> set[str]:
    """Returns names of snapshots that this store or a sharing store needs. Raises SnapshotError, StoreError."""
    ids = {id for f in map(find_group_file, store.sharing_stores) for id in find_needed_ids(f.record, f.store_id)}
    snapshots = list_snapshots(store.snapshots_path).snapshots
    return {find_snapshot(store.snapshots_path, id).name for id in ids & {each.manifest.id for each in snapshots}}


def find_reusable_names(snapshots: Path, record: Record, store_id: str) -> set[str]:
    """Returns the names of a store's snapshots that recovery skipped. A run may overwrite these snapshots.

    Excludes parents of snapshots that were saved later, after a load of a skipped snapshot.
    """
    low, high = record.skipped_sequences.get(store_id, (0, 0))
    reusable_names, kept_names = set[str](), set[str]()
    needed_ids = find_needed_ids(record, store_id)
    for snapshot in reversed(list_snapshots(snapshots).snapshots if high > low else []):  # children before parents
        manifest = snapshot.manifest
        if low < manifest.sequence <= high and not (manifest.id in needed_ids or snapshot.name in kept_names):
            reusable_names.add(snapshot.name)
        elif manifest.parent is not None:
            kept_names.add(manifest.parent.name)
    return reusable_names


def link_state_snapshot(store: StoreFolder, id: str | None, keep: int | None) -> Path | None:
    """Link a snapshot for a `state_dict()`. Returns the link, or None if `id` is None. Raises SnapshotError.

    First removes links that earlier calls of `state_dict()` made, except the latest `keep` links.
    """
    snapshot = None if id is None else find_snapshot(store.snapshots_path, id)
    link = None if snapshot is None else store.snapshots_path / (STATE_PREFIX + snapshot.manifest.id)
    if keep is not None and (link is None or not link.is_dir()):
        _prune_states(store, keep)
    if snapshot is not None and link is not None and not link.is_dir():
        link_snapshot(snapshot, link)
    return link


def is_state_snapshot(snapshot: Snapshot) -> bool:
    """True if a `state_dict()` made the snapshot: its name contains its id."""
    return snapshot.name == STATE_PREFIX + snapshot.manifest.id


def _prune_states(store: StoreFolder, keep: int) -> None:
    """Remove the snapshots made by `state_dict()`, except the latest `keep` and any that recovery or a child needs."""
    snapshots = [snapshot for snapshot in list_snapshots(store.snapshots_path).snapshots if is_state_snapshot(snapshot)]
    snapshots.sort(key=lambda snapshot: snapshot.folder.stat().st_mtime_ns)  # the time of the link, not of the save
    removable = snapshots[:-keep]
    needed = list_needed_names(store) if removable else set()
    for snapshot in removable:
        if snapshot.name in needed or find_children(snapshot.folder):
            continue
        remove_snapshot(snapshot.folder)
        log.info(
            "state_dict_snapshots=%d: removed snapshot %r; the state_dict at step %d that names it cannot be loaded",
            keep,
            snapshot.name,
            snapshot.description["step"],
        )


def link_backup(folder: Path) -> None:
    """Link a snapshot under a second name before an overwrite, as recovery may need it. Raises SnapshotError."""
    snapshot = Snapshot.open(folder)
    link = folder.with_name(f"{BACKUP_PREFIX}{snapshot.manifest.id}")
    if not link.is_dir():  # a failed save may have left this link
        link_snapshot(snapshot, link)


def remove_backups(store: StoreFolder) -> None:
    """Remove links that `link_backup` made, except links that recovery or a child needs. Raises SnapshotError."""
    try:
        backups = [folder for folder in store.snapshots_path.glob(f"{BACKUP_PREFIX}*/") if is_backup(folder)]
    except OSError as error:
        raise SnapshotError(f"the snapshots in {str(store.snapshots_path)!r} cannot be listed: {error}") from error
    if backups:
        needed = list_needed_names(store)
        for folder in backups:
            if folder.name not in needed and not find_children(folder):
                remove_snapshot(folder)


def is_backup(folder: Path) -> bool:
    """True if `link_backup` gave the snapshot its name."""
    return folder.name == f"{BACKUP_PREFIX}{read_snapshot_id(folder)}"


def prune(
    store: StoreFolder,
    keep_last: int,
    keep_every: int | None = None,
    folds: bool = True,
    progress: ProgressCallback | None = None,
) -> PrunePlan:
    """Remove a store's snapshots that `plan_prune` does not keep, and fold others. Returns what was done.

    Removes the latest snapshots first, so that even after a kill, every remaining snapshot has its parents. If a
    manifest is damaged, raises SnapshotError and removes nothing, because that snapshot's parent is unknown.
    folds: False if snapshots may be in use. progress: called with the row count of each chunk that is folded.
    """
    remove_backups(store)
    plan = plan_store_prune(store, keep_last, keep_every)
    for snapshot in reversed(plan.removed):
        remove_snapshot(snapshot.folder)
    return plan._replace(folds=[run for run in plan.folds if folds and folding.fold(run, progress)])


def remove_if_unreferenced(store: StoreFolder, saved: Snapshot) -> None:
    """Remove `saved` unless recovery or a child needs it. Keeps a newer snapshot of this name. Raises SnapshotError."""
    name, id, folder = saved.name, saved.manifest.id, store.snapshots_path / saved.name
    if read_snapshot_id(folder) == id and name not in list_needed_names(store) and not find_children(folder):
        remove_snapshot(folder)
