"""Saves and loads all embeddings in a model together, under one snapshot name and from the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...distributed.world import World
from ...engine.checks import validate_arguments
from ...engine.errors import OptionError, SnapshotError
from ...engine.table.background_save import SaveHandle
from ...snapshots.store.selection import ALL, LoadReport, Selection
from ..autograd.shadow import make_converter
from ..saving.background_saving import CheckpointPart
from ..saving.save_and_load import load_rows_together, load_together, save_together
from .saved_rows import RowLoadingMixin, SnapshotEmbedding


class ModelSnapshots(RowLoadingMixin):
    """Mixin for modules and optimizers: saves and loads all their embeddings together."""

    def _find_embeddings(self) -> list[SnapshotEmbedding]:
        assert isinstance(self, nn.Module)
        return [module for module in self.modules() if isinstance(module, SnapshotEmbedding)]

    @validate_arguments("kind", "background", "overwrite")
    def save_snapshot(
        self, snapshot_name: str, kind: str = "full", background: bool = False, *, overwrite: bool = False
    ) -> SaveHandle | None:
        """Save a snapshot of each embedding in its store folder, all under one name and between two steps.

        If this raises, no snapshot was saved, unless the error says otherwise.

        Args:
            snapshot_name, kind, background, overwrite: As in `MultiTableEmbedding.save_snapshot`. With
                kind="incremental", an embedding without a parent snapshot is saved full.

        Returns:
            A `SaveHandle` for a save in the background, otherwise None.

        Raises:
            SnapshotError: If the name is invalid or taken, or an embedding has no persistent_path.
            StoreError: If rows cannot be read or written.
            OptionError: If `kind` is invalid or does not fit, or the embeddings have different worlds.
        """
        managers, world = self._list_managers(), find_world(self._require_embeddings())
        return save_together(world, managers, snapshot_name, kind, overwrite, background)

    def load_snapshot(self, snapshot_name: str) -> list[LoadReport]:
        """Load the snapshots that `save_snapshot` saved under one name, replacing all rows.

        All snapshots are verified before a row is replaced.

        Args:
            snapshot_name: The snapshots' name.

        Returns:
            A `LoadReport` for each embedding.

        Raises:
            SnapshotError: If a snapshot is missing, damaged or does not fit, or the snapshots are of different steps.
            StoreError: If a store cannot be read or written.
            OptimizerError: If a snapshot contains another optimizer's state.
        """
        managers, world = self._list_managers(for_load=True), find_world(self._require_embeddings())
        reports = load_together(world, managers, snapshot_name)
        self.keep_rows()
        return reports

    def keep_rows(self) -> None:
        """Accept all present rows, although a loaded state_dict names other rows."""
        for embedding in self._find_embeddings():
            embedding.keep_rows()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert or move the module, as torch does. Raises an embedding's error before any module is converted."""
        for embedding in self._find_embeddings() if recurse else ():
            make_converter(embedding, fn, f"Nothing of the {type(self).__name__} is converted by now")
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def prune_snapshots(self, keep_last: int, keep_every: int | None = None) -> dict[str, list[str]]:
        """Remove old snapshots of all embeddings.

        Args:
            keep_last, keep_every: As in `MultiTableEmbedding.prune_snapshots`.

        Returns:
            The names of the removed snapshots, by embedding.
        """
        return {
            embedding.name: embedding.prune_snapshots(keep_last, keep_every) for embedding in self._require_embeddings()
        }

    def _require_embeddings(self) -> list[SnapshotEmbedding]:
        if embeddings := self._find_embeddings():
            return embeddings
        raise SnapshotError("there is no embedding whose rows could be saved or loaded; give the module one")

    def _list_managers(self, for_load: bool = False) -> list[Any]:
        return [embedding.table_handle(for_load).snapshot_manager for embedding in self._require_embeddings()]


def save_rows(
    embeddings: Sequence[SnapshotEmbedding],
    paths: Sequence[Path],
    kind: str | None = None,
    part: CheckpointPart | None = None,
) -> SaveHandle | None:
    """Save `embeddings[i]` as the snapshot `paths[i]`, all from the same step. kind: None for the cheapest kind.

    With `part`, the rest of a checkpoint, this saves in the background, and returns the save.
    """
    managers = [embedding.table_handle().snapshot_manager for embedding in embeddings]
    if kind == "checkpoint" and (
        name := next((e.name for e in embeddings if not e.store_options.persistent_path), None)
    ):
        raise OptionError(f"kind='checkpoint': the rows of embedding {name!r} are in memory; leave kind out")
    world, name = find_world(embeddings), paths[0].name if paths else ""
    return save_together(world, managers, name, kind, background=part is not None, paths=paths, part=part)


def load_rows(embeddings: Sequence[SnapshotEmbedding], paths: Sequence[Path], selection: Selection = ALL) -> None:
    """Load the rows of `embeddings[i]`, or a selection, from the snapshot `paths[i]`."""
    world = find_world(embeddings)
    managers = [embedding.table_handle(for_load=True).snapshot_manager for embedding in embeddings]
    have_folders = [selection.can_recover and e.store_options.persistent_path is not None for e in embeddings]
    for manager, has_folder, path in zip(managers, have_folders, paths, strict=True):
        if not has_folder:
            manager.load_snapshot_at(path, selection)
    if any(have_folders):
        load_rows_together(world, [*compress(managers, have_folders)], [*compress(paths, have_folders)])
    for embedding in embeddings:
        embedding.keep_rows()


def find_world(embeddings: Sequence[SnapshotEmbedding]) -> World:
    """Return the world that all embeddings have in common. Raises OptionError for different worlds."""
    worlds = {id(embedding.world): embedding.world for embedding in embeddings}
    if len(worlds) > 1:
        raise OptionError("these embeddings have different worlds; save and load the embeddings of one world at a time")
    return next(iter(worlds.values()), None) or World.single()
