"""The part of the native core for the rows of lookups and the layout of a line: `_core` has what is here."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]

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
