"""Sorted streams of rows: two side by side, their difference, and the files of a bucket in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, Change, Chunks, RowArray, keys_of

_NONE = np.empty(0, np.uint8)
_NEW = 2  # a code of `_core.join_rows`


def aligned(left: Chunks, right: Chunks) -> Iterator[tuple[int, RowArray | None, RowArray | None]]:
    """Both streams in pieces (bucket, rows of left, rows of right), each over one range of (bucket, table, key).

    None where a stream has no row in the range. A (table, key) of both streams is in one piece. One chunk of each
    stream is held at a time.
    """
    a, b = _Stream(left), _Stream(right)
    for bucket in range(BUCKETS):
        while (x := a.rows_of(bucket)) is not None and (y := b.rows_of(bucket)) is not None:
            last = min(sort_keys(x[-1:])[0], sort_keys(y[-1:])[0])
            yield bucket, a.take(last), b.take(last)
        while (x := a.rows_of(bucket)) is not None:
            yield bucket, a.take(None), None
        while (y := b.rows_of(bucket)) is not None:
            yield bucket, None, b.take(None)


def changed(older: Chunks, newer: Chunks, deleted: Chunks, twice: Callable[[int], Exception]) -> Chunks:
    """The rows of `older` as they are after changes: without the `deleted` keys, and with the rows of `newer`.

    Raises `twice(bucket)` where a key of the bucket is both in `newer` and in `deleted`. All three may be streams of
    keys alone.
    """
    streams = [_Stream(chunks) for chunks in (older, newer, deleted)]
    for bucket in range(BUCKETS):
        while there := [stream for stream in streams if stream.rows_of(bucket) is not None]:
            if there == streams[:1]:
                yield bucket, there[0].drop(len(there[0].rows))
                continue
            dtype = there[0].rows.dtype
            before, after, gone = (s.rows.view(np.uint8) if s in there else _NONE for s in streams)
            merged, *counts, both = _core.merge_rows(before, after, gone, dtype.itemsize)
            if both:
                raise twice(bucket)
            for stream, count in zip(streams, counts, strict=True):
                if stream in there:
                    stream.drop(count)
            if len(merged):
                yield bucket, merged.view(dtype)


def sort_keys(rows: RowArray) -> NDArray[np.bytes_]:
    """(table, key) of rows or keys [n] as bytes [n] of the same order; NumPy compares them as one."""
    keys = np.empty(len(rows), np.dtype([("table", ">u4"), ("key", ">u8")]))
    keys["table"], keys["key"] = rows["table"], rows["key"]
    return keys.view("S12")


def among(keys: NDArray[np.bytes_], others: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """[n], which of `keys` [n] are in `others`. `others` ascend."""
    if len(others) == 0:
        return np.zeros(len(keys), bool)
    places = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    found: NDArray[np.bool_] = others[places] == keys
    return found


class _Stream:
    """A stream of sorted chunks. It holds what was not taken of one chunk."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._bucket = -1
        self.rows: Any = ()

    def rows_of(self, bucket: int) -> RowArray | None:
        """The held rows, if they are of this bucket."""
        while len(self.rows) == 0:
            self._bucket, self.rows = next(self._chunks, (BUCKETS, (None,)))
        rows: RowArray = self.rows
        return rows if self._bucket == bucket else None

    def take(self, last: bytes | None) -> RowArray | None:
        """Take the held rows up to the key `last`, or all; None if there are none."""
        count = len(self.rows) if last is None else int(np.searchsorted(sort_keys(self.rows), last, side="right"))
        return self.drop(count) if count else None

    def drop(self, count: int) -> RowArray:
        """Take the first `count` held rows."""
        taken: RowArray = self.rows[:count]
        self.rows = self.rows[count:]
        return taken


class BucketDiff(NamedTuple):
    """Rows of one bucket, each part in ascending order of (table, key)."""

    bucket: int
    rows: RowArray  # [n], the rows that are new or differ in any byte, as they are after
    new: NDArray[np.bool_]  # [n], whether there was no such row before
    gone: RowArray  # erased rows, as they were before


def difference(before: Chunks, after: Chunks) -> Iterator[BucketDiff]:
    """The rows in which two tables of the same row type differ. Both are given as `Tier.scan` yields them.

    Buckets ascend, and within a bucket (table, key) of each part ascends, over all items. One chunk of each table is
    held at a time. What the chunks raise passes through.
    """
    old, now = _Ahead(before), _Ahead(after)
    while old.there or now.there:
        bucket = min(old.bucket, now.bucket)
        if now.bucket > bucket:
            was = old.take(len(old.rows))
            yield BucketDiff(bucket, was[:0], np.zeros(0, np.bool_), was)
        elif old.bucket > bucket:
            rows = now.take(len(now.rows))
            yield BucketDiff(bucket, rows, np.ones(len(rows), np.bool_), rows[:0])
        else:
            gone, state = _core.join_rows(_bytes(old.rows), _bytes(now.rows), now.rows.dtype.itemsize)
            was, rows, there = old.take(len(gone)), now.take(len(state)), state > 0
            if there.any() or gone.any():
                yield BucketDiff(bucket, rows[there], state[there] == _NEW, was[gone > 0])


def changes_between(before: Chunks, after: Chunks) -> Iterator[Change]:
    """The changes that make the table `after` from the table `before`, as `difference` finds them."""
    for bucket, rows, _, gone in difference(before, after):
        yield bucket, rows, keys_of(gone)


class _Ahead:
    """A stream of chunks, of which it holds the rows of one chunk that were not taken yet."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._next()

    def _next(self) -> None:
        self.there, self.bucket = False, BUCKETS
        for bucket, rows in self._chunks:
            if len(rows):
                self.there, self.bucket, self.rows = True, bucket, np.ascontiguousarray(rows)
                return

    def take(self, count: int) -> RowArray:
        taken, self.rows = self.rows[:count], self.rows[count:]
        if not len(self.rows):
            self._next()
        return taken


def _bytes(rows: RowArray) -> NDArray[np.uint8]:
    return rows.view(np.uint8)


def merge_sorted(parts: Sequence[Iterator[RowArray]]) -> Iterator[RowArray]:
    """The rows of `parts` in order of (table, key). In each they strictly ascend, and none is in two.

    Two chunks of each part are held at a time. A chunk that comes out is of no more rows than those that are held.
    """
    held = [_Held(part) for part in parts]
    while len(held := [part for part in held if len(part.rows)]) > 1:
        dtype = held[0].rows.dtype
        more = [part.coming is not None for part in held]
        rows, counts = _core.merge_parts([part.rows.view(np.uint8) for part in held], more, dtype.itemsize)
        for part, count in zip(held, counts, strict=True):
            part.drop(count)
        yield rows.view(dtype)
    for part in held:
        while len(part.rows):
            yield part.drop(len(part.rows))


class _Held:
    """A stream of rows, of which it holds those of a chunk that were not taken yet, and the chunk that comes after it.

    At the end `rows` has none, and `coming` is None.
    """

    def __init__(self, chunks: Iterator[RowArray]) -> None:
        self._chunks = (rows for rows in chunks if len(rows))
        self.rows: RowArray = next(self._chunks, np.empty(0, np.void))
        self.coming = next(self._chunks, None)

    def drop(self, count: int) -> RowArray:
        """Take the first `count` held rows."""
        taken, self.rows = self.rows[:count], self.rows[count:]
        if not len(self.rows) and self.coming is not None:
            self.rows, self.coming = self.coming, next(self._chunks, None)
        return taken
