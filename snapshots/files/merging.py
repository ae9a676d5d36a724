"""Sorted streams of rows: reads two in parallel, compares them, applies changes to one, and merges several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, Change, Chunks, RowArray, keys_of

_NONE: Any = np.empty(0, np.uint8)


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


def aligned(left: Chunks, right: Chunks) -> Iterator[tuple[int, RowArray | None, RowArray | None]]:
    """Both streams in pieces (bucket, rows of left, rows of right), each over one range of (bucket, table, key).

    None if a stream has no row in the range. A (table, key) of both streams is in one piece. One chunk of each stream
    is in memory at a time.
    """
    a, b = RowCursor(left), RowCursor(right)
    while (bucket := min(a.bucket, b.bucket)) < BUCKETS:
        if a.bucket != b.bucket:
            yield bucket, a.take() if a.bucket == bucket else None, b.take() if b.bucket == bucket else None
            continue
        last = min(sort_keys(a.rows[-1:])[0], sort_keys(b.rows[-1:])[0])
        counts = (int(np.searchsorted(sort_keys(one.rows), last, side="right")) for one in (a, b))
        x, y = (one.take(count) if count else None for one, count in zip((a, b), counts, strict=True))
        yield bucket, x, y


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
        before, after, gone = (_bytes(cursor.rows) if cursor in present else _NONE for cursor in cursors)
        merged, *counts, both = _core.merge_rows(before, after, gone, dtype.itemsize)
        if both:
            raise twice(bucket)
        for cursor, count in zip(cursors, counts, strict=True):
            if cursor in present:
                cursor.take(count)
        if len(merged):
            yield bucket, merged.view(dtype)


def sort_keys(rows: RowArray) -> NDArray[np.bytes_]:
    """(table, key) of rows or keys [n] as bytes [n] of the same order; NumPy compares them as one."""
    keys = np.empty(len(rows), np.dtype([("table", ">u4"), ("key", ">u8")]))
    keys["table"], keys["key"] = rows["table"], rows["key"]
    return keys.view("S12")


def among(keys: NDArray[np.bytes_], others: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """bool [n]: which of `keys` [n] are in `others`, which ascend."""
    if len(others) == 0:
        return np.zeros(len(keys), bool)
    indexes = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    found: NDArray[np.bool_] = others[indexes] == keys
    return found


def changes_between(before: Chunks, after: Chunks) -> Iterator[Change]:
    """The changes that make the table `after` from the table `before`, of one row type.

    Both are streams as `Tier.scan` yields them. Buckets ascend, and within a bucket (table, key) of rows and of keys of
    deleted rows. One chunk of each table is in memory at a time. Raises what the chunks raise.
    """
    old, now = RowCursor(before), RowCursor(after)
    while (bucket := min(old.bucket, now.bucket)) < BUCKETS:
        if now.bucket > bucket:
            was = old.take()
            yield bucket, was[:0], keys_of(was)
        elif old.bucket > bucket:
            rows = now.take()
            yield bucket, rows, keys_of(rows[:0])
        else:
            gone, differs = _core.join_rows(_bytes(old.rows), _bytes(now.rows), now.rows.dtype.itemsize)
            was, rows = old.take(len(gone)), now.take(len(differs))
            if differs.any() or gone.any():
                yield bucket, rows[differs > 0], keys_of(was[gone > 0])


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
