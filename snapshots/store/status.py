"""What a store folder holds and what the next run would do with it, read without disturbing the process that has it."""

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
from .closed_store import mark_of_ranks
from .folder_state import RANKS, SNAPSHOTS, FolderState, clean_markers, holder, shard_folder
from .instants import Group, no_instant

CHECKPOINT = "graph.msgpack"  # the file of a checkpoint that no store folder has


@dataclass(frozen=True)
class Restart:
    """Where the next run's rows come from.

    `source`: "live" rows, a "snapshot", "empty" for no rows, "nowhere" where the run cannot start, by `problem`, or
    "elsewhere" where shares of ranks on other hosts tell, and one process cannot start.
    `step`: the step of the rows. `lost_steps`: how many later steps are lost, None where that is not known.
    """

    source: Literal["live", "snapshot", "empty", "nowhere", "elsewhere"]
    step: int = 0
    snapshot: str | None = None
    lost_steps: int | None = 0
    problem: str | None = None


@dataclass(frozen=True)
class StoreStatus:
    """A store folder at one instant.

    `holder`: the id of the process that has it open, 0 where that is not known, None for no process. `mark`: describes
    the live rows, None while they are of different steps or absent; it is one mark for the shares of ranks. `live`:
    "rows", "rocksdb", "ranks" or None. `ranks`: how many ranks share the live rows, None for one process. `rows`: how
    many live rows, None without a mark. `step`: of the live rows, None where it is not known. `base`: the snapshot that
    they go back to, if any. `bytes`: of the live rows, the snapshots and the rest; a file that two parts share counts
    in the first. `together`: the names of the others that it is trained together with. `restart`: what a run that
    starts now would do; with a holder, a run that starts after its kill.
    """

    path: Path
    holder: int | None
    mark: dict[str, Any] | None
    live: str | None
    rows: int | None
    step: int | None
    base: str | None
    bytes: dict[str, int]
    restart: Restart
    ranks: int | None = None
    together: tuple[str, ...] = ()

    @property
    def rows_by_table(self) -> dict[str, int] | None:
        """How many live rows each table has, by its name or number; None where the mark does not tell."""
        counts = None if self.mark is None else counts_in(self.mark, len(self.mark["tables"]))
        if self.mark is None or counts is None:
            return None
        return dict(zip(labels_of(names_in(self.mark)), counts.tolist(), strict=True))

    @property
    def state(self) -> Literal["open", "closed", "unclean", "new", "elsewhere"]:
        """Whether the store is open in a process, was closed, ended without being closed, or was never written.

        "elsewhere" where this host has none of the shares of ranks, which tell it.
        """
        if self.holder is not None:
            return "open"
        if self.restart.source == "elsewhere":
            return "elsewhere"
        if self.mark is not None:
            return "closed"
        return "new" if self.live is None and self.step is None else "unclean"


def store_status(path: Path) -> StoreStatus:
    """The status of a store. StoreError where no store can be read, SnapshotError where its snapshots cannot be."""
    path = existing_store(Path(path))
    group = Group(path, {})
    others = [m.name for id, m in group.members.items() if id != group.first] + [*group.missing.values()]
    if not others:
        return _by_itself(path)
    return _with_others(_by_itself(path), group, tuple(sorted(others)))


def _with_others(status: StoreStatus, group: Group, others: tuple[str, ...]) -> StoreStatus:
    """The status of a store of a group, whose recovery is that of the group."""
    status = replace(status, together=others)
    held = any(holder(member.path) is not None for member in group.members.values())
    if status.restart.source == "elsewhere" or (not held and group.is_at_rest):
        return status
    target = group.target(killed=held)
    if target is None:
        return replace(status, restart=Restart("nowhere", problem=no_instant(group), lost_steps=None))
    member, version = group.members[group.first], target.versions[group.first]
    if not held and member.clean is not None and member.clean.now == version:
        return status
    snapshot = None if version is None else member.snapshot_of(version)
    step = 0 if snapshot is None else int(snapshot.description["step"])
    lost = None if member.reached is None else max(0, member.reached - step)
    if snapshot is None:
        return replace(status, restart=Restart("empty", lost_steps=lost))
    return replace(status, restart=Restart("snapshot", step, snapshot.name, lost))


