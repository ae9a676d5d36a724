"""Where the record of a group is: in MARK of a store that is trained alone, else in a file GROUP-<id> of its own.

The file lies in the folder of the model, beside one of the stores. Each store's MARK leads to it, and it lists the
stores: a store is a member if both hold.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.durable import read_record, seal, unseal, write_atomically
from ...engine.errors import SnapshotError, StoreError
from ..files.format import MANIFEST
from ..files.reader import Listing, Snapshot, list_snapshots, name_of
from .folder_state import SNAPSHOTS, FolderState, shard_versions
from .lock import FileLock, InUseError
from .mark import Link, OldGroup, live_version
from .record import EMPTY, NOTHING, Entry, Files, NoCommonRows, Place, Record, choose, needed, usable

PREFIX = "GROUP-"
_UNKNOWN = "unknown"  # a snapshot that no folder has
Shards = Mapping[str, Mapping[int, str | None]]  # by the paths of stores, the versions of their shards on all hosts


class GroupFile:
    """The record of the group of a store, as it was read. Raises StoreError.

    path: of the file; None if it is in the store's MARK. store: the store's id in it.
    """

    def __init__(
        self,
        folder: FolderState,
        shards: Shards | None = None,
        beside: Sequence[Path] = (),
        here: Mapping[str, FolderState] | None = None,
        is_alone: bool = False,
    ) -> None:
        """folder: of the store. shards: of stores whose rows ranks share; those on this host if it is not given.

        beside: folders where others of the group may be now, if they have been moved. here: the stores that this
        process has open, whose MARK nobody else writes, by their real paths. is_alone: whether it has no group,
        whatever its MARK leads to, and is a new store for others.
        """
        self.folder, self.shards, self.beside, self.here = folder, shards or {}, beside, here or {}
        self.home = folder.recovery_folder  # whose MARK has the record, or leads to it
        mark = self.home.mark
        self.path: Path | None = None
        self.store = mark.store or (mark.group.id if mark.group is not None else secrets.token_hex(8))
        if is_alone:
            self.store = secrets.token_hex(8)
            self.record = self._of_old_store()
        elif mark.link is not None:
            self.path, self.record = self._follow(mark.link)
            self._check_no_copy()
        elif mark.group is not None:
            self.path, self.record = self._of_old_group(mark.group)
        elif mark.exists or not self._find_by_place():
            self.record = mark.record or self._of_old_store()

    def read_again(self) -> None:
        """Read the record once more, of a group whose lock was not taken before. StoreError."""
        if self.path is not None and self.path.exists():
            self.path, self.record = self._follow(Link.to(self.path, self.home.path))

    @property
    def key(self) -> str:
        """What all stores of the group have alike."""
        return os.path.realpath(self.home.path if self.path is None else self.path)

    def _follow(self, link: Link) -> tuple[Path, Record]:
        folder, error = self.home.path, ""
        while True:
            for path in link.paths(folder):
                try:
                    content = unseal(read_record(path))
                    if "forward" not in content:
                        return path, self._checked(path, Record.parse(content))
                    link, folder = Link(*map(str, content["forward"])), path.parent
                    break
                except (OSError, ValueError, TypeError, KeyError, AttributeError) as wrong:
                    error = error or f"{str(path)!r}: {wrong}"
            else:
                named = ", ".join(repr(one.name) for one in self.listing.snapshots) or "none"
                raise StoreError(
                    f"{str(self.folder.path)!r} is trained together with other embeddings, and the record of what they "
                    f"hold is missing or damaged, {error}: put that file back; or take the store out of its group by "
                    f"`tierbed store detach`, and load one of its snapshots ({named})"
                )

    def _checked(self, path: Path, record: Record) -> Record:
        if self.store not in record.now:
            raise StoreError(
                f"{str(self.folder.path)!r} is not listed in {str(path)!r}, to which it leads: it is from before it "
                "was taken out; load one of its snapshots after `tierbed store detach`"
            )
        return record

    def _check_no_copy(self) -> None:
        """Raises StoreError if the record lists another folder for this store, which exists and leads there as well."""
        assert self.path is not None
        place = self.record.places[self.store]
        there = [self._folder(path) for path in place.paths(self.path.parent) if path.is_dir()]
        same = [one for one in there if one.recovery_folder.mark.store == self.store]
        ours = (self.folder.path, self.folder.snapshot_store.path)
        if same and not any(os.path.samefile(one.path, path) for one in same for path in ours):
            raise StoreError(
                f"{str(self.folder.path)!r} is a copy of {str(same[0].path)!r}, which is trained together with other "
                "embeddings: move the latter away if this one is to take its place, or make this one a store of its "
                "own by `tierbed store detach`"
            )

    def _find_by_place(self) -> bool:
        """Whether a record in the folder of the model lists this folder, whose MARK is lost, but not its snapshots."""
        if not self.listing.snapshots:
            return False
        for path in sorted(self.folder.path.parent.glob(f"{PREFIX}*")):
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                record = Record.parse(unseal(read_record(path)))
                if record.joining:
                    continue
                for store, place in record.places.items():
                    if any(
                        one.is_dir() and os.path.samefile(one, self.folder.path) for one in place.paths(path.parent)
                    ):
                        self.path, self.record, self.store = path, record, store
                        return True
        return False

    @property
    def listing(self) -> Listing:
        return list_snapshots(self.folder.snapshots)

    @property
    def last_snapshot(self) -> str | None:
        """The name of the snapshot of the last step that the record has of all stores; None for none."""
        id = self.record.commit[self.store]
        return None if id == EMPTY else name_of(self.folder.snapshots, id)

    def _of_old_store(self) -> Record:
        """The record of a new store, or of one that an earlier version wrote and that was trained alone."""
        mark, ids = self.home.mark, {one.name: one.manifest.id for one in self.listing.snapshots}
        recovery, parent = self.home.recovery_snapshot, self.home.parent_snapshot
        latest = next(reversed(ids.values()), EMPTY)
        commit = latest if recovery is None else ids.get(recovery, EMPTY)
        files = self.files(self.folder)
        live = files.live[0] if len({*files.live}) == 1 else None
        shards = self.shards_of(self.folder)
        if len(shards) < self.folder.ranks and None not in shards.values() and len({*shards.values()}) < 2:
            live = next(iter(shards.values()), _UNKNOWN)  # the others may be on other hosts
        has_rows = mark.ranks is not None and live == f"{mark.ranks.run}:{mark.ranks.saved}"
        snapshot = commit if live is None and not self.folder.was_open else commit if has_rows else None
        trained = frozenset({self.store} if live is None and self.folder.was_open else ())
        parents = {self.store: ids.get(parent or "", EMPTY)} if parent else {}
        of_one = {self.store: commit}
        return Record({self.store: Entry(snapshot, live)}, of_one, of_one, trained=trained, parents=parents)

    def _of_old_group(self, group: OldGroup) -> tuple[Path, Record]:
        """The record of stores that an earlier version trained together: where it will be, or is since one was opened.

        Its commit are the newest snapshots of one save of all.
        """
        found, waiting = dict[str, FolderState](), [(group.id, self.folder, group)]
        places = dict[str, tuple[Path, Place]]()
        while waiting:
            id, folder, noted = waiting.pop()
            found[id] = folder
            for other, place in noted.others.items():
                path = next((one for one in place.paths(folder.path) if one.is_dir()), None)
                places.setdefault(other, (folder.path, place))
                state = None if path is None else FolderState(path)
                theirs = None if state is None else state.recovery_folder.mark.group
                if state is not None and theirs is not None and theirs.id == other and other not in found:
                    waiting.append((other, state, theirs))
        first = min(found.values(), key=lambda one: one.path.name).snapshot_store.path.parent
        name = hashlib.sha256(" ".join(sorted({*found, *places})).encode()).hexdigest()[:16]
        path = first / f"{PREFIX}{name}"
        if path.exists():
            return self._follow(Link.to(path, self.home.path))
        listed = {id: Place.of(one.path, one.snapshot_store.path, first) for id, one in found.items()}
        listed |= {
            id: Place(place.name, os.path.relpath(place.paths(folder)[0], first), place.absolute)
            for id, (folder, place) in places.items()
            if id not in found
        }
        files = {id: self.files(folder) for id, folder in found.items()}
        lives = {id: one.live[0] if len({*one.live}) == 1 else None for id, one in files.items()}
        saves = {
            id: {one.manifest.moment: one.manifest.id for one in list_snapshots(folder.snapshots).snapshots}
            for id, folder in found.items()
        }
        shared = set.intersection(*({*of_store} - {None} for of_store in saves.values()))
        newest = next((moment for moment in reversed(saves[min(saves)]) if moment in shared), None)
        commit = {id: saves[id].get(newest, _UNKNOWN) if id in saves else _UNKNOWN for id in listed}
        now = {id: Entry(None, lives.get(id)) for id in listed}
        trained = frozenset(id for id, live in lives.items() if live is None)
        parents = {id: commit[id] for id in commit if newest is not None}
        return path, Record(now, commit, commit, places=listed, trained=trained, parents=parents)

    def members(self, lenient: bool = False) -> dict[str, FolderState]:
        """The folders of the stores, by id. StoreError if one is missing, or is from before it joined the group.

        lenient: leave these out instead.
        """
        if self.path is None:
            return {self.store: self.folder}
        found: dict[str, FolderState] = {}
        for store, place in self.record.places.items():
            if store == self.store:
                found[store] = self.folder
                continue
            moved = [path for path in self.beside if path.name == place.name]
            there = [self._folder(path) for path in (*place.paths(self.path.parent), *moved) if path.is_dir()]
            if not there and not lenient:
                raise StoreError(
                    f"the rows of embedding {place.name!r}, which was trained together with {self.folder.path.name!r}, "
                    f"are lost: {place.absolute!r} is missing. Put it back; or start over with the store option "
                    'open="fresh" in each; or accept it without rows with open="mixed"'
                )
            ours = next((one for one in there if self._leads_here(one, store)), None)
            if ours is not None:
                found[store] = ours
            elif not self.record.joining and not lenient:
                raise StoreError(
                    f"{str(there[0].path)!r} is not of the group that {self.folder.path.name!r} is trained in: it is "
                    "new, from before it was trained together with it, or another store. Put the right folder back; or "
                    'start over with the store option open="fresh" in each; or accept it as it is with open="mixed"'
                )
        return found

    def _folder(self, path: Path) -> FolderState:
        return self.here.get(os.path.realpath(path)) or FolderState(path)

    def _leads_here(self, folder: FolderState, store: str) -> bool:
        mark = folder.recovery_folder.mark
        if not mark.exists:  # it is lost
            return bool(list_snapshots(folder.snapshots).snapshots)
        if mark.link is None:  # it has not been opened since an earlier version trained it with these
            return mark.group is not None and mark.group.id == store and self.store in mark.group.others
        direct = any(os.path.realpath(path) == self.key for path in mark.link.paths(folder.recovery_folder.path))
        return mark.store == store and (direct or GroupFile(folder).key == self.key)

    def files(self, folder: FolderState) -> Files:
        """What recovery reads of a store."""
        versions = self.shards_of(folder)
        live = [versions.get(rank) for rank in range(folder.ranks)] or [live_version(folder.clean_marker)]
        return Files(live, {one.manifest.id for one in list_snapshots(folder.snapshots).snapshots})

    def shards_of(self, folder: FolderState) -> Mapping[int, str | None]:
        """The versions of the shards of a store, by rank, without those that are on other hosts."""
        known = self.shards.get(str(folder.path))
        return shard_versions(folder.path, folder.ranks) if known is None else known

    def unclean(self) -> dict[str, FolderState]:
        """The stores that their last run has not closed."""
        members = self.members(lenient=True)
        live = {store: self.record.now[store].live for store, folder in members.items() if folder.ranks}
        lost = {x for x, version in live.items() if version and {version} != {*self.files(members[x]).live}}
        return {store: members[store] for store in self.record.trained | lost if store in members}

    def _check_here(self, store: str, folder: FolderState) -> None:
        """Raises StoreError if live rows that no snapshot has may be in shards of ranks on other hosts."""
        entry, shards, ranks = self.record.now[store], self.shards_of(folder), folder.ranks
        away = [str(rank) for rank in range(ranks) if rank not in shards]
        is_saved = usable(entry, self.files(folder)).snapshot is not None
        if away and entry.live and {*shards.values()} <= {entry.live} and not is_saved:
            lacks = f"the shards of rank {', '.join(away)} are not" if shards else "none of their shards is"
            raise StoreError(
                f"store folder {str(folder.path)!r} has live rows of {ranks} ranks, and {lacks} here: open it where "
                f"they are, with {ranks} ranks, and save a snapshot. To do without these rows, `tierbed snapshot load` "
                'loads a snapshot, and open="fresh" starts empty'
            )

    def target(self) -> dict[str, Entry]:
        """What each member opens with, if no process trains one of them. StoreError, SnapshotError."""
        members = self.members()
        for store, folder in members.items():
            self._check_here(store, folder)
        files = {store: self.files(folder) for store, folder in members.items()}
        try:
            chosen = choose(self.record, files)
        except NoCommonRows:
            _check_damage(members.values())
            raise StoreError(self._no_common_rows(members)) from None
        if any(chosen[store].snapshot != self.record.commit[store] and not chosen[store].live for store in chosen):
            _check_damage(members.values())
        saved = any(self.record.parents.get(store, EMPTY) != EMPTY for store in members)
        if saved and {*chosen.values()} == {Entry(EMPTY)} and chosen != {x: self.record.now[x] for x in chosen}:
            raise StoreError(self._no_common_rows(members))
        return chosen

    def after_kill(self) -> dict[str, Entry]:
        """What each member would open with if the processes that have stores open were killed now."""
        alone = replace(self.record, now={store: Entry(entry.snapshot) for store, entry in self.record.now.items()})
        file = copy(self)
        file.record = alone
        return file.target()

    def own_entry(self) -> Entry:
        """What the store opens with while another process trains others of its group. NOTHING if it is unknown."""
        return usable(self.record.now[self.store], self.files(self.folder))

    def _no_common_rows(self, members: Mapping[str, FolderState]) -> str:
        has = []
        for folder in sorted(members.values(), key=lambda one: one.path.name):
            snapshots, marker = list_snapshots(folder.snapshots).snapshots, folder.clean_marker
            if marker is not None:
                has.append(f"{folder.path.name!r} has live rows at step {marker['step']}")
            elif snapshots:
                latest = snapshots[-1]
                has.append(f"{folder.path.name!r} has snapshot {latest.name!r}, at step {latest.description['step']}")
            else:
                has.append(f"{folder.path.name!r} has no snapshot")
        return (
            "embeddings that are trained together were not closed by their last run, and there is no step of which all "
            f"have the rows: {', '.join(has)}. Load a checkpoint by graph.load or load_checkpoint; or a snapshot into "
            'each by load_snapshot, or `tierbed snapshot load`; or start over with the store option open="fresh" in '
            'each; or accept these rows as they are with open="mixed"'
        )

    def newest(self) -> dict[str, Entry]:
        """What each member has by itself, for open="mixed"."""
        chosen = {}
        for store, folder in self.members(lenient=True).items():
            files, ids = self.files(folder), [one.manifest.id for one in list_snapshots(folder.snapshots).snapshots]
            last = Entry(self.record.parents.get(store, self.record.commit[store]))
            own = (usable(one, files) for one in (self.record.now[store], last))
            chosen[store] = next((one for one in own if one != NOTHING), Entry(ids[-1] if ids else EMPTY))
        return chosen


def needed_ids(file: GroupFile) -> set[str]:
    """The ids of the snapshots of a store that its record names."""
    return {id for id in needed(file.record, {}, file.store) if id not in (None, EMPTY)}


def check_one_moment(names: Sequence[str], snapshots: Sequence[Snapshot]) -> None:
    """Raises SnapshotError if the snapshots of embeddings of these names were saved at different steps.

    The ids of one save have their first half alike; for those of an earlier version see `Manifest.moment`.
    """
    manifests = [snapshot.manifest for snapshot in snapshots]
    moments = {one.moment for one in manifests}
    of_one_save = len({one.id[:16] for one in manifests}) == 1 or (len(moments) == 1 and None not in moments)
    if not of_one_save and len({one.description["step"] for one in snapshots}) > 1:
        both = zip(names, snapshots, strict=True)
        steps = ", ".join(f"{name!r} at step {one.description['step']}" for name, one in both)
        raise SnapshotError(
            f"the snapshots {snapshots[0].name!r} were not saved together, and have rows of different steps: {steps}. "
            "Load each by itself, or the name of a save of all of them"
        )


def lock_of_group(path: Path, file: GroupFile) -> FileLock:
    """The lock of the group whose record is in a file, as it was read. StoreError."""
    try:
        return FileLock(lock_file(path), f"the group of {file.folder.path.name!r}")
    except InUseError as error:
        names = ", ".join(sorted(repr(place.name) for place in file.record.places.values()))
        raise StoreError(
            f"process {error.holder} trains embeddings of the group {names}, and one process at a time can: train them "
            "in one process or one world, or take a store out by `tierbed store detach` when that process has ended"
        ) from None


def lock_file(path: Path) -> Path:
    """The file that whoever writes the record of a file, or rows of its stores, has locked."""
    return path.with_name(f"{path.name}.LOCK")


def put(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file of a record, or a forward. StoreError."""
    try:
        write_atomically(path, seal(content))
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}, the record of a group: {error}; {FolderState.remedy}") from error


def _check_damage(folders: Iterable[FolderState]) -> None:
    """Raises SnapshotError if a snapshot cannot be read, which may be one that recovery needs."""
    for folder in folders:
        for name, error in list_snapshots(folder.snapshots).damaged.items():
            if os.path.lexists(folder.path / SNAPSHOTS / name / MANIFEST):
                raise SnapshotError(f"it is unknown which step is the latest: {error}") from error
