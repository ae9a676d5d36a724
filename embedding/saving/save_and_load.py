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
from ..tables.training_group import between_steps, mark_inconsistent
from .background_saving import BackgroundSaving
from .table_save import write_and_commit

log = logging.getLogger("tierbed")

SnapshotManagers = Sequence[Any]  # the `SnapshotManager` of each embedding


def save_together(
    world: World,
    tables: SnapshotManagers,
    name: str,
    kind: str = "full",
    overwrite: bool = False,
    background: bool = False,
    progress: ProgressCallback | None = None,
) -> SaveHandle | None:
    """Save each table's rows as snapshot `name` in the table's store folder, between two steps. All ranks call this.

    On an error, no snapshot exists, unless the error says otherwise. If several tables are saved as incremental, tables
    without a parent snapshot are saved in full. If `background` is True, this returns at once, and threads save the
    rows. `progress` is called with the row count of each written chunk. Raises SnapshotError, StoreError, OptionError.
    """
    op, *others = [table.op(f"saving snapshot {name!r}") for table in tables]
    count_text = f"{len(tables)} embeddings" if others else ""
    op = f"saving snapshot {name!r} of {count_text}" if others else op
    for table in tables:
        table.before_save(background)  # may complete a background save, whose snapshot becomes the parent
    with ExitStack() as locks, NewSnapshots() as new:
        locks.enter_context(between_steps(tables, waits=world.size == 1))
        kinds = [kind] * len(tables)
        if count_text and kind == "incremental" and not background:
            kinds = world.call_on_rank_0(op, lambda: [_choose_kind(table) for table in tables])
        for table, table_kind in zip(tables, kinds, strict=True):
            try:
                table.check_save(name, table_kind, overwrite, background)
            except (OptionError, SnapshotError) as error:
                if count_text and world.size == 1:
                    raise type(error)(f"embedding {table.name!r}: {error}") from error
                raise
        saves = [
            table.begin_save(op, name, table_kind, overwrite, new)
            for table, table_kind in zip(tables, kinds, strict=True)
        ]
        if background:
            label = f"snapshot {name!r}" + (f" of {count_text}" if count_text else "")
            saving = BackgroundSaving(world, op, label, saves, new.pop_all())
            for table in tables:
                table.note_saving(saving)
            return saving
        write_and_commit(world, op, saves, new, locks, progress)
    return None


def _choose_kind(table: Any) -> str:
    """Return "incremental", or "full" for a table without a parent snapshot."""
    if table.last:
        return "incremental"
    log.info("embedding %r has no parent for an incremental snapshot, so it is saved full", table.name)
    return "full"


def load_together(world: World, tables: SnapshotManagers, name: str) -> list[LoadReport]:
    """Replace all rows of each table by the table's snapshot `name`. All ranks call this.

    All snapshots are verified before a row is replaced. Raises SnapshotError (also for snapshots of different steps),
    StoreError, OptimizerError. If a load fails after other loads replaced rows, no store can be written or saved until
    every store is loaded.
    """
    op = f"loading snapshot {name!r} of {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with between_steps(tables, replaces=True):
        snapshots: list[Snapshot] = world.call_on_all_ranks(op, lambda: [table.snapshot(name) for table in tables])
        world.call_on_all_ranks(op, lambda: check_one_moment([table.name for table in tables], snapshots))
        for table, snapshot in zip(tables, snapshots, strict=True):
            table.check_snapshot(snapshot)
        return _load(world, op, tables, snapshots)


def load_rows_together(world: World, tables: SnapshotManagers, paths: Sequence[Path]) -> None:
    """Load the snapshots `paths`, already checked by `check_rows`, and link them into the store folders."""
    op = f"loading {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with between_steps(tables, replaces=True), ExitStack() as linking:
        linked = [table.link_into_store(path, linking) for table, path in zip(tables, paths, strict=True)]
        _load(world, op, tables, world.call_on_all_ranks(op, lambda: [Snapshot.open(path) for path in linked]))


def _finish_saving(world: World, op: str, tables: SnapshotManagers) -> None:
    """Wait for background saves before taking locks. One may still be writing the snapshot that will be loaded."""
    world.call_on_all_ranks(op, lambda: [table.local.table for table in tables])  # raises ClosedError
    for table in tables:
        table.finish_saving()


def _load(world: World, op: str, tables: SnapshotManagers, snapshots: Sequence[Snapshot]) -> list[LoadReport]:
    """Load verified snapshots. Once the record names the snapshots, the next run loads them even after a kill."""
    loads = {
        table.member: snapshot.manifest.id for table, snapshot in zip(tables, snapshots, strict=True) if table.member
    }
    reports = []
    with ExitStack() as noting:
        world.call_on_all_ranks(op, lambda: noting.enter_context(record_load(loads)) if loads else None)
        try:
            for table, snapshot in zip(tables, snapshots, strict=True):
                reports.append(table.load(snapshot))
        except BaseException as error:
            if reports:
                mark_inconsistent(loads, f"a load of {len(tables)} embeddings raised during its changes ({error!r})")
            raise
    return reports
