"""Loads snapshots into several stores that are trained together, with one write of their record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..distributed.world import World
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.group import loading
from ..snapshots.store.group_file import check_one_moment
from ..snapshots.store.selection import LoadReport
from .saving import Tables, locked
from .training_group import tear


def load_together(world: World, tables: Tables, name: str) -> list[LoadReport]:
    """Replace all rows of each by those of its snapshot `name`. All are verified before a row is replaced.

    Raises SnapshotError, also if they were saved at different steps, StoreError, OptimizerError. If it raises during
    the loads, the stores can neither be written nor saved until each is loaded. All ranks call it.
    """
    op = f"loading snapshot {name!r} of {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with locked(tables):
        snapshots: list[Snapshot] = world.call_on_all_ranks(op, lambda: [table.snapshot(name) for table in tables])
        world.call_on_all_ranks(op, lambda: check_one_moment([table.name for table in tables], snapshots))
        for table, snapshot in zip(tables, snapshots, strict=True):
            table.check_snapshot(snapshot)
        return _load(world, op, tables, snapshots)


def load_rows_together(world: World, tables: Tables, places: Sequence[Path]) -> None:
    """Load the snapshots `places`, which `check_rows` has checked, and which the store folders get too."""
    op = f"loading {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with locked(tables), ExitStack() as linking:
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
                reports.append(table.load_from(snapshot))
        except BaseException as error:
            if reports:
                tear(loads, f"a load of {len(tables)} embeddings raised during its changes ({error!r})")
            raise
    return reports
