"""Implements `cache_budget_mb="auto"`: divides free memory between a cache and the other users of the memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .._core import WAY_BYTES, WAYS
from ..options.store_options import compute_default_overflow_mb
from ..row_format import BUCKETS
from ..store.rocksdb import MIN_READS, READ_THREADS, WRITE_BUFFER_BYTES

MB = 1 << 20
LINE_OVERHEAD_BYTES = WAY_BYTES + 1  # bytes of metadata for each line in a cache: a way and a tag
OVERFLOW_OVERHEAD_BYTES = 91  # bytes of metadata for each line in an overflow area
MIN_CACHE_ROWS = WAYS * BUCKETS  # one set per bucket; if buckets shared a set, the insertion order would change

# What shares memory with the cache. rocksdb: RocksDB and the page cache; table: a full table; device: other GPU data.
MemorySharer = Literal["rocksdb", "table", "device"]
CACHE_SHARES = {"rocksdb": 1 / 2, "table": 1 / 8, "device": 1 / 2}
OVERFLOW_SHARES = {"rocksdb": 1 / 8, "table": 1 / 8, "device": 0.0}  # upper limits
ROCKSDB_SHARES = {"rocksdb": 1 / 8, "table": 0.0, "device": 0.0}  # for write buffers, file indexes and file filters
REST_NAMES = {"rocksdb": "page cache and all else", "table": "the table and all else", "device": "all else"}
THREAD_BYTES = 1 << 16  # the used part of a reading thread's stack
LINES_PER_ROW = 1.5  # rows hash to sets at random; a cache with 1.5 lines per row evicts hardly any rows


def compute_index_bytes(row_bytes: int, block_bytes: int = 4096, is_bounded: bool = False) -> float:
    """Return how many bytes per stored row the index and filter of RocksDB's files take.

    The filter has 10 bits per row (RocksDB's NewBloomFilterPolicy), and the index has an entry for each block; the
    entry's size was measured. With `index_mb`, a Ribbon filter takes 30 % less, and index keys share prefixes.
    """
    rows_per_block = max(1, (block_bytes - 64) // (row_bytes + 20))  # as `align_blocks` reckons in rocksdb_options.cpp
    return 0.9 + 11 / rows_per_block if is_bounded else 1.25 + 23 / rows_per_block


def compute_thread_bytes(batch_rows: int = 0, block_bytes: int = 4096, threads: int = READ_THREADS) -> int:
    """Return the most memory of blocks and stacks that reading threads hold for a batch that misses `batch_rows`."""
    return max(threads * MIN_READS, batch_rows // 4) * block_bytes + threads * THREAD_BYTES


class MemorySplit(NamedTuple):
    """A division of free memory, in MiB. The other sizes, from `cache_mb` to `rest_mb`, add up to `free_mb`."""

    free_mb: float
    cache_mb: float
    overflow_mb: float
    rocksdb_mb: float
    fixed_mb: float  # budgets that the user set as numbers
    rest_mb: float
    sharer: MemorySharer

    def __str__(self) -> str:
        sizes = self.cache_mb, self.overflow_mb, self.rocksdb_mb, self.fixed_mb
        parts = zip(("cache", "overflow", "RocksDB", "other options"), sizes, strict=True)
        texts = [f"{name} {mb:.1f} MiB" for name, mb in parts if mb]
        if index_mb := max(self.rocksdb_mb - WRITE_BUFFER_BYTES / MB, 0):
            position = 2 if self.overflow_mb else 1
            texts[position] += f" (write buffers {self.rocksdb_mb - index_mb:.1f}, index and filters {index_mb:.1f})"
        if self.overflow_mb:
            texts[1] += f" ({self.cache_mb + self.overflow_mb:.1f} together)"
        return ", ".join([*texts, f"{REST_NAMES[self.sharer]} {self.rest_mb:.1f} MiB"])


def split_memory(
    free_mb: float,
    row_bytes: int,
    sharer: MemorySharer,
    *,
    capacity: int | None = None,
    overflow_mb: float | None = 0,
    fixed_mb: float = 0,
    has_index_limit: bool = False,
) -> MemorySplit:
    """Reserve `fixed_mb` of `free_mb` MiB for other budgets, then divide the rest between a cache and `sharer`.

    row_bytes: cache memory per row, metadata included. capacity: maximum number of rows. The cache and RocksDB get at
    most the memory for `capacity` rows. overflow_mb: limit for the overflow area; None means the option's default.
    has_index_limit: `fixed_mb` includes the memory for RocksDB's indexes and filters.
    """
    available = max(free_mb - fixed_mb, 0)
    cache, rocksdb = available * CACHE_SHARES[sharer], available * ROCKSDB_SHARES[sharer]
    if capacity is not None:
        cache = min(cache, max(LINES_PER_ROW * capacity, MIN_CACHE_ROWS) * row_bytes / MB)
        rocksdb = min(rocksdb, (WRITE_BUFFER_BYTES + compute_index_bytes(row_bytes) * capacity) / MB)
    if has_index_limit:
        rocksdb = min(rocksdb, WRITE_BUFFER_BYTES / MB)
    if overflow_mb is None:
        store = "cached_ssd" if sharer == "rocksdb" else "cached_host_mem"
        overflow_mb = compute_default_overflow_mb(store, cache)
    overflow = min(overflow_mb, available * OVERFLOW_SHARES[sharer])
    return MemorySplit(free_mb, cache, overflow, rocksdb, fixed_mb, available - cache - overflow - rocksdb, sharer)
