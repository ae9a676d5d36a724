"""What a full table makes of no rows, of lines that are longer than their rows, and of a buffer of another size."""

from __future__ import annotations

import numpy as np
import pytest

from support import naive
from support.row_rules import pinned
from support.rows import SPECIAL_KEYS, Table, same_bits
from tierbed.engine import _core
from tierbed.engine.row_format import BUCKETS

pytestmark = pytest.mark.op


def test_read_and_write_move_whole_lines_by_address(threads: int) -> None:
    table = Table([5], [0.0, 1.0])
    store, rng = _core.FullTable(table.layout), np.random.default_rng(0)
    keys = np.unique(np.concatenate([rng.integers(0, 2**64, 800, np.uint64), np.array(SPECIAL_KEYS, np.uint64)]))
    tables = rng.integers(0, table.tables, len(keys), np.uint32)
    memory, lines = table.lines(len(keys))
    for number, line in enumerate(lines):
        values, record = table.view(line)
        values[:] = rng.standard_normal(table.width)
        record[:] = number + 1, number + 2
    store.write(tables, keys, lines)
    order = rng.permutation(len(keys))
    copy, copied = table.lines(len(keys))
    assert store.read(tables[order], keys[order], copied).all()
    np.testing.assert_array_equal(table.records(copied), table.records(lines)[order])
    same_bits(table.values(copied), table.values(lines)[order])
    assert memory.size == copy.size


def test_empty_calls_and_an_empty_table() -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    store.write(*nothing)
    assert store.read(*nothing).shape == (0,)
    assert store.look_up_rows(table.batch([], [])) == 0
    assert store.metrics()["resident_rows"] == sum(len(store.scan(bucket)) for bucket in range(BUCKETS)) == 0


def test_scan_refuses_a_buffer_of_another_size() -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    batch = pinned(table, store, np.ones(1, np.uint64), np.zeros(1, np.uint32))
    table.update(batch, np.ones((1, 4), np.float32), "sgd", [0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    memory = np.zeros(64, np.uint8)
    with pytest.raises((TypeError, ValueError)):
        store.scan(naive.bucket(0, 1), memory[:3])
    assert not memory.any()
