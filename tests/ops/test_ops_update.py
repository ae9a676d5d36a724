from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.row_rules import MAKERS, optimizer_of, pinned, random_ids, table_of
from support.rows import Table, same_bits
from tierbed.engine import _core

pytestmark = pytest.mark.optimizer

TYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("float16", "bfloat16"),
    ("float32", "bfloat16"),
]
SGD = "sgd", [1.0, 0.0, 0.0, 0.0, 0.0]  # with a learning rate of 1


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("dim", [1, 3, 17, 64, 100])
@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.pairs
@pytest.mark.rotated("dim")
def test_five_steps_equal_the_reference_to_the_bit(name: str, dim: int, types: tuple[str, str]) -> None:
    optimizer = optimizer_of(name)
    table = table_of(optimizer, dim, types)
    store = _core.FullTable(table.layout)
    expected: dict[tuple[int, int], tuple[np.ndarray, int, int]] = {}
    rng = np.random.default_rng(dim)
    padding = 3
    for step in (1, 2, 5, 6, 40):  # the steps between belong to other rows
        keys, tables = random_ids(rng, 24, table)
        grads = rng.standard_normal((24, dim), np.float32) * np.float32(10.0) ** rng.integers(-6, 3, (24, 1)).astype(
            np.float32
        )
        batch = pinned(table, store, keys, tables, padding)
        wanted = naive.unique(keys, tables, padding)
        rows = list(zip(wanted.tables.tolist(), wanted.keys.tolist(), strict=True))
        fresh = table.initial(wanted.tables, wanted.keys)
        before = [expected.get(row, (values, 0, 0)) for row, values in zip(rows, fresh, strict=True)]
        values = np.array([values for values, _, _ in before])
        updates, last = (np.array([row[column] for row in before], np.uint32) for column in (1, 2))
        new = int((updates == 0).sum())
        reduced = naive.reduce(grads, wanted.occurrences, wanted.offsets)
        naive.update(values, updates, reduced, optimizer.rule, optimizer.hyper(step), step, last)
        values = table.by_chance(values, wanted.tables, wanted.keys, step)
        expected |= {row: (v, u, step) for row, v, u in zip(rows, values, updates, strict=True)}

        assert _core.count_new(batch, table.layout) == new
        assert table.update(batch, grads, optimizer.rule, optimizer.hyper(step), step) == new
        assert _core.count_new(batch, table.layout) == 0
        same_bits(table.values(batch.lines), values)
        np.testing.assert_array_equal(table.records(batch.lines), [(u, step) for u in updates])


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", ["momentum", "adam", "clipped rowwise", "catch-up adam"])
@pytest.mark.pairs
@pytest.mark.rotated("threads")
def test_many_rows_with_duplicates_are_the_same_for_any_threads(
    name: str, types: tuple[str, str], threads: int
) -> None:
    optimizer = optimizer_of(name)
    table = table_of(optimizer, 6, types)
    store = _core.FullTable(table.layout)
    rng = np.random.default_rng(0)
    keys = rng.zipf(1.3, 8000).astype(np.uint64) % np.uint64(3000)
    tables = rng.integers(0, table.tables, 8000, np.uint32)
    grads = rng.standard_normal((8000, 6), np.float32)
    wanted = naive.unique(keys, tables)
    values, updates = table.initial(wanted.tables, wanted.keys), np.zeros(len(wanted.keys), np.uint32)
    reduced, last = naive.reduce(grads, wanted.occurrences, wanted.offsets), np.zeros_like(updates)
    for step in (1, 4):
        naive.update(values, updates, reduced, optimizer.rule, optimizer.hyper(step), step, last)
        values = table.by_chance(values, wanted.tables, wanted.keys, step)
        batch = pinned(table, store, keys, tables)
        table.update(batch, grads, optimizer.rule, optimizer.hyper(step), step)
    same_bits(table.values(batch.lines), values)


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1e8, 1.0, -1e8, 1e-30, float("inf"), float("nan")]), min_size=1, max_size=8)
)
def test_duplicates_are_summed_in_the_order_of_their_positions(parts: list[float]) -> None:
    table = Table([1])
    store = _core.FullTable(table.layout)
    keys = np.zeros(len(parts), np.uint64)
    grads = np.array(parts, np.float32)[:, None]
    batch = pinned(table, store, keys, np.zeros(len(parts), np.uint32))
    values = table.initial(batch.tables, batch.keys)
    with np.errstate(all="ignore"):
        total = naive.reduce(grads, batch.occurrences, batch.offsets)
        naive.update(values, np.zeros(1, np.uint32), total, *SGD)
    table.update(batch, grads, *SGD, 1)
    np.testing.assert_array_equal(table.values(batch.lines), values)


