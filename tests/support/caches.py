"""Caches over each kind of tier, their batches, and a dict of what their rows must be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.rows import SPECIAL_KEYS, Table
from tierbed.engine import _core
from tierbed.engine._core import WAY_BYTES, WAYS
from tierbed.engine.store.rocksdb import RocksDB

METADATA_BYTES = WAY_BYTES + 1  # of a line
PLACE_BYTES = 91  # of a row in the overflow, beside its line
TABLE = Table([3], [0.1], tables=2)
KEYS = [*SPECIAL_KEYS, *range(100, 200)]
Row = tuple[int, int]


def set_bytes(table: Table = TABLE) -> int:
    return WAYS * (table.layout.line_bytes + METADATA_BYTES)


def cache_over(below: Any, sets: int, policy: str = "lru", overflow_rows: int = 10_000) -> _core.CachedTier:
    return _core.CachedTier(
        TABLE.layout,
        below,
        budget_bytes=sets * set_bytes() + 1,
        overflow_bytes=overflow_rows * (TABLE.layout.line_bytes + PLACE_BYTES),
        policy=policy,
        io_threads=2,
    )


def batch_of(rows: list[Row]) -> _core.Batch:
    return TABLE.batch([key for _, key in rows], [table for table, _ in rows])


def identities(batch: _core.Batch) -> list[Row]:
    return list(zip(batch.tables.tolist(), batch.keys.tolist(), strict=True))


def places(cache: _core.CachedTier, rows: Iterable[Row]) -> dict[Row, tuple[int, bool]]:
    """Of those rows that are resident, the slot, -1 in the overflow area, and whether the row is dirty."""
    return {row: (found["slot"], found["dirty"]) for row in rows if (found := cache.locate(*row))}


class Model:
    """What rows must be: `updates` times 1 added to each float of their initial values."""

    def __init__(self) -> None:
        self.updates: dict[Row, int] = {}

    def check(self, batch: _core.Batch) -> None:
        initial = TABLE.initial(batch.tables, batch.keys)
        updates = np.array([self.updates.get(row, 0) for row in identities(batch)], np.uint32)
        assert TABLE.records(batch.lines)[:, 0].tolist() == updates.tolist()
        for _ in range(updates.max(initial=0)):
            initial[updates > 0] += np.float32(1)
            updates[updates > 0] -= 1
        assert TABLE.values(batch.lines).tobytes() == initial.tobytes()

    def write(self, batch: _core.Batch) -> None:
        for row, line in zip(identities(batch), batch.lines, strict=True):
            values, record = TABLE.view(line)
            values += np.float32(1)
            record[0] += 1
            self.updates[row] = self.updates.get(row, 0) + 1

    def check_tier(self, tier: Any) -> None:
        """`tier` has what was written, and nothing else of what tests use."""
        rows = [(table, key) for table in range(2) for key in KEYS]
        batch = batch_of(rows)
        _core.initialise_missing(batch, TABLE.layout)
        found = tier.read(batch.tables, batch.keys, batch.lines, touch=False)
        assert {row for row, is_there in zip(identities(batch), found, strict=True) if is_there} == {
            row for row, updates in self.updates.items() if updates
        }
        self.check(batch)


KINDS = pytest.mark.parametrize("kind", ["memory", "disk", "cache"])


@contextmanager
def tier_below(kind: str) -> Iterator[Any]:
    if kind == "memory":
        yield _core.FullTable(TABLE.layout)
    elif kind == "cache":
        yield cache_over(_core.FullTable(TABLE.layout), 1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = RocksDB(Path(folder) / "db", TABLE.width, new_shards=1)
            yield store.native
            store.close()
