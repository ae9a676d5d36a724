"""Saves and loads one or several embeddings together, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...distributed.world import World
from ...engine.errors import OptionError, SnapshotError
from ...engine.table.background_save import SaveHandle
from ...snapshots.files.reader import Snapshot
from ...snapshots.files.writer import NewSnapshots, ProgressCallback
from ...snapshots.store.group import record_load
from ...snapshots.store.group_file import check_one_moment
from ...snapshots.store.selection import LoadReport
from ..tables.training_group import lock_between_steps, mark_inconsistent
from .background_saving import BackgroundSnapshotJob, CheckpointPart
from .table_save import write_and_commit

log = logging.getLogger("tierbed")

SnapshotManagers = list[Any]  # the `SnapshotManager` of each embedding


def save_together(
    world: World,
    managers: SnapshotManagers,
    name: str,
    kind: str | None = "full",
    overwrite: bool = False,
    background: bool = False,
    progress: ProgressCallback | None = None,
    paths: Sequence[Path | None] = (),
    part: CheckpointPart | None = None,
) -> SaveHandle | None:
    """Save each table's rows as snapshot `name` in the table's store folder, between two steps. All ranks call this.

    On an error, no snapshot exists, unless the error says otherwise. If several tables are saved as incremental, tables
    without a parent snapshot are saved in full. If `kind` is None, each table uses its `cheapest_kind`. If `background`
    is True, this returns at once, and threads save the rows. `progress` is called with the row count of each written
    chunk. `paths` are for a checkpoint, one for each table: the snapshot is also linked there, or only saved there if
    the table has no store folder. `part` is the rest of a checkpoint that is saved in the background.

    Raises SnapshotError, StoreError, OptionError.
    """
    ops = [manager.name_call(f"saving snapshot {name!r}") for manager in managers]
    count_text = "" if len(ops) == 1 else f"{len(managers)} embeddings"
    op = f"saving snapshot {name!r} of {count_text}" if count_text else ops[0]
    paths = paths or [None] * len(managers)
    for manager in managers:
        # may complete a background save, whose snapshot then becomes the parent
        manager.prepare_save(flushes=not background and kind != "incremental")
    with ExitStack() as locks, NewSnapshots() as new_snapshots:
        locks.enter_context(lock_between_steps(managers, awaits_step=world.size == 1))
        kinds = [manager.cheapest_kind if kind is None else kind for manager in managers]
        if count_text and kind == "incremental":
            kinds = world.call_on_rank_0(op, lambda: [_choose_kind(manager, background) for manager in managers])
        for manager, own_kind, path in zip(managers, kinds, paths, strict=True):
            try:
                if path is None or manager.has_folder:
                    manager.check_save(name, own_kind, overwrite, background)
            except (OptionError, SnapshotError) as error:
                if count_text and world.size == 1:
                    raise type(error)(f"embedding {manager.name!r}: {error}") from error
                raise
        saves = [
            manager.begin_save(op, name, own_kind, overwrite, new_snapshots, path)
            for manager, own_kind, path in zip(managers, kinds, paths, strict=True)
        ]
        if background:
            label = f"snapshot {name!r}" + (f" of {count_text}" if count_text else "")
            part = part or CheckpointPart(label, lambda: None, ExitStack())
            job = BackgroundSnapshotJob(world, op, saves, new_snapshots.pop_all(), part)
            for manager in managers:
                manager.set_background_save(job)
            return job
        write_and_commit(world, op, saves, new_snapshots, locks, progress)
    return None


def _choose_kind(manager: Any, background: bool) -> str:
    """Return "incremental", or "full" for a table without a parent snapshot."""
    if manager.last_snapshot_name or (background and manager.local.table.processor.defers_errors):  # on a GPU, refused
        return "incremental"
    log.info("embedding %r has no parent for an incremental snapshot, so it is saved full", manager.name)
    return "full"


def load_together(world: World, managers: SnapshotManagers, name: str) -> list[LoadReport]:
    """Replace all rows of each table by the table's snapshot `name`. All ranks call this.

    All snapshots are verified before a row is replaced. If a load fails after other loads replaced rows, no store can
    be written until every store is loaded. Raises SnapshotError (also if steps differ), StoreError, OptimizerError.
    """
    op = f"loading snapshot {name!r} of {len(managers)} embeddings"
    _wait_for_save(world, op, managers)
    with lock_between_steps(managers, finishes_saves=True):
        snapshots: list[Snapshot] = world.call_on_all_ranks(
            op, lambda: [manager.open_by_name(name) for manager in managers]
        )
        world.call_on_all_ranks(op, lambda: check_one_moment([manager.name for manager in managers], snapshots))
        for manager, snapshot in zip(managers, snapshots, strict=True):
            manager.check_snapshot(snapshot)
        return _load(world, op, managers, snapshots)


def load_rows_together(world: World, managers: SnapshotManagers, paths: Sequence[Path]) -> None:
    """Load the snapshots `paths`, already checked by `check_snapshot_at`, and link them into the store folders."""
    op = f"loading {len(managers)} embeddings"
    _wait_for_save(world, op, managers)
    with lock_between_steps(managers, finishes_saves=True), ExitStack() as link_stack:
        linked = [manager.link_into_store(path, link_stack) for manager, path in zip(managers, paths, strict=True)]
        _load(world, op, managers, world.call_on_all_ranks(op, lambda: [Snapshot.open(path) for path in linked]))


def _wait_for_save(world: World, op: str, managers: SnapshotManagers) -> None:
    """Wait for background saves before taking locks. One may still be writing the snapshot that will be loaded."""
    world.call_on_all_ranks(op, lambda: [manager.local.table for manager in managers])  # raises ClosedError
    for manager in managers:
        manager.wait_for_save()


def _load(world: World, op: str, managers: SnapshotManagers, snapshots: Sequence[Snapshot]) -> list[LoadReport]:
    """Load verified snapshots. Once the record names the snapshots, the next run loads them even after a kill."""
    pairs = [*zip(managers, snapshots, strict=True)]
    loads = {manager.member: snapshot.manifest.id for manager, snapshot in pairs if manager.member}
    reports = []
    with ExitStack() as record_stack:
        world.call_on_all_ranks(op, lambda: record_stack.enter_context(record_load(loads)) if loads else None)
        try:
            for manager, snapshot in pairs:
                reports.append(manager.load(snapshot))
        except BaseException as error:
            if reports:
                mark_inconsistent(loads, f"a load of {len(managers)} embeddings raised during its changes ({error!r})")
            raise
    return reports
