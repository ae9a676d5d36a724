"""Finds, reads and writes the record of a training group.

A store that trains alone keeps its record in its file MARK. Stores that train together share a record file, GROUP-<id>,
in the model's folder, next to the stores. Each store's MARK names this record file, and the record file lists the
stores. A store is a member of the group only if MARK and the record agree, so copied or restored folders are noticed.
Folders may be moved, because the record and MARK contain relative and absolute paths, and both kinds are tried.
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

from ...engine.durable import seal, write_atomically
from ...engine.errors import SnapshotError, StoreError
from ..files.format import MANIFEST
from ..files.reader import Snapshot, find_snapshot_name, list_snapshots
from .folder import StoreFolder
from .folder_state import SNAPSHOTS, FolderState, read_shard_versions
from .lock import FileLock, InUseError
from .mark import FORMAT, PARSE_ERRORS, Link, read_live_version, read_store_file
from .recovery_rule import (
    EMPTY_ID,
    NO_ENTRY,
    Entry,
    Record,
    StoreFiles,
    choose_entries,
    drop_lost_rows,
    make_snapshot_version,
)

GROUP_FILE_PREFIX = "GROUP-"
Shards = Mapping[str, Mapping[int, str | None]]  # {store path: {rank: version of the shard}}, from all hosts


class RecordError(StoreError):
    """Raised if a store cannot use its group's record. problem: the error text without advice."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = problem


