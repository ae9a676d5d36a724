"""How free memory is divided between a cache and what shares the memory: the rule of `cache_budget_mb="auto"`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .._core import WAY_BYTES, WAYS
from ..options.store_options import default_overflow_mb
from ..row_format import BUCKETS
from ..store.rocksdb import WRITE_BUFFER_BYTES

MB = 1 << 20
LINE_OVERHEAD_BYTES = WAY_BYTES + 1  # of a cache's metadata for each line: a way and a tag
OVERFLOW_OVERHEAD_BYTES = 91  # of the overflow area's metadata for each line
MIN_CACHE_ROWS = WAYS * BUCKETS  # a smaller cache inserts the rows of a batch in another order

SharedWith = Literal["rocksdb", "table", "device"]
CACHE = {"rocksdb": 1 / 2, "table": 1 / 8, "device": 1 / 2}
OVERFLOW = {"rocksdb": 1 / 8, "table": 1 / 8, "device": 0.0}  # at most
ROCKSDB = {"rocksdb": 1 / 8, "table": 0.0, "device": 0.0}
REST = {"rocksdb": "page cache and all else", "table": "the table and all else", "device": "all else"}
LINES_PER_ROW = 1.5  # of a cache that hardly evicts: rows hash to its sets at random
INDEX_BYTES = 3  # of RocksDB's files for each row


class MemorySplit(NamedTuple):
    """MiB of free memory by use, which add up to `free_mb`."""

    free_mb: float
    cache_mb: float
    overflow_mb: float
    rocksdb_mb: float  # index and filters of files, write buffers
    given_mb: float  # of other options with numbers
    rest_mb: float
    shared_with: SharedWith

    def __str__(self) -> str:
        parts = [
            ("cache", self.cache_mb),
            ("overflow", self.overflow_mb),
            ("RocksDB", self.rocksdb_mb),
            ("other options", self.given_mb),
        ]
        shown = [f"{name} {mb:.1f} MiB" for name, mb in parts if mb]
        if self.overflow_mb:
            shown[1] += f" ({self.cache_mb + self.overflow_mb:.1f} together)"
        return ", ".join([*shown, f"{REST[self.shared_with]} {self.rest_mb:.1f} MiB"])


def split_memory(
    free_mb: float,
    row_bytes: int,
    shared_with: SharedWith,
    *,
    capacity: int | None = None,
    overflow_mb: float | None = 0,
    given_mb: float = 0,
) -> MemorySplit:
    """Divide `free_mb` MiB, less the `given_mb` of other options, between a cache and what shares the memory with it.

    shared_with: "rocksdb": half is for the cache, an eighth for RocksDB's index, filters and write buffers, at most an
    eighth for the overflow area, and the rest for the page cache and steps. "table", a full table of the same rows: an
    eighth is for the cache, at most an eighth for the overflow area. "device", the memory of a GPU: half is for the
    cache. row_bytes: of a row in the cache, metadata included. capacity: the maximum of rows; the cache and RocksDB get
    no more than these need. overflow_mb: the maximum for the overflow area; None: as of the
    option.
    """
    shared = max(free_mb - given_mb, 0)
    cache = shared * CACHE[shared_with]
    rocksdb = shared * ROCKSDB[shared_with]
    if capacity is not None:
        cache = min(cache, max(LINES_PER_ROW * capacity, MIN_CACHE_ROWS) * row_bytes / MB)
        rocksdb = min(rocksdb, (WRITE_BUFFER_BYTES + INDEX_BYTES * capacity) / MB)
    if overflow_mb is None:
        overflow_mb = default_overflow_mb("cached_ssd" if shared_with == "rocksdb" else "cached_host_mem", cache)
    overflow = min(overflow_mb, shared * OVERFLOW[shared_with])
    return MemorySplit(free_mb, cache, overflow, rocksdb, given_mb, shared - cache - overflow - rocksdb, shared_with)
