"""What a table holds after that many steps, replayed in NumPy: SGD with momentum 1, and the rounding of narrow rows.

Steps follow from their number alone, and so does the noise of their rounding: every way to step n, through kills and
rollbacks, must lead to the same rows.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tierbed
from support import naive
from support.lifecycle_model import Model, Row, Written
from support.naive import hash_row
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.distributed import World
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.row_format import EMBEDDING, RowFormat

Types = tuple[str, str]
Numbers = NDArray[np.float32]

DIM = 3
STATE = "momentum_buffer"
SEED = 0  # of an embedding that is given none
BEGIN = [0.25, -0.5]  # each table's initial value
RATE = 2.0**-10
BATCH = 40

TYPES: list[Types] = [
    *2 * [("float32", "float32")],
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("float16", "bfloat16"),
    ("float32", "bfloat16"),
]
LIVES: dict[str, dict[str, Any]] = {
    "forever": {},
    "ttl": {"ttl_steps": 2},
    "lru": {"eviction": "lru", "capacity": 60},
}


def gradients(keys: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """[n, DIM], a little more than whole numbers from 1 to 7, so that numbers of 16 bits are rounded."""
    return (1 + 2.0**-6 + (keys[:, None] * 3 + np.arange(DIM)) % 7).astype(np.float32)


class History:
    """Steps of tables with `keys` keys and a life, from LIVES, and their rows. types: of embedding and state."""

    def __init__(self, keys: int, life: str, types: Types, world: World | None = None) -> None:
        """world: whose ranks share the rows, and divide the keys of a step among them."""
        self.keys, self.life, self.types, self.world = keys, LIVES[life], types, world
        self._form = RowFormat(DIM, types[0], [STATE], [DIM], [types[1]])
        self._written: list[dict[Row, Written]] = [{}]
        self._numbers: list[dict[Row, Numbers]] = [{}]  # of each row [2 * DIM]: its embedding, its momentum

    @cached_property
    def _model(self) -> Model:
        return Model(**self.life)

    def embedding(self, path: Path, store: str, **more: Any) -> MultiTableEmbedding:
        tables = [tierbed.make_constant_initializer(value) for value in BEGIN]
        made = options(store, path, **self.life, **more)
        dtype, state = (getattr(torch, name) for name in self.types)
        embedding = MultiTableEmbedding(
            "rows", DIM, dtype, torch.int64, tables, made, state_dtype=state, world=self.world, seed=SEED
        )
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
        if len(self.gone(step)):
            gone = self._mine(self.gone(step))
            embedding.delete(gone, gone % 2)
        keys = self._mine(self.batch(step))
        pinned = embedding.pin([Lookup(torch.from_numpy(keys), torch.from_numpy(keys % 2))])
        pinned.gather(0)
        pinned.update([torch.from_numpy(gradients(keys))], scale=1.0)

    def announce(self, embedding: MultiTableEmbedding, step: int) -> None:
        keys = torch.from_numpy(self._mine(self.batch(step)))
        embedding.prefetch(keys, keys % 2)

    def _mine(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return keys if self.world is None else keys[self.world.rank :: self.world.size]

    def rows(self, step: int) -> NDArray[np.void]:
        """All rows after `step` steps, in order of (table, key)."""
        while len(self._written) <= step:
            self._replay(len(self._written))
        written = sorted(self._written[step].items())
        rows = np.zeros(len(written), self._form.dtype)
        if written:
            rows["table"], rows["key"] = np.array([row for row, _ in written]).T
            rows["updates"], rows["step"] = np.array([record for _, record in written]).T
            numbers = np.array([self._numbers[step][row] for row, _ in written])
            self._form.set_values(rows, EMBEDDING, numbers[:, :DIM])
            self._form.set_values(rows, STATE, numbers[:, DIM:])
        return rows

    def values(self, step: int) -> Numbers:
        """The embeddings of `rows`: [n, DIM]."""
        return self._form.values(self.rows(step), EMBEDDING)

    def _replay(self, step: int) -> None:
        keys = self.batch(step)
        batch = [(int(key) % 2, int(key)) for key in keys]
        self._model.delete({(int(key) % 2, int(key)) for key in self.gone(step)})
        self._model.train(set(batch))
        written = self._model.rows
        before = {row: numbers for row, numbers in self._numbers[-1].items() if row in written}
        begun = [np.repeat(np.array([begin, 0], np.float32), DIM) for begin in BEGIN]
        old = np.array([begun[row[0]] if written[row].updates == 1 else before[row] for row in batch])
        momentum = old[:, DIM:] + gradients(keys)
        weights = old[:, :DIM] - np.float32(RATE) * momentum
        noise = naive.noise(SEED, np.array([hash_row(*row) for row in batch], np.uint64), step, 2 * DIM)
        weights = naive.trained(weights, self.types[0], noise[:, :DIM])
        momentum = naive.trained(momentum, self.types[1], noise[:, DIM:])
        self._written.append(dict(written))
        self._numbers.append(before | dict(zip(batch, np.hstack([weights, momentum]), strict=True)))


def in_order(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Scanned rows in order of (table, key)."""
    return rows[np.lexsort((rows["key"], rows["table"]))]
