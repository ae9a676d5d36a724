"""The native core. Arrays are C-contiguous NumPy arrays; every loop releases the interpreter lock.

Wrong sizes and dtypes raise `TypeError` or `ValueError`. Arguments of users are checked by the callers in the package.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Bools = NDArray[np.bool_]

has_rocksdb: bool
WAYS: int  # rows of a set of a cache
GROUP: int  # rows of the group of a set that is a row's home
WAY_BYTES: int  # bytes that a cache needs for a row, in addition to its line and a tag of one byte

def set_threads(threads: int) -> None:
    """Set the number of threads of native loops, the caller's included."""

def instruction_sets() -> list[str]:
    """The instruction sets that loops are built for and this processor has. The first is the best, and is used."""

def use_instruction_set(name: str) -> None:
    """For tests: results are bit-identical. ValueError if this processor lacks it."""

def scratch(bytes: int) -> U8:
    """Uninitialised memory, which a later call reuses once the array is freed: the system would clear it again."""

def slot_hash() -> U64:
    """[6], the random numbers of this process that `SlotHash` of kernels/hash.h has."""

def buckets(tables: U32, keys: U64) -> U8:
    """[n] -> [n], the bucket 0..63 of each row: the top 6 bits of its hash."""

def owners(tables: U32, keys: U64, ranks: int) -> U16:
    """[n] -> [n], the rank 0..ranks - 1, of at most 1024, that owns each row: an interval of 16 bits of its hash."""

def hash_parts(bytes: U8, offsets: I64, seed: int, out: I64) -> None:
    """Write to out [n] the XXH64 of bytes[offsets[i]:offsets[i + 1]]."""

def hash_rows(bytes: U8, width: int, is_text: bool, seed: int, out: I64) -> int:
    """Write to out [n] the XXH64 of rows of `width` bytes each, without trailing zeros.

    is_text: rows are characters of 4 bytes, whose UTF-8 is hashed. Returns the first row that is not Unicode, or n.
    """

def normal_quantile(p: float) -> float:
    """The inverse of the standard normal distribution function, 0 < p < 1: Wichura's AS 241 in IEEE operations."""

def gather(
    batch: Batch,
    layout: Layout,
    lookup: int,
    out: F32 | U16,
    mean: bool = False,
    weights: F32 | None = None,
    dtype: str = "float32",
) -> None:
    """out [bags, dim]: the sum or mean of each bag's rows, each times its weight [n]; zeros for padding and empty bags.

    Needs `batch.lines`. `dtype` "float16" or "bfloat16": rounded to nearest even, `out` gets the bits.
    """

def weights_grad(
    batch: Batch, layout: Layout, lookup: int, grads: F32 | U16, out: F32, mean: bool = False, dtype: str = "float32"
) -> None:
    """out [n]: the gradient of each weight, <grads [bags, dim] of its bag, row>, over the bag's rows for a mean."""

def square_gradients(
    batch: Batch,
    layout: Layout,
    grads: list[F32] | list[U16] | list[F32 | U16],
    means: Sequence[bool],
    weights: list[F32 | None],
    dtype: str = "float32",
) -> F32:
    """[unique], the sum of squares of each row's gradient, which is reduced as in `update`."""

def sum_gradients(
    batch: Batch,
    layout: Layout,
    grads: list[F32] | list[U16] | list[F32 | U16],
    means: Sequence[bool],
    weights: list[F32 | None],
    out: F32,
    places: I64 | None = None,
    dtype: str = "float32",
) -> None:
    """Write the gradient of row u, reduced as in `update`, to row places[u] of out [*, dim], or to row u."""

def set_lines(
    batch: Batch, layout: Layout, rows: F32, places: I64, rest: Batch | None = None, position: int = 0
) -> None:
    """Set the line of row u to rows[places[u]], of rows [*, dim], which must live as long as the batch. For `gather`.

    Place len(rows) + i is the row that lookups read at position `position` + i of the batch `rest`.
    """

