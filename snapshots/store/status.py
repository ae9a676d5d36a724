"""Reports what a store folder contains and how the next run would start. Does not lock the folder."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...engine.errors import SnapshotError, StoreError
from ...engine.options.table_names import label_tables, read_table_names
from ...engine.store.table_counts import read_counts
from ..files.format import MANIFEST
from ..files.reader import find_snapshot
from .closed_store import merge_clean_markers
from .folder_state import RANKS, SNAPSHOTS, FolderState, find_holder, read_clean_markers, read_last_step
from .group_file import GroupFile
from .mark import read_live_version
from .recovery_rule import EMPTY_ID

CHECKPOINT = "graph.msgpack"  # every checkpoint contains this file, but no store folder does


@dataclass(frozen=True)
class Restart:
    """The rows that the next run starts with."""

    # "nowhere": no run can start. "elsewhere": shards are on other hosts, so a run with one process cannot start
    origin: Literal["live", "snapshot", "empty", "nowhere", "elsewhere"]
    step: int = 0
    snapshot: str | None = None
    lost_steps: int | None = 0  # how many steps after `step` are lost, or None if unknown
    problem: str | None = None  # why the run cannot start


class MemberStatus(NamedTuple):
    """What a group's record says about one store. A missing snapshot is shown as its id with "(missing)"."""

    name: str
    path: Path
    has_live_rows: bool  # True if live rows equal the current rows; False while the store is trained and after a kill
    snapshot: str | None  # a snapshot that equaled the rows when the record was last written, or None
    step: int | None  # the step of the rows that the record names; None if unknown
    common: str | None  # this store's snapshot of the last step that all stores saved; None if it then had no rows
    common_step: int | None


@dataclass(frozen=True)
class StoreStatus:
    """A store folder's status."""

    path: Path
    holder: int | None  # the id of the process that has the store open, 0 if unknown; None if the store is not open
    marker: dict[str, Any] | None  # the clean marker, merged for ranks; None if live rows are absent or not clean
    live_kind: str | None  # the kind of the live rows: "rows", "rocksdb" or "ranks"
    rows: int | None  # the number of live rows; None without a clean marker, or if unknown
    step: int | None  # the live rows' step; None if unknown
    recovery_snapshot: str | None  # the store's snapshot of the last step that all stores of its group saved
    bytes: dict[str, int]  # sizes of live rows, snapshots and other files; a hard-linked file counts once
    restart: Restart  # how a run would start now; for an open store, how a run would start after a kill
    num_ranks: int | None = None  # the number of ranks; None for one process
    group: tuple[MemberStatus, ...] = ()  # all stores of the group, including this one; empty if the store trains alone

    @property
    def partners(self) -> tuple[str, ...]:
        """The names of the other embeddings that are trained together with this store."""
        return tuple(member.name for member in self.group if member.path != self.path)

    @property
    def rows_by_table(self) -> dict[str, int] | None:
        """The number of live rows for each table, by table name or number; None if unknown."""
        counts = None if self.marker is None else read_counts(self.marker, len(self.marker["tables"]))
        if self.marker is None or counts is None:
            return None
        return dict(zip(label_tables(read_table_names(self.marker)), counts.tolist(), strict=True))

    @property
    def state(self) -> Literal["open", "closed", "unclean", "new", "elsewhere"]:
        """Tells if the store is open in a process, cleanly closed, unclean, never written, or on other hosts."""
        if self.holder is not None:
            return "open"
        if self.restart.origin == "elsewhere":
            return "elsewhere"
        if self.marker is not None:
            return "closed"
        return "new" if self.live_kind is None and self.step is None else "unclean"


def read_store_status(path: Path) -> StoreStatus:
    """Read a store's status. Raises StoreError, or SnapshotError if the store's snapshots cannot be read."""
    path = require_store(Path(path))
    folder = FolderState(path)
    ranks, top, marker, recorded_step = folder.num_ranks, folder.live_path, folder.clean_marker, folder.recorded_step
    if ranks:
        top, marker, recorded_step = path / RANKS, merge_clean_markers(folder), read_last_step(path, ranks)
    kind = "ranks" if ranks else _find_live_kind(folder.live_path) if marker is None else marker["live"]
    group: tuple[MemberStatus, ...] = ()
    name = None
    if ranks and not read_clean_markers(path, ranks):
        restart = Restart("elsewhere", lost_steps=None)
    else:
        try:
            file = GroupFile(folder)
            group = _read_group(file)
            name = file.last_snapshot
            restart = _choose_restart(file, marker, recorded_step)
        except (StoreError, SnapshotError) as error:
            restart = Restart("nowhere", problem=str(error), lost_steps=recorded_step)
    if not ranks and not folder.had_live_rows:
        restart = replace(restart, lost_steps=0)  # the folder has only copied snapshots, so no steps were lost
    rows, step = (None, recorded_step) if marker is None else (marker.get("rows"), marker["step"])
    holder, sizes = find_holder(path), _find_sizes(path, top)
    return StoreStatus(path, holder, marker, kind, rows, step, name, sizes, restart, ranks or None, group)


