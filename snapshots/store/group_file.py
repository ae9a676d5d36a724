"""Where the record of a group is: in MARK of a store that is trained alone, else in a file GROUP-<id> of its own.

The file lies in the folder of the model, beside one of the stores. Each store's MARK leads to it, and it lists the
stores: a store is a member if both hold.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ...engine.durable import read_record, seal, unseal, write_atomically
from ...engine.errors import SnapshotError, StoreError
from ..files.format import MANIFEST
from ..files.reader import Listing, Snapshot, list_snapshots, name_of
from .folder import StoreFolder
from .folder_state import SNAPSHOTS, FolderState, shard_versions
from .lock import FileLock, InUseError
from .mark import Link, live_version
from .old_stores import PREFIX, OldGroup, record_of_group, record_of_store
from .recovery_rule import EMPTY, NOTHING, Entry, Files, Record, choose, needed, usable

INVALID = (ValueError, TypeError, KeyError, AttributeError)  # what reading a damaged record raises
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
        is_alone: bool = False,
    ) -> None:
        """folder: of the store. shards: of stores whose rows ranks share; those on this host if it is not given.

        beside: folders where others of the group may be now, if they have been moved. is_alone: whether it has no
        group, whatever its MARK leads to, and is a new store for others.
        """
        self.folder, self.shards, self.beside = folder, shards or {}, beside
        self._folders = {os.path.realpath(folder.path): folder}  # by real path, so that each MARK is read once
        self.home = folder.recovery_folder  # whose MARK has the record, or leads to it
        mark, group = self.home.mark, OldGroup.of(self.home.mark)
        self.path: Path | None = None
        self.store = mark.store or (group.id if group is not None else secrets.token_hex(8))
        if is_alone:
            self.store = secrets.token_hex(8)
            self.record = self._record_alone()
        elif mark.link is not None:
            self.path, self.record = self._follow(mark.link)
        elif group is not None:
            path, record = record_of_group(folder, group, self.files)
            follow = self._follow(Link.to(path, self.home.path)) if record is None else (path, record)
            self.path, self.record = follow
        elif mark.exists or not self._find_by_place():
            self.record = mark.record or self._record_alone()
        if self.path is not None:
            self._check_listed()

    def _record_alone(self) -> Record:
        live, shards = self.files(self.folder).one_live, self.shards_of(self.folder)
        return record_of_store(self.store, self.folder, live, shards)

    def but(self, **attributes: Any) -> Self:
        """A copy with other attributes."""
        made = copy(self)
        if "path" in attributes:  # to which the MARKs of its stores will lead
            attributes["_folders"] = {}
        vars(made).update(attributes)
        return made

    def read_again(self) -> Self:
        """The record as it is now, of a group whose lock was not taken before. StoreError."""
        return self if self.path is None else type(self)(self.folder, self.shards, self.beside)

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
                        return path, Record.parse(content)
                    link, folder = Link(*map(str, content["forward"])), path.parent
                    break
                except (OSError, *INVALID) as wrong:
                    error = error or f"{str(path)!r}: {wrong}"
            else:
                named = ", ".join(repr(one.name) for one in self.listing.snapshots) or "none"
                raise StoreError(
                    f"{str(self.folder.path)!r} is trained together with other embeddings, and the record of what they "
                    f"hold is missing or damaged, {error}: put that file back; or take the store out of its group by "
                    f"`tierbed store detach`, and load one of its snapshots ({named})"
                )

    def _check_listed(self) -> None:
        """Raises StoreError if the record does not list this store, or another folder for it that leads there too."""
        if self.store not in self.record.now:
            raise StoreError(
                f"{str(self.folder.path)!r} is not listed in {str(self.path)!r}, to which it leads: it is from before "
                "it was taken out; load one of its snapshots after `tierbed store detach`"
            )
        same = [one for one in self._listed(self.store) if one.recovery_folder.mark.store == self.store]
        ours = (self.folder.path, self.folder.snapshot_store.path)
        if same and not any(os.path.samefile(one.path, path) for one in same for path in ours):
            raise StoreError(
                f"{str(self.folder.path)!r} is a copy of {str(same[0].path)!r}, which is trained together with other "
                "embeddings: move the latter away if this one is to take its place, or make this one a store of its "
                "own by `tierbed store detach`"
            )

    def _find_by_place(self) -> bool:
        """Whether a record in the folder of the model lists this folder, whose MARK is lost, but not its snapshots."""
        if self.listing.snapshots:
            for path in sorted(self.folder.path.parent.glob(f"{PREFIX}*")):
                with suppress(OSError, *INVALID):
                    record = Record.parse(unseal(read_record(path)))
                    for store, place in record.places.items() if not record.joining else ():
                        there = [one for one in place.paths(path.parent) if one.is_dir()]
                        if any(os.path.samefile(one, self.folder.path) for one in there):
                            self.path, self.record, self.store = path, record, store
                            return True
        return False

    def lead(self, home: StoreFolder, store: str, **fields: Any) -> None:
        """Let the MARK of a store have the record, or lead to its file. fields: others that change. StoreError."""
        record, link = (self.record, None) if self.path is None else (None, Link.to(self.path, home.path))
        if fields or (home.mark.record, home.mark.link) != (record, link):
            home.change(store=store, record=record, link=link, old={}, **fields)

    @property
    def listing(self) -> Listing:
        return list_snapshots(self.folder.snapshots)

    @property
    def last_snapshot(self) -> str | None:
        """The name of the snapshot of the last step that the record has of all stores; None for none."""
        id = self.record.commit[self.store]
        return None if id == EMPTY else name_of(self.folder.snapshots, id)

    @property
    def needed(self) -> set[str]:
        """The ids of the snapshots of the store that may not be removed."""
        return needed(self.record, self.store)

    def members(self, lenient: bool = False) -> dict[str, FolderState]:
        """The folders of the stores, by id. StoreError if one is missing, or is from before it joined the group.

        lenient: leave these out instead.
        """
        found = {self.store: self.folder}
        for store, place in self.record.places.items():
            if store in found:
                continue
            there = self._listed(store)
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

    def _listed(self, store: str) -> list[FolderState]:
        """The folders that exist where the record says that a store is, or where others have been moved."""
        assert self.path is not None
        place = self.record.places[store]
        moved = [] if store == self.store else [path for path in self.beside if path.name == place.name]
        there = {os.path.realpath(path): path for path in (*place.paths(self.path.parent), *moved) if path.is_dir()}
        return [self._folders.setdefault(real, FolderState(path)) for real, path in there.items()]

    def _leads_here(self, folder: FolderState, store: str) -> bool:
        mark = folder.recovery_folder.mark
        if not mark.exists:  # it is lost
            return bool(list_snapshots(folder.snapshots).snapshots)
        if mark.link is None:  # it has not been opened since an earlier version trained it with these
            group = OldGroup.of(mark)
            return group is not None and group.id == store and self.store in group.others
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

    def check_closed(self) -> None:
        """Raises StoreError if their last run has not closed all stores, for open="error"."""
        unclean = []
        for store, folder in self.members(lenient=True).items():
            live = self.record.now[store].live if folder.ranks else None
            if store in self.record.trained or (live and live != self.files(folder).one_live):
                unclean.append(repr(str(folder.path)))
        if unclean and self.path is None:
            raise StoreError(
                f"store folder {unclean[0]} was not closed by its last run, so its live rows cannot be used; "
                'open="resume" restores the last snapshot or starts empty'
            )
        if unclean:
            raise StoreError(
                f"{', '.join(sorted(unclean))} of the store folders that are trained together were not closed by their "
                'last run, so their live rows cannot be used; open="resume" recovers the last step of which all have '
                "the rows"
            )

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
        members, record = self.members(), self.record
        for store, folder in members.items():
            self._check_here(store, folder)
        chosen = choose(record, {store: self.files(folder) for store, folder in members.items()})
        if chosen is None or any(e.snapshot != record.commit[x] and not e.live for x, e in chosen.items()):
            _check_damage(members.values())
        if chosen is not None:
            was_saved = any(record.parents.get(store, EMPTY) != EMPTY for store in members)
            starts_over = {*chosen.values()} == {Entry(EMPTY)} and chosen != {x: record.now[x] for x in chosen}
            if not (was_saved and starts_over):
                return chosen
        has = ", ".join(_text_of(one) for one in sorted(members.values(), key=lambda one: one.path.name))
        raise StoreError(
            "embeddings that are trained together were not closed by their last run, and there is no step of which all "
            f"have the rows: {has}. Load a checkpoint by graph.load or load_checkpoint; or a snapshot into "
            'each by load_snapshot, or `tierbed snapshot load`; or start over with the store option open="fresh" in '
            'each; or accept these rows as they are with open="mixed"'
        )

    def after_kill(self) -> dict[str, Entry]:
        """What each member would open with if the processes that have stores open were killed now."""
        now = {store: Entry(entry.snapshot) for store, entry in self.record.now.items()}
        return self.but(record=replace(self.record, now=now)).target()

    def own_entry(self) -> Entry:
        """What the store opens with while another process trains others of its group. NOTHING if it is unknown."""
        return usable(self.record.now[self.store], self.files(self.folder))

    def newest(self) -> dict[str, Entry]:
        """What each member has by itself, for open="mixed"."""
        chosen = {}
        for store, folder in self.members(lenient=True).items():
            files, ids = self.files(folder), [one.manifest.id for one in list_snapshots(folder.snapshots).snapshots]
            last = Entry(self.record.parents.get(store, self.record.commit[store]))
            own = (usable(one, files) for one in (self.record.now[store], last))
            chosen[store] = next((one for one in own if one != NOTHING), Entry(ids[-1] if ids else EMPTY))
        return chosen


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


def lock_of_group(file: GroupFile) -> FileLock:
    """The lock of the group whose record is in a file, as it was read. StoreError."""
    assert file.path is not None
    try:
        return FileLock(lock_file(file.path), f"the group of {file.folder.path.name!r}")
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


def remove(path: Path) -> None:
    """Remove the file of a record to which no store leads any more, and its lock, as far as possible."""
    with suppress(OSError):
        path.unlink()
        lock_file(path).unlink()


def _text_of(folder: FolderState) -> str:
    """The rows that a store has."""
    snapshots, marker = list_snapshots(folder.snapshots).snapshots, folder.clean_marker
    if marker is not None:
        return f"{folder.path.name!r} has live rows at step {marker['step']}"
    if snapshots:
        latest = snapshots[-1]
        return f"{folder.path.name!r} has snapshot {latest.name!r}, at step {latest.description['step']}"
    return f"{folder.path.name!r} has no snapshot"


def _check_damage(folders: Iterable[FolderState]) -> None:
    """Raises SnapshotError if a snapshot cannot be read, which may be one that recovery needs."""
    for folder in folders:
        for name, error in list_snapshots(folder.snapshots).damaged.items():
            if os.path.lexists(folder.path / SNAPSHOTS / name / MANIFEST):
                raise SnapshotError(f"it is unknown which step is the latest: {error}") from error
