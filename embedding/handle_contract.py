"""What an embedding needs of its rows, whether one process has them all or ranks share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.ops.rows_contract import Pinned
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.options.lookup import Lookup
from ..engine.options.store_options import StoreOptions
from ..engine.options.table_spec import TableSpec
from ..engine.table.background_save import SaveHandle
from ..engine.table.table import OpenTable
from ..snapshots.files.reader import Snapshot
from ..snapshots.store.selection import ALL, LoadReport, Selection
from .rows_in_tensors import RowTensors
from .rows_reference import RowsReference
from .training_group import TrainingGroup


class TableOfAll(Protocol):
    """All rows of an embedding, for lookups and steps. The methods are those of `OpenTable`."""

    @property
    def optimizer(self) -> RowOptimizer | None: ...

    def read(self, lookup: Lookup, weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor: ...

    def get(self, lookup: Lookup) -> Tensor: ...

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor: ...

    def pin(self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, like: Any = None) -> Pinned: ...

    def announce(self, lookups: list[Lookup]) -> None: ...

    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None: ...

    def delete(self, lookup: Lookup) -> int: ...


class TableHandle(Protocol):
    """An embedding's hold on its rows. The methods are those of `LocalTableHandle`."""

    device: torch.device
    awaited: Sequence[RowsReference]

    @property
    def table(self) -> TableOfAll: ...

    @property
    def own_table(self) -> OpenTable:
        """The table of the rows that this process has."""

    @property
    def base(self) -> str | None: ...

    @property
    def exchanged(self) -> dict[str, dict[str, int]]: ...

    def size(self) -> int: ...

    @property
    def unsettled(self) -> str: ...

    def keep_rows(self) -> None: ...

    def join(self, group: TrainingGroup) -> None: ...

    def use_optimizer(self, optimizer: RowOptimizer) -> None: ...

    def move(self, device: torch.device) -> None: ...

    def forget_announced(self) -> None: ...

    def release(self) -> None: ...

    def check_save(self, name: str, kind: str, overwrite: bool) -> None: ...

    def save_snapshot(self, name: str, kind: str, overwrite: bool) -> Any: ...

    def save_in_background(self, name: str, kind: str, overwrite: bool) -> SaveHandle: ...

    def load_snapshot(self, name: str, selection: Selection, strict: bool) -> LoadReport: ...

    def prune_snapshots(self, keep_last: int, keep_every: int | None) -> list[str]: ...

    def save_rows(self, place: Path) -> None: ...

    def link_rows(self, place: Path) -> None: ...

    def check_rows(self, place: Path, selection: Selection = ALL) -> None: ...

    def discard_rows(self, name: str) -> None: ...

    def load_rows(self, place: Path, selection: Selection = ALL) -> None: ...

    def drop_rows(self, saved: Snapshot) -> None: ...

    def named(self) -> RowsReference: ...

    def save_for_state(self, keep: int | None) -> RowsReference: ...

    def go_to(self, awaited: RowsReference) -> bool: ...

    def tensors(self) -> RowTensors: ...

    def load_tensors(self, tensors: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def finish(self) -> None: ...


class Ranks(Protocol):
    """The processes that share the rows of an embedding: `tierbed.distributed.World`."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def untold(self, error: BaseException) -> bool:
        """Whether the others are to hear of an error: it was not raised on all of them, and they can still meet."""

    def meet(self, op: str, error: BaseException | None = None, note: int = 0) -> list[int]:
        """The notes of all ranks, in their order. Where a rank gives an error, raises on every rank."""

    def save_together(
        self, tables: Sequence[TableHandle], name: str, kind: str, overwrite: bool, background: bool
    ) -> SaveHandle | None:
        """Save the rows of several embeddings, all or none."""

    def load_together(self, tables: Sequence[TableHandle], name: str) -> list[LoadReport]:
        """Load the rows of several embeddings."""

    def load_rows(self, tables: Sequence[TableHandle], places: Sequence[Path]) -> None:
        """Load the rows of several embeddings from a checkpoint."""

    def hold(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        group: TrainingGroup | None = None,
        for_load: bool = False,
    ) -> TableHandle:
        """Open the rows over all ranks."""
