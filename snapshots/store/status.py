"""Reports what a store folder holds and what the next run would do, without the lock."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...engine.errors import SnapshotError, StoreError
from ...engine.options.table_names import labels_of, names_in
from ...engine.store.table_counts import counts_in
from ..files.format import MANIFEST
from ..files.reader import snapshot_by_id
from .closed_store import merged_clean_marker
from .folder_state import RANKS, SNAPSHOTS, FolderState, clean_markers, holder, last_step
from .group_file import GroupFile
from .mark import live_version
from .recovery_rule import EMPTY

CHECKPOINT = "graph.msgpack"  # a file of checkpoints, which store folders lack


@dataclass(frozen=True)
class Restart:
    """The rows that the next run starts with.

    `source`: "live" rows, a "snapshot", "empty" for no rows, "nowhere" if the run cannot start because of `problem`, or
    "elsewhere" if the shards are on other hosts and one process cannot start.
    `step`: of the rows. `lost_steps`: how many later steps are lost, None if unknown.
    """

    source: Literal["live", "snapshot", "empty", "nowhere", "elsewhere"]
    step: int = 0
    snapshot: str | None = None
    lost_steps: int | None = 0
    problem: str | None = None


class MemberStatus(NamedTuple):
    """What the record of a group says of a store.

    live, snapshot: which durable rows are the present ones: live rows, a snapshot, both, or neither if it is open for
    training or was killed. step: of these; None if unknown. common: the snapshot that it goes back to with the others,
    None for no rows. common_step: of that.
    """

    name: str
    path: Path
    live: bool
    snapshot: str | None
    step: int | None
    common: str | None
    common_step: int | None


@dataclass(frozen=True)
class StoreStatus:
    """The status of a store folder.

    `holder`: the id of the process that has it open, 0 if unknown, None for no process. `marker`: the clean marker,
    None if the live rows are not clean or absent; for ranks it is merged from those of all shards. `live`: "rows",
    "rocksdb", "ranks" or None. `ranks`: the number of ranks, None for one process. `rows`: the number of live rows,
    None without a clean marker. `step`: of the live rows, None if unknown. `recovery_snapshot`: its name, if any.
    `bytes`: of the live rows, the snapshots and the rest; a file that two of these share counts in the first.
    `group`: what the record says of each store that is trained together with this one, and of this one; empty if it is
    trained alone. `restart`: what a run would do that starts now, or if there is a holder, after a kill of it.
    """

    path: Path
    holder: int | None
    marker: dict[str, Any] | None
    live: str | None
    rows: int | None
    step: int | None
    recovery_snapshot: str | None
    bytes: dict[str, int]
    restart: Restart
    ranks: int | None = None
    group: tuple[MemberStatus, ...] = ()

    @property
    def partners(self) -> tuple[str, ...]:
        """The names of the embeddings that it is trained together with."""
        return tuple(one.name for one in self.group if one.path != self.path)

    @property
    def rows_by_table(self) -> dict[str, int] | None:
        """The number of live rows by name or number of the table; None if it is unknown."""
        counts = None if self.marker is None else counts_in(self.marker, len(self.marker["tables"]))
        if self.marker is None or counts is None:
            return None
        return dict(zip(labels_of(names_in(self.marker)), counts.tolist(), strict=True))

    @property
    def state(self) -> Literal["open", "closed", "unclean", "new", "elsewhere"]:
        """Whether it is open in a process, was closed cleanly or not, was never written, or is on other hosts alone."""
        if self.holder is not None:
            return "open"
        if self.restart.source == "elsewhere":
            return "elsewhere"
        if self.marker is not None:
            return "closed"
        return "new" if self.live is None and self.step is None else "unclean"


def store_status(path: Path) -> StoreStatus:
    """The status of a store. Raises StoreError if the store cannot be read, SnapshotError if its snapshots cannot."""
    path = existing_store(Path(path))
    folder = FolderState(path)
    ranks, top, marker, noted_step = folder.ranks, folder.live, folder.clean_marker, folder.noted_step
    if ranks:
        top, marker, noted_step = path / RANKS, merged_clean_marker(folder), last_step(path, ranks)
    live = "ranks" if ranks else _kind_of(folder.live) if marker is None else marker["live"]
    group: tuple[MemberStatus, ...] = ()
    name = None
    if ranks and not clean_markers(path, ranks):
        restart = Restart("elsewhere", lost_steps=None)
    else:
        try:
            file = GroupFile(folder)
            group = _group_of(file)
            name = file.last_snapshot
            restart = _restart(file, marker, noted_step)
        except (StoreError, SnapshotError) as error:
            restart = Restart("nowhere", problem=str(error), lost_steps=noted_step)
    if not ranks and not folder.was_open:
        restart = replace(restart, lost_steps=0)  # no step was lost: its snapshots were copied here
    rows, step = (None, noted_step) if marker is None else (marker.get("rows"), marker["step"])
    sizes = _sizes(path, top)
    return StoreStatus(path, holder(path), marker, live, rows, step, name, sizes, restart, ranks or None, group)


def _group_of(file: GroupFile) -> tuple[MemberStatus, ...]:
    """What a record of several stores says of each, by name."""
    if file.path is None:
        return ()
    found = []
    for store, place in file.record.places.items():
        paths = place.paths(file.path.parent)
        path = file.folder.path if store == file.store else next((one for one in paths if one.is_dir()), paths[0])
        entry, commit, folder = file.record.now[store], file.record.commit[store], FolderState(path)
        snapshot, step = _snapshot_of(folder, entry.snapshot)
        if entry.live is not None:
            markers = [folder.clean_marker, *clean_markers(path, folder.ranks).values()]  # of shards on this host
            step = next((one["step"] for one in markers if one and live_version(one) == entry.live), step)
        common = _snapshot_of(folder, commit)
        found.append(MemberStatus(place.name, path, entry.live is not None, snapshot, step, *common))
    return tuple(sorted(found))


def _snapshot_of(folder: FolderState, id: str | None) -> tuple[str | None, int | None]:
    """The name and step of a snapshot of a record; its id if it is missing. The step of no rows is 0."""
    if id is None or id == EMPTY:
        return None, None if id is None else 0
    try:
        found = snapshot_by_id(folder.snapshots, id)
    except SnapshotError:
        return id, None
    return found.name, int(found.description["step"])


def _restart(file: GroupFile, marker: dict[str, Any] | None, noted_step: int | None) -> Restart:
    if any(holder(folder.path) is not None for folder in file.members().values()):
        entry = file.after_kill()[file.store]
    else:
        entry = file.target()[file.store]
    if entry.live is not None and marker is not None:
        return Restart("live", marker["step"])
    if entry.snapshot == EMPTY:
        return Restart("empty", lost_steps=noted_step)
    snapshot = snapshot_by_id(file.folder.snapshots, str(entry.snapshot))
    step = int(snapshot.description["step"])
    reached = marker["step"] if marker is not None else noted_step
    return Restart("snapshot", step, snapshot.name, None if reached is None else max(0, reached - step))


def existing_store(path: Path) -> Path:
    """The path, if it is a store. Raises StoreError otherwise: a mistyped path must not become a store."""
    if _may_be_store(path):
        return path
    inside = ", ".join(repr(str(store)) for store in stores_in(path))
    if not inside and (os.path.lexists(path / CHECKPOINT) or any(path.glob(f"*/{CHECKPOINT}"))):
        raise StoreError(f"{str(path)!r} is not a store folder, but has checkpoints: use `tierbed checkpoint`")
    remedy = f"give the path of one of its stores, {inside}" if inside else "give <persistent_path>/<embedding name>"
    raise StoreError(f"{str(path)!r} is not a store folder: {remedy}")


def stores_in(path: Path) -> list[Path]:
    """The store folders in the folder of a model, without other folders; empty for a store folder."""
    if _may_be_store(path) or not os.path.isdir(path):
        return []
    return sorted(one for one in path.iterdir() if _is_store(one))


def _is_store(path: Path) -> bool:
    """Whether a folder is a store that was written, or that a process has open to write it for the first time."""
    if os.path.isfile(path / "MARK") or any(path.glob(f"snapshots/*/{MANIFEST}")):
        return True
    return os.path.isfile(path / "LOCK") and holder(path) is not None


def is_snapshot(path: Path) -> bool:
    """Whether the path is the folder of a snapshot in a store or elsewhere, or would be in a store."""
    in_store = path.parent.name == SNAPSHOTS and _may_be_store(path.parent.parent)
    return (in_store or os.path.isfile(path / MANIFEST)) and not _may_be_store(path)


def _may_be_store(path: Path) -> bool:
    return os.path.isfile(path / "LOCK") or os.path.isdir(path / "snapshots")


def _kind_of(live: Path) -> str | None:
    if not live.is_dir():
        return None
    return "rocksdb" if any(live.glob("shard-*")) else "rows"


def _sizes(path: Path, live: Path) -> dict[str, int]:
    """The bytes of files, each counted once, as `live`, `snapshots` and `other`. Other processes may change them."""
    sizes, seen = {"live": 0, "snapshots": 0, "other": 0}, set()
    for part, top in (("live", live), ("snapshots", path / "snapshots"), ("other", path)):
        for folder, _, files in os.walk(top):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(os.path.join(folder, name))
                    if (found.st_dev, found.st_ino) not in seen:
                        seen.add((found.st_dev, found.st_ino))
                        sizes[part] += found.st_size
    return sizes