class GroupFile:
    """The record of a store's training group, as read from disk. Raises StoreError.

    Args:
        shards: the versions of ranks' shards. Default: the shards on this host.
        siblings: more store folders to try, if a member's folder was moved.
        is_alone: treat the store as new and without a group, even if MARK names a group.
    """

    def __init__(
        self, folder: FolderState, shards: Shards | None = None, siblings: Sequence[Path] = (), is_alone: bool = False
    ) -> None:
        self.folder, self.shards, self.siblings = folder, shards or {}, siblings
        self._folders = {os.path.realpath(folder.path): folder}  # by real path, so that each MARK is read once
        self.mark_folder = folder.recovery_folder  # its MARK contains the record, or the record file's path
        mark = self.mark_folder.mark
        self.path: Path | None = None  # the record file; None if the record is in the store's MARK
        self.store_id = mark.store_id or secrets.token_hex(8)
        if is_alone:
            self.store_id = secrets.token_hex(8)
            self.record = self._make_own_record()
        elif mark.link is not None:
            self.path, self.record = self._follow(mark.link)
        elif mark.exists or not self._search_by_path():
            self.record = mark.record or self._make_own_record()
        if self.path is not None:
            self._check_membership()

    def _make_own_record(self) -> Record:
        """Returns the record of a store that is new, or that lost its record."""
        folder, shards = self.folder, self.read_shards(self.folder)
        newest, version = [EMPTY_ID, *_list_ids(folder)][-1], self.read_files(folder).common_version
        if len(shards) < folder.num_ranks and None not in shards.values() and len({*shards.values()}) < 2:
            version = next(iter(shards.values()), "unknown")  # the missing shards may be on other hosts
        is_lost = version is None and folder.had_live_rows
        is_newest = version == make_snapshot_version(newest) or (version is None and not is_lost)
        entry, commit = Entry(newest if is_newest else None, version), {self.store_id: newest}
        return Record({self.store_id: entry}, commit, commit, changed_stores=frozenset(commit if is_lost else ()))

    def copy_with(self, **attributes: Any) -> Self:
        result = copy(self)
        if "path" in attributes:  # the stores' MARKs will change
            attributes["_folders"] = {}
        vars(result).update(attributes)
        return result

    def read_again(self) -> Self:
        """Read the record again, because it may have changed before this process locked it. Raises StoreError."""
        return self if self.path is None else type(self)(self.folder, self.shards, self.siblings)

    @property
    def identity(self) -> str:
        """A path that identifies the group: equal for all stores in the group, different for other groups."""
        return os.path.realpath(self.mark_folder.path if self.path is None else self.path)

    def _follow(self, link: Link) -> tuple[Path, Record]:
        folder, error = self.mark_folder.path, ""
        while True:
            for path in link.list_paths(folder):
                try:
                    content = read_store_file(path)
                    if "forward" not in content:
                        return path, Record.parse(content)
                    link, folder = Link(*map(str, content["forward"])), path.parent
                    break
                except (OSError, *PARSE_ERRORS) as cause:
                    error = error or f"{str(path)!r}: {cause}"
            else:
                snapshots = list_snapshots(self.folder.snapshots_path).snapshots
                names = ", ".join(repr(snapshot.name) for snapshot in snapshots) or "none"
                raise RecordError(
                    f"{str(self.folder.path)!r} is trained together with other embeddings, and the group's record is "
                    f"missing or damaged, {error}",
                    "put the record file back; or take the store out of its group by `tierbed store detach`, and load "
                    f"one of its snapshots ({names})",
                )

    def _check_membership(self) -> None:
        """Raises StoreError if the record does not list this store, or lists another folder with the same id."""
        if self.store_id not in self.record.entries:
            raise RecordError(
                f"the group's record {str(self.path)!r} does not list {str(self.folder.path)!r}: this folder is a copy "
                "from before the store was taken out of the group",
                "run `tierbed store detach` on the folder, and load one of its snapshots",
            )
        copies = [f for f in self._find_folders(self.store_id) if f.recovery_folder.mark.store_id == self.store_id]
        own_paths = (self.folder.path, self.folder.snapshot_store.path)
        if copies and not any(os.path.samefile(folder.path, path) for folder in copies for path in own_paths):
            raise RecordError(
                f"{str(self.folder.path)!r} is a copy of {str(copies[0].path)!r}, which is trained together with other "
                "embeddings",
                "move the original away if the copy replaces it, or make the copy an independent store by `tierbed "
                "store detach`",
            )

    def _search_by_path(self) -> bool:
        """Find the record that lists this folder. Used if MARK is lost but snapshots exist. Returns True if found."""
        if list_snapshots(self.folder.snapshots_path).snapshots:
            for path in sorted(self.folder.path.parent.glob(f"{GROUP_FILE_PREFIX}*")):
                with suppress(OSError, *PARSE_ERRORS):
                    record = Record.parse(read_store_file(path))
                    for id, location in record.locations.items() if not record.is_joining else ():
                        folders = [folder for folder in location.list_paths(path.parent) if folder.is_dir()]
                        if any(os.path.samefile(folder, self.folder.path) for folder in folders):
                            self.path, self.record, self.store_id = path, record, id
                            return True
        return False

    def write_mark(self, mark_folder: StoreFolder, store_id: str, **fields: Any) -> None:
        """Write `fields` into a store's MARK. Also write the record or a link to its file. Raises StoreError."""
        record, link = (self.record, None) if self.path is None else (None, Link.make(self.path, mark_folder.path))
        if fields or (mark_folder.mark.record, mark_folder.mark.link) != (record, link):
            mark_folder.change(store_id=store_id, record=record, link=link, **fields)

    @property
    def last_snapshot(self) -> str | None:
        """The name of the store's snapshot in the record's `commit`, or None if the commit is empty."""
        id = self.record.commit[self.store_id]
        return None if id == EMPTY_ID else find_snapshot_name(self.folder.snapshots_path, id)

    def find_members(self, lenient: bool = False) -> dict[str, FolderState]:
        """Returns the folders of the group's members, by store id.

        Raises StoreError if a member's folder is missing. Also raises StoreError if the folder does not belong to the
        group, for example because it is an old copy. lenient: leave out members without a valid folder; do not raise.
        """
        folders = {self.store_id: self.folder}
        for id, location in self.record.locations.items():
            if id in folders:
                continue
            candidates = self._find_folders(id)
            if not candidates and not lenient:
                raise StoreError(
                    f"folder {location.absolute!r} is missing. Its embedding {location.name!r} was trained together "
                    f"with {self.folder.path.name!r}. Put the folder back; or start over with the store option "
                    'open="fresh" for each; or continue without the missing rows with open="mixed"'
                )
            member = next((candidate for candidate in candidates if self._is_member(candidate, id)), None)
            if member is not None:
                folders[id] = member
            elif not self.record.is_joining and not lenient:
                raise StoreError(
                    f"{str(candidates[0].path)!r} is not in the group of {self.folder.path.name!r}. It is a new store, "
                    "another store, or a copy from before the store joined the group. Put the right folder back; "
                    'or start over with the store option open="fresh" for each; or accept this folder with open="mixed"'
                )
        return folders

    def _find_folders(self, id: str) -> list[FolderState]:
        """Returns folders that may be a store: existing paths from the record, and same-named folders in `siblings`."""
        assert self.path is not None
        location = self.record.locations[id]
        moved = [] if id == self.store_id else [path for path in self.siblings if path.name == location.name]
        folders = {
            os.path.realpath(path): path for path in (*location.list_paths(self.path.parent), *moved) if path.is_dir()
        }
        return [self._folders.setdefault(real_path, FolderState(path)) for real_path, path in folders.items()]

    def _is_member(self, folder: FolderState, id: str) -> bool:
        mark = folder.recovery_folder.mark
        if not mark.exists:  # MARK is lost
            return bool(list_snapshots(folder.snapshots_path).snapshots)
        if mark.link is None or mark.store_id != id:
            return False
        is_direct = self.identity in map(os.path.realpath, mark.link.list_paths(folder.recovery_folder.path))
        return is_direct or GroupFile(folder).identity == self.identity

    def read_files(self, folder: FolderState) -> StoreFiles:
        versions = self.read_shards(folder)
        live_versions = [*map(versions.get, range(folder.num_ranks))] or [read_live_version(folder.clean_marker)]
        return StoreFiles(live_versions, _list_ids(folder))

    def read_shards(self, folder: FolderState) -> Mapping[int, str | None]:
        """Returns the versions of a store's shards by rank: from `self.shards`, or else from shards on this host."""
        versions = self.shards.get(str(folder.path))
        return read_shard_versions(folder.path, folder.num_ranks) if versions is None else versions

    def check_closed(self) -> None:
        """Raises StoreError if the last run did not close all members. Called for the store option open="error"."""
        unclosed = []
        for id, folder in self.find_members(lenient=True).items():
            version = self.record.entries[id].live_version if folder.num_ranks else None
            if id in self.record.changed_stores or (version and version != self.read_files(folder).common_version):
                unclosed.append(repr(str(folder.path)))
        if unclosed and self.path is None:
            raise StoreError(
                f"store folder {unclosed[0]} was not closed by its last run, so its live rows cannot be used; "
                'open="resume" restores the last snapshot, or starts empty if there is none'
            )
        if unclosed:
            raise StoreError(
                f"store folders {', '.join(sorted(unclosed))} are trained together and were not closed by their last "
                'run, so their live rows cannot be used; open="resume" recovers the last step that all of them saved'
            )

    def _check_remote_shards(self, id: str, folder: FolderState) -> None:
        """Raises StoreError if shards on other hosts may hold live rows that no snapshot has."""
        entry, shards, ranks = self.record.entries[id], self.read_shards(folder), folder.num_ranks
        remote = [str(rank) for rank in range(ranks) if rank not in shards]
        is_saved = drop_lost_rows(entry, self.read_files(folder)).snapshot is not None
        if remote and entry.live_version and {*shards.values()} <= {entry.live_version} and not is_saved:
            problem = f"the shards of rank {', '.join(remote)} are not" if shards else "none of their shards is"
            raise StoreError(
                f"store folder {str(folder.path)!r} has live rows of {ranks} ranks, and {problem} here. Open the store "
                f"with {ranks} ranks, on hosts that together have all shards, and save a snapshot. To do without these "
                'rows, load a snapshot by `tierbed snapshot load`, or start empty with open="fresh"'
            )

    def choose_entries(self) -> dict[str, Entry]:
        """Choose the durable rows for each member's next open, given that no process trains the group.

        Raises StoreError if members' durable rows share no moment, SnapshotError if damage leaves this uncertain.
        """
        members, record, commit = self.find_members(), self.record, self.record.commit
        for id, folder in members.items():
            self._check_remote_shards(id, folder)
        chosen = choose_entries(record, {id: self.read_files(folder) for id, folder in members.items()})
        is_certain = chosen and all(e.snapshot == commit[id] or e.live_version for id, e in chosen.items())
        if not is_certain or not self.mark_folder.mark.exists:  # without MARK, the newest snapshot was chosen
            _check_damage(members.values())
        if chosen is not None:
            was_saved = any(record.parents.get(id, EMPTY_ID) != EMPTY_ID for id in members)
            starts_over = {*chosen.values()} == {Entry(EMPTY_ID)} and chosen != {x: record.entries[x] for x in chosen}
            if not (was_saved and starts_over):
                return chosen
        in_order = sorted(members.items(), key=lambda item: item[1].path.name)
        rows = ", ".join(_describe_rows(folder) for _, folder in in_order)
        lost = [text for id, folder in in_order if (text := self._describe_missing_commit(id, folder, members))]
        raise StoreError(
            "embeddings that are trained together were not closed by their last run, and they have no saved step in "
            f"common: {rows}. {''.join(f'{text}: put it back. ' for text in lost)}Do one of these: (1) load a "
            "checkpoint by graph.load or load_checkpoint; (2) load a snapshot into each by load_snapshot or `tierbed "
            'snapshot load`; (3) start over with open="fresh" for each; (4) accept different steps with open="mixed"'
        )

    def _describe_missing_commit(self, id: str, folder: FolderState, members: Mapping[str, FolderState]) -> str:
        """Describe the snapshot that `commit` names for the store, if it is missing on disk; otherwise return ""."""
        commit = self.record.commit[id]
        if commit in (EMPTY_ID, *_list_ids(folder)):
            return ""
        snapshots = [s for member in members.values() for s in list_snapshots(member.snapshots_path).snapshots]
        same_save = [snapshot.name for snapshot in snapshots if snapshot.manifest.id[:16] == commit[:16]]
        name = f"{same_save[0]!r} " if same_save else ""
        return f"{folder.path.name!r} lacks snapshot {name}(id {commit}) of the last step that all of them had saved"

    def choose_after_kill(self) -> dict[str, Entry]:
        """Choose each member's rows for the next open, as if all processes that use the group were killed now."""
        entries = {id: Entry(entry.snapshot) for id, entry in self.record.entries.items()}
        return self.copy_with(record=replace(self.record, entries=entries)).choose_entries()

    def choose_own_entry(self) -> Entry:
        """Choose the rows for opening this store while another process trains its group; NO_ENTRY if unknown."""
        return drop_lost_rows(self.record.entries[self.store_id], self.read_files(self.folder))

    def choose_newest(self) -> dict[str, Entry]:
        """Choose each member's newest durable rows, even if their steps differ. Used for open="mixed"."""
        chosen = {}
        for id, folder in self.find_members(lenient=True).items():
            files = self.read_files(folder)
            parent = Entry(self.record.parents.get(id, self.record.commit[id]))
            entries = (drop_lost_rows(entry, files) for entry in (self.record.entries[id], parent))
            newest = Entry([EMPTY_ID, *files.snapshot_ids][-1])
            chosen[id] = next((entry for entry in entries if entry != NO_ENTRY), newest)
        return chosen


