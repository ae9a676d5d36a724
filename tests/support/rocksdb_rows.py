"""Rows in memory of their own that the RocksDB tier writes and reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierbed.engine.row_format import row_dtype
from tierbed.engine.store.rocksdb import RocksDB

WIDTH = 3
ROW = row_dtype(WIDTH)
STORED = 4 * WIDTH + 8  # bytes of a row in RocksDB


class Rows:
    def __init__(self, names: list[tuple[int, int]], fill: int = 0) -> None:
        self.tables = np.array([table for table, _ in names], np.uint32)
        self.keys = np.array([key for _, key in names], np.uint64)
        self.memory = np.full((len(names), WIDTH + 2 + 3), fill, np.uint32)  # with padding behind the row
        step = self.memory.strides[0]
        self.lines = (self.memory.ctypes.data + step * np.arange(len(names))).astype(np.uint64)

    @property
    def stored(self) -> NDArray[np.uint32]:
        return self.memory[:, : WIDTH + 2]


def keys_from(first: int, count: int) -> list[tuple[int, int]]:
    return [(0, key) for key in range(first, first + count)]


def read_all(tier: RocksDB, names: list[tuple[int, int]]) -> list[int | None]:
    """The first word of each row, None if it is not held."""
    rows = Rows(names)
    found = tier.read(rows.tables, rows.keys, rows.lines)
    return [int(words[0]) if there else None for words, there in zip(rows.stored, found, strict=True)]


def write(tier: RocksDB, names: list[tuple[int, int]], fill: int) -> None:
    rows = Rows(names, fill)
    tier.write(rows.tables, rows.keys, rows.lines)
