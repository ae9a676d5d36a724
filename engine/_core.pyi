"""The native core. Arrays are C-contiguous NumPy arrays; every loop releases the interpreter lock.

`threads` is how many threads may work (1 or more); results do not depend on it.
Wrong sizes and dtypes raise `TypeError`/`ValueError`: callers inside the package validate what users pass.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]

has_rocksdb: bool

def set_threads(threads: int) -> None:
    """How many threads the native loops use from now on, the caller's included."""

def buckets(tables: U32, keys: U64) -> U8:
    """[n] -> [n], the bucket 0..63 of each row: the top 6 bits of its hash."""

def normal_quantile(p: float) -> float:
    """The inverse of the standard normal distribution function, 0 < p < 1: Wichura's AS 241 in IEEE operations."""

class Batch:
    """The unique rows of one or several lookups.

    Positions number the ids of all segments one after another. Unique rows are ordered by bucket, then by first
    occurrence.
    """

    def __init__(self, segments: Sequence[tuple[U64, U32 | None]], num_tables: int, padding: int | None) -> None:
        """Each segment: keys [n] and table ids [n], or None where its position i belongs to table i % num_tables.

        Keys equal to `padding` (as unsigned 64 bits) are no rows. A table id >= num_tables raises IndexError naming
        its position.
        """
    size: int  # positions, padding included
    unique: int  # unique rows
    keys: U64  # [unique]
    tables: U32  # [unique]
    inverse: NDArray[np.int32]  # [size], the unique row of each position, -1 for padding
    lines: U64  # [unique], addresses, writable; zero until pinned or peeked
    occurrences: U32  # [size - padding], positions grouped by unique row, ascending within one
    offsets: U32  # [unique + 1], where each row's occurrences start

    def allocate(self, n: int, layout: Layout) -> U64:
        """[n], the addresses of fresh lines that live as long as the batch."""

class Layout:
    """What a line looks like and how a new one begins."""

    def __init__(
        self,
        dim: int,
        states: Sequence[float],
        seed: int,
        columns: Sequence[int],
        kinds: Sequence[int],
        parameters: F32,
        quantiles: NDArray[np.float64],
    ) -> None:
        """`states`: the initial value of each optimizer state, each `dim` floats wide.

        `columns`: widths of the column groups, summing to `dim`.

        For table t and column group c, entry t * len(columns) + c of `kinds`, `parameters` [n, 2], `quantiles` [n, 2]
        describes the initial
        values; u is uniform in [0, 1):
        kind 0 constant a; 1 uniform a + u * (b - a); 2 normal a + b * quantile(q0 + u * (q1 - q0)), with (q0, q1) =
        (0, 1) untruncated.
        """
    dim: int
    width: int  # floats, states included
    line_bytes: int

def initialise(layout: Layout, tables: U32, keys: U64, out: F32) -> None:
    """out [n, layout.width]: the initial values of rows, state included."""

def gather(batch: Batch, layout: Layout, begin: int, out: F32) -> None:
    """out [n, dim]: the embedding of positions begin .. begin + n; padding is zeros. Needs `batch.lines`."""

def update(batch: Batch, layout: Layout, grads: F32, rule: str, hyper: Sequence[float], step: int) -> int:
    """Reduce grads [size, dim] over each row's occurrences, ascending, and apply the rule to each unique line.

    Returns how many rows were written for the first time.
    """

def assign(batch: Batch, layout: Layout, values: F32, step: int) -> int:
    """Write values [size, dim] to the lines' embeddings, the last occurrence winning.

    Optimizer state stays. Returns how many rows were written for the first time.
    """

def count_new(batch: Batch, layout: Layout) -> int:
    """How many lines have `updates == 0`. A zero address counts as new."""

def initialise_lines(layout: Layout, tables: U32, keys: U64, lines: U64) -> None:
    """Give each line the initial values of its row."""

def copy_lines(layout: Layout, source: U64, to: U64) -> None:
    """Copy each line to another address."""

def initialise_missing(batch: Batch, layout: Layout) -> None:
    """Give each unique row whose line is zero initial values in memory that the batch owns."""

class FullTable:
    """Every row in memory: an open-addressing index per bucket, lines in segments that never move."""

    def __init__(self, layout: Layout) -> None: ...
    def find(self, batch: Batch) -> int:
        """Set `batch.lines`, zero where a row is absent. Returns how many are absent."""
    def insert_missing(self, batch: Batch, layout: Layout) -> None:
        """Insert and initialise each row whose line is zero."""
    def read(self, tables: U32, keys: U64, lines: U64) -> Bools: ...
    def write(self, tables: U32, keys: U64, lines: U64) -> None: ...
    def held(self, bucket: int) -> int:
        """Rows of the bucket with `updates > 0`."""
    def scan(self, bucket: int, rows: U8) -> None:
        """Write those rows, packed as `row_dtype` and sorted by (table, key)."""
    rows: int
    bytes: int

class Admission:
    """What `Cache.admit` decided for n rows, and what must happen before their lines are used."""

    lines: U64  # [n], where each row is or shall be; 0 where its set had no room
    hit: Bools  # [n], whether the line holds the row already
    victim_tables: U32  # dirty rows that gave way: write them down before the misses are fetched
    victim_keys: U64
    victim_lines: U64

class Cache:
    """A set-associative LRU cache of lines. It decides and remembers; it moves nothing."""

    def __init__(self, layout: Layout, budget_bytes: int) -> None:
        """ValueError where the budget has no room for one set."""
    def admit(self, tables: U32, keys: U64) -> Admission:
        """Make room for distinct rows and pin them."""
    def release(self, admission: Admission, dirty: bool) -> None:
        """End the pins of an admission whose lines were filled."""
    def cancel(self, admission: Admission, restore: bool) -> None:
        """Undo an admission: `restore` where its victims were not written down."""
    def find(self, tables: U32, keys: U64, lines: U64) -> None:
        """Set lines [n] to where each row is, 0 where it is not up. Changes nothing."""
    def dirty(self) -> tuple[U32, U64, U64]:
        """Tables, keys and lines of the dirty rows."""
    def mark_clean(self) -> None: ...
    capacity: int  # lines
    used: int  # lines
    bytes: int
    counts: dict[str, int]

class RocksTier:
    """Rows in RocksDB, one database a shard of buckets.

    Absent where the build found no RocksDB. Failures raise RuntimeError.
    """

    def __init__(
        self,
        folder: str,
        width: int,
        *,
        create: bool,
        shards: int,
        block_bytes: int,
        block_cache_bytes: int,
        write_buffer_bytes: int,
    ) -> None: ...
    def read(self, tables: U32, keys: U64, lines: U64) -> Bools: ...
    def write(self, tables: U32, keys: U64, lines: U64) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None:
        """Close the databases; scans must be closed before, and nothing is called after."""
    def property(self, name: str) -> int:
        """A RocksDB integer property, summed over the shards."""
    def scan(self) -> RocksTier.Scan: ...

    class Scan:
        def next(self, rows: U8, max_rows: int) -> tuple[int, int]:
            """Pack up to max_rows rows of one bucket into rows: (bucket, how many), 0 at the end."""
        def close(self) -> None:
            """Let go of the databases; `next` raises from then on."""
