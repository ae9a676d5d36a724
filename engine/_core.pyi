"""The native core. Arrays are C-contiguous NumPy arrays; every loop releases the interpreter lock.

Wrong sizes and dtypes raise `TypeError`/`ValueError`: callers inside the package validate what users pass.
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
GROUP: int  # those of them among which a row usually replaces another
WAY_BYTES: int  # what a cache keeps for each beside its line and a tag of one byte

def set_threads(threads: int) -> None:
    """How many threads the native loops use from now on, the caller's included."""

def instruction_sets() -> list[str]:
    """Those that this processor has of the ones that the loops were built for, the best, which is used, first."""

def use_instruction_set(name: str) -> None:
    """For tests: all give the same bits. ValueError for one that is not there."""

def scratch(bytes: int) -> U8:
    """Uninitialised memory that is kept for the next call when the array dies: the system would clear it each time."""

def buckets(tables: U32, keys: U64) -> U8:
    """[n] -> [n], the bucket 0..63 of each row: the top 6 bits of its hash."""

def owners(tables: U32, keys: U64, ranks: int) -> U16:
    """[n] -> [n], the rank 0..ranks - 1, of at most 1024, that owns each row: an interval of 16 bits of its hash."""

def by_owner(batch: Batch, last: int, keys: I64, tables: I64, places: I64, counts: I64) -> None:
    """Write the unique rows of a batch by the owners of `counts` [ranks], those of one in the order of the batch.

    keys, tables [unique]: in that order, in which owner `last` is behind the others. places [unique]: of each row of
    the batch, in that order.
    """

def hash_parts(bytes: U8, offsets: I64, seed: int, out: I64) -> None:
    """Write to out [n] the XXH64 of bytes[offsets[i]:offsets[i + 1]]."""

def hash_rows(bytes: U8, width: int, is_text: bool, seed: int, out: I64) -> int:
    """Write to out [n] the XXH64 of rows of `width` bytes each, without the zeros at their ends.

    is_text: whether rows are characters of 4 bytes, whose UTF-8 is hashed. Returns the first row that has none, or n.
    """

def normal_quantile(p: float) -> float:
    """The inverse of the standard normal distribution function, 0 < p < 1: Wichura's AS 241 in IEEE operations."""

def initialise(layout: Layout, tables: U32, keys: U64, out: F32) -> None:
    """out [n, layout.width]: the initial values of rows, state included."""

def gather(
    batch: Batch,
    layout: Layout,
    lookup: int,
    out: F32 | U16,
    mean: bool = False,
    weights: F32 | None = None,
    dtype: str = "float32",
) -> None:
    """out [bags, dim]: the sum or mean of each bag's rows, each times its weight [n]; zeros for padding and no rows.

    Needs `batch.lines`. `dtype` "float16" or "bfloat16": rounded to nearest even, `out` holds the bits.
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
    """[unique], the sum of the squares of each row's gradient, which is reduced as in `update`."""

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
    """The gradient of row u, reduced as in `update`, to place places[u] of out [*, dim]; without places, to place u."""

def set_lines(
    batch: Batch, layout: Layout, rows: F32, places: I64, rest: Batch | None = None, position: int = 0
) -> None:
    """Let the line of row u be rows[places[u]], of rows [*, dim], which live as long as the batch. For `gather`.

    Place len(rows) + i is what lookups read at position `position` + i of the batch `rest`.
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
    weight * (1 / rows of the bag); their order is that of positions, in blocks of 256 (ops/kernels/gradients.h).
    Returns how many rows were written for the first time, and adds those of each table to `by_table` [tables].
    """

def settle(batch: Batch, layout: Layout, rule: str, hyper: Sequence[float], step: int) -> None:
    """Give rows that missed steps before `step` an address in `batch.views` that holds them as of then.

    Of rules that catch up; others are left alone. No line changes.
    """

def catch_up(layout: Layout, lines: U64, rule: str, hyper: Sequence[float], step: int) -> None:
    """Bring lines [n] of rows that missed steps before `step` up to date, in place."""

def assign(batch: Batch, layout: Layout, values: F32, step: int, by_table: U64 | None = None) -> int:
    """Write values [size, dim] to the lines' embeddings, the last occurrence winning.

    Optimizer state stays. Returns and counts first writes as `update` does.
    """

def count_new(batch: Batch, layout: Layout) -> int:
    """How many lines have `updates == 0`. A zero address counts as new."""

def count_written(batch: Batch, layout: Layout) -> U64:
    """[tables], how many lines of each table have `updates > 0`."""

