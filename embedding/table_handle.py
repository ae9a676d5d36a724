"""The handle of an embedding to its rows, while they are open: in this process alone."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..distributed.sharded_table import ShardedTable
from ..distributed.world import World
from ..engine.errors import StoreError
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.options.store_options import StoreOptions
from ..engine.options.table_spec import TableSpec
from ..engine.table.table import OpenTable
from ..snapshots.control.server import SaveTarget
from ..snapshots.store.group import Member
from .local_table import LocalTable
from .rows_in_tensors import RowTensors
from .rows_reference import RowsReference
from .save_requests import LocalRequests
from .snapshots import Snapshots
from .training_group import TrainingGroup

_by_folder: weakref.WeakValueDictionary[str, TableHandle] = weakref.WeakValueDictionary()


class TableHandle:
    """The open rows of an embedding. A process has one handle of a folder.

    own: the rows that this process has, which are all rows. awaited: of the embedding, the rows of a loaded state that
    it does not have. Raises what `LocalTable` raises.
    """

    own: LocalTable
    snapshots: Snapshots
    world: World

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        group: TrainingGroup | None = None,
        for_load: bool = False,
        awaited: Sequence[RowsReference] = (),
    ) -> None:
        self.world, self.awaited = World.of_one(), awaited
        folder = claimed_folder(spec, options)
        self.own = LocalTable(spec, options, optimizer, device, group=group, for_load=for_load)
        store = self.own.store
        self.snapshots = Snapshots(self.own, self.world, None if store is None else store.snapshots, store)
        self.register(folder)
        self.requests: SaveTarget = LocalRequests(self, open_handle)
        self.own.serve(self.requests)

    def register(self, folder: str | None) -> None:
        """Have a folder, which `claimed_folder` has returned."""
        if folder is not None:
            _by_folder[folder] = self

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def group(self) -> TrainingGroup | None:
        """The embeddings that it is trained together with."""
        return self.own.group

    @property
    def member(self) -> Member | None:
        """The store in its group; None for rows without a folder, and on ranks other than 0."""
        return self.own.member

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def table(self) -> OpenTable | ShardedTable:
        """What reads and trains all rows. ClosedError."""
        return self.own.table

    @property
    def local_table(self) -> OpenTable:
        """The open table with the rows that this process has. ClosedError."""
        return self.own.table

    @property
    def exchanged(self) -> dict[str, dict[str, int]]:
        """Metrics of what went between ranks: none, for rows of one process."""
        return {}

    def rename(self, name: str) -> None:
        """Be called by another name from here on, with rows that are in memory."""
        self.own.rename(name)

    def keep_rows(self) -> None:
        """Keep the rows, whatever state was loaded into others. StoreError for rows that need a load first."""
        self.own.keep_rows()

    def join(self, group: TrainingGroup) -> None:
        """Be trained together with others from here on. StoreError. Local."""
        self.own.join(group)

    def tensors(self) -> RowTensors:
        """All rows, copied."""
        return self.own.tensors()

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Replace all rows. SnapshotError, StoreError, OptimizerError; if it raises, nothing has changed."""
        self.own.load_tensors(RowTensors.parse(tensors))

    def use_optimizer(self, optimizer: RowOptimizer) -> None:
        """Train the rows by `optimizer` from here on, as `LocalTable.use_optimizer`."""
        self.own.use_optimizer(optimizer)

    def forget_announced(self) -> None:
        """Forget what was announced, and end the prefetch thread, if the table is open."""
        self.own.forget_announced()

    def release(self) -> None:
        """Drop the pin that a failed step left, if the table is open."""
        self.own.release()

    def close(self) -> None:
        """Write back the rows and unlock the folder, as `LocalTable.close`."""
        self.own.close()

    def finish(self) -> None:
        """Close at the end of the embedding or the process. Errors are logged, since nobody could catch them."""
        self.own.finish()


def claimed_folder(spec: TableSpec, options: StoreOptions) -> str | None:
    """The real path of an embedding's folder; None without one. StoreError if another of this process has it open."""
    if options.persistent_path is None:
        return None
    folder = os.path.realpath(Path(options.persistent_path) / spec.name)
    for is_last in (False, True):
        older = _by_folder.get(folder)
        if older is None or older.own.own_open is None:
            return folder
        if not is_last:
            gc.collect()  # an embedding that nobody can use may wait in a circle of references
    raise StoreError(
        f"embedding {spec.name!r}: another embedding of that name in this process has {folder} open; use that one in "
        "both places, or call its close(), or give one of them another name or persistent_path, or del all that holds "
        "the other one, such as its EagerOptimizer"
    )


def open_handle(store: str) -> TableHandle:
    """The handle of this process to a store, by the real path of its folder. Raises StoreError if it has none open."""
    handle = _by_folder.get(store)
    if handle is None or handle.own.own_open is None:
        raise StoreError(f"process {os.getpid()} does not have {store!r} open; save that store by itself")
    return handle
