"""The handle through which an embedding uses its open rows, if this process holds all rows."""

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
from ..tables.row_tensors import RowTensors
from ..tables.training_group import TrainingGroup
from .rows_reference import RowsReference
from .save_requests import LocalRequestHandler
from .snapshot_manager import SnapshotManager

_handles_by_folder: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # open handles


class TableHandle(LocalTable):
    """The open rows of an embedding, all in this process. Each folder has at most one handle.

    pending_references: name the rows of a loaded state_dict, as long as the embedding does not have these rows.
    """

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        group: TrainingGroup | None = None,
        for_load: bool = False,
        pending_references: Sequence[RowsReference] = (),
    ) -> None:
        self.world, self.pending_references = World.single(), pending_references
        folder = claim_folder(spec, options)
        super().__init__(spec, options, optimizer, device, group=group, for_load=for_load)
        snapshots_path = None if self.store is None else self.store.snapshots_path
        self.snapshot_manager = SnapshotManager(self, self.world, snapshots_path, self.store)
        register_handle(folder, self)
        self.request_handler = LocalRequestHandler(self, find_handle)
        self.serve(self.request_handler, self.store)

    @property
    def open_table(self) -> OpenTable:
        """The open table with this process's rows. Raises ClosedError."""
        return self.table

    def load_state(self, tensors: Mapping[str, Any]) -> None:
        """Replace all rows. On SnapshotError, StoreError or OptimizerError, nothing has changed."""
        self.load_tensors(RowTensors.parse(tensors))


def register_handle(folder: str | None, handle: Any) -> None:
    """Register a handle for a folder that `claim_folder` has returned."""
    if folder is not None:
        _handles_by_folder[folder] = handle


def claim_folder(spec: TableSpec, options: StoreOptions) -> str | None:
    """Return the real path of the embedding's folder, if any. Raises StoreError if it is open in this process."""
    if options.persistent_path is None:
        return None
    folder = os.path.realpath(Path(options.persistent_path) / spec.name)
    if _find_open_handle(folder) is not None:
        gc.collect()  # an unreachable embedding in a reference cycle may still keep the folder open
    if _find_open_handle(folder) is not None:
        raise StoreError(
            f"embedding {spec.name!r}: another embedding with this name in this process has {folder} open. Use the "
            "open embedding in both places, or call its close(). Or delete the open embedding and all objects that "
            "hold it, such as its EagerOptimizer. Or give one embedding another name or persistent_path"
        )
    return folder


def find_handle(store_path: str) -> Any:
    """Return this process's handle to the store with this real path. Raises StoreError if the store is not open."""
    handle = _find_open_handle(store_path)
    if handle is None:
        raise StoreError(f"process {os.getpid()} does not have {store_path!r} open; save that store by itself")
    return handle


def _find_open_handle(folder: str) -> Any:
    handle = _handles_by_folder.get(folder)
    return None if handle is None or handle.local.table_if_open is None else handle