def initialise_lines(layout: Layout, tables: U32, keys: U64, lines: U64) -> None:
    """Give each line the initial values of its row."""

def copy_lines(layout: Layout, source: U64, to: U64) -> None:
    """Copy each line to another address."""

def initialise_missing(batch: Batch, layout: Layout) -> None:
    """Give each unique row whose line is zero initial values in memory that the batch owns."""

class Tier:
    """Rows below a cache. No array holds a row (table, key) twice."""

    def read(self, tables: U32, keys: U64, lines: U64, touch: bool = True) -> Bools:
        """Copy each held row to its line. `touch`: the read counts for recency. Returns which are held."""
    def write(self, tables: U32, keys: U64, lines: U64) -> None:
        """Copy each line to its row, inserting it where it is new."""
    def erase(self, tables: U32, keys: U64) -> None:
        """Forget rows; those that are not there are fine."""
    def forget_errors(self) -> None:
        """Wait for writes of its own that are under way, and forget why some failed: their rows are tried again."""

class FullTable(Tier):
    """Every row in memory: an open-addressing index per bucket, lines in segments that never move."""

    def __init__(self, layout: Layout) -> None: ...
    def asked(self) -> U64:
        """[tables * 2], of each table the rows that were asked for and found, then those that were not."""
    def find(self, batch: Batch) -> int:
        """Set `batch.lines`, zero where a row is absent. Returns how many are absent."""
    def insert_missing(self, batch: Batch, layout: Layout) -> None:
        """Insert and initialise each row whose line is zero."""
    def where(self, table: int, key: int) -> dict[str, int] | None:
        """`updates` and `last_step` of a row, and its `line` in its bucket; None where it is not here."""
    def metrics(self) -> dict[str, float]: ...
    def scan(self, bucket: int) -> U8:
        """Rows of the bucket with `updates > 0`, packed as `row_dtype` and sorted by (table, key)."""
    rows: int
    bytes: int

class CachedTier(Tier):
    """A set-associative write-back cache over another tier: the store of a step, and a tier itself.

    Errors of the tier below are raised as they are; those of its writing thread at the next call.
    """

    def __init__(
        self,
        layout: Layout,
        below: Tier,
        *,
        budget_bytes: int,
        overflow_bytes: int,
        policy: str,
        io_threads: int,
    ) -> None:
        """ValueError where the budget has no room for one set. `policy`: lru or lfu."""
    def announce(self, batch: Batch) -> None: ...
    def prefetch(self, batch: Batch) -> bool: ...
    def cancel(self) -> None: ...
    def pin(self, batch: Batch) -> None:
        """Bring up the rows of an announced batch, or of one while none is announced, and set their addresses."""
    def unpin(self, batch: Batch) -> None: ...
    def peek(self, batch: Batch) -> None: ...
    def flush(self) -> None:
        """Write every dirty line to the tier below."""
    def close(self) -> None:
        """End the thread. Nothing may be used after it."""
    def where(self, table: int, key: int) -> dict[str, Any] | None: ...
    def residents(self) -> tuple[I64, U32, U64, Bools]:
        """Slots, tables, keys and dirty flags of the rows that are up: of the sets, then with slot -1 the others."""
    def metrics(self) -> dict[str, float]: ...
    def asked(self) -> U64:
        """As `FullTable.asked`."""

def use_own_pool(threads: int) -> None:
    """Let loops that the calling thread runs from here on have their own threads, apart from those of steps."""

class Admitted:
    """What `Ledger.admit` decided about a batch."""

    fresh: int  # new rows that are kept, where they had to be counted
    refused: int  # new rows that are not kept
    lacking: int  # rows too many: the batch must not be written
    def take_victims(self) -> tuple[U32, U64]:
        """Tables and keys of the rows that must go before the batch is written; empty from then on."""

class Ledger:
    """How often and when each row was written: what decides which rows stay, and which new ones are kept.

    Asked in the order of steps, it answers the same whatever tiers the rows are in.
    """

    def __init__(
        self, *, eviction: str, capacity: int | None, ttl_steps: int, sights: int, chance: float, seed: int
    ) -> None:
        """`eviction`, `capacity`, `ttl_steps` (0: none) as in `StoreOptions`; `sights` and `chance`: admission."""
    def admit(self, batch: Batch, layout: Layout, now: int, training: bool) -> Admitted:
        """Decide what becomes of a batch that step `now` writes; without `training` no row is refused.

        Refused rows get initial values in lines of the batch's own. The ledger does not change.
        """
    def commit(self, batch: Batch, now: int) -> None:
        """The batch was written: each of its rows once, but for refused ones, which count as seen."""
    def expired(self, now: int) -> tuple[U32, U64]:
        """Tables and keys of rows not written for more than `ttl_steps`."""
    def load(self, tables: U32, keys: U64, updates: U32, steps: U32) -> None:
        """Add stored rows, distinct."""
    def erase(self, tables: U32, keys: U64) -> int:
        """Forget rows, distinct. Returns how many were there."""
    def find(self, tables: U32, keys: U64) -> tuple[U32, U32]:
        """Updates [n], 0 for rows that are not there, and the steps [n] of the last."""
    rows: int
    bytes: int

