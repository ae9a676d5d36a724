"""The handle of an embedding to its rows, while they are open: in this process alone."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...distributed.world import World
from ...engine.errors import StoreError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.store_options import StoreOptions
from ...engine.options.table_spec import TableSpec
from ...engine.table.table import OpenTable
from ..tables.local_table import LocalTable
from ..tables.rows_in_tensors import RowTensors
from ..tables.training_group import TrainingGroup
from .rows_reference import RowsReference
from .save_requests import LocalRequests
from .snapshots import Snapshots

_by_folder: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # handles


class TableHandle(LocalTable):
    """The open rows of an embedding that has all of them in this process. A process has one handle of a folder.

    awaited: of the embedding, the rows of a loaded state that it does not have.
    """

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
        super().__init__(spec, options, optimizer, device, group=group, for_load=for_load)
        self.snapshots = Snapshots(self, self.world, None if self.store is None else self.store.snapshots, self.store)
        register(folder, self)
        self.requests = LocalRequests(self, open_handle)
        self.serve(self.requests, self.store)

    @property
    def local_table(self) -> OpenTable:
        """The open table with the rows that this process has. ClosedError."""
        return self.table

    def load_state(self, tensors: Mapping[str, Any]) -> None:
        """Replace all rows. SnapshotError, StoreError, OptimizerError; if it raises, nothing has changed."""
        self.load_tensors(RowTensors.parse(tensors))


def register(folder: str | None, handle: Any) -> None:
    """Let a handle have a folder, which `claimed_folder` has returned."""
    if folder is not None:
        _by_folder[folder] = handle


def claimed_folder(spec: TableSpec, options: StoreOptions) -> str | None:
    """The real path of an embedding's folder; None without one. StoreError if another of this process has it open."""
    if options.persistent_path is None:
        return None
    folder = os.path.realpath(Path(options.persistent_path) / spec.name)
    if _find_open(folder) is not None:
        gc.collect()  # an embedding that nobody can use may wait in a circle of references
    if _find_open(folder) is not None:
        raise StoreError(
            f"embedding {spec.name!r}: another embedding of that name in this process has {folder} open; use that one "
            "in both places, or call its close(), or give one of them another name or persistent_path, or del all that "
            "holds the other one, such as its EagerOptimizer"
        )
    return folder


def open_handle(store: str) -> Any:
    """The handle of this process to a store, by the real path of its folder. Raises StoreError if it has none open."""
    handle = _find_open(store)
    if handle is None:
        raise StoreError(f"process {os.getpid()} does not have {store!r} open; save that store by itself")
    return handle


def _find_open(folder: str) -> Any:
    handle = _by_folder.get(folder)
    return None if handle is None or handle.own.own_open is None else handle
