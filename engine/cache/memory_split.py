"""How free memory is divided between a cache of rows and what lies beside it: the rule of `cache_budget_mb="auto"`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .._core import WAY_BYTES, WAYS
from ..row_format import BUCKETS
from ..store.rocksdb import WRITE_BUFFER_BYTES

MB = 1 << 20
LINE_OVERHEAD_BYTES = WAY_BYTES + 1  # of a cache's metadata for each line: a way and a tag
LEAST = WAYS * BUCKETS  # lines; a smaller cache takes the rows of a batch in another order

SharedWith = Literal["rocksdb", "table", "device"]
CACHE = {"rocksdb": 1 / 2, "table": 1 / 8, "device": 1 / 2}
OVERFLOW = {"rocksdb": 1 / 8, "table": 1 / 8, "device": 0.0}  # at most
ROCKSDB = {"rocksdb": 1 / 8, "table": 0.0, "device": 0.0}
REST = {"rocksdb": "page cache and all else", "table": "the table and all else", "device": "all else"}
LINES_A_ROW = 1.5  # of a cache in which hardly a row gives way: rows fall on its sets at random
INDEX_BYTES = 3  # of RocksDB's files for each row


class MemorySplit(NamedTuple):
    """MiB of free memory, by what they are for; the others add up to `free_mb`."""

    free_mb: float
    cache_mb: float
    overflow_mb: float
    rocksdb_mb: float  # index and filters of files, write buffers
    given_mb: float  # what other options give away by numbers
    rest_mb: float
    beside: SharedWith

    def __str__(self) -> str:
        parts = [
            ("cache", self.cache_mb),
            ("overflow", self.overflow_mb),
            ("RocksDB", self.rocksdb_mb),
            ("other options", self.given_mb),
        ]
        shown = [f"{name} {mb:.1f} MiB" for name, mb in parts if mb]
        return ", ".join([*shown, f"{REST[self.beside]} {self.rest_mb:.1f} MiB"])


def divide(
    free_mb: float,
    row_bytes: int,
    beside: SharedWith,
    *,
    capacity: int | None = None,
    overflow_mb: float = 0,
    given_mb: float = 0,
) -> MemorySplit:
    """Divide `free_mb` MiB, less `given_mb` that other options give away, between a cache and what lies beside it.

    beside: what shares the memory. "rocksdb": half is the cache, an eighth RocksDB's index, filters and write buffers,
    at most an eighth the overflow, and the rest the page cache and what steps take. "table", a full table of the same
    rows: an eighth is the cache, at most an eighth the overflow. "device", the memory of a GPU: half is the cache.
    row_bytes: of a row in the cache, metadata included. capacity: the most rows; the cache and RocksDB get no more than
    they take. overflow_mb: the most that the overflow may have.
    """
    shared = max(free_mb - given_mb, 0)
    cache = shared * CACHE[beside]
    rocksdb = shared * ROCKSDB[beside]
    if capacity is not None:
        cache = min(cache, max(LINES_A_ROW * capacity, LEAST) * row_bytes / MB)
        rocksdb = min(rocksdb, (WRITE_BUFFER_BYTES + INDEX_BYTES * capacity) / MB)
    overflow = min(overflow_mb, shared * OVERFLOW[beside])
    return MemorySplit(free_mb, cache, overflow, rocksdb, given_mb, shared - cache - overflow - rocksdb, beside)