def update(
    batch: Batch,
    layout: Layout,
    grads: list[F32] | list[U16] | list[F32 | U16],
    means: Sequence[bool],
    weights: list[F32 | None],
    rule: str,
    hyper: Sequence[float],
    step: int,
    dtype: str = "float32",
    scale: float = 1.0,
    by_table: U64 | None = None,
) -> int:
    """Reduce the gradients of each row's occurrences, times `scale`, and apply the rule to each unique line.

    grads, means, weights: one for each lookup, as in `gather`. An occurrence's gradient is its bag's times
    weight * (1 / rows of the bag). They are added in the order of positions, in blocks of 256
    (ops/kernels/gradients.h). Returns the number of rows written for the first time, and adds those of each table to
    `by_table` [tables].
    """

def preview_catch_up(batch: Batch, layout: Layout, rule: str, hyper: Sequence[float], step: int) -> None:
    """Point `batch.views` to copies, caught up to `step`, of rows that missed steps.

    Does nothing for rules that do not catch up. No line changes.
    """

def catch_up(layout: Layout, lines: U64, rule: str, hyper: Sequence[float], step: int) -> None:
    """Catch up lines [n] of rows that missed steps before `step`, in place."""

def assign(batch: Batch, layout: Layout, values: F32, step: int, by_table: U64 | None = None) -> int:
    """Write values [size, dim] to the lines' embeddings; the last occurrence of a row wins.

    Optimizer state does not change. Returns and counts first writes as `update` does.
    """

def count_new(batch: Batch, layout: Layout) -> int:
    """The number of lines with `updates == 0`. A zero address counts as new."""

def count_written(batch: Batch, layout: Layout) -> U64:
    """[tables], the number of lines of each table with `updates > 0`."""

def copy_lines(layout: Layout, source: U64, to: U64) -> None:
    """Copy each line to another address."""

def initialise_missing(batch: Batch, layout: Layout) -> None:
    """Set each line that is zero to memory of the batch, with the row's initial values."""

class Tier:
    """A tier below a cache, as `Tier` of store/contract.py."""

    def read(self, tables: U32, keys: U64, lines: U64, touch: bool = True) -> Bools: ...
    def write(self, tables: U32, keys: U64, lines: U64) -> None: ...
    def erase(self, tables: U32, keys: U64) -> None: ...
    def forget_errors(self) -> None:
        """Wait for the tier's own writes and drop their errors. Rows whose write failed are written again later."""

class FullTable(Tier):
    """All rows in memory: an open-addressing index per bucket, lines in segments that never move."""

    def __init__(self, layout: Layout) -> None: ...
    def hit_counts(self) -> U64:
        """[tables * 2], the hits and misses of each table."""
    def find(self, batch: Batch) -> int:
        """Set `batch.lines`, zero for missing rows. Returns the number of missing rows."""
    def gather_few(self, keys: U64, last_ids: U64 | None, out: F32) -> int:
        """Copy the rows of up to 256 ids of table 0 to `out` [n, dim] without a batch; rows and `out` are float32.

        Returns how many different ids they are, or 0 if a row is missing or an id is beyond its last one.
        """
    def insert_missing(self, batch: Batch, layout: Layout) -> None:
        """Insert and initialise each row whose line is zero."""
    def locate(self, table: int, key: int) -> dict[str, int] | None:
        """`updates` and `last_step` of a row, and its `line` in its bucket; None if the table lacks it."""
    def metrics(self) -> dict[str, float]: ...
    def scan(self, bucket: int) -> U8:
        """Rows of the bucket with `updates > 0`, packed as `row_dtype` and sorted by (table, key)."""

