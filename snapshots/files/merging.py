"""Sorted streams of rows: reads two in parallel, compares them, applies changes to one, and merges several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, KEY, Change, Chunks, RowArray, keys_of

NEW = 2  # the state of a row that the table before lacks
_NONE: RowArray = np.empty(0, KEY)


class RowCursor:
    """Reads a stream of sorted chunks: `rows` of `bucket` come next. It holds one chunk, or two after `has_more`."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._bucket = -1
        self._following: tuple[int, RowArray] | None = None
        self.rows: RowArray = _NONE

    @property
    def bucket(self) -> int:
        """The bucket of the next row; `BUCKETS` at the end. `rows` is not empty before the end once this was read."""
        if not len(self.rows) and self._bucket < BUCKETS:
            self._bucket, self.rows = self._following or self._read()
            self._following = None
        return self._bucket

    @property
    def has_more(self) -> bool:
        """Whether the bucket has rows after `rows`."""
        self._following = self._following or self._read()
        return self._following[0] == self._bucket

    def take(self, count: int | None = None) -> RowArray:
        """Take the first `count` of `rows`, or all."""
        count = len(self.rows) if count is None else count
        taken, self.rows = self.rows[:count], self.rows[count:]
        return taken

    def _read(self) -> tuple[int, RowArray]:
        for bucket, rows in self._chunks:
            if len(rows):
                return bucket, np.ascontiguousarray(rows)
        return BUCKETS, _NONE


def joined(
    before: Chunks, after: Chunks
) -> Iterator[tuple[int, RowArray, RowArray, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Two tables in pieces of one range of keys: (bucket, rows before, rows after, gone, state) as of `join_rows`.

    Both are streams as `Tier.scan` yields them. Rows of two types are compared by their records. One chunk of each
    table is in memory at a time. Raises what the chunks raise.
    """
    old, now = RowCursor(before), RowCursor(after)
    while (bucket := min(old.bucket, now.bucket)) < BUCKETS:
        gone, state = _bytes(_NONE), _bytes(_NONE)
        if now.bucket > bucket:
            gone = np.ones(len(old.rows), np.uint8)
        elif old.bucket > bucket:
            state = np.full(len(now.rows), NEW, np.uint8)
        else:
            left, right = old.rows, now.rows
            if left.dtype != right.dtype:
                left, right = (repack_fields(rows[["table", "key", "updates", "step"]]) for rows in (left, right))
            gone, state = _core.join_rows(_bytes(left), _bytes(right), left.dtype.itemsize)
        yield bucket, old.take(len(gone)), now.take(len(state)), gone, state


def changed(older: Chunks, newer: Chunks, deleted: Chunks, twice: Callable[[int], Exception]) -> Chunks:
    """The rows of `older` as they are after changes: without the `deleted` keys, and with the rows of `newer`.

    Raises `twice(bucket)` if a key of the bucket is both in `newer` and in `deleted`. All three may be streams of keys
    alone.
    """
    cursors = [RowCursor(chunks) for chunks in (older, newer, deleted)]
    while (bucket := min(cursor.bucket for cursor in cursors)) < BUCKETS:
        present = [cursor for cursor in cursors if cursor.bucket == bucket]
        if present == cursors[:1]:
            yield bucket, present[0].take()
            continue
        dtype = present[0].rows.dtype
        before, after, gone = (_bytes(cursor.rows if cursor in present else _NONE) for cursor in cursors)
        merged, *counts, both = _core.merge_rows(before, after, gone, dtype.itemsize)
        if both:
            raise twice(bucket)
        for cursor, count in zip(cursors, counts, strict=True):
            if cursor in present:
                cursor.take(count)
        if len(merged):
            yield bucket, merged.view(dtype)


def changes_between(before: Chunks, after: Chunks) -> Iterator[Change]:
    """The changes that make the table `after` from the table `before`, of one row type, in the order of `joined`."""
    for bucket, old, new, gone, state in joined(before, after):
        if gone.any() or state.any():
            yield bucket, new[state > 0], keys_of(old[gone > 0])


def _bytes(rows: RowArray) -> NDArray[np.uint8]:
    return rows.view(np.uint8)


def merge_sorted(parts: Sequence[Chunks]) -> Chunks:
    """The rows of `parts` by bucket, in order of (table, key). In each they strictly ascend, and none is in two.

    Two chunks of each part are in memory at a time. A merged chunk has at most the rows of those.
    """
    cursors = [RowCursor(part) for part in parts]
    while (bucket := min((cursor.bucket for cursor in cursors), default=BUCKETS)) < BUCKETS:
        present = [cursor for cursor in cursors if cursor.bucket == bucket]
        if len(present) == 1:
            yield bucket, present[0].take()
            continue
        dtype = present[0].rows.dtype
        more = [cursor.has_more for cursor in present]
        rows, counts = _core.merge_parts([_bytes(cursor.rows) for cursor in present], more, dtype.itemsize)
        for cursor, count in zip(present, counts, strict=True):
            cursor.take(count)
        yield bucket, rows.view(dtype)