class ChangedRows:
    """The names of rows that were written or erased, with `room` for about so many until it grows."""

    def __init__(self, room: int = 0) -> None: ...
    def note(self, batch: Batch) -> None:
        """The rows of a batch that is written, but for those with `own_lines`."""
    def note_rows(self, tables: U32, keys: U64) -> None: ...
    def merge(self, other: ChangedRows) -> None:
        """Note all that the other has."""
    def rows(self, bucket: int) -> tuple[U32, U64]:
        """Tables [n] and keys [n] of those of a bucket, ordered by (table, key)."""
    size: int
    bytes: int

class TableImage:
    """The rows of a full table as they are when this is made, read bucket by bucket while they change.

    Nothing runs beside anything else, but for `sort` beside what `keep` and `keep_rows` do.
    """

    def __init__(self, table: FullTable, layout: Layout, top: Tier) -> None:
        """The table has every row: `top`, itself or a cache over it, has no newer one."""
    def keep(self, batch: Batch) -> None:
        """To be called before the lines of a pinned batch are written: what they hold is kept aside."""
    def keep_rows(self, tables: U32, keys: U64) -> None:
        """The same before rows, distinct, are erased."""
    def list(self, bucket: int) -> None:
        """Begin to read a bucket; they are read in ascending order."""
    def sort(self) -> None:
        """Between `list` and the first `next`."""
    def next(self, rows: U8) -> int:
        """Pack as many rows as there is room for, by (table, key), as `row_dtype`. How many: 0 at the bucket's end."""
    kept_bytes: int

rocksdb_version: str

def parse_rocksdb_options(text: str) -> list[tuple[str, str]]:
    """Names and values of RocksDB's options string. ValueError."""

def check_rocksdb_options(options: Sequence[tuple[str, str]]) -> None:
    """ValueError, "name='value': reason and remedy", for an unknown option, a bad value or a refused one."""

def rocksdb_option_names() -> list[str]:
    """Those that `check_rocksdb_options` may take."""

def rocksdb_table_field_names() -> list[str]:
    """Those that block_based_table_factory may take."""

def rocksdb_has_async_io() -> bool:
    """Whether the library reads by io_uring here."""