def _read_group(file: GroupFile) -> tuple[MemberStatus, ...]:
    """Returns what a group's record says about each of the group's stores, sorted by name."""
    if file.path is None:
        return ()
    members = []
    for store, location in file.record.locations.items():
        paths = location.list_paths(file.path.parent)
        path = file.folder.path if store == file.store_id else next((path for path in paths if path.is_dir()), paths[0])
        entry, commit, folder = file.record.entries[store], file.record.commit[store], FolderState(path)
        snapshot, step = _find_snapshot(folder, entry.snapshot)
        if (version := entry.live_version) is not None:
            markers = [folder.clean_marker, *read_clean_markers(path, folder.num_ranks).values()]  # this host's shards
            step = next((marker["step"] for marker in markers if marker and read_live_version(marker) == version), step)
        common = _find_snapshot(folder, commit)
        members.append(MemberStatus(location.name, path, version is not None, snapshot, step, *common))
    return tuple(sorted(members))


def _find_snapshot(folder: FolderState, id: str | None) -> tuple[str | None, int | None]:
    """Returns the name and step of a snapshot in a record. The step is 0 for EMPTY_ID, None for a missing snapshot."""
    if id is None or id == EMPTY_ID:
        return None, None if id is None else 0
    try:
        snapshot = find_snapshot(folder.snapshots_path, id)
    except SnapshotError:
        return f"{id} (missing)", None
    return snapshot.name, int(snapshot.description["step"])


def _choose_restart(file: GroupFile, marker: dict[str, Any] | None, recorded_step: int | None) -> Restart:
    is_open = any(find_holder(folder.path) is not None for folder in file.find_members().values())
    entry = (file.choose_after_kill() if is_open else file.choose_entries())[file.store_id]
    if entry.live_version is not None and marker is not None:
        return Restart("live", marker["step"])
    if entry.snapshot == EMPTY_ID:
        return Restart("empty", lost_steps=recorded_step)
    snapshot = find_snapshot(file.folder.snapshots_path, str(entry.snapshot))
    step = int(snapshot.description["step"])
    reached = marker["step"] if marker is not None else recorded_step
    return Restart("snapshot", step, snapshot.name, None if reached is None else max(0, reached - step))


def require_store(path: Path) -> Path:
    """Returns the path if it is a store, or else raises StoreError, so that no mistyped path becomes a new store."""
    if _may_be_store(path):
        return path
    inside = ", ".join(repr(str(store)) for store in find_stores(path))
    if not inside and (os.path.lexists(path / CHECKPOINT) or any(path.glob(f"*/{CHECKPOINT}"))):
        raise StoreError(f"{str(path)!r} is not a store folder, but contains checkpoints: use `tierbed checkpoint`")
    remedy = f"give the path of one of its stores, {inside}" if inside else "give <persistent_path>/<embedding name>"
    raise StoreError(f"{str(path)!r} is not a store folder: {remedy}")


def find_stores(path: Path) -> list[Path]:
    """Returns the store folders in a model's folder, or [] if the path is itself a store folder."""
    if _may_be_store(path) or not os.path.isdir(path):
        return []
    return sorted(folder for folder in path.iterdir() if _is_store(folder))


def _is_store(path: Path) -> bool:
    """True if the folder is a store with rows or snapshots, or a new store that a process has open."""
    if os.path.isfile(path / "MARK") or any(path.glob(f"snapshots/*/{MANIFEST}")):
        return True
    return os.path.isfile(path / "LOCK") and find_holder(path) is not None


def is_snapshot(path: Path) -> bool:
    """True if the path is a snapshot's folder, or would be one: a path directly in a store's `snapshots`."""
    in_store = path.parent.name == SNAPSHOTS and _may_be_store(path.parent.parent)
    return (in_store or os.path.isfile(path / MANIFEST)) and not _may_be_store(path)


def _may_be_store(path: Path) -> bool:
    return os.path.isfile(path / "LOCK") or os.path.isdir(path / "snapshots")


def _find_live_kind(live: Path) -> str | None:
    if not live.is_dir():
        return None
    return "rocksdb" if any(live.glob("shard-*")) else "rows"


def _find_sizes(path: Path, live: Path) -> dict[str, int]:
    """Returns the sizes in bytes of live rows, snapshots and other files. A hard-linked file counts once."""
    sizes, seen = {"live": 0, "snapshots": 0, "other": 0}, set()
    for part, top in (("live", live), ("snapshots", path / "snapshots"), ("other", path)):
        for folder, _, files in os.walk(top):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # another process may remove files meanwhile
                    status = os.lstat(os.path.join(folder, name))
                    if (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        sizes[part] += status.st_size
    return sizes
