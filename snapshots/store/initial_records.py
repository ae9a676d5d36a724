"""Builds the record of a store that lacks one: a new store, or a store that an earlier version wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..files.format import OLD_CANDIDATES, OLD_GROUP, read_snapshot_id
from ..files.reader import list_snapshots
from .folder_state import FolderState
from .mark import Mark
from .recovery_rule import EMPTY_ID, Entry, Location, Record, StoreFiles, make_snapshot_version

GROUP_FILE_PREFIX = "GROUP-"
MISSING_SNAPSHOT_ID = "unknown"  # the id of a snapshot that no folder has


class OldGroup(NamedTuple):
    """A training group as an earlier version stored it."""

    id: str  # this store's id
    others: dict[str, Location]  # the other stores' locations, by store id

    @classmethod
    def read(cls, mark: Mark) -> OldGroup | None:
        match mark.old_fields.get(OLD_GROUP):
            case {"id": str(id), "peers": dict(peers)}:
                return cls(id, {str(other): Location(*map(str, location)) for other, location in peers.items()})
        return None


def _yield_candidates(recovery_folder: FolderState) -> Iterator[tuple[str, bool]]:
    """Yields the snapshot names that an earlier version listed in MARK for recovery, best first. "" means no rows.

    Each name comes with True if a user saved or loaded the snapshot, False if a state_dict did. MARK may list ids of
    older snapshots with the same name. A name is skipped if its folder still contains one of these older snapshots.
    """
    candidates = recovery_folder.mark.old_fields.get(OLD_CANDIDATES)
    for candidate in candidates if isinstance(candidates, list) else ():
        match [candidate, None] if isinstance(candidate, str) else candidate:
            case [str(name), *ids]:
                folder = recovery_folder.snapshots_path / name
                if not name or (folder.is_dir() and read_snapshot_id(folder) not in ids):
                    yield name, bool(ids)


def make_store_record(id: str, folder: FolderState, version: str | None, shards: Mapping[int, str | None]) -> Record:
    """Returns the record of a store that is new or trained alone. The rows have `version`, or versions by rank."""
    shard_layout = folder.recovery_folder.mark.shard_layout
    ids = {"": EMPTY_ID} | {each.name: each.manifest.id for each in list_snapshots(folder.snapshots_path).snapshots}
    candidates = [*_yield_candidates(folder.recovery_folder)]
    commit = ids.get(candidates[0][0] if candidates else next(reversed(ids)), EMPTY_ID)
    parent = next((name for name, is_of_user in candidates if is_of_user), "")
    if len(shards) < folder.num_ranks and None not in shards.values() and len({*shards.values()}) < 2:
        version = next(iter(shards.values()), MISSING_SNAPSHOT_ID)  # the missing shards may be on other hosts
    is_commit = shard_layout is not None and version == f"{shard_layout.run}:{shard_layout.saved}"
    is_commit |= version == make_snapshot_version(commit)  # killed in the first close, before the record was written
    is_commit |= version is None and not folder.had_live_rows
    commits, changed_stores = {id: commit}, frozenset({id} if version is None and folder.had_live_rows else ())
    entries, parents = {id: Entry(commit if is_commit else None, version)}, {id: ids.get(parent, EMPTY_ID)}
    return Record(entries, commits, commits, changed_stores=changed_stores, parents=parents if parent else {})


def make_group_record(
    folder: FolderState, group: OldGroup, read_files: Callable[[FolderState], StoreFiles]
) -> tuple[Path, Record | None]:
    """Returns the path and the record of stores that trained together. The commit is the newest save that all share.

    The record is None if its file already exists. read_files: a function that reads a store's files.
    """
    folders, pending = dict[str, FolderState](), [(group, folder)]
    other_locations = dict[str, Location]()  # by store id, including missing stores
    while pending:
        (id, others), folder = pending.pop()
        folders[id] = folder
        for other, location in others.items():
            paths = [path for path in location.list_paths(folder.path) if path.is_dir()]
            other_locations.setdefault(other, location._replace(relative=str(location.list_paths(folder.path)[0])))
            other_folder = FolderState(paths[0]) if paths else None
            other_group = None if other_folder is None else OldGroup.read(other_folder.recovery_folder.mark)
            if other_folder and other_group and other_group.id == other and other not in folders:
                pending.append((other_group, other_folder))
    model_folder = min(folders.values(), key=lambda folder: folder.path.name).snapshot_store.path.parent
    name = hashlib.sha256(" ".join(sorted({*folders, *other_locations})).encode()).hexdigest()[:16]
    path = model_folder / f"{GROUP_FILE_PREFIX}{name}"
    if path.exists():
        return path, None
    locations = {
        id: location._replace(relative=os.path.relpath(location.relative, model_folder))
        for id, location in other_locations.items()
    }
    locations |= {id: Location.make(f.path, f.snapshot_store.path, model_folder) for id, f in folders.items()}
    live_versions = {id: read_files(folder).common_version for id, folder in folders.items()}
    saved_ids = {  # snapshot ids by store and moment
        id: {each.manifest.moment: each.manifest.id for each in list_snapshots(folder.snapshots_path).snapshots}
        for id, folder in folders.items()
    }
    common_moments = set.intersection(*({*moments} - {None} for moments in saved_ids.values()))
    newest = next((moment for moment in reversed(saved_ids[min(saved_ids)]) if moment in common_moments), None)
    commit = {id: saved_ids.get(id, {}).get(newest, MISSING_SNAPSHOT_ID) for id in locations}
    entries = {id: Entry(None, live_versions.get(id)) for id in locations}
    changed_stores = frozenset(id for id, version in live_versions.items() if version is None)
    return path, Record(entries, commit, commit, locations, changed_stores, parents={} if newest is None else commit)