class CachedTier(Tier):
    """A set-associative write-back cache over another tier. It serves steps, or is itself a tier.

    Errors of the tier below are raised as they are; errors of the write-behind thread by the next call.
    """

    def __init__(
        self,
        layout: Layout,
        below: Tier,
        *,
        budget_bytes: int,
        overflow_bytes: int,
        follows_batch: bool = False,
        policy: str,
        io_threads: int,
    ) -> None:
        """ValueError if the budget is too small for one set. `policy`: lru or lfu."""
    def announce(self, batch: Batch) -> None: ...
    def prefetch(self, batch: Batch) -> bool: ...
    def cancel(self) -> None: ...
    def pin(self, batch: Batch) -> None: ...
    def unpin(self, batch: Batch) -> None: ...
    def peek(self, batch: Batch) -> tuple[int, int]:
        """As in the contract. Returns how many rows it did not have, and how many of these no tier has."""
    def flush(self) -> None: ...
    def flush_some(self, begin: int, rows: int) -> int:
        """Write dirty lines, `rows` at most, from a slot on. Returns where the next call goes on, 0 at the end."""
    def close(self) -> None:
        """End the write-behind thread. Nothing may be called after it."""
    def locate(self, table: int, key: int) -> dict[str, Any] | None: ...
    def metrics(self) -> dict[str, float]: ...
    def hit_counts(self) -> U64:
        """As `FullTable.hit_counts`."""

def use_own_pool(threads: int) -> None:
    """Give the calling thread its own pool of threads, so that its loops do not use the pool of steps."""

class Admitted:
    """The decisions of `Ledger.admit` about a batch."""

    fresh: int  # new rows that are admitted; 0 if nothing had to be decided
    refused: int  # new rows that are not admitted
    lacking: int  # rows beyond the capacity: the batch must not be written
    def take_victims(self) -> tuple[U32, U64]:
        """Tables and keys of the rows to erase before the batch is written; empty after the first call."""

class Ledger:
    """How often and when each row was written. Decides which rows are admitted, expire or are evicted from their table.

    Its calls must be in the order of steps. Then its decisions do not depend on the tiers.
    """

    def __init__(
        self, *, eviction: str, capacity: int | None, ttl_steps: int, min_lookups: int, chance: float, seed: int
    ) -> None:
        """`eviction`, `capacity`, `ttl_steps` (0: none) as in `StoreOptions`; `min_lookups` or `chance`: admission."""
    def admit(self, batch: Batch, layout: Layout, now: int, training: bool) -> Admitted:
        """Decide which rows of a batch that step `now` writes are admitted. Without `training` no row is refused.

        Refused rows get initial values in `batch.own_lines`. Counts and ages do not change.
        """
    def commit(self, batch: Batch, now: int) -> None:
        """Count the batch: a write of each admitted row, a lookup of each refused row."""
    def expired(self, now: int) -> tuple[U32, U64]:
        """Tables and keys of the rows whose last write was more than `ttl_steps` ago."""
    def load(self, tables: U32, keys: U64, updates: U32, steps: U32) -> None:
        """Add stored rows, distinct."""
    def erase(self, tables: U32, keys: U64) -> int:
        """Erase rows, distinct. Returns how many of them the ledger had."""
    rows: int
    bytes: int

class ChangedRows:
    """The row keys of rows that were written or erased. `room`: about how many it takes before it grows."""

    def __init__(self, room: int = 0) -> None: ...
    def note(self, batch: Batch) -> None:
        """Add the rows of a batch that is written, except those with `own_lines`."""
    def note_rows(self, tables: U32, keys: U64) -> None: ...
    def merge(self, other: ChangedRows) -> None:
        """Add the rows of another set."""
    def rows(self, bucket: int) -> tuple[U32, U64]:
        """Tables [n] and keys [n] of the rows of a bucket, sorted by (table, key)."""
    size: int
    bytes: int

class TableImage:
    """`TableImage` of store/contract.py."""

    def __init__(self, table: FullTable, layout: Layout, top: Tier) -> None:
        """`top`: the table itself, or a cache over it that has no newer rows."""
    def save_before_images(self, batch: Batch) -> None: ...
    def save_before_images_of(self, tables: U32, keys: U64) -> None: ...
    def list(self, bucket: int) -> None: ...
    def sort(self) -> None: ...
    def next(self, rows: U8) -> int: ...
    before_image_bytes: int

rocksdb_version: str