def check_one_moment(names: Sequence[str], snapshots: Sequence[Snapshot]) -> None:
    """Raises SnapshotError if the snapshots were saved at different steps. names: the snapshots' embeddings."""
    is_one_save = len({snapshot.manifest.id[:16] for snapshot in snapshots}) == 1  # they then share half of their ids
    if not is_one_save and len({snapshot.description["step"] for snapshot in snapshots}) > 1:
        pairs = zip(names, snapshots, strict=True)
        steps = ", ".join(f"{name!r} at step {snapshot.description['step']}" for name, snapshot in pairs)
        raise SnapshotError(
            f"the snapshots {snapshots[0].name!r} were not saved together, and have rows of different steps: {steps}. "
            "Load each store by itself, or give the name of a snapshot that was saved for all of them together"
        )


def lock_group(file: GroupFile) -> FileLock:
    """Lock the group that `file` describes. Raises StoreError if another process has locked the group."""
    assert file.path is not None
    try:
        return FileLock(make_lock_path(file.path), f"the group of {file.folder.path.name!r}")
    except InUseError as error:
        names = ", ".join(sorted(repr(location.name) for location in file.record.locations.values()))
        raise StoreError(
            f"process {error.holder} trains embeddings of the group {names}, and only one process at a time can. Train "
            f"all these embeddings in one process or one world. Or end process {error.holder}, and take a store out of "
            "the group by `tierbed store detach`"
        ) from None


