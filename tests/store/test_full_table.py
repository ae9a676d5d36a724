from __future__ import annotations

import numpy as np
import pytest

from support import naive
from support.rows import SPECIAL_KEYS, Table, same_bits
from tierbed.engine import _core
from tierbed.engine.row_format import BUCKETS, row_dtype

pytestmark = pytest.mark.op

SGD = "sgd", [0.5, 0.0, 0.0, 0.0, 0.0]


def insert(table: Table, store: _core.FullTable, keys, tables) -> _core.Batch:
    batch = table.batch(keys, tables)
    store.find(batch)
    store.insert_missing(batch, table.layout)
    return batch


def scan(table: Table, store: _core.FullTable) -> list[np.ndarray]:
    return [store.scan(bucket).view(row_dtype(table.width)) for bucket in range(BUCKETS)]


def test_a_row_is_found_by_table_and_key_alone() -> None:
    table = Table([3])
    store = _core.FullTable(table.layout)
    tables = np.repeat(np.arange(3, dtype=np.uint32), len(SPECIAL_KEYS))
    keys = np.tile(np.array(SPECIAL_KEYS, np.uint64), 3)
    batch = table.batch(keys, tables)
    assert store.find(batch) == batch.unique == 3 * len(SPECIAL_KEYS)
    assert not batch.lines.any()
    store.insert_missing(batch, table.layout)
    assert len(set(batch.lines.tolist())) == store.metrics()["resident_rows"] == batch.unique
    same_bits(table.values(batch.lines), table.initial(batch.tables, batch.keys))
    again = table.batch(keys[::-1], tables[::-1])
    assert store.find(again) == 0
    where = dict(zip(zip(batch.tables.tolist(), batch.keys.tolist(), strict=True), batch.lines.tolist(), strict=True))
    rows = zip(again.tables.tolist(), again.keys.tolist(), strict=True)
    assert [where[row] for row in rows] == again.lines.tolist()
    absent = table.batch([*SPECIAL_KEYS, 4, 5], [3] * len(SPECIAL_KEYS) + [0, 1])
    assert store.find(absent) == absent.unique


def test_growth_to_a_hundred_thousand_rows_moves_no_line(threads: int) -> None:
    table = Table([2], tables=2)
    store = _core.FullTable(table.layout)
    before = store.metrics()["bytes"]
    early = insert(table, store, np.arange(1000), np.zeros(1000))
    assert table.update(early, np.ones((1000, 2), np.float32), *SGD, 1) == 1000
    values = table.values(early.lines)
    for begin in range(0, 50_000, 10_000):
        keys = np.arange(begin, begin + 10_000)
        insert(table, store, np.tile(keys, 2), np.repeat([0, 1], 10_000))
    assert store.metrics()["resident_rows"] == 100_000
    assert store.metrics()["bytes"] - before >= 100_000 * table.layout.line_bytes
    again = table.batch(np.arange(1000), np.zeros(1000))
    assert store.find(again) == 0
    np.testing.assert_array_equal(again.lines, early.lines)
    same_bits(table.values(again.lines), values)
    everything = table.batch(np.tile(np.arange(-1, 50_001).astype(np.uint64), 2), np.repeat([0, 1], 50_002))
    assert store.find(everything) == 4  # keys -1 and 50,000 of both tables
    assert len(set(everything.lines.tolist())) == 100_001  # zero among them


def test_only_written_rows_are_held_and_scanned_in_order() -> None:
    table = Table([3], [0.5])
    store = _core.FullTable(table.layout)
    keys = np.array(SPECIAL_KEYS * 20, np.uint64) * np.uint64(7) + np.repeat(
        np.arange(20, dtype=np.uint64), len(SPECIAL_KEYS)
    )
    tables = np.arange(len(keys), dtype=np.uint32) % table.tables
    written = insert(table, store, keys, tables)
    insert(table, store, np.arange(500, 900), np.zeros(400))  # pinned, never written
    table.update(written, np.ones((len(keys), 3), np.float32), "adagrad", [0.1, 0.0, 0.0, 1e-3, 0.0, 0.0], 12)
    buckets = scan(table, store)
    for bucket, rows in enumerate(buckets):
        ids = list(zip(rows["table"].tolist(), rows["key"].tolist(), strict=True))
        assert ids == sorted(ids)
        assert {naive.bucket(*row) for row in ids} <= {bucket}
    scanned = np.concatenate(buckets)
    order, expected = np.lexsort((scanned["key"], scanned["table"])), np.lexsort((written.keys, written.tables))
    np.testing.assert_array_equal(scanned["key"][order], written.keys[expected])
    np.testing.assert_array_equal(scanned["table"][order], written.tables[expected])
    same_bits(scanned["values"][order], table.values(written.lines)[expected])
    assert set(scanned["updates"]) == {1}
    assert set(scanned["step"]) == {12}


def test_read_and_write_move_whole_lines_by_address(threads: int) -> None:
    table = Table([5], [0.0, 1.0])
    store = _core.FullTable(table.layout)
    rng = np.random.default_rng(0)
    keys = np.unique(np.concatenate([rng.integers(0, 2**64, 3000, np.uint64), np.array(SPECIAL_KEYS, np.uint64)]))
    tables = rng.integers(0, table.tables, len(keys), np.uint32)
    memory, lines = table.lines(len(keys))
    for number, line in enumerate(lines):
        values, record = table.view(line)
        values[:] = rng.standard_normal(table.width)
        record[:] = number + 1, number + 2
    store.write(tables, keys, lines)
    assert store.metrics()["resident_rows"] == sum(map(len, scan(table, store))) == len(keys)

    order = rng.permutation(len(keys))
    copy, copied = table.lines(len(keys))
    assert store.read(tables[order], keys[order], copied).all()
    np.testing.assert_array_equal(table.records(copied), table.records(lines)[order])
    same_bits(table.values(copied), table.values(lines)[order])

    table.view(lines[0])[0][:] = 5.0
    store.write(tables[:1], keys[:1], lines[:1])
    assert store.metrics()["resident_rows"] == len(keys)
    batch = table.batch(keys[:1], tables[:1])
    assert store.find(batch) == 0
    assert (table.values(batch.lines) == 5.0).all()
    assert memory.size == copy.size


def test_read_leaves_the_lines_of_missing_rows() -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    written = insert(table, store, [1], [0])
    table.update(written, np.ones((1, 4), np.float32), *SGD, 1)
    insert(table, store, [2], [0])  # known to the index, never written
    memory, lines = table.lines(3)
    memory[:] = 0xAB
    found = store.read(np.zeros(3, np.uint32), np.array([1, 2, 3], np.uint64), lines)
    assert found.tolist() == [True, False, False]
    assert (memory[1:] == 0xAB).all()
    same_bits(table.values(lines[:1]), table.values(written.lines))


def test_empty_calls_and_an_empty_table() -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    store.write(*nothing)
    assert store.read(*nothing).shape == (0,)
    assert store.find(table.batch([], [])) == 0
    assert store.metrics()["resident_rows"] == sum(len(rows) for rows in scan(table, store)) == 0


def test_scan_refuses_a_buffer_of_another_size() -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    batch = insert(table, store, [1], [0])
    table.update(batch, np.ones((1, 4), np.float32), *SGD, 1)
    memory = np.zeros(64, np.uint8)
    with pytest.raises((TypeError, ValueError)):
        store.scan(naive.bucket(0, 1), memory[:3])
    assert not memory.any()
