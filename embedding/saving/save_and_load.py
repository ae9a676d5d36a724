"""Saves and loads of snapshots of one or several embeddings, which train together or not."""

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
from ...snapshots.store.group import loading
from ...snapshots.store.group_file import check_one_moment
from ...snapshots.store.selection import LoadReport
from ..tables.training_group import between_steps, tear
from .background_saving import BackgroundSaving
from .table_save import write_and_commit

log = logging.getLogger("tierbed")

Tables = Sequence[Any]  # each the `Snapshots` of an embedding


def save_together(
    world: World,
    tables: Tables,
    name: str,
    kind: str = "full",
    overwrite: bool = False,
    background: bool = False,
    progress: ProgressCallback | None = None,
) -> SaveHandle | None:
    """Save the rows of all as snapshot `name`, in each store folder, between two steps.

    If it raises, none of the snapshots exists, unless the error says so. An incremental one of several is full in a
    store that has no snapshot to be based on. background: return at once, while threads save the rows as they are now.
    progress: called with the rows of each chunk that this process writes. Raises SnapshotError, StoreError,
    OptionError. All ranks call it.
    """
    op, *others = [table.op(f"saving snapshot {name!r}") for table in tables]
    several = f"{len(tables)} embeddings" if others else ""
    op = f"saving snapshot {name!r} of {several}" if others else op
    for table in tables:
        table.before_save(background)  # a save in the background that completes now may be the parent
    with ExitStack() as locks, NewSnapshots() as new:
        locks.enter_context(between_steps(tables, waits=world.size == 1))
        kinds = [kind] * len(tables)
        if several and kind == "incremental" and not background:
            kinds = world.call_on_rank_0(op, lambda: [_kind_of(table) for table in tables])
        for table, its_kind in zip(tables, kinds, strict=True):
            try:
                table.check_save(name, its_kind, overwrite, background)
            except (OptionError, SnapshotError) as error:
                if several and world.size == 1:
                    raise type(error)(f"embedding {table.name!r}: {error}") from error
                raise
        saves = [table.begin_save(op, name, of, overwrite, new) for table, of in zip(tables, kinds, strict=True)]
        if background:
            what = f"snapshot {name!r}" + (f" of {several}" if several else "")
            saving = BackgroundSaving(world, op, what, saves, new.pop_all())
            for table in tables:
                table.note_saving(saving)
            return saving
        write_and_commit(world, op, saves, new, locks, progress)
    return None


def _kind_of(table: Any) -> str:
    """The kind of an incremental snapshot of a table that is saved with others."""
    if table.last:
        return "incremental"
    log.info("embedding %r has no snapshot to be based on, and is saved full", table.name)
    return "full"


def load_together(world: World, tables: Tables, name: str) -> list[LoadReport]:
    """Replace all rows of each by those of its snapshot `name`. All are verified before a row is replaced.

    Raises SnapshotError, also if they were saved at different steps, StoreError, OptimizerError. If it raises during
    the loads, the stores can neither be written nor saved until each is loaded. All ranks call it.
    """
    op = f"loading snapshot {name!r} of {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with between_steps(tables, replaces=True):
        snapshots: list[Snapshot] = world.call_on_all_ranks(op, lambda: [table.snapshot(name) for table in tables])
        world.call_on_all_ranks(op, lambda: check_one_moment([table.name for table in tables], snapshots))
        for table, snapshot in zip(tables, snapshots, strict=True):
            table.check_snapshot(snapshot)
        return _load(world, op, tables, snapshots)


def load_rows_together(world: World, tables: Tables, places: Sequence[Path]) -> None:
    """Load the snapshots `places`, which `check_rows` has checked, and which the store folders get too."""
    op = f"loading {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with between_steps(tables, replaces=True), ExitStack() as linking:
        ours = [table.link_in(place, linking) for table, place in zip(tables, places, strict=True)]
        _load(world, op, tables, world.call_on_all_ranks(op, lambda: [Snapshot.open(place) for place in ours]))


def _finish_saving(world: World, op: str, tables: Tables) -> None:
    """Wait for all snapshots in the background before the locks are taken: one that is completed may be loaded."""
    world.call_on_all_ranks(op, lambda: [table.local_table for table in tables])  # ClosedError
    for table in tables:
        table.finish_saving()


def _load(world: World, op: str, tables: Tables, snapshots: Sequence[Snapshot]) -> list[LoadReport]:
    """Load verified snapshots. A kill from the write of the record on is finished by the next run."""
    loads = {table.member: one.manifest.id for table, one in zip(tables, snapshots, strict=True) if table.member}
    reports = []
    with ExitStack() as noting:
        world.call_on_all_ranks(op, lambda: noting.enter_context(loading(loads)) if loads else None)
        try:
            for table, snapshot in zip(tables, snapshots, strict=True):
                reports.append(table.load(snapshot))
        except BaseException as error:
            if reports:
                tear(loads, f"a load of {len(tables)} embeddings raised during its changes ({error!r})")
            raise
    return reports
