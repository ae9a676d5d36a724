"""Embeddings with any store and optimizer, their steps without a graph, and all that a table holds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tierbed
from support.optimizers import OPTIMIZERS
from tierbed import MultiTableEmbedding
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.row_step import run_row_step
from tierbed.engine.table.table import OpenTable

DIM = 5
Ids = Tensor | Sequence[int]
TABLES = [
    tierbed.make_uniform_initializer(-0.1, 0.1),
    tierbed.make_normal_initializer(0.5, 2.0),
    tierbed.make_constant_initializer(0.25),
]


def make(
    store_options: Any,
    optimizer: str | None = None,
    name: str = "rows",
    key_type: torch.dtype = torch.int64,
    tables: int = len(TABLES),
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> MultiTableEmbedding:
    more = {"seed": 0, **more}  # embeddings of several names are compared
    embedding = MultiTableEmbedding(name, DIM, dtype, key_type, TABLES[:tables], store_options, **more)
    if optimizer is not None:
        attach(embedding, optimizer)
    return embedding


def ask_to_leave(table: OpenTable, keys: Sequence[int], cause: str = "deleted") -> None:
    """Rows of table 0 are to leave, and no tier has taken them out yet: as StoreError of a full disk leaves them."""
    there = np.array([len(keys)] + [0] * (table.spec.num_tables - 1))  # of each table
    table.pending_erasure = np.zeros(len(keys), np.uint32), np.array(keys, np.uint64), there, cause
    table.counts.erasing_counts = there


def attach(embedding: MultiTableEmbedding, optimizer: str, **changes: Any) -> torch.optim.Optimizer:
    kind, settings = OPTIMIZERS[optimizer]
    made = kind(embedding.parameters(), **{**settings, **changes})  # type: ignore[arg-type]
    embedding.attach(made, made.param_groups[0])
    return made


def train(embedding: MultiTableEmbedding, ids: Ids, tables: Ids | int = 0, grad: Any = None) -> Tensor:
    """One step; returns the rows that it saw. Without `grad`, gradients depend on ids, tables and rows."""
    return run_row_step([(embedding, embedding.row_optimizer)], "a test", pin_and_update, embedding, ids, tables, grad)


def pin_and_update(embedding: MultiTableEmbedding, ids: Ids, tables: Ids | int = 0, grad: Any = None) -> Tensor:
    """What `train` does, outside of a `run_row_step`: signals are not deferred."""
    place = next(embedding.parameters()).device
    ids = torch.as_tensor(ids, dtype=embedding.spec.key_type).to(place)
    tables = torch.as_tensor(tables).to(place).broadcast_to(ids.shape)
    pinned = embedding.pin([Lookup(ids, tables)])
    rows = pinned.gather(0)
    if grad is None:
        phase = (ids.to(torch.int64) % 1009 + tables).to(torch.float32)[..., None].cpu()
        waves = torch.sin(phase + torch.arange(embedding.dim))  # a GPU's sine has other bits
        grad = waves.to(place) + rows / 8
    pinned.update([torch.as_tensor(grad, dtype=torch.float32).expand_as(rows)])
    return rows


def contents(embedding: MultiTableEmbedding) -> NDArray[np.void]:
    """Every row with optimizer state and lifecycle record, in the order of a scan."""
    table = embedding.table_handle().table
    return np.concatenate([np.empty(0, table.row_format.dtype), *(rows.copy() for _, rows in table.scan())])


def rows_by_key(embedding: MultiTableEmbedding) -> dict[tuple[int, int], list[float]]:
    """Every row that iteration yields, by (table, key)."""
    return {(table, key): row.tolist() for table, key, row in embedding}


def reloaded(state: Any) -> Any:
    """A state as a file of torch brings it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