def make_lock_path(path: Path) -> Path:
    """Returns a record file's lock file. Lock this file before writing the record or any member's rows."""
    return path.with_name(f"{path.name}.LOCK")


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record file. Its content is a record, or the path of another record file. Raises StoreError."""
    try:
        write_atomically(path, seal({"format": FORMAT, **content}))
    except OSError as error:
        raise StoreError(f"cannot write the group's record {str(path)!r}: {error}; {FolderState.remedy}") from error


def remove_record(path: Path) -> None:
    """Remove a record file that no store's MARK names any more, and its lock file. Errors are ignored."""
    with suppress(OSError):
        path.unlink()
        make_lock_path(path).unlink()


def _list_ids(folder: FolderState) -> list[str]:
    """Returns the ids of a store's readable snapshots, from oldest to newest."""
    return [snapshot.manifest.id for snapshot in list_snapshots(folder.snapshots_path).snapshots]


def _describe_rows(folder: FolderState) -> str:
    snapshots, marker = list_snapshots(folder.snapshots_path).snapshots, folder.clean_marker
    if marker is not None:
        return f"{folder.path.name!r} has live rows at step {marker['step']}"
    if snapshots:
        latest = snapshots[-1]
        return f"{folder.path.name!r} has snapshot {latest.name!r}, at step {latest.description['step']}"
    return f"{folder.path.name!r} has no snapshot"


def _check_damage(folders: Iterable[FolderState]) -> None:
    """Raises SnapshotError if a snapshot cannot be read, because recovery may need that snapshot."""
    for folder in folders:
        for name, error in list_snapshots(folder.snapshots_path).damaged.items():
            if os.path.lexists(folder.path / SNAPSHOTS / name / MANIFEST):
                raise SnapshotError(f"recovery cannot tell which step is the latest: {error}") from error
