"""What a table holds after so many steps: a row is a function of its key and of the number of its updates.

Steps follow from their number alone, so every way to step n, through kills and rollbacks, must lead to the same rows.
All of it is exact in float32: SGD with momentum 1 and whole gradients.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.embeddings import train
from support.lifecycle_model import Model, Row, Written
from support.stores import options
from tierbed import engine
from tierbed.engine import MultiTableEmbedding
from tierbed.engine.row_format import row_dtype

DIM = 3
BEGIN = [0.25, -0.5]  # each table's initial value
RATE = 2.0**-10
BATCH = 40

LIVES: dict[str, dict[str, Any]] = {
    "for ever": {},
    "ttl": {"ttl_steps": 2},
    "lru": {"eviction": "lru", "capacity": 60},
}


def gradients(keys: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """[n, DIM], whole numbers from 1 to 7."""
    return (1 + (keys[:, None] * 3 + np.arange(DIM)) % 7).astype(np.float32)


def values(tables: NDArray[Any], keys: NDArray[Any], updates: NDArray[Any]) -> NDArray[np.float32]:
    """[n, 2 * DIM]: w0 - rate * g * (1 + 2 + ... + updates), then the momentum updates * g."""
    steps = g = gradients(keys.astype(np.int64)).astype(np.float64)
    count = updates.astype(np.float64)[:, None]
    steps = RATE * g * count * (count + 1) / 2
    weights = np.array(BEGIN)[tables][:, None] - steps
    return np.concatenate([weights, g * count], axis=1).astype(np.float32)


class History:
    """Steps of tables with `keys` keys and a life, from LIVES, and their rows."""

    def __init__(self, keys: int, life: str) -> None:
        self.keys, self.life = keys, LIVES[life]
        self._rows: list[dict[Row, Written]] = [{}]

    @cached_property
    def _model(self) -> Model:
        return Model(**self.life)

    def embedding(self, path: Path, store: str, trained: bool = True, **more: Any) -> MultiTableEmbedding:
        tables = [engine.make_constant_initializer(value) for value in BEGIN]
        made = options(store, path, **self.life, **more)
        embedding = MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, made)
        if trained:
            optimizer = torch.optim.SGD(embedding.parameters(), lr=RATE, momentum=1.0)
            embedding.attach(optimizer, optimizer.param_groups[0])
        return embedding

    def batch(self, step: int) -> NDArray[np.int64]:
        """The keys of a step: half of them are hot. Their tables are `keys % 2`."""
        moving = (np.arange(BATCH // 2) * 7 + step * 5) % self.keys
        hot = (np.arange(BATCH // 2) + step) % (BATCH // 2 + 3)
        return np.unique(np.concatenate([moving, hot]))

    def gone(self, step: int) -> NDArray[np.int64]:
        """Keys that are deleted before a step: some at every fourth."""
        return (np.arange(6) * 13 + step * 11) % self.keys if step % 4 == 0 else np.empty(0, np.int64)

    def take(self, embedding: MultiTableEmbedding, step: int) -> None:
        """The step of that number."""
        if len(gone := self.gone(step)):
            embedding.delete(gone, gone % 2)
        keys = self.batch(step)
        train(embedding, torch.from_numpy(keys), torch.from_numpy(keys % 2), torch.from_numpy(gradients(keys)))

    def announce(self, embedding: MultiTableEmbedding, step: int) -> None:
        keys = torch.from_numpy(self.batch(step))
        embedding.prefetch(keys, keys % 2)

    def rows(self, step: int) -> NDArray[np.void]:
        """All rows after `step` steps, in order of (table, key)."""
        while len(self._rows) <= step:
            number = len(self._rows)
            self._model.delete({(int(key) % 2, int(key)) for key in self.gone(number)})
            self._model.train({(int(key) % 2, int(key)) for key in self.batch(number)})
            self._rows.append(dict(self._model.rows))
        written = sorted(self._rows[step].items())
        rows = np.zeros(len(written), row_dtype(2 * DIM))
        if written:
            rows["table"], rows["key"] = np.array([row for row, _ in written]).T
            rows["updates"], rows["step"] = np.array([record for _, record in written]).T
            rows["values"] = values(rows["table"], rows["key"], rows["updates"])
        return rows


def in_order(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Scanned rows in order of (table, key)."""
    return rows[np.lexsort((rows["key"], rows["table"]))]
