"""Saving and loading the rows of several embeddings that ranks share: all, or none. All ranks make each call."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.persist.together import instant_of
from ..engine.persist.training_group import OfAll
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.all_or_none import Decided
from ..snapshots.store.instants import check_one_instant
from ..snapshots.store.selection import LoadReport, Selection
from .agreement import attempt, everywhere

if TYPE_CHECKING:
    from .group import Group
    from .held import ShardedHeld
    from .part_save import PartSave


def save_together(
    world: Group, tables: Sequence[ShardedHeld], name: str, kind: str = "full", overwrite: bool = False
) -> None:
    """As `save_together` of one process."""
    for table in tables:
        table.check_save(name, _kind(table, kind), overwrite)
        table.saves.at_step()
    op = f"saving snapshot {name!r} of {len(tables)} embeddings"
    identity = secrets.token_hex(16)
    saves: list[tuple[ShardedHeld, PartSave]] = []
    with ExitStack() as locks:
        for table in tables:
            locks.enter_context(table.own.table.lock)
        try:
            for table in tables:
                first = tables[0].saves
                commit = None if first.place is None else Decided(first.place / name, identity, lambda: None)
                of_all = None
                if commit is not None and first.membership is not None:
                    of_all = OfAll(name, first.membership, identity, commit)
                save, parent = table.saves.begin(op, name, _kind(table, kind), overwrite, of_all)
                saves.append((table, save))
                _, error = attempt(partial(table.saves.write, save, parent, None))
                save.gather(error)
            for _, save in saves:
                everywhere(world, f"{op}: manifests", save.write_manifest)
        except BaseException:
            for _, save in saves:
                save.drop()
            raise
        for table, save in saves:  # the first is the commit
            table.saves.saved(kind, save.put_in_place(table.saves.noted()))


def load_together(world: Group, tables: Sequence[ShardedHeld], name: str) -> list[LoadReport]:
    """As `load_together` of one process."""
    op = f"loading snapshot {name!r} of {len(tables)} embeddings"
    places = [table.saves.folder / name for table in tables]
    snapshots: list[Snapshot] = everywhere(world, op, lambda: [Snapshot.open(place) for place in places])
    everywhere(world, op, lambda: check_one_instant([table.name for table in tables], snapshots))
    for table, place in zip(tables, places, strict=True):
        table.saves.check_rows(place, True)
    return _load(tables, places)


def save_rows(world: Group, tables: Sequence[ShardedHeld], places: Sequence[Path]) -> None:
    """As `save_rows_together` of one process, into folders that all ranks see."""
    stored = [table for table in tables if table.home is not None]
    if stored:
        save_together(world, stored, places[0].name)
    for table, place in zip(tables, places, strict=True):
        if table in stored:
            table.saves.link(place)
        else:
            table.save_rows(place)


def load_rows(tables: Sequence[ShardedHeld], places: Sequence[Path], state: bool) -> None:
    """As `load_rows_together` of one process."""
    stored = [(t, p) for t, p in zip(tables, places, strict=True) if state and t.home is not None]
    for table, place in zip(tables, places, strict=True):
        if (table, place) not in stored:
            table.load_rows(place, state)
    with ExitStack() as linking:
        own = [table.saves.link_in(place, linking) for table, place in stored]
        _load([table for table, _ in stored], own)


def _load(tables: Sequence[ShardedHeld], places: Sequence[Path]) -> list[LoadReport]:
    members = [table.membership for table in tables if table.membership is not None]
    together = instant_of(members, [Snapshot.open(place) for place in places]) if members else None
    reports = []
    for table, place in zip(tables, places, strict=True):
        op = f"loading snapshot {place.name!r} of embedding {table.name!r}"
        reports.append(table.saves.load_from(op, place, Selection(), place.name, together))
    return reports


def _kind(table: ShardedHeld, kind: str) -> str:
    return "full" if kind == "incremental" and not table.base else kind
