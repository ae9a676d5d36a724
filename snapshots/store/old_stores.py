"""The record of stores that have none: new ones, and those of an earlier version."""

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
from .recovery_rule import EMPTY, Entry, Files, Place, Record

PREFIX = "GROUP-"
_UNKNOWN = "unknown"  # a snapshot that no folder has


class OldGroup(NamedTuple):
    """What an earlier version noted of stores that are trained together: this one's id, and the places of others."""

    id: str
    others: dict[str, Place]

    @classmethod
    def of(cls, mark: Mark) -> OldGroup | None:
        match mark.old.get(OLD_GROUP):
            case {"id": str(id), "peers": dict(peers)}:
                return cls(id, {str(other): Place(*map(str, place)) for other, place in peers.items()})
        return None


def _candidates(home: FolderState) -> Iterator[tuple[str, bool]]:
    """The names that an earlier version noted for the recovery snapshot, "" for none, of which the first one counts.

    With each, whether a user saved or loaded it, and no state_dict. A second text is the id that the snapshot of this
    name had before the save.
    """
    noted = home.mark.old.get(OLD_CANDIDATES)
    for one in noted if isinstance(noted, list) else ():
        match [one, None] if isinstance(one, str) else one:
            case [str(name), *ids]:
                folder = home.snapshots / name
                if not name or (folder.is_dir() and snapshot_id(folder) not in ids):
                    yield name, bool(ids)


def record_of_store(store: str, folder: FolderState, live: str | None, shards: Mapping[int, str | None]) -> Record:
    """Of a new store, or of one that was trained alone. live, shards: versions of its rows, and of ranks' shards."""
    home = folder.recovery_folder
    ids = {"": EMPTY} | {one.name: one.manifest.id for one in list_snapshots(folder.snapshots).snapshots}
    candidates = [*_candidates(home)]
    commit = ids.get(candidates[0][0] if candidates else next(reversed(ids)), EMPTY)
    parent = next((name for name, is_of_user in candidates if is_of_user), "")
    if len(shards) < folder.ranks and None not in shards.values() and len({*shards.values()}) < 2:
        live = next(iter(shards.values()), _UNKNOWN)  # the others may be on other hosts
    is_commit = home.mark.ranks is not None and live == f"{home.mark.ranks.run}:{home.mark.ranks.saved}"
    is_commit |= live is None and not folder.was_open
    was_killed = live is None and folder.was_open
    of_one = {store: commit}
    return Record(
        {store: Entry(commit if is_commit else None, live)},
        of_one,
        of_one,
        trained=frozenset({store} if was_killed else ()),
        parents={store: ids.get(parent, EMPTY)} if parent else {},
    )


def record_of_group(
    folder: FolderState, group: OldGroup, files: Callable[[FolderState], Files]
) -> tuple[Path, Record | None]:
    """Of stores that were trained together. Its commit are the newest snapshots of one save of all.

    Also its path; no record if another of the stores was opened before, so that the file exists. files: of a store.
    """
    found, waiting = dict[str, FolderState](), [(group, folder)]
    places = dict[str, Place]()  # of those that are not found
    while waiting:
        (id, others), folder = waiting.pop()
        found[id] = folder
        for other, place in others.items():
            there = [path for path in place.paths(folder.path) if path.is_dir()]
            places.setdefault(other, place._replace(relative=str(place.paths(folder.path)[0])))
            theirs = FolderState(there[0]) if there else None
            noted = None if theirs is None else OldGroup.of(theirs.recovery_folder.mark)
            if theirs is not None and noted is not None and noted.id == other and other not in found:
                waiting.append((noted, theirs))
    first = min(found.values(), key=lambda one: one.path.name).snapshot_store.path.parent
    name = hashlib.sha256(" ".join(sorted({*found, *places})).encode()).hexdigest()[:16]
    path = first / f"{PREFIX}{name}"
    if path.exists():
        return path, None
    listed = {id: place._replace(relative=os.path.relpath(place.relative, first)) for id, place in places.items()}
    listed |= {id: Place.of(one.path, one.snapshot_store.path, first) for id, one in found.items()}
    lives = {id: files(folder).one_live for id, folder in found.items()}
    saves = {
        id: {one.manifest.moment: one.manifest.id for one in list_snapshots(folder.snapshots).snapshots}
        for id, folder in found.items()
    }
    shared = set.intersection(*({*of_store} - {None} for of_store in saves.values()))
    newest = next((moment for moment in reversed(saves[min(saves)]) if moment in shared), None)
    commit = {id: saves[id].get(newest, _UNKNOWN) if id in saves else _UNKNOWN for id in listed}
    return path, Record(
        {id: Entry(None, lives.get(id)) for id in listed},
        commit,
        commit,
        places=listed,
        trained=frozenset(id for id, live in lives.items() if live is None),
        parents={} if newest is None else commit,
    )