def parse_rocksdb_options(text: str) -> list[tuple[str, str]]:
    """The names and values of RocksDB's options string. ValueError."""

def check_rocksdb_options(options: Sequence[tuple[str, str]]) -> None:
    """ValueError for an option that this build of RocksDB lacks."""

def rocksdb_has_async_io() -> bool:
    """Whether RocksDB can read by io_uring on this machine."""

class RocksTier(Tier):
    """Rows in RocksDB: shards of buckets, one database for each. Failures raise StoreError with the remedy.

    A build without RocksDB has neither this class nor the functions above with rocksdb in their name.
    """

    def __init__(
        self,
        folder: str,
        width: int,
        *,
        create: bool,
        read_only: bool,
        shards: int,
        block_bytes: int,
        cache_bytes: int,
        buffer_bytes: int,
        read_mode: str,
        async_io: bool,
        read_threads: int,
        options: Sequence[tuple[str, str]],
    ) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None:
        """Close the databases. Scans must be closed before, and nothing may be called after."""
    def make_writable(self) -> None: ...
    @property
    def failed(self) -> bool: ...
    def versions(self) -> list[tuple[str, int]]: ...
    def compact(self) -> None:
        """Merge the files of each shard."""
    def hold_files(self) -> list[tuple[str, int, int | None, bytes | None]]:
        """Flush, and return the files that have all rows written so far. They exist until `release_files`.

        For each file (shard-N/<file>, bytes, crc32c if RocksDB knows it, content if the live file may be replaced): a
        copy has the first `bytes` of the file, or `content`. One caller at a time.
        """
    def release_files(self) -> None: ...
    def locate(self, table: int, key: int) -> dict[str, int] | None:
        """`updates` and `last_step` of a row; None if RocksDB lacks it."""
    def metrics(self) -> dict[str, float]: ...
    def info(self) -> dict[str, Any]: ...
    def scan(self) -> RocksTier.Scan: ...

    class Scan:
        def next(self, rows: U8, max_rows: int) -> tuple[int, int]:
            """Pack up to max_rows rows of one bucket into rows. Returns (bucket, their number), 0 rows at the end."""
        def close(self) -> None:
            """Release the databases. `next` raises after that."""

Segment = tuple[U64, U32 | None, int | I64 | None]
FeatureSegment = tuple[U64, U32, I64, U32, int]  # with features and their batch

class Batch:
    """The unique rows of one or several lookups.

    Positions number the ids of all segments in order. Unique rows are sorted by bucket, then by first occurrence; or by
    number, if all ids have one and neighbouring bags are of one table.
    Arrays that depend on the ids alone are read-only.
    """

    def __init__(
        self,
        segments: Sequence[Segment | FeatureSegment],
        num_tables: int,
        padding: int | None,
        last_ids: U64 | None = None,
        drops: Sequence[bool] = (),
    ) -> None:
        """Each segment is the ids of one lookup: (keys [n], table ids, bags).

        `bags`: None if each id is a bag, the length of every bag, or offsets [bags + 1] that ascend from 0 to n. Table
        ids [bags], or None if bag i is of table i % num_tables.

        With features, offsets are [features * batch + 1] of all features in order, and (features [columns] uint32,
        batch) follow: the features that are looked up, each once. Table ids are [columns], and bag b * columns + c is
        of sample b and feature features[c].

        last_ids [num_tables]: the last legal id of each table. A larger id is padding. It is counted in `dropped` if
        `drops` of its table is set, else it is an error. `drops` may be empty: all False.

        Keys equal to `padding` (as unsigned 64 bits) are padding. A table id >= num_tables raises IndexError with its
        position.
        """
    size: int  # positions, padding included
    sources: int  # bags of all segments: the rows of their outputs
    unique: int  # unique rows
    dropped: list[int]  # [num_tables] ids that were dropped; empty without last_ids
    illegal: tuple[int, int] | None  # (table, key) of the first id that is an error
    keys: U64  # [unique]
    tables: U32  # [unique]
    inverse: NDArray[np.int32]  # [size], the unique row of each position, -1 for padding
    lines: U64  # [unique], addresses, writable; zero until pinned or peeked
    views: U64  # [unique], the lines that `gather` reads: `lines`, or the copies that `preview_catch_up` made
    occurrences: U32  # [size - padding], positions grouped by unique row, ascending within one
    offsets: U32  # [unique + 1], the beginning of each row's occurrences

    own_lines: U64  # [unique], the lines of rows that `Ledger.admit` refused, 0 for others; empty if it refused none

    def sibling(self) -> Batch:
        """A batch of the same ids for another embedding: it shares the deduplication, and has its own lines."""

