"""Two sorted streams of rows, side by side, for merging and comparing snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, Chunks

Rows = NDArray[np.void]

_NONE = np.empty(0, np.uint8)


def aligned(left: Chunks, right: Chunks) -> Iterator[tuple[int, Rows | None, Rows | None]]:
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


def sort_keys(rows: Rows) -> NDArray[np.bytes_]:
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

    def rows_of(self, bucket: int) -> Rows | None:
        """The held rows, if they are of this bucket."""
        while len(self.rows) == 0:
            self._bucket, self.rows = next(self._chunks, (BUCKETS, (None,)))
        rows: Rows = self.rows
        return rows if self._bucket == bucket else None

    def take(self, last: bytes | None) -> Rows | None:
        """Take the held rows up to the key `last`, or all; None if there are none."""
        count = len(self.rows) if last is None else int(np.searchsorted(sort_keys(self.rows), last, side="right"))
        return self.drop(count) if count else None

    def drop(self, count: int) -> Rows:
        """Take the first `count` held rows."""
        taken: Rows = self.rows[:count]
        self.rows = self.rows[count:]
        return taken
