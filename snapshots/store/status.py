"""Reports what a store folder holds and what the next run would do, without the lock."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...engine.errors import SnapshotError, StoreError
from ...engine.options.table_names import labels_of, names_in
from ...engine.store.table_counts import counts_in
from ..files.format import MANIFEST
from ..files.reader import Snapshot, list_snapshots
from .closed_store import merged_clean_marker
from .folder_state import RANKS, SNAPSHOTS, FolderState, clean_markers, holder, shard_folder
from .instants import Group, no_instant

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


@dataclass(frozen=True)
class StoreStatus:
    """The status of a store folder.

    `holder`: the id of the process that has it open, 0 if unknown, None for no process. `marker`: the clean marker,
    None if the live rows are not clean or absent; for ranks it is merged from those of all shards. `live`: "rows",
    "rocksdb", "ranks" or None. `ranks`: the number of ranks, None for one process. `rows`: the number of live rows,
    None without a clean marker. `step`: of the live rows, None if unknown. `recovery_snapshot`: its name, if any.
    `bytes`: of the live rows, the snapshots and the rest; a file that two of these share counts in the first.
    `together`: the names of the embeddings that it is trained together with. `restart`: what a run would do that starts
    now, or if there is a holder, after a kill of it.
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
    together: tuple[str, ...] = ()

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
    group = Group(path, {})
    others = [m.name for id, m in group.members.items() if id != group.first] + [*group.missing.values()]
    if not others:
        return _by_itself(path)
    return _with_others(_by_itself(path), group, tuple(sorted(others)))


def _with_others(status: StoreStatus, group: Group, others: tuple[str, ...]) -> StoreStatus:
    """The status of a store of a group, which recovers with its group."""
    status = replace(status, together=others)
    in_use = any(holder(member.path) is not None for member in group.members.values())
    if status.restart.source == "elsewhere" or (not in_use and group.is_at_rest):
        return status
    target = group.target(killed=in_use)
    if target is None:
        return replace(status, restart=Restart("nowhere", problem=no_instant(group), lost_steps=None))
    member, version = group.members[group.first], target.versions[group.first]
    if not in_use and member.clean is not None and member.clean.now == version:
        return status
    snapshot = None if version is None else member.snapshot_of(version)
    step = 0 if snapshot is None else int(snapshot.description["step"])
    lost = None if member.reached is None else max(0, member.reached - step)
    if snapshot is None:
        return replace(status, restart=Restart("empty", lost_steps=lost))
    return replace(status, restart=Restart("snapshot", step, snapshot.name, lost))


def _by_itself(path: Path) -> StoreStatus:
    view = FolderState(path)
    marker = view.clean_marker
    record = view.snapshot_store.mark.ranks if marker is None else None
    if record is not None:  # the live rows are shards of ranks
        ranks, top, recovery_snapshot = record.ranks, path / RANKS, view.snapshot_store.recovery_snapshot
        marker = merged_clean_marker(view)
        steps = [FolderState(shard_folder(path, rank, ranks)).noted_step for rank in range(ranks)]
        noted_step = max((step for step in steps if step is not None), default=None)
    else:
        ranks, top, recovery_snapshot, noted_step = 0, view.live, view.recovery_snapshot, view.noted_step
    live = "ranks" if ranks else _kind_of(view.live) if marker is None else marker["live"]
    if ranks and not clean_markers(path, ranks):
        restart = Restart("elsewhere", lost_steps=None)
    elif marker is not None:
        restart = Restart("live", marker["step"])
    else:
        restart = _after_kill(path, recovery_snapshot, noted_step)
    if not ranks and not view.was_open:
        restart = replace(restart, lost_steps=0)  # no step was lost: its snapshots were copied here
    rows, step = (None, noted_step) if marker is None else (marker.get("rows"), marker["step"])
    name, sizes = recovery_snapshot or None, _sizes(path, top)
    return StoreStatus(path, holder(path), marker, live, rows, step, name, sizes, restart, ranks or None)


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
    return sorted(
        one for one in path.iterdir() if os.path.isfile(one / "MARK") or any(one.glob(f"snapshots/*/{MANIFEST}"))
    )


def is_snapshot(path: Path) -> bool:
    """Whether the path is the folder of a snapshot in a store or elsewhere, or would be in a store."""
    in_store = path.parent.name == SNAPSHOTS and _may_be_store(path.parent.parent)
    return (in_store or os.path.isfile(path / MANIFEST)) and not _may_be_store(path)


def _may_be_store(path: Path) -> bool:
    return os.path.isfile(path / "LOCK") or os.path.isdir(path / "snapshots")


def _after_kill(path: Path, recovery_snapshot: str | None, noted_step: int | None) -> Restart:
    try:
        if recovery_snapshot:
            snapshot = Snapshot.open(path / "snapshots" / recovery_snapshot)
        elif recovery_snapshot == "" or not (listing := list_snapshots(path / "snapshots")).snapshots:
            return Restart("empty", lost_steps=noted_step)
        elif listing.damaged:
            raise next(iter(listing.damaged.values()))
        else:
            snapshot = listing.snapshots[-1]
    except SnapshotError as error:
        return Restart("nowhere", problem=str(error), lost_steps=noted_step)
    step = snapshot.description["step"]
    return Restart("snapshot", step, snapshot.name, None if noted_step is None else max(0, noted_step - step))


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