class RocksTier(Tier):
    """Rows in RocksDB, one database a shard of buckets.

    Absent where the build found none, as what is named after it. Failures raise RuntimeError with the remedy.
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
        """Close the databases; scans must be closed before, and nothing is called after."""
    def make_writable(self) -> None: ...
    @property
    def failed(self) -> bool: ...
    def compact(self) -> None:
        """Merge the files of each shard."""
    def hold_files(self) -> list[tuple[str, int, int | None, bytes | None]]:
        """Flush, and tell the files that hold all rows written so far, which stay until `release_files`.

        Of each (shard-N/<file>, how many of its bytes, its crc32c where RocksDB knows it, what it is to hold where the
        file there may be replaced). One caller at a time.
        """
    def release_files(self) -> None: ...
    def where(self, table: int, key: int) -> dict[str, int] | None:
        """`updates` and `last_step` of a row; None where it is not here."""
    def metrics(self) -> dict[str, float]: ...
    def info(self) -> dict[str, Any]: ...
    def scan(self) -> RocksTier.Scan: ...

    class Scan:
        def next(self, rows: U8, max_rows: int) -> tuple[int, int]:
            """Pack up to max_rows rows of one bucket into rows: (bucket, how many), 0 at the end."""
        def close(self) -> None:
            """Let go of the databases; `next` raises from then on."""

Segment = tuple[U64, U32 | None, int | I64 | None]
FeatureSegment = tuple[U64, U32, I64, U32, int]  # with features and their batch

class Batch:
    """The unique rows of one or several lookups.

    Positions number the ids of all segments one after another. Unique rows are ordered by bucket, then by first
    occurrence. What follows from the ids alone is read-only.
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

        `bags`: None where each id is a bag of its own, the length of every bag, or offsets [bags + 1] that ascend from
        0 to n. Table ids [bags], or None where bag i is of table i % num_tables.

        With features, offsets are [features * batch + 1] of all features, one after another, and (features [columns]
        uint32, batch) follow: the features that are looked up, each once. Table ids are [columns], and bag
        b * columns + c is of sample b and feature features[c].

        last_ids [num_tables]: the last legal id of each table. A larger one is taken as padding; it is counted in
        `dropped` where `drops` of its table is set, and else a mistake. `drops` may be empty: none is.

        Keys equal to `padding` (as unsigned 64 bits) are no rows. A table id >= num_tables raises IndexError naming
        its position.
        """
    size: int  # positions, padding included
    sources: int  # bags of all segments: the rows of their outputs
    unique: int  # unique rows
    dropped: list[int]  # [num_tables] ids that were dropped; empty without last_ids
    illegal: tuple[int, int] | None  # (table, key) of the first id that is a mistake
    keys: U64  # [unique]
    tables: U32  # [unique]
    inverse: NDArray[np.int32]  # [size], the unique row of each position, -1 for padding
    lines: U64  # [unique], addresses, writable; zero until pinned or peeked
    views: U64  # [unique], where `gather` reads: the lines, or copies of rows that `settle` brought up to date
    occurrences: U32  # [size - padding], positions grouped by unique row, ascending within one
    offsets: U32  # [unique + 1], where each row's occurrences start

    own_lines: U64  # [unique], the lines of rows that `Ledger.admit` refused, 0 for others; empty where it refused none

    def sibling(self) -> Batch:
        """A batch of the same ids for another table: it shares what follows from them, and has lines of its own."""
    def allocate(self, n: int, layout: Layout) -> U64:
        """[n], the addresses of fresh lines that live as long as the batch."""
    def use_own_lines(self) -> None:
        """Put them in the place of the lines that a tier has for those rows."""

class Layout:
    """What a line looks like and how a new one begins."""

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
    ) -> None:
        """`states`: the initial value of each optimizer state; `state_widths`: its numbers in a row, `dim` or, last, 1.

        `dtype`: of the embedding, `state_dtype`: of the first `narrow_states` states, all others being float32.

        `columns`: widths of the column groups, summing to `dim`.

        For table t and column group c, entry t * len(columns) + c of `kinds`, `parameters` [n, 2], `quantiles` [n, 2]
        describes the initial
        values; u is uniform in [0, 1):
        kind 0 constant a; 1 uniform a + u * (b - a); 2 normal a + b * quantile(q0 + u * (q1 - q0)), with (q0, q1) =
        (0, 1) untruncated.
        """
    dim: int
    width: int  # words of 4 bytes, states included
    line_bytes: int

class Crc32c:
    """The checksum that RocksDB keeps of each file of rows, of bytes that come in pieces."""

    def __init__(self) -> None: ...
    def update(self, bytes: U8) -> None: ...
    def finish(self) -> int:
        """The checksum. Nothing is called after."""

class RowCheck:
    """What no snapshot holds among the rows of a bucket, or names of rows (table u32, key u64), that come in parts.

    `tables`: how many there are; `int32`: whether keys are; `part`: the owner of the rows among `parts`.
    """

    def __init__(self, bucket: int, tables: int, int32: bool, part: int, parts: int) -> None: ...
    def problem(self, rows: U8, row_bytes: int) -> str | None:
        """What is wrong with rows that follow those before: their order, bucket, part, table, key or record."""

def join_rows(before: U8, after: U8, row_bytes: int) -> tuple[U8, U8]:
    """Compare packed rows of one bucket, each side in strictly ascending order, until either side has no more.

    Of those of `before` that were compared: 1 where `after` lacks the row. Of those of `after`: 0 where it is the same,
    1 where its bytes differ, 2 where `before` lacks it.
    """

def merge_parts(parts: list[U8], more: list[bool], row_bytes: int) -> tuple[U8, list[int]]:
    """The packed rows of several parts of one bucket, in one order, until a part of which `more` come has no row left.

    Each part is in strictly ascending order, and no row is in two. The rows, and how many of each part were taken.
    """

def merge_rows(before: U8, after: U8, gone: U8, row_bytes: int) -> tuple[U8, int, int, int, bool]:
    """The packed rows `before` of one bucket as they are after changes: those of `after`, and without the names `gone`.

    Each side is in strictly ascending order, and is taken up to the least of their last names; a side may be empty. The
    rows, how many of each side were taken, and whether a name is both in `after` and `gone`.
    """