def _by_itself(path: Path) -> StoreStatus:
    view = _AtOneInstant(path)
    mark, base, noted = view.read_mark(), view.base, view.noted_step
    if mark is None and (record := view.keeper.of_ranks) is not None:
        return _of_ranks(view, record.ranks)
    live = _kind_of(view.live) if mark is None else mark["live"]
    restart = _after_kill(path, base, noted) if mark is None else Restart("live", mark["step"])
    if not view.was_open:
        restart = replace(restart, lost_steps=0)  # no step was lost: its snapshots came from elsewhere
    rows, step = (None, noted) if mark is None else (mark.get("rows"), mark["step"])
    return StoreStatus(path, holder(path), mark, live, rows, step, base or None, _sizes(path, view.live), restart)


def _of_ranks(view: FolderState, ranks: int) -> StoreStatus:
    """The status of a store whose live rows are shares of ranks."""
    path, base, mark = view.path, view.keeper.base, mark_of_ranks(view)
    shares = [FolderState(shard_folder(path, rank, ranks)) for rank in range(ranks)]
    noted = max((share.noted_step for share in shares if share.noted_step is not None), default=None)
    rows, step = (None, noted) if mark is None else (mark.get("rows"), mark["step"])
    if not clean_markers(path, ranks):
        restart = Restart("elsewhere", lost_steps=None)
    else:
        restart = _after_kill(path, base, noted) if mark is None else Restart("live", mark["step"])
    return StoreStatus(
        path, holder(path), mark, "ranks", rows, step, base or None, _sizes(path, path / RANKS), restart, ranks
    )


class _AtOneInstant(FolderState):
    """A store folder with the mark as it was read first, since the holder may write another."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._content = super()._read()

    def _read(self) -> dict[str, Any]:
        return self._content


def existing_store(path: Path) -> Path:
    """The path, if there is a store. Raises StoreError otherwise: a mistyped path must not become a store."""
    if _may_be_store(path):
        return path
    inside = ", ".join(repr(str(store)) for store in stores_in(path))
    if not inside and (os.path.lexists(path / CHECKPOINT) or any(path.glob(f"*/{CHECKPOINT}"))):
        raise StoreError(f"{str(path)!r} is no store folder, and has checkpoints: use `tierbed checkpoint` for it")
    remedy = f"give the path of one of its stores, {inside}" if inside else "give <persistent_path>/<embedding name>"
    raise StoreError(f"{str(path)!r} is no store folder: {remedy}")


def stores_in(path: Path) -> list[Path]:
    """The store folders in the folder of a model, without what others keep there; none in a store folder."""
    if _may_be_store(path) or not os.path.isdir(path):
        return []
    return sorted(
        one for one in path.iterdir() if os.path.isfile(one / "MARK") or any(one.glob(f"snapshots/*/{MANIFEST}"))
    )


def is_snapshot(path: Path) -> bool:
    """Whether the path is the folder of a snapshot, in a store or elsewhere, or of one that a store lacks."""
    in_store = path.parent.name == SNAPSHOTS and _may_be_store(path.parent.parent)
    return (in_store or os.path.isfile(path / MANIFEST)) and not _may_be_store(path)


def _may_be_store(path: Path) -> bool:
    return os.path.isfile(path / "LOCK") or os.path.isdir(path / "snapshots")


def _after_kill(path: Path, base: str | None, noted: int | None) -> Restart:
    try:
        if base:
            snapshot = Snapshot.open(path / "snapshots" / base)
        elif base == "" or not (listing := list_snapshots(path / "snapshots")).snapshots:
            return Restart("empty", lost_steps=noted)
        elif listing.damaged:
            raise next(iter(listing.damaged.values()))
        else:
            snapshot = listing.snapshots[-1]
    except SnapshotError as error:
        return Restart("nowhere", problem=str(error), lost_steps=noted)
    step = snapshot.description["step"]
    return Restart("snapshot", step, snapshot.name, None if noted is None else max(0, noted - step))


def _kind_of(live: Path) -> str | None:
    if not live.is_dir():
        return None
    return "rocksdb" if any(live.glob("shard-*")) else "rows"


def _sizes(path: Path, live: Path) -> dict[str, int]:
    """The bytes of files, each once, as `live`, `snapshots` and `other`. Another process may be changing them."""
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
