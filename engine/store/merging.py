"""Compares two sorted row streams, and merges several sorted streams with rows or changes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from .. import _core
from ..row_format import BUCKETS, ROW_KEY_DTYPE, Change, Chunks, RowArray, extract_row_keys

STATUS_NEW = 2  # a row's status if only the later table has it
_NO_KEYS: RowArray = np.empty(0, ROW_KEY_DTYPE)


class RowCursor:
    """Reads sorted chunks. `rows` are the next rows, all in `bucket`. At most two chunks are in memory."""

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
    like `Tier.scan`. If row dtypes differ, only `updates` and `step` are compared. It keeps one chunk per table.
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


def merge_chain(
    snapshots: Sequence[Sequence[Chunks]],
    counts: NDArray[np.int64],
    conflict_error: Callable[[int, int], Exception],
) -> Generator[Change, None, None]:
    """Merge successive snapshots' changes: a key's latest row or deletion counts.

    Reads each stream once, however many there are. Adds to `counts` [n] by how many rows each snapshot adds to its
    parent. Keeps up to two chunks per stream in memory.

    Args:
        snapshots: Each snapshot's rows and deleted keys [n], from the oldest snapshot to the latest.
        conflict_error: Called with a snapshot's index and a bucket if both streams have the same key.

    Yields:
        (bucket, rows, deleted keys). Both ascend by (table, key), and no key is in both.
    """
    cursors = [RowCursor(stream) for streams in zip(*snapshots, strict=True) for stream in streams]  # rows come first
    while (bucket := min((cursor.bucket for cursor in cursors), default=BUCKETS)) < BUCKETS:
        present = [index for index, cursor in enumerate(cursors) if cursor.bucket == bucket]
        if present == [0]:
            rows = cursors[0].take()
            counts[0] += len(rows)
            yield bucket, rows, _NO_KEYS
            continue
        lasts = [cursors[index].rows[-1] for index in present if cursors[index].has_more]
        last = min(((row["table"], row["key"]) for row in lasts), default=None)  # later rows wait for the next pass
        parts = {index: cursors[index].take(_count_until(cursors[index].rows, last)) for index in present}
        tables, keys = (np.concatenate([part[name] for part in parts.values()]) for name in ("table", "key"))
        snapshot = np.repeat([index % len(snapshots) for index in parts], [len(part) for part in parts.values()])
        has_row = np.repeat([index < len(snapshots) for index in parts], [len(part) for part in parts.values()])
        order = np.lexsort((snapshot, keys, tables))
        tables, keys, snapshot, has_row = tables[order], keys[order], snapshot[order], has_row[order]
        is_repeated = (tables[1:] == tables[:-1]) & (keys[1:] == keys[:-1])
        if (conflicts := is_repeated & (snapshot[1:] == snapshot[:-1])).any():
            raise conflict_error(int(snapshot[1:][conflicts][0]), bucket)
        had_row = np.append(False, has_row[:-1] & is_repeated)
        np.add.at(counts, snapshot, has_row.astype(np.int64) - had_row)
        is_latest = np.append(~is_repeated, True)
        latest, is_deletion = order[is_latest], ~has_row[is_latest]
        rows, deleted = _NO_KEYS, np.empty(np.count_nonzero(is_deletion), ROW_KEY_DTYPE)
        deleted["table"], deleted["key"] = tables[is_latest][is_deletion], keys[is_latest][is_deletion]
        if stored := [part for index, part in parts.items() if index < len(snapshots)]:
            row_bytes = np.dtype((np.void, stored[0].dtype.itemsize))  # NumPy copies rows with fields 7 times as slowly
            rows = np.concatenate([part.view(row_bytes) for part in stored])[latest[~is_deletion]].view(stored[0].dtype)
        yield bucket, rows, deleted


def _count_until(rows: RowArray, last: tuple[int, int] | None) -> int:
    """Returns how many of the sorted rows have a (table, key) up to `last`; None stands for all."""
    if last is None:
        return len(rows)
    table, key = last
    return int(((rows["table"] < table) | ((rows["table"] == table) & (rows["key"] <= key))).sum())


def find_changes(before: Chunks, after: Chunks) -> Iterator[Change]:
    """Yields the changes from table `before` to `after`, in `join_tables`'s order. Row dtypes must be equal."""
    for bucket, old, new, is_removed, status in join_tables(before, after):
        if is_removed.any() or status.any():
            yield bucket, new[status > 0], extract_row_keys(old[is_removed > 0])


def replace_rows(rows: Chunks, replacements: Chunks) -> Chunks:
    """Merge two sorted row streams. If both have a row, yields the one in `replacements`."""
    for bucket, old, new, is_only_old, _ in join_tables(rows, replacements):
        yield from merge_sorted([iter([(bucket, old[is_only_old > 0])]), iter([(bucket, new)])])


def _as_bytes(rows: RowArray) -> NDArray[np.uint8]:
    return rows.view(np.uint8)


def merge_sorted(streams: Sequence[Chunks]) -> Chunks:
    """Merge sorted streams into one stream, sorted by bucket, table and key. No row may be in two streams.

    Keeps up to two chunks per stream in memory. Each merged chunk takes rows from at most one chunk per stream.
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
