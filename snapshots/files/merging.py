"""Compares two sorted streams of rows, applies changes to a sorted stream, and merges several sorted streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, ROW_KEY_DTYPE, Change, Chunks, RowArray, extract_row_keys

STATUS_NEW = 2  # the status of a row that is only in the later table
_NO_KEYS: RowArray = np.empty(0, ROW_KEY_DTYPE)


class RowCursor:
    """Reads a stream of sorted chunks. `rows` are the next rows, all in `bucket`. At most two chunks are in memory."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._bucket = -1
        self._following: tuple[int, RowArray] | None = None
        self.rows: RowArray = _NO_KEYS

    @property
    def bucket(self) -> int:
        """The bucket of the next row, or `BUCKETS` at the end of the stream. Refills `rows` if it is empty."""
        if not len(self.rows) and self._bucket < BUCKETS:
            self._bucket, self.rows = self._following or self._read()
            self._following = None
        return self._bucket

    @property
    def has_more(self) -> bool:
        """True if the stream has more rows of this bucket after `rows`."""
        self._following = self._following or self._read()
        return self._following[0] == self._bucket

    def take(self, count: int | None = None) -> RowArray:
        """Remove and return the first `count` rows of `rows`, by default all rows."""
        count = len(self.rows) if count is None else count
        rows, self.rows = self.rows[:count], self.rows[count:]
        return rows

    def _read(self) -> tuple[int, RowArray]:
        for bucket, rows in self._chunks:
            if len(rows):
                return bucket, np.ascontiguousarray(rows)
        return BUCKETS, _NO_KEYS


def join_tables(
    before: Chunks, after: Chunks
) -> Iterator[tuple[int, RowArray, RowArray, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Read two tables in parallel, in pieces that cover the same key range.

    Yields (bucket, rows before, rows after, is_removed, status); see `diff_rows`. Both inputs are sorted
    like `Tier.scan`. If row dtypes differ, only `updates` and `step` are compared. It keeps one chunk of each table.
    """
    old, newer = RowCursor(before), RowCursor(after)
    while (bucket := min(old.bucket, newer.bucket)) < BUCKETS:
        is_removed, status = _as_bytes(_NO_KEYS), _as_bytes(_NO_KEYS)
        if newer.bucket > bucket:
            is_removed = np.ones(len(old.rows), np.uint8)
        elif old.bucket > bucket:
            status = np.full(len(newer.rows), STATUS_NEW, np.uint8)
        else:
            left, right = old.rows, newer.rows
            if left.dtype != right.dtype:
                left, right = (repack_fields(rows[["table", "key", "updates", "step"]]) for rows in (left, right))
            is_removed, status = _core.diff_rows(_as_bytes(left), _as_bytes(right), left.dtype.itemsize)
        yield bucket, old.take(len(is_removed)), newer.take(len(status)), is_removed, status


def apply_changes(older: Chunks, newer: Chunks, deleted: Chunks, conflict_error: Callable[[int], Exception]) -> Chunks:
    """Apply changes to the table `older`: drop rows whose keys are `deleted`, and replace or add the rows in `newer`.

    Raises `conflict_error(bucket)` if `newer` and `deleted` share a key. All streams may contain keys instead of rows.
    """
    cursors = [RowCursor(chunks) for chunks in (older, newer, deleted)]
    while (bucket := min(cursor.bucket for cursor in cursors)) < BUCKETS:
        present = [cursor for cursor in cursors if cursor.bucket == bucket]
        if present == cursors[:1]:
            yield bucket, present[0].take()
            continue
        dtype = present[0].rows.dtype
        before, after, deleted_keys = (_as_bytes(cursor.rows if cursor in present else _NO_KEYS) for cursor in cursors)
        merged, *counts, has_conflict = _core.merge_rows(before, after, deleted_keys, dtype.itemsize)
        if has_conflict:
            raise conflict_error(bucket)
        for cursor, count in zip(cursors, counts, strict=True):
            if cursor in present:
                cursor.take(count)
        if len(merged):
            yield bucket, merged.view(dtype)


def find_changes(before: Chunks, after: Chunks) -> Iterator[Change]:
    """Yields the changes from table `before` to `after`, in the order of `join_tables`. Row dtypes must be equal."""
    for bucket, old, new, is_removed, status in join_tables(before, after):
        if is_removed.any() or status.any():
            yield bucket, new[status > 0], extract_row_keys(old[is_removed > 0])


def _as_bytes(rows: RowArray) -> NDArray[np.uint8]:
    return rows.view(np.uint8)


def merge_sorted(streams: Sequence[Chunks]) -> Chunks:
    """Merge sorted streams into one stream, sorted by bucket, table and key. No row may be in two streams.

    Keeps up to two chunks of each stream in memory. Each merged chunk takes rows from at most one chunk of each stream.
    """
    cursors = [RowCursor(stream) for stream in streams]
    while (bucket := min((cursor.bucket for cursor in cursors), default=BUCKETS)) < BUCKETS:
        present = [cursor for cursor in cursors if cursor.bucket == bucket]
        if len(present) == 1:
            yield bucket, present[0].take()
            continue
        dtype = present[0].rows.dtype
        more = [cursor.has_more for cursor in present]
        rows, counts = _core.merge_parts([_as_bytes(cursor.rows) for cursor in present], more, dtype.itemsize)
        for cursor, count in zip(present, counts, strict=True):
            cursor.take(count)
        yield bucket, rows.view(dtype)
