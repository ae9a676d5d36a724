"""A full table while its index grows and rows leave: none lost, none twice, no line moved, lines used again.

In one with numbered ids, the first half of the keys have numbers, and the others are hashed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.cuda_tables import EMULATED, GPU, DeviceTable, array, tensor
from support.examples import examples
from support.rows import SPECIAL_KEYS, Table
from tierbed.engine import _core
from tierbed.engine.ops.cuda.batch import Batch, Faults
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.ops.cuda.step import assign
from tierbed.engine.row_format import row_dtype
from tierbed.engine.store.cuda.full_tier import CudaFullTier
from tierbed.engine.store.full_tier import CpuFullTier

pytestmark = pytest.mark.op

SLOT_BYTES = 16
Ints = NDArray[np.int64]


class Native:
    """A full table of the core. Batches are of the rows of a table."""

    def __init__(self, table: Table) -> None:
        self.table, self.store = table, CpuFullTier(table.layout, "device")

    def batch(self, keys: NDArray[np.uint64], tables: NDArray[np.uint32]) -> _core.Batch:
        return self.table.batch(keys, tables)

    def find(self, batch: _core.Batch) -> tuple[int, NDArray[np.uint64]]:
        """How many rows are missing, and the line of each position, 0 of those."""
        missing = self.store.native.look_up_rows(batch)
        return missing, batch.lines[batch.inverse]

    def put(self, batch: _core.Batch, values: NDArray[np.float32], step: int) -> None:
        self.store.pin(batch, None)
        _core.assign(batch, self.table.layout, values, step)
        self.store.unpin(batch, True)


class OnDevice:
    """The same of a device."""

    def __init__(self, device: Callable[[], Device], tier: str, table: Table) -> None:
        self.side = DeviceTable(device(), table)
        self.faults = Faults(self.side.device, "t", table.tables, None)
        self.side.faults = self.faults.word
        self.store = CudaFullTier(self.side.layout, table.layout, None, self.faults, tier)

    def batch(self, keys: NDArray[np.uint64], tables: NDArray[np.uint32]) -> Batch:
        return self.side.batch([(keys.tolist(), tables.tolist(), None)])

    def find(self, batch: Batch) -> tuple[int, NDArray[np.uint64]]:
        missing = int(self.store.table.find(batch)[-1]) if batch.num_positions else 0
        return missing, array(batch.lines[batch.inverse.long()], np.uint64)

    def put(self, batch: Batch, values: NDArray[np.float32], step: int) -> None:
        self.store.pin(batch, None)
        given = tensor(self.side.device, values, np.float32)
        assign(batch, self.side.layout, given, step, self.side.written, self.faults.word)
        self.store.unpin(batch, True)
        self.faults.check()


Kind = Callable[[Table], Any]
KINDS = [pytest.param(Native, id="cpu")] + [
    pytest.param(partial(OnDevice, one.values[0], tier), id=f"{one.id}-{tier}", marks=one.marks)
    for one, tier in zip([*EMULATED, *GPU], ["device", "host", "device", "host"], strict=False)
]


class Checked:
    """A full table of one column, and what it must hold of rows 0 .. n - 1. Every call is checked."""

    def __init__(self, kind: Kind, n: int, numbered: bool = False) -> None:
        rng = np.random.default_rng(0)
        keys = np.concatenate([np.array(SPECIAL_KEYS, np.uint64), rng.integers(0, 2**64, 2 * n, np.uint64)])
        if numbered:
            keys[: n // 4] = np.arange(n // 4)
        self.keys = keys[np.sort(np.unique(keys, return_index=True)[1])][: n // 2].repeat(2)
        self.tables = np.tile(np.array([0, 1], np.uint32), n // 2)
        max_ids = [n // 4 - 1, n // 4 - 1] if numbered else None
        self.max_ids = None if max_ids is None else np.array(max_ids, np.uint64)
        self.layout = Table([1], tables=2, max_ids=max_ids)
        self.own = kind(self.layout)
        self.store = self.own.store
        [self.tier] = self.store.metrics()
        self.empty_bytes = self.bytes
        self.lines, self.values = np.zeros(n, np.uint64), np.zeros(n, np.float32)
        self.updates, self.steps = np.zeros(n, np.uint32), np.zeros(n, np.uint32)
        self.step = self.most = 0  # the maximum of rows at a time

    @property
    def bytes(self) -> int:
        return int(self.store.metrics()[self.tier]["bytes"])

    def batch(self, rows: Ints) -> tuple[Any, Ints]:
        """And the rows in the order of its positions: if all have numbers, ids of two features, one for each table."""
        if self.max_ids is None or (self.keys[rows] > self.max_ids[0]).any():
            return self.own.batch(self.keys[rows], self.tables[rows]), rows
        rows = rows[np.argsort(self.tables[rows], kind="stable")]
        offsets, features = np.array([0, (self.tables[rows] == 0).sum(), len(rows)]), np.arange(2, dtype=np.uint32)
        return _core.Batch([(self.keys[rows], features, offsets, features, 1)], 2, None, self.max_ids), rows

    def find(self, rows: Ints) -> tuple[Any, Ints]:
        """The rows which were ever put have to be where they were."""
        batch, rows = self.batch(rows)
        missing, lines = self.own.find(batch)
        assert missing == (self.lines[rows] == 0).sum()
        np.testing.assert_array_equal(lines, self.lines[rows])
        return batch, rows

    def put(self, rows: Ints) -> None:
        """A step: find, insert what is missing, give every row another value."""
        batch, rows = self.find(rows)
        self._count(rows)
        self.own.put(batch, self.values[rows, None], self.step)
        missing, self.lines[rows] = self.own.find(batch)
        assert missing == 0
        self._check_size()

    def write(self, rows: Ints) -> None:
        """From other lines, as a cache writes rows down."""
        memory, lines = self.layout.lines(len(rows))
        self._count(rows)
        memory[:, :4] = self.values[rows, None].view(np.uint8)
        memory[:, 4:12] = np.stack([self.updates[rows], self.steps[rows]], axis=1).view(np.uint8)
        self.store.write(self.tables[rows], self.keys[rows], lines)
        missing, places = self.own.find(self.own.batch(self.keys[rows], self.tables[rows]))
        assert missing == 0
        known = self.lines[rows] != 0
        np.testing.assert_array_equal(places[known], self.lines[rows][known])
        self.lines[rows] = places
        self._check_size()

    def erase(self, rows: Ints) -> None:
        self.store.erase(self.tables[rows], self.keys[rows])
        self.lines[rows] = self.updates[rows] = 0
        self._check_size()

    def read(self, rows: Ints) -> None:
        memory, lines = self.layout.lines(len(rows))
        memory[:] = 0xAB
        found = self.store.read(self.tables[rows], self.keys[rows], lines)
        np.testing.assert_array_equal(found, self.updates[rows] > 0)
        assert (memory[~found] == 0xAB).all()
        np.testing.assert_array_equal(memory[:, :4].view(np.float32)[found, 0], self.values[rows][found])
        records = np.stack([self.updates[rows], self.steps[rows]], axis=1)
        np.testing.assert_array_equal(memory[:, 4:12].view(np.uint32)[found], records[found])

    def locate(self, rows: Ints) -> None:
        for row in rows[:4].tolist():
            found = self.store.locate(int(self.tables[row]), int(self.keys[row]))
            assert bool(found) == (self.lines[row] != 0)
            if found:
                assert (found[0]["tier"], found[0]["updates"]) == (self.tier, self.updates[row])
                assert found[0]["last_step"] == self.steps[row] or not self.updates[row]

    def scan(self) -> None:
        found = np.concatenate([np.zeros(0, row_dtype(1)), *(rows.copy() for _, rows in self.store.scan())])
        rows = np.flatnonzero(self.updates)
        buckets = _core.buckets(self.tables[rows], self.keys[rows])
        rows = rows[np.lexsort((self.keys[rows], self.tables[rows], buckets))]
        expected = np.zeros(len(rows), row_dtype(1))
        fields = "table", "key", "updates", "step"
        for field, values in zip(fields, (self.tables, self.keys, self.updates, self.steps), strict=True):
            expected[field] = values[rows]
        expected["values"][:, 0] = self.values[rows]
        assert found.tobytes() == expected.tobytes()

    def _count(self, rows: Ints) -> None:
        self.step += 1
        self.values[rows] = rows + self.step / 1024
        self.updates[rows] += 1
        self.steps[rows] = self.step

    def _check_size(self) -> None:
        known = self.lines[self.lines != 0]
        assert self.store.metrics()[self.tier]["resident_rows"] == len(known) == len(np.unique(known))
        line = self.layout.layout.line_bytes
        self.most = max(self.most, len(known))
        least = self.most * (line + (SLOT_BYTES if self.max_ids is None else 4))
        assert least <= self.bytes <= self.empty_bytes + 8 * self.most * (line + SLOT_BYTES) + 2**20


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "write", "erase", "find", "read", "locate", "scan"]),
        st.integers(0, 2999),
        st.sampled_from([1, 2, 30, 700, 2500]),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", KINDS)
@examples(0.5)
@given(calls=operations, numbered=st.booleans())
def test_any_order_of_calls_keeps_every_row(kind: Kind, calls: list[tuple[str, int, int]], numbered: bool) -> None:
    checked = Checked(kind, 3000, numbered and kind is Native)
    for name, begin, count in calls:
        if name == "scan":
            checked.scan()
        else:
            getattr(checked, name)(np.arange(begin, begin + count) % 3000)
    checked.find(np.arange(3000))
    checked.scan()


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.rotated("threads")
def test_rows_that_come_one_by_one(numbered: bool, threads: int) -> None:
    checked = Checked(Native, 800, numbered)
    for row in range(len(checked.keys)):
        (checked.write if row % 3 else checked.put)(np.array([row]))
        if row % 100 == 0:
            checked.find(np.arange(800))
            checked.scan()
    checked.read(np.arange(800))


@pytest.mark.parametrize("threads", [1, 16], indirect=True)
def test_buckets_grow_one_after_another(threads: int) -> None:
    """Each at another load, so no step grows all: rows that leave and come meanwhile are where they were."""
    checked = Checked(Native, 120_000)
    checked.put(np.arange(40_000))
    sizes = [checked.bytes]
    for begin in range(40_000, 60_000, 2000):
        checked.put(np.arange(begin, begin + 2000))
        checked.erase(np.arange(begin, begin + 2000, 3))
        checked.write(np.arange(begin, begin + 2000, 6))
        checked.find(np.arange(0, 120_000, 17))
        sizes.append(checked.bytes)
    largest = 64 * 2048 * SLOT_BYTES
    assert max(after - before for before, after in itertools.pairwise(sizes)) < largest // 2
    checked.read(np.arange(120_000))
    checked.scan()


def test_rows_that_come_at_once_grow_every_bucket_several_times(threads: int) -> None:
    checked = Checked(Native, 60_000)
    checked.put(np.arange(10))
    checked.write(np.arange(5, 60_000))
    checked.read(np.arange(60_000))
    checked.erase(np.arange(0, 60_000, 2))
    checked.find(np.arange(60_000))
    checked.scan()


@pytest.mark.parametrize(
    ("kind", "numbered"), [(Native, False), (Native, True), *((one.values[0], False) for one in KINDS[1:2])]
)
def test_lines_are_used_again(kind: Kind, numbered: bool) -> None:
    """Any number of rows may be inserted and erased: the table is as large as for the maximum of rows at a time."""
    checked = Checked(kind, 60_000, numbered)
    checked.put(np.arange(2000))
    checked.erase(np.arange(2000))
    before = checked.bytes
    for begin in range(0, 20_000, 1000):
        checked.put(np.arange(begin, begin + 1000))
        checked.read(np.arange(begin, begin + 1000))
        checked.erase(np.arange(begin, begin + 1000))
    line = checked.layout.layout.line_bytes + 4 * numbered
    assert checked.bytes <= before + 64 * 3 * 16 * line  # buckets are not equally full