@pytest.mark.parametrize("count", [256, 257, 700])
def test_many_occurrences_are_summed_in_blocks_of_256(count: int) -> None:
    table = Table([3], seed=1)
    store = _core.FullTable(table.layout)
    grads = np.random.default_rng(count).standard_normal((count, 3), np.float32)
    batch = pinned(table, store, np.zeros(count, np.uint64), np.zeros(count, np.uint32))
    blocks = [np.add.accumulate(grads[begin : begin + 256])[-1] for begin in range(0, count, 256)]
    total = np.add.accumulate(np.array(blocks))[-1]
    same_bits(naive.reduce(grads, batch.occurrences, batch.offsets), total[None])
    expected = table.initial(batch.tables, batch.keys) - total
    table.update(batch, grads, *SGD, 1)
    same_bits(table.values(batch.lines), expected)


@pytest.mark.parametrize(("value", "norm"), [(0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_the_summed_gradient_of_a_row_is_clipped_before_weight_decay(value: float, norm: float) -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    grads = np.array([[3, -4, 0, 0], [0.25, 0.1, 0, -0.25], [1, 1, 0, 0], [-1, -1, 0, np.nan]], np.float32)
    batch = pinned(table, store, np.array([1, 2, 3, 3], np.uint64), np.zeros(4, np.uint32))
    before = table.values(batch.lines)
    table.update(batch, grads, "sgd", [1.0, 0.5, 0.0, value, norm], 1)
    moved = dict(zip(batch.keys.tolist(), (before * np.float32(0.5) - table.values(batch.lines)).tolist(), strict=True))
    clamped = np.clip([3, -4, 0, 0], -value, value) if value else np.array([3, -4, 0, 0])
    wanted = clamped * min(1.0, norm / np.linalg.norm(clamped)) if norm else clamped
    np.testing.assert_allclose(moved[1], wanted, atol=1e-6)
    np.testing.assert_allclose(moved[2], [0.25, 0.1, 0, -0.25], atol=1e-6)
    assert np.isnan(moved[3][3])


def test_rows_that_are_behind_are_seen_caught_up_and_stay_as_they_are() -> None:
    optimizer = optimizer_of("catch-up adam with a rest")
    table = table_of(optimizer, 5)
    store = _core.FullTable(table.layout)
    keys, zeros = np.arange(40, dtype=np.uint64), np.zeros(40, np.uint32)
    for step, some in ((1, keys[:30]), (2, keys[:20]), (9, keys[:10])):
        grads = np.random.default_rng(step).standard_normal((len(some), 5), np.float32)
        table.update(pinned(table, store, some, zeros[: len(some)]), grads, optimizer.rule, optimizer.hyper(step), step)
    batch = pinned(table, store, keys, zeros)
    values, records = table.values(batch.lines), table.records(batch.lines)
    expected = values.copy()
    naive.catch_up(expected, *records.T, 5, optimizer.rule, optimizer.hyper(200), 200)
    _core.preview_catch_up(batch, table.layout, optimizer.rule, optimizer.hyper(200), 200)
    same_bits(table.values(batch.views), expected)
    same_bits(table.values(batch.lines), values)
    out = np.empty((40, 5), np.float32)
    _core.gather(batch, table.layout, 0, out)
    same_bits(out, expected[batch.inverse, :5])

    _core.catch_up(table.layout, batch.lines.copy(), optimizer.rule, optimizer.hyper(200), 200)
    same_bits(table.values(batch.lines), expected)
    written = records[:, 0] > 0
    assert (table.records(batch.lines)[written, 1] == 199).all()
    np.testing.assert_array_equal(table.records(batch.lines)[~written], records[~written])


def test_gather_copies_rows_and_gives_zeros_for_padding(threads: int) -> None:
    table = Table([5, 4], [0.5])
    store = _core.FullTable(table.layout)
    keys, tables = random_ids(np.random.default_rng(2), 1500, table)
    batch = pinned(table, store, keys, tables, padding=7)
    expected = naive.gather(table.initial(batch.tables, batch.keys)[:, :9], batch.inverse)
    assert (batch.inverse < 0).any()
    out = np.full((1500, 9), np.nan, np.float32)
    _core.gather(batch, table.layout, 0, out)
    same_bits(out, expected)


def test_lines_may_stand_anywhere_and_are_set_from_python() -> None:
    table = Table([3])
    batch = table.batch([4, 5, 4], [0, 0, 0])
    memory, lines = table.lines(2)
    for line, value in zip(lines, (1.0, 2.0), strict=True):
        table.view(line)[0][:] = value
    batch.lines[:] = lines
    out = np.empty((3, 3), np.float32)
    _core.gather(batch, table.layout, 0, out)
    same_bits(out, np.repeat(np.float32(1) + batch.inverse[:, None].astype(np.float32), 3, axis=1))
    assert memory.any()


def test_an_empty_batch_and_one_of_padding_alone_change_nothing() -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    for keys in ([], [9, 9]):
        batch = pinned(table, store, np.array(keys, np.uint64), np.zeros(len(keys), np.uint32), padding=9)
        out = np.full((len(keys), 4), np.nan, np.float32)
        _core.gather(batch, table.layout, 0, out)
        assert not out.any()
        assert table.update(batch, np.ones_like(out), *SGD, 1) == 0
        assert _core.assign(batch, table.layout, np.ones_like(out), 1) == 0
    assert store.metrics()["resident_rows"] == 0


def test_assign_keeps_the_last_occurrence_and_the_state() -> None:
    table = Table([3], [0.25])
    store = _core.FullTable(table.layout)
    keys = np.array([5, 6, 5, 8, 6, 5], np.uint64)
    batch = pinned(table, store, keys, np.zeros(6, np.uint32), padding=8)
    values = np.arange(18, dtype=np.float32).reshape(6, 3)
    assert _core.assign(batch, table.layout, values, 4) == 2
    assert _core.assign(batch, table.layout, values, 9) == 0
    by_key = dict(zip(batch.keys.tolist(), table.values(batch.lines).tolist(), strict=True))
    assert by_key == {5: [15, 16, 17, 0.25, 0.25, 0.25], 6: [12, 13, 14, 0.25, 0.25, 0.25]}
    assert table.records(batch.lines).tolist() == [[2, 9], [2, 9]]


def test_initialise_missing_serves_unknown_rows_from_memory_of_the_batch() -> None:
    table = Table([3, 2])
    store = _core.FullTable(table.layout)
    known = pinned(table, store, np.array([1, 2], np.uint64), np.zeros(2, np.uint32))
    table.update(known, np.ones((2, 5), np.float32), *SGD, 1)
    batch = table.batch([1, 2, 3, 4], [0, 0, 0, 0])
    assert store.find(batch) == 2
    assert _core.count_new(batch, table.layout) == 2
    _core.initialise_missing(batch, table.layout)
    expected = table.initial(batch.tables, batch.keys)
    expected[batch.keys < 3] -= np.float32(1)
    same_bits(table.values(batch.lines), expected)
    assert store.metrics()["resident_rows"] == 2


def test_wrong_sizes_are_refused_before_anything_is_read() -> None:
    table = Table([4], [0.0])
    store = _core.FullTable(table.layout)
    batch = pinned(table, store, np.arange(3, dtype=np.uint64), np.zeros(3, np.uint32))
    before = table.values(batch.lines)
    for shape in ((2, 4), (3, 5), (4, 4)):
        with pytest.raises((TypeError, ValueError)):
            table.update(batch, np.ones(shape, np.float32), "adagrad", [1.0, 0.0, 0.0, 0.1, 0.0, 0.0], 1)
        with pytest.raises((TypeError, ValueError)):
            _core.assign(batch, table.layout, np.ones(shape, np.float32), 1)
    with pytest.raises((TypeError, ValueError)):
        _core.gather(batch, table.layout, 0, np.empty((4, 4), np.float32))
    with pytest.raises((TypeError, ValueError)):
        table.update(batch, np.ones((3, 4), np.float32), "no such rule", [1.0], 1)
    with pytest.raises((TypeError, ValueError)):
        table.update(batch, np.ones((3, 4), np.float32), "adagrad", [1.0], 1)
    with pytest.raises((TypeError, ValueError)):  # one state, where adam keeps two
        table.update(batch, np.ones((3, 4), np.float32), "adam", [1.0] * 10, 1)
    same_bits(table.values(batch.lines), before)
