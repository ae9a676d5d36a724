"""Caches over each kind of tier, their batches, and a dict of what their rows must be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.rows import SPECIAL_KEYS, Table
from tierbed.engine import _core
from tierbed.engine._core import WAY_BYTES, WAYS
from tierbed.engine.row_format import Chunks, row_dtype
from tierbed.engine.store.rocksdb import RocksDB

METADATA_BYTES = WAY_BYTES + 1  # of a line
PLACE_BYTES = 91  # of a row in the overflow, beside its line
TABLE = Table([3], [0.1], tables=2)
KEYS = [*SPECIAL_KEYS, *range(100, 200)]
Row = tuple[int, int]


def set_bytes(table: Table = TABLE) -> int:
    return WAYS * (table.layout.line_bytes + METADATA_BYTES)


def cache_over(below: Any, sets: int, policy: str = "lru", overflow_rows: int = 10_000) -> _core.CacheTier:
    return _core.CacheTier(
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


def places(cache: _core.CacheTier, rows: Iterable[Row]) -> dict[Row, tuple[int, bool]]:
    """Of those rows that are resident, the slot, -1 in the overflow area, and whether the row is dirty."""
    return {row: (found["slot"], found["dirty"]) for row in rows if (found := cache.locate(*row))}


class HostRows:
    """Batches of the core, and their rows."""

    batch = staticmethod(batch_of)
    names = staticmethod(identities)

    def read(self, batch: Any) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
        """Numbers and records of its rows."""
        return TABLE.values(batch.lines), TABLE.records(batch.lines)

    def add(self, batch: Any) -> None:
        """1 to the embedding of each row."""
        out = np.empty((batch.num_positions, TABLE.dim), np.float32)
        _core.gather(batch, TABLE.layout, 0, out)
        _core.assign(batch, TABLE.layout, out + np.float32(1), 1)


class Model:
    """What rows must be: `updates` times 1 added to each number of their initial embedding."""

    def __init__(self, rows: Any = None) -> None:
        self.updates: dict[Row, int] = {}
        self.rows = rows or HostRows()

    def expected(self, names: list[Row]) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
        """Numbers and updates."""
        tables = np.array([table for table, _ in names], np.uint32)
        initial = TABLE.initial(tables, np.array([key for _, key in names], np.uint64))
        updates = np.array([self.updates.get(row, 0) for row in names], np.uint32)
        for turn in range(updates.max(initial=0)):
            initial[updates > turn, : TABLE.dim] += np.float32(1)
        return initial, updates

    def check(self, batch: Any) -> None:
        self._check(self.rows.names(batch), *self.rows.read(batch))

    def _check(self, names: list[Row], values: NDArray[np.float32], records: NDArray[np.uint32]) -> None:
        initial, updates = self.expected(names)
        assert records[:, 0].tolist() == updates.tolist()
        assert values.tobytes() == initial.tobytes()

    def write(self, batch: Any) -> None:
        self.rows.add(batch)
        for row in self.rows.names(batch):
            self.updates[row] = self.updates.get(row, 0) + 1

    def check_tier(self, tier: Any) -> None:
        """`tier` has what was written, and nothing else of what tests use."""
        batch = batch_of([(table, key) for table in range(2) for key in KEYS])
        _core.initialise_missing(batch, TABLE.layout)
        found = tier.read(batch.tables, batch.keys, batch.lines, should_touch=False)
        self._check_names(row for row, is_there in zip(identities(batch), found, strict=True) if is_there)
        self._check(identities(batch), *HostRows().read(batch))

    def check_scan(self, chunks: Chunks) -> None:
        """The same of a scan."""
        rows = np.concatenate([np.zeros(0, row_dtype(TABLE.width)), *(part for _, part in chunks)])
        names = list(zip(rows["table"].tolist(), rows["key"].tolist(), strict=True))
        self._check_names(names)
        self._check(names, TABLE.decoded(rows["values"]), rows["updates"][:, None])

    def _check_names(self, names: Iterable[Row]) -> None:
        assert set(names) == {row for row, updates in self.updates.items() if updates}


class HostCache(HostRows):
    """A cache of the core over a tier, and the model of its rows."""

    def __init__(self, below: Any, sets: int, policy: str = "lru", overflow_rows: int = 10_000) -> None:
        self.below, self.native = below, cache_over(below, sets, policy, overflow_rows)
        native = self.native
        self.prefetch, self.cancel_announced, self.pin = native.prefetch, native.cancel_announced, native.pin
        self.peek, self.flush, self.metrics, self.close = native.peek, native.flush, native.metrics, native.close
        self.model = Model(self)

    def announce(self, *batches: _core.Batch) -> None:
        for batch in batches:
            self.native.announce(batch)

    def unpin(self, batch: _core.Batch, is_dirty: bool = True) -> None:
        self.native.unpin(batch)

    def step(self, batch: _core.Batch) -> None:
        self.pin(batch)
        self.model.check(batch)
        self.model.write(batch)
        self.unpin(batch)

    def erase(self, rows: list[Row]) -> None:
        batch = batch_of(rows)
        self.native.erase(batch.tables, batch.keys)
        for row in rows:
            self.model.updates.pop(row, None)

    def places(self, rows: Iterable[Row]) -> Any:
        """Where rows are, unless they leave for the tier at any time."""
        return None if isinstance(self.below, _core.RocksTier) else places(self.native, rows)

    def check_stored(self) -> None:
        """Rows are in the cache or below, and flushed below."""
        self.model.check_tier(self.native)
        self.native.flush()
        self.model.check_tier(self.below)


KINDS = pytest.mark.parametrize("kind", ["memory", "disk", "cache"])


@contextmanager
def tier_below(kind: str) -> Iterator[Any]:
    if kind == "memory":
        yield _core.FullTable(TABLE.layout)
    elif kind == "cache":
        yield cache_over(_core.FullTable(TABLE.layout), 1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = RocksDB(Path(folder) / "db", TABLE.width, new_shards=1, options="write_buffer_size=64k")
            yield store.native
            store.close()
