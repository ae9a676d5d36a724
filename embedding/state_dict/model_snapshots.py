"""Snapshots of all embeddings of a model: one name in every store folder, all from the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...distributed.world import World
from ...engine.checks import checked_arguments
from ...engine.errors import OptionError, SnapshotError
from ...engine.table.background_save import SaveHandle
from ...snapshots.store.selection import ALL, LoadReport, Selection
from ..autograd.shadow import converter
from ..saving.save_and_load import load_rows_together, load_together, save_together
from .saved_rows import SavedRows, rows_stay


class ModelSnapshots:
    """What has embeddings, and saves and loads the rows of all of them together."""

    def _snapshot_embeddings(self) -> list[SavedRows]:
        """The embeddings whose rows these are."""
        assert isinstance(self, nn.Module)
        return [module for module in self.modules() if isinstance(module, SavedRows)]

    @checked_arguments("kind", "background", "overwrite")
    def save_snapshot(
        self, snapshot_name: str, kind: str = "full", background: bool = False, *, overwrite: bool = False
    ) -> SaveHandle | None:
        """Save the rows of all embeddings under one name, each in its store folder, between two steps.

        If it raises, none of the snapshots exists, unless the error says so. The arguments are those of
        `MultiTableEmbedding.save_snapshot`. An embedding without a parent for an incremental snapshot is saved full.
        SnapshotError, also if an embedding has no persistent_path;
        StoreError, OptionError.
        """
        tables, world = self._snapshots(), _world_of(self._stored())
        return save_together(world, tables, snapshot_name, kind, overwrite, background)

    def load_snapshot(self, snapshot_name: str) -> list[LoadReport]:
        """Replace the rows of all embeddings by those of their snapshots of that name, which were saved together.

        All are verified before a row is replaced. Returns a report for each embedding. SnapshotError, StoreError,
        OptimizerError.
        """
        tables, world = self._snapshots(for_load=True), _world_of(self._stored())
        reports = load_together(world, tables, snapshot_name)
        self.keep_rows()
        return reports

    def keep_rows(self) -> None:
        """Keep the rows as they are, though a loaded state_dict is of others."""
        for embedding in self._snapshot_embeddings():
            embedding.keep_rows()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's. strict: False lets rows that the state is not of stay, with a warning."""
        with rows_stay(strict is False):
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As torch's. What an embedding refuses is raised before any module is converted."""
        for embedding in self._snapshot_embeddings() if recurse else ():
            converter(embedding, fn, f"Nothing of the {type(self).__name__} is converted by now")
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def prune_snapshots(self, keep_last: int, keep_every: int | None = None) -> dict[str, list[str]]:
        """Remove snapshots of all embeddings, as `MultiTableEmbedding.prune_snapshots`. Returns names by embedding."""
        return {one.name: one.prune_snapshots(keep_last, keep_every) for one in self._stored()}

    def _stored(self) -> list[SavedRows]:
        found = self._snapshot_embeddings()
        if not found:
            raise SnapshotError("there is no embedding whose rows could be saved or loaded; give the module one")
        return found

    def _snapshots(self, for_load: bool = False) -> list[Any]:
        return [embedding.table_handle(for_load).snapshots for embedding in self._stored()]


def save_rows(embeddings: Sequence[SavedRows], places: Sequence[Path]) -> None:
    """Save the rows of embeddings as the snapshots `places`, from the same step."""
    world = _world_of(embeddings)
    tables = [embedding.table_handle().snapshots for embedding in embeddings]
    stored = [embedding.store_options.persistent_path is not None for embedding in embeddings]
    if any(stored):
        save_together(world, [*compress(tables, stored)], places[0].name)
    for table, is_stored, place in zip(tables, stored, places, strict=True):
        (table.link_rows if is_stored else table.save_rows)(place)


def load_rows(embeddings: Sequence[SavedRows], places: Sequence[Path], selection: Selection = ALL) -> None:
    """Load the rows of embeddings, or a selection of what they have, from the snapshots `places`."""
    world = _world_of(embeddings)
    tables = [embedding.table_handle(for_load=True).snapshots for embedding in embeddings]
    stored = [selection.can_recover and embedding.store_options.persistent_path is not None for embedding in embeddings]
    for table, is_stored, place in zip(tables, stored, places, strict=True):
        if not is_stored:
            table.load_rows(place, selection)
    if any(stored):
        load_rows_together(world, [*compress(tables, stored)], [*compress(places, stored)])
    for embedding in embeddings:
        embedding.keep_rows()


def _world_of(embeddings: Sequence[SavedRows]) -> World:
    """The ranks that share the rows of all of them. OptionError where some are shared otherwise than others."""
    worlds = {id(embedding.world): embedding.world for embedding in embeddings}
    if len(worlds) > 1:
        raise OptionError(
            "some of these embeddings have another world than the others; save and load those of one world together"
        )
    return next(iter(worlds.values()), None) or World.of_one()
