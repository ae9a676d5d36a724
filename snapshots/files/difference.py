"""The difference between two states of a table, by merging two streams of rows in the order of a scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, Change, Chunks, Rows, keys_of

_NEW = 2  # a code of `_core.join_rows`


class Difference(NamedTuple):
    """Rows of one bucket, each part in ascending order of (table, key)."""

    bucket: int
    rows: Rows  # [n], the rows that are new or differ in any byte, as they are after
    new: NDArray[np.bool_]  # [n], whether there was no such row before
    gone: Rows  # erased rows, as they were before


def difference(before: Chunks, after: Chunks) -> Iterator[Difference]:
    """The rows in which two tables of the same row type differ. Both are given as `Tier.scan` yields them.

    Buckets ascend, and within a bucket (table, key) of each part ascends, over all items. One chunk of each table is
    held at a time. What the chunks raise passes through.
    """
    old, now = _Ahead(before), _Ahead(after)
    while old.there or now.there:
        bucket = min(old.bucket, now.bucket)
        if now.bucket > bucket:
            was = old.take(len(old.rows))
            yield Difference(bucket, was[:0], np.zeros(0, np.bool_), was)
        elif old.bucket > bucket:
            rows = now.take(len(now.rows))
            yield Difference(bucket, rows, np.ones(len(rows), np.bool_), rows[:0])
        else:
            gone, state = _core.join_rows(_bytes(old.rows), _bytes(now.rows), now.rows.dtype.itemsize)
            was, rows, there = old.take(len(gone)), now.take(len(state)), state > 0
            if there.any() or gone.any():
                yield Difference(bucket, rows[there], state[there] == _NEW, was[gone > 0])


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

    def take(self, count: int) -> Rows:
        taken, self.rows = self.rows[:count], self.rows[count:]
        if not len(self.rows):
            self._next()
        return taken


def _bytes(rows: Rows) -> NDArray[np.uint8]:
    return rows.view(np.uint8)
