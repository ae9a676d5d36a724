"""Loading the rows of several stores that are trained together: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ..distributed.world import World
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.versions import Instant
from ..snapshots.store.instants import check_one_instant, rows_of
from ..snapshots.store.selection import LoadReport
from .saving import Tables, locked, members_of
from .training_group import Membership


def load_together(world: World, tables: Tables, name: str) -> list[LoadReport]:
    """Replace all rows of each by those of its snapshot `name`. All are verified before a row is replaced.

    Raises SnapshotError, also if they were saved at different steps, StoreError, OptimizerError. If it raises during
    the loads, the stores can neither be written nor saved until each is loaded. All ranks call it.
    """
    op = f"loading snapshot {name!r} of {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with locked(tables):
        snapshots: list[Snapshot] = world.call_on_all_ranks(op, lambda: [table.snapshot(name) for table in tables])
        world.call_on_all_ranks(op, lambda: check_one_instant([table.name for table in tables], snapshots))
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
    """Load verified snapshots. A kill between two of them is finished by the next run: `Group.target`."""
    members = members_of(tables)
    together = world.call_on_all_ranks(op, lambda: instant_of(members, snapshots))
    both = zip(tables, snapshots, strict=True)
    return load_all(members, [partial(table.load_from, snapshot, together) for table, snapshot in both])


def load_all(members: Sequence[Membership], loads: Sequence[Callable[[], LoadReport]]) -> list[LoadReport]:
    """Load several embeddings. members: of their stores, which are torn if it raises during the loads."""
    reports = []
    try:
        for load in loads:
            reports.append(load())
    except BaseException as error:
        if reports and members:
            members[0].tear(f"a load of {len(loads)} embeddings raised during its changes ({error!r})")
        raise
    return reports


def instant_of(members: Sequence[Membership], snapshots: Sequence[Snapshot]) -> Instant | None:
    """The instant to which a load of these snapshots moves the stores; None if they are trained apart."""
    if not members or members[0].record is None:
        return None
    now = members[0].instant()
    loaded = zip((member.id for member in members), (rows_of(snapshot).now for snapshot in snapshots), strict=True)
    return Instant(now.number, {**now.versions, **dict(loaded)})
