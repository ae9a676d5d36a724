"""The full table while its index grows and rows leave: none lost, none twice, no line moved, lines used again.

In one with numbered ids, the first half of the keys have numbers, and the others are hashed.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.rows import SPECIAL_KEYS, Table
from tierbed.engine import _core
from tierbed.engine.row_format import BUCKETS, row_dtype

pytestmark = pytest.mark.op

SLOT_BYTES = 16


class Checked:
    """A full table of one column, and what it must hold of rows 0 .. n - 1. Every call is checked."""

    def __init__(self, n: int, numbered: bool = False) -> None:
        rng = np.random.default_rng(0)
        keys = np.concatenate([np.array(SPECIAL_KEYS, np.uint64), rng.integers(0, 2**64, 2 * n, np.uint64)])
        if numbered:
            keys[: n // 4] = np.arange(n // 4)
        self.keys = keys[np.sort(np.unique(keys, return_index=True)[1])][: n // 2].repeat(2)
        self.tables = np.tile(np.array([0, 1], np.uint32), n // 2)
        last_ids = [n // 4 - 1, n // 4 - 1] if numbered else None
        self.last_ids = None if last_ids is None else np.array(last_ids, np.uint64)
        self.layout = Table([1], tables=2, last_ids=last_ids)
        self.store = _core.FullTable(self.layout.layout)
        self.empty_bytes = self.store.metrics()["bytes"]
        self.lines = np.zeros(n, np.uint64)
        self.values = np.zeros(n, np.float32)
        self.updates, self.steps = np.zeros(n, np.uint32), np.zeros(n, np.uint32)
        self.step = 0
        self.most = 0  # the maximum of rows at a time

    def find(self, rows: NDArray[np.int64]) -> tuple[_core.Batch, NDArray[np.int64]]:
        """The batch, and the rows in the order of its positions. Those which were ever put have to be where they were.

        If all have numbers, they are the ids of two features, one for each table.
        """
        if self.last_ids is not None and (self.keys[rows] <= self.last_ids[0]).all():
            rows = rows[np.argsort(self.tables[rows], kind="stable")]
            offsets = np.array([0, (self.tables[rows] == 0).sum(), len(rows)])
            features = np.arange(2, dtype=np.uint32)
            batch = _core.Batch([(self.keys[rows], features, offsets, features, 1)], 2, None, self.last_ids)
        else:
            batch = self.layout.batch(self.keys[rows], self.tables[rows])
        assert self.store.find(batch) == (self.lines[rows] == 0).sum()
        np.testing.assert_array_equal(batch.lines[batch.inverse], self.lines[rows])
        return batch, rows

    def put(self, rows: NDArray[np.int64]) -> None:
        """A step: find, insert what is missing, give every row another value."""
        batch, rows = self.find(rows)
        self.store.insert_missing(batch, self.layout.layout)
        self.lines[rows] = batch.lines[batch.inverse]
        self._count(rows)
        _core.assign(batch, self.layout.layout, self.values[rows, None], self.step)
        self._check_size()

    def write(self, rows: NDArray[np.int64]) -> None:
        """From other lines, as a cache writes rows down."""
        memory, lines = self.layout.lines(len(rows))
        self._count(rows)
        memory[:, :4] = self.values[rows, None].view(np.uint8)
        memory[:, 4:12] = np.stack([self.updates[rows], self.steps[rows]], axis=1).view(np.uint8)
        self.store.write(self.tables[rows], self.keys[rows], lines)
        batch = self.layout.batch(self.keys[rows], self.tables[rows])
        assert self.store.find(batch) == 0
        places = batch.lines[batch.inverse]
        known = self.lines[rows] != 0
        np.testing.assert_array_equal(places[known], self.lines[rows][known])
        self.lines[rows] = places
        self._check_size()

    def erase(self, rows: NDArray[np.int64]) -> None:
        self.store.erase(self.tables[rows], self.keys[rows])
        self.lines[rows] = self.updates[rows] = 0
        self._check_size()

    def read(self, rows: NDArray[np.int64]) -> None:
        memory, lines = self.layout.lines(len(rows))
        found = self.store.read(self.tables[rows], self.keys[rows], lines)
        np.testing.assert_array_equal(found, self.updates[rows] > 0)
        np.testing.assert_array_equal(memory[:, :4].view(np.float32)[found, 0], self.values[rows][found])
        records = np.stack([self.updates[rows], self.steps[rows]], axis=1)
        np.testing.assert_array_equal(memory[:, 4:12].view(np.uint32)[found], records[found])

    def scan(self) -> None:
        scanned = []
        for bucket in range(BUCKETS):
            scanned.append(self.store.scan(bucket).view(row_dtype(1)))
        written = np.flatnonzero(self.updates)
        expected = np.zeros(len(written), row_dtype(1))
        expected["table"], expected["key"] = self.tables[written], self.keys[written]
        expected["values"][:, 0], expected["updates"], expected["step"] = (
            self.values[written],
            self.updates[written],
            self.steps[written],
        )
        found = np.concatenate(scanned)
        found, expected = (rows[np.lexsort((rows["key"], rows["table"]))] for rows in (found, expected))
        assert found.tobytes() == expected.tobytes()

    def _count(self, rows: NDArray[np.int64]) -> None:
        self.step += 1
        self.values[rows] = rows + self.step / 1024
        self.updates[rows] += 1
        self.steps[rows] = self.step

    def _check_size(self) -> None:
        known = self.lines[self.lines != 0]
        assert self.store.metrics()["resident_rows"] == len(known) == len(np.unique(known))
        line = self.layout.layout.line_bytes
        self.most = max(self.most, len(known))
        least = self.most * (line + (SLOT_BYTES if self.last_ids is None else 4))
        assert least <= self.store.metrics()["bytes"] <= self.empty_bytes + 8 * self.most * (line + SLOT_BYTES) + 2**20

    def __len__(self) -> int:
        return len(self.keys)


operations = st.tuples(
    st.sampled_from(["put", "write", "erase", "find", "read", "scan"]),
    st.integers(0, 2999),
    st.sampled_from([1, 2, 30, 700, 2500]),
)


@given(st.lists(operations, max_size=30), st.booleans())
def test_any_order_of_calls_keeps_every_row(calls: list[tuple[str, int, int]], numbered: bool) -> None:
    checked = Checked(3000, numbered)
    for name, begin, count in calls:
        rows = np.arange(begin, begin + count) % 3000
        if name == "scan":
            checked.scan()
        else:
            getattr(checked, name)(rows)
    checked.find(np.arange(3000))
    checked.scan()


@pytest.mark.parametrize("numbered", [False, True])
def test_rows_that_come_one_by_one(numbered: bool, threads: int) -> None:
    checked = Checked(800, numbered)
    for row in range(len(checked)):
        (checked.write if row % 3 else checked.put)(np.array([row]))
        if row % 100 == 0:
            checked.find(np.arange(len(checked)))
            checked.scan()
    checked.read(np.arange(len(checked)))


def test_buckets_grow_one_after_another(threads: int) -> None:
    """Each at another load, so no step grows all: rows that leave and come meanwhile are where they were."""
    checked = Checked(120_000)
    checked.put(np.arange(40_000))
    sizes = [checked.store.metrics()["bytes"]]
    for begin in range(40_000, 60_000, 1000):
        checked.put(np.arange(begin, begin + 1000))
        checked.erase(np.arange(begin, begin + 1000, 3))
        checked.write(np.arange(begin, begin + 1000, 6))
        checked.find(np.arange(0, 120_000, 7))
        sizes.append(checked.store.metrics()["bytes"])
    largest = BUCKETS * 2048 * SLOT_BYTES
    assert max(after - before for before, after in itertools.pairwise(sizes)) < largest // 2
    checked.read(np.arange(120_000))
    checked.scan()


def test_rows_that_come_at_once_grow_every_bucket_several_times(threads: int) -> None:
    checked = Checked(120_000)
    checked.put(np.arange(10))
    checked.write(np.arange(5, 120_000))
    checked.read(np.arange(120_000))
    checked.scan()
    checked.erase(np.arange(0, 120_000, 2))
    checked.find(np.arange(120_000))
    checked.scan()


@pytest.mark.parametrize("numbered", [False, True])
def test_lines_are_used_again(numbered: bool, threads: int) -> None:
    """Any number of rows may be inserted and erased: the table is as large as for the maximum of rows at a time."""
    checked = Checked(60_000, numbered)
    checked.put(np.arange(2000))
    checked.erase(np.arange(2000))
    before = checked.store.metrics()["bytes"]
    for begin in range(0, 60_000, 1000):
        checked.put(np.arange(begin, begin + 1000))
        checked.read(np.arange(begin, begin + 1000))
        checked.erase(np.arange(begin, begin + 1000))
        assert checked.store.metrics()["resident_rows"] == 0
    line = checked.layout.layout.line_bytes + 4 * numbered
    assert checked.store.metrics()["bytes"] <= before + 64 * 3 * 16 * line  # buckets are not equally full