class Layout:
    """The shape of a table's lines, and their initial values."""

    def __init__(
        self,
        dim: int,
        states: Sequence[float],
        state_widths: Sequence[int],
        seed: int,
        columns: Sequence[int],
        kinds: Sequence[int],
        parameters: F32,
        quantiles: NDArray[np.float64],
        dtype: str = "float32",
        state_dtype: str = "float32",
        narrow_states: int = 0,
        zero_key: int | None = None,
        last_ids: Sequence[int] | None = None,
    ) -> None:
        """`states`: the initial value of each optimizer state; `state_widths`: its numbers in a row, `dim` or, last, 1.

        `dtype`: of the embedding, `state_dtype`: of the first `narrow_states` states, all others being float32.

        `columns`: widths of the column groups, summing to `dim`.

        For table t and column group c, entry t * len(columns) + c of `kinds`, `parameters` [n, 2], `quantiles` [n, 2]
        describes the initial
        values; u is uniform in [0, 1):
        kind 0 constant a; 1 uniform a + u * (b - a); 2 normal a + b * quantile(q0 + u * (q1 - q0)), with (q0, q1) =
        (0, 1) untruncated. `zero_key`: the key of the row that begins as zeros in every table.

        `last_ids` [tables]: the last id of each; if there are not too many, they have numbers, and the full table an
        array as index.
        """
    dim: int
    width: int  # words of 4 bytes, states included
    line_bytes: int

class Crc32c:
    """The checksum that RocksDB keeps of each file of rows, of bytes that are passed in pieces."""

    def __init__(self) -> None: ...
    def update(self, bytes: U8) -> None: ...
    def finish(self) -> int:
        """The checksum. Nothing may be called after."""

class RowCheck:
    """Finds rows that are invalid in a snapshot, among the rows or row keys (table u32, key u64) of a bucket.

    The rows are passed in pieces. `tables`: their number; `int32`: keys are int32; `part`: the owner of the rows among
    `parts`.
    """

    def __init__(self, bucket: int, tables: int, int32: bool, part: int, parts: int) -> None: ...
    def problem(self, rows: U8, row_bytes: int) -> str | None:
        """The error of the next rows, if there is one: in their order, bucket, part, table, key or record."""

def join_rows(before: U8, after: U8, row_bytes: int) -> tuple[U8, U8]:
    """Compare packed rows of one bucket, both sides in strictly ascending order, to the end of the shorter side.

    Returns two arrays for the rows compared. For rows of `before`: 1 if `after` lacks the row. For rows of `after`: 0
    if it is equal, 1 if its bytes differ, 2 if `before` lacks it.
    """

def merge_parts(parts: list[U8], more: list[bool], row_bytes: int) -> tuple[U8, list[int]]:
    """Merge the packed rows of several parts of one bucket, to the end of the first part of which `more` will come.

    Each part is in strictly ascending order, and no row is in two. Returns the rows, and how many of each part.
    """

def merge_rows(before: U8, after: U8, gone: U8, row_bytes: int) -> tuple[U8, int, int, int, bool]:
    """Apply changes to the packed rows `before` of one bucket: add or replace rows of `after`, remove row keys `gone`.

    Each side is in strictly ascending order, and is read up to the least of their last keys; a side may be empty.
    Returns the rows, how many of each side were read, and whether a row key is both in `after` and in `gone`.
    """
