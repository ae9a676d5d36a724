"""What changed between two states of a table, from their rows in the order of a scan: a merge of two streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.row_format import BUCKETS, Change, Chunks, Rows, keys_of

_NEW = 2  # of `_core.join_rows`


class Difference(NamedTuple):
    """Rows of one bucket, each part in ascending order of (table, key)."""

    bucket: int
    rows: Rows  # [n] that are new or of which any byte differs, as they are after
    new: NDArray[np.bool_]  # [n], whether there was no such row before
    gone: Rows  # as they were before


def difference(before: Chunks, after: Chunks) -> Iterator[Difference]:
    """The rows in which two tables of the same row type differ; both as `Tier.scan` yields them.

    Buckets ascend, and within one so do (table, key) of each part from one item to the next. Holds one chunk of either
    at a time. What the chunks raise passes through.
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
    """What makes the table `after` of the table `before`, as `difference` finds it."""
    for bucket, rows, _, gone in difference(before, after):
        yield bucket, rows, keys_of(gone)


class _Ahead:
    """The rows of a stream that were not taken yet, those of one chunk."""

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
