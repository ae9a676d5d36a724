"""Builds the record of a store that lacks one: a new store, or a store that an earlier version wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..files.format import OLD_CANDIDATES, OLD_GROUP, snapshot_id
from ..files.reader import list_snapshots
from .folder_state import FolderState
from .mark import Mark
from .recovery_rule import EMPTY, Entry, Files, Location, Record, version_of_snapshot

PREFIX = "GROUP-"
UNKNOWN = "unknown"  # the id of a snapshot that no folder has


class OldGroup(NamedTuple):
    """A training group as an earlier version stored it. id: this store's. others: other stores' locations, by id."""

    id: str
    others: dict[str, Location]

    @classmethod
    def of(cls, mark: Mark) -> OldGroup | None:
        match mark.old.get(OLD_GROUP):
            case {"id": str(id), "peers": dict(peers)}:
                return cls(id, {str(other): Location(*map(str, location)) for other, location in peers.items()})
        return None


def _candidates(home: FolderState) -> Iterator[tuple[str, bool]]:
    """Yields the snapshot names that an earlier version listed in MARK for recovery, best first. "" means no rows.

    Each name comes with True if a user saved or loaded the snapshot, False if a state_dict did. MARK may list ids of
    older snapshots with the same name. A name is skipped if its folder still contains one of these older snapshots.
    """
    candidates = home.mark.old.get(OLD_CANDIDATES)
    for candidate in candidates if isinstance(candidates, list) else ():
        match [candidate, None] if isinstance(candidate, str) else candidate:
            case [str(name), *ids]:
                folder = home.snapshots / name
                if not name or (folder.is_dir() and snapshot_id(folder) not in ids):
                    yield name, bool(ids)


def make_store_record(store: str, folder: FolderState, live: str | None, shards: Mapping[int, str | None]) -> Record:
    """Returns the record of a store that is new or trained alone. live: the rows' version. shards: versions by rank."""
    home = folder.recovery_folder
    ids = {"": EMPTY} | {snapshot.name: snapshot.manifest.id for snapshot in list_snapshots(folder.snapshots).snapshots}
    candidates = [*_candidates(home)]
    commit = ids.get(candidates[0][0] if candidates else next(reversed(ids)), EMPTY)
    parent = next((name for name, is_of_user in candidates if is_of_user), "")
    if len(shards) < folder.ranks and None not in shards.values() and len({*shards.values()}) < 2:
        live = next(iter(shards.values()), UNKNOWN)  # the missing shards may be on other hosts
    is_commit = home.mark.ranks is not None and live == f"{home.mark.ranks.run}:{home.mark.ranks.saved}"
    is_commit |= live == version_of_snapshot(commit)  # killed in the first close, before the record was written
    is_commit |= live is None and not folder.was_open
    commits = {store: commit}
    return Record(
        {store: Entry(commit if is_commit else None, live)},
        commits,
        commits,
        trained=frozenset({store} if live is None and folder.was_open else ()),
        parents={store: ids.get(parent, EMPTY)} if parent else {},
    )


def make_group_record(
    folder: FolderState, group: OldGroup, files: Callable[[FolderState], Files]
) -> tuple[Path, Record | None]:
    """Returns the path and the record of stores that trained together. The commit is the newest save that all share.

    If the record's file already exists, returns None instead of a record. files: a function that reads a store's files.
    """
    folders, pending = dict[str, FolderState](), [(group, folder)]
    places = dict[str, Location]()  # locations by store id, including missing stores
    while pending:
        (id, others), folder = pending.pop()
        folders[id] = folder
        for other, location in others.items():
            paths = [path for path in location.paths(folder.path) if path.is_dir()]
            places.setdefault(other, location._replace(relative=str(location.paths(folder.path)[0])))
            peer = FolderState(paths[0]) if paths else None
            peer_group = None if peer is None else OldGroup.of(peer.recovery_folder.mark)
            if peer is not None and peer_group is not None and peer_group.id == other and other not in folders:
                pending.append((peer_group, peer))
    model_folder = min(folders.values(), key=lambda folder: folder.path.name).snapshot_store.path.parent
    name = hashlib.sha256(" ".join(sorted({*folders, *places})).encode()).hexdigest()[:16]
    path = model_folder / f"{PREFIX}{name}"
    if path.exists():
        return path, None
    listed = {
        id: location._replace(relative=os.path.relpath(location.relative, model_folder))
        for id, location in places.items()
    }
    listed |= {id: Location.of(folder.path, folder.snapshot_store.path, model_folder) for id, folder in folders.items()}
    lives = {id: files(folder).common_version for id, folder in folders.items()}
    saves = {
        id: {folder.manifest.moment: folder.manifest.id for folder in list_snapshots(folder.snapshots).snapshots}
        for id, folder in folders.items()
    }
    shared = set.intersection(*({*moments} - {None} for moments in saves.values()))
    newest = next((moment for moment in reversed(saves[min(saves)]) if moment in shared), None)
    commit = {id: saves[id].get(newest, UNKNOWN) if id in saves else UNKNOWN for id in listed}
    return path, Record(
        {id: Entry(None, lives.get(id)) for id in listed},
        commit,
        commit,
        places=listed,
        trained=frozenset(id for id, live in lives.items() if live is None),
        parents={} if newest is None else commit,
    )
