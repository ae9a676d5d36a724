"""Saving and loading the rows of several embeddings that ranks share: all, or none. All ranks make each call."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..embedding.group_snapshots import instant_of, load_all
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.writer import ProgressCallback
from ..snapshots.store.all_or_none import Decided, OfAll
from ..snapshots.store.instants import check_one_instant
from ..snapshots.store.selection import LoadReport
from .agreement import call_on_all_ranks, catch
from .part_save import BackgroundShardedSave, commit_together
from .rank_group import RankGroup

if TYPE_CHECKING:
    from .part_save import ShardedSave


Tables = Sequence[Any]  # of ShardedTableHandle, whose file imports this one


class SavesTogether(RankGroup):
    """Ranks that save and load the rows of several embeddings: all of them, or none. All ranks make each call."""

    def save_together(
        self,
        tables: Tables,
        name: str,
        kind: str = "full",
        overwrite: bool = False,
        background: bool = False,
        progress: ProgressCallback | None = None,
    ) -> BackgroundShardedSave | None:
        """As `save_together` of one process, or as `save_together_in_background`. progress: of this rank's rows."""
        for table in tables:
            table.check_save(name, _kind(table, kind), overwrite, background)
            table.at_step()
        op = f"saving snapshot {name!r} of {len(tables)} embeddings"
        home, of_all = tables[0].home, None
        if home is not None:
            of_all = OfAll(name, home.path, Decided(home.snapshots / name, secrets.token_hex(16), lambda: None))
        saves: list[tuple[ShardedSave, Snapshot | None]] = []
        with _locked(tables):
            noted = [table.when_saved() for table in tables]
            try:
                for table in tables:
                    table.check_not_saving(op)
                    saves.append(table.begin_save(op, name, _kind(table, kind), overwrite, of_all))
            except BaseException:
                for save, _ in saves:
                    save.drop()
                raise
            if background:
                parts = [(table.own, save) for table, (save, _) in zip(tables, saves, strict=True)]
                saving = BackgroundShardedSave(self, op, parts, noted, f"snapshot {name!r} of {len(tables)} embeddings")
                for table in tables:
                    table.goes_on(saving)
                return saving
            errors = [
                catch(partial(table.write_save, save, parent, progress))[1]
                for table, (save, parent) in zip(tables, saves, strict=True)
            ]
            made = commit_together(self, op, [save for save, _ in saves], errors, noted)
            for table, id in zip(tables, made, strict=True):
                table.end_save(kind, id)
        return None

    def load_together(self, tables: Tables, name: str) -> list[LoadReport]:
        """As `load_together` of one process."""
        op = f"loading snapshot {name!r} of {len(tables)} embeddings"
        places = [table.folder / name for table in tables]
        snapshots: list[Snapshot] = call_on_all_ranks(self, op, lambda: [Snapshot.open(place) for place in places])
        call_on_all_ranks(self, op, lambda: check_one_instant([table.name for table in tables], snapshots))
        with _locked(tables):
            for table, place in zip(tables, places, strict=True):
                table.check_rows(place)
            return _load(self, tables, places)

    def load_rows(self, tables: Tables, places: Sequence[Path]) -> None:
        """As `load_rows_together` of one process."""
        with _locked(tables), ExitStack() as linking:
            both = zip(tables, places, strict=True)
            _load(self, tables, [table.link_in(place, linking) for table, place in both])


@contextmanager
def _locked(tables: Tables) -> Iterator[None]:
    """A block in which this rank serves no other process: rank 0 prunes nothing that is being read."""
    with ExitStack() as locks:
        for table in tables:
            locks.enter_context(table.own.table.lock)
        yield


def _load(world: RankGroup, tables: Tables, places: Sequence[Path]) -> list[LoadReport]:
    members = [table.membership for table in tables if table.membership is not None]
    op = f"loading {len(tables)} embeddings"
    together = call_on_all_ranks(world, op, lambda: instant_of(members, [Snapshot.open(place) for place in places]))
    both = zip(tables, places, strict=True)
    return load_all(members, [partial(table.load_from, place, together=together) for table, place in both])


def _kind(table: Any, kind: str) -> str:
    return "full" if kind == "incremental" and not table.base else kind
