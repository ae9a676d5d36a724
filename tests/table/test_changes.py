"""Which rows changed: noted while they change, and found by joining two scans. Both beside plain dicts of rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.changed_rows import FIRST, Calls, Row, by_name, calls, check_noted, in_order, in_small_chunks
from support.cuda_tables import on_one_device, with_policies
from support.embeddings import make, train
from support.examples import examples
from support.rows import any_key
from support.small_snapshots import chunked
from support.stores import STORES, options
from tierbed import StoreError
from tierbed.engine import _core
from tierbed.engine.row_format import BUCKETS, ROW_KEY_DTYPE, row_dtype
from tierbed.engine.store.merging import find_changes

Rows = NDArray[np.void]


stores = pytest.mark.parametrize("store", STORES)
some_names = st.lists(st.tuples(st.integers(0, 3), any_key), max_size=60)


def arrays(names: Iterable[Row]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    listed = list(names)
    return np.array([t for t, _ in listed], np.uint32), np.array([key for _, key in listed], np.uint64)


def note_changes(rows: _core.ChangedRows) -> list[tuple[int, int, int]]:
    return [
        (bucket, table, key)
        for bucket in range(64)
        for table, key in zip(*(part.tolist() for part in rows.list_keys(bucket)), strict=True)
    ]


@given(st.lists(some_names, max_size=6), some_names)
def test_a_list_of_names_beside_a_set_of_python(parts: list[list[Row]], others: list[Row]) -> None:
    rows, other, expected = _core.ChangedRows(), _core.ChangedRows(), set()
    for names in parts:
        rows.add_keys(*arrays(names))
        expected |= set(names)
        assert note_changes(rows) == in_order(expected)
        assert rows.size == len(expected)
    other.add_keys(*arrays(others))
    rows.merge(other)
    assert note_changes(rows) == in_order(expected | set(others))
    assert note_changes(other) == in_order(others)


@stores
def test_a_row_that_is_written_again_and_again_is_noted_once(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "sgd") as embedding:
        observers = embedding.table_handle().table.observers
        observers.track_changes(FIRST)
        for _ in range(20):
            train(embedding, range(100))
        assert observers.tracker is not None
        assert observers.tracker.bytes == 12 * 1024  # one block


def test_names_that_are_added_again_and_again_take_little_memory() -> None:
    rows, keys = _core.ChangedRows(), np.arange(10_000, dtype=np.uint64)
    for _ in range(1000):
        rows.add_keys(np.zeros(len(keys), np.uint32), keys)
    assert rows.bytes < 48 << 20
    assert sum(len(rows.list_keys(bucket)[1]) for bucket in range(BUCKETS)) == len(keys)


@on_one_device
def test_beyond_the_limit_of_memory_no_tier_notes_rows(place: torch.device, tmp_path: Path) -> None:
    with make(options("ssd", tmp_path, changed_keys_mb=0.001), "sgd").to(place) as embedding:
        observers = embedding.table_handle().table.observers
        observers.track_changes(FIRST)
        assert observers.tracker is not None
        source = weakref.ref(observers.tracker._source)
        for begin in range(0, 2000, 100):
            train(embedding, range(begin, begin + 100))
        assert observers.tracker is None
        assert source() is None


def test_a_set_of_names_refuses_what_is_no_list_of_rows() -> None:
    rows = _core.ChangedRows()
    with pytest.raises(ValueError, match="differ in length"):
        rows.add_keys(np.zeros(2, np.uint32), np.zeros(3, np.uint64))
    with pytest.raises(ValueError, match="no such bucket"):
        rows.list_keys(64)


small_rows = st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 9)), st.integers(0, 2), max_size=25)
both = st.tuples(st.dictionaries(st.integers(0, 4), small_rows), st.dictionaries(st.integers(0, 4), small_rows))


def rows_by_bucket(buckets: dict[int, dict[Row, int]]) -> dict[int, Rows]:
    """Rows of width 1 by bucket, each with a value of its own."""
    result = {}
    for bucket, rows in sorted(buckets.items()):
        result[bucket] = np.zeros(len(rows), row_dtype(1))
        for row, ((table, key), value) in zip(result[bucket], sorted(rows.items()), strict=True):
            row["table"], row["key"], row["values"], row["updates"] = table, key, value - 0.0, 1
    return result


@given(both, st.integers(1, 9), st.integers(1, 9))
def test_changes_make_the_later_rows_of_the_earlier_ones(
    buckets: tuple[dict[int, dict[Row, int]], dict[int, dict[Row, int]]], size: int, other_size: int
) -> None:
    before, after = rows_by_bucket(buckets[0]), rows_by_bucket(buckets[1])
    found: dict[int, tuple[list[Row], list[Row]]] = {}
    for bucket, rows, keys in find_changes(chunked(before, size), chunked(after, other_size)):
        assert keys.dtype == ROW_KEY_DTYPE
        assert by_name(rows).items() <= by_name(after.get(bucket, ())).items()
        changed, gone = found.setdefault(bucket, ([], []))
        changed += list(by_name(rows))
        gone += list(zip(keys["table"].tolist(), keys["key"].tolist(), strict=True))
    assert list(found) == sorted(found)
    for bucket in before | after:
        was, now = by_name(before.get(bucket, ())), by_name(after.get(bucket, ()))
        changed, gone = found.get(bucket, ([], []))
        assert changed == sorted(name for name in now if was.get(name) != now[name])
        assert gone == sorted(was.keys() - now.keys())


POLICIES: dict[str, dict[str, Any]] = {
    "evicts": {"eviction": "lru", "capacity": 60},
    "expires": {"ttl_steps": 2, "admission": 2},
}


@stores
@with_policies(POLICIES)
@examples(0.2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=calls, during=calls, after=calls, chunk=st.integers(1, 9))
@pytest.mark.rotated("store")
def test_noted_changes_make_the_rows_of_now_of_those_before(
    tmp_path_factory: pytest.TempPathFactory,
    place: torch.device,
    store: str,
    policy: dict[str, Any],
    before: Calls,
    during: Calls,
    after: Calls,
    chunk: int,
) -> None:
    check_noted(options(store, tmp_path_factory.mktemp("store"), **policy), before, during, after, chunk, place)


@stores
def test_only_what_was_written_is_noted(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path, admission=2), "sgd") as embedding:
        table = embedding.table_handle().table
        train(embedding, range(50))
        train(embedding, range(50))
        table.observers.track_changes(FIRST)
        embedding.get(np.arange(50), 0)
        train(embedding, range(40, 60))  # ten of them are seen for the first time, and refused
        found = table.observers.read_changes(FIRST)
        assert found is not None
        rows, gone = zip(*((rows, gone) for _, rows, gone in found), strict=True)
        assert sorted(np.concatenate(rows)["key"].tolist()) == list(range(40, 50))
        assert not sum(map(len, gone))


def test_chunks_of_changes_are_bounded() -> None:
    with make(options("device"), "sgd") as embedding, in_small_chunks(4):
        table = embedding.table_handle().table
        table.observers.track_changes(FIRST)
        train(embedding, range(2000))
        found = table.observers.read_changes(FIRST)
        assert found is not None
        sizes = [len(rows) for _, rows, _ in found]
        assert sum(sizes) == 2000
        assert max(sizes) == 4 * row_dtype(10).itemsize // row_dtype(5).itemsize


def test_changes_of_a_closed_table_are_not_read() -> None:
    embedding = make(options("device"), "sgd")
    table = embedding.table_handle().table
    table.observers.track_changes(FIRST)
    train(embedding, range(9))
    found = table.observers.read_changes(FIRST)
    assert found is not None
    next(found)
    embedding.close()
    with pytest.raises(StoreError, match="was closed"):
        next(found)
