"""Two sorted streams of rows, side by side: what merging and comparing snapshots is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.store.contract import BUCKETS, Chunks

Rows = NDArray[np.void]


def aligned(left: Chunks, right: Chunks) -> Iterator[tuple[int, Rows | None, Rows | None]]:
    """Both streams in pieces (bucket, rows of left, rows of right), each over one range of (bucket, table, key).

    None where a stream has no row in the range. A (table, key) of both streams is in one piece. What is held at a time
    is a chunk of each.
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


def changed(older: Chunks, newer: Chunks, deleted: Chunks) -> Chunks:
    """The rows of `older` as they are after changes: without the `deleted` keys, and with the rows of `newer`."""
    for bucket, left, right in aligned(_without(older, deleted), newer):
        if left is None or right is None:
            rows = right if left is None else left
            assert rows is not None
            yield bucket, rows
            continue
        rows = np.concatenate([left[~among(sort_keys(left), sort_keys(right))], right])
        yield bucket, rows[np.argsort(sort_keys(rows))]


def _without(chunks: Chunks, deleted: Chunks) -> Chunks:
    for bucket, rows, keys in aligned(chunks, deleted):
        if rows is not None:
            yield bucket, rows if keys is None else rows[~among(sort_keys(rows), sort_keys(keys))]


def sort_keys(rows: Rows) -> NDArray[np.bytes_]:
    """(table, key) of rows or of keys [n] as bytes [n] of the same order, which NumPy compares as one."""
    keys = np.empty(len(rows), np.dtype([("table", ">u4"), ("key", ">u8")]))
    keys["table"], keys["key"] = rows["table"], rows["key"]
    return keys.view("S12")


def among(keys: NDArray[np.bytes_], others: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """Which of `keys` [n] are in `others`, which are in ascending order: [n]."""
    if len(others) == 0:
        return np.zeros(len(keys), bool)
    places = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    found: NDArray[np.bool_] = others[places] == keys
    return found


class Order:
    """Whether the rows of a bucket come in strictly ascending order of (table, key), part by part."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def holds(self, rows: Rows) -> bool:
        """Of rows [n], n > 0, that follow those before."""
        tables, keys = rows["table"], rows["key"]
        ascending = (tables[1:] > tables[:-1]) | ((tables[1:] == tables[:-1]) & (keys[1:] > keys[:-1]))
        before, self._last = self._last, (int(tables[-1]), int(keys[-1]))
        return bool(ascending.all()) and (before is None or before < (int(tables[0]), int(keys[0])))


class _Stream:
    """Sorted chunks, of which one is held, less what was taken of it."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._bucket = -1
        self._rows: Any = ()

    def rows_of(self, bucket: int) -> Rows | None:
        """The rows that are held, if they are of this bucket."""
        while len(self._rows) == 0:
            self._bucket, self._rows = next(self._chunks, (BUCKETS, (None,)))
        rows: Rows = self._rows
        return rows if self._bucket == bucket else None

    def take(self, last: bytes | None) -> Rows | None:
        """The rows that are held, up to the key `last`, or all; None for none."""
        count = len(self._rows) if last is None else int(np.searchsorted(sort_keys(self._rows), last, side="right"))
        taken, self._rows = self._rows[:count], self._rows[count:]
        return taken if count else None
