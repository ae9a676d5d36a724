"""The native batch of some features, or of tables with limited ids, departs from the plain reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.rows import Table
from tierbed.engine import _core

pytestmark = pytest.mark.op

TABLES = 3


class Case:
    """Ids of `count` features of `batch` bags each; tables [columns] of the features that are looked up."""

    def __init__(self, count: int, batch: int, features: list[int], lengths: list[int], seed: int, keys: int) -> None:
        rng = np.random.default_rng(seed)
        self.batch, self.features = batch, features
        self.offsets = np.cumsum([0, *lengths], dtype=np.int64)
        self.keys = rng.integers(0, keys, int(self.offsets[-1]), np.uint64)
        self.tables = rng.integers(0, TABLES, len(features)).astype(np.uint32)
        column_of = {feature: column for column, feature in enumerate(features)}
        parts = np.repeat(np.arange(count * batch), np.diff(self.offsets))
        feature_of = parts // batch if batch else parts
        columns = np.array([column_of.get(feature, -1) for feature in feature_of.tolist()], np.int64)
        self.used = np.flatnonzero(columns >= 0)  # positions
        self.table_of = self.tables[columns[self.used]] if len(self.used) else np.zeros(0, np.uint32)
        self.rows = parts[self.used] % max(batch, 1) * len(features) + columns[self.used]  # of the output

    @property
    def segment(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint32], int]:
        return self.keys, self.tables, self.offsets, np.array(self.features, np.uint32), self.batch


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count, batch = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    features = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    lengths = draw(st.lists(st.integers(0, 5), min_size=count * batch, max_size=count * batch))
    return Case(count, batch, list(features), lengths, draw(st.integers(0, 2**32)), 6)


def check(case: Case, padding: int | None, last: list[int] | None = None) -> _core.Batch:
    """last: the last id of each table, if ids have numbers."""
    last_ids = None if last is None else np.array(last, np.uint64)
    batch = _core.Batch([case.segment], TABLES, padding, last_ids)
    numbered = last is not None and sum(last) + TABLES <= 2**28
    expected = naive.unique(case.keys[case.used], case.table_of, padding, numbered)
    np.testing.assert_array_equal(batch.keys, expected.keys)
    np.testing.assert_array_equal(batch.tables, expected.tables)
    inverse = np.full(len(case.keys), -1, np.int32)
    inverse[case.used] = expected.inverse
    np.testing.assert_array_equal(batch.inverse, inverse)
    np.testing.assert_array_equal(batch.occurrences, case.used[expected.occurrences])
    np.testing.assert_array_equal(batch.offsets, expected.offsets)
    return batch


numbers = st.none() | st.lists(st.integers(5, 9) | st.just(2**20), min_size=TABLES, max_size=TABLES)


@given(cases(), st.none() | st.just(2), numbers)
def test_unique_rows_of_features_equal_the_reference(case: Case, padding: int | None, last: list[int] | None) -> None:
    check(case, padding, last)


@given(cases(), st.booleans(), st.booleans(), numbers)
def test_pooled_features_equal_the_reference(case: Case, mean: bool, weighted: bool, last: list[int] | None) -> None:
    table = Table([3], tables=TABLES)
    batch = check(case, None, last)
    _core.initialise_missing(batch, table.layout)
    weights = np.random.default_rng(0).standard_normal(len(case.keys), np.float32) if weighted else None
    outputs = case.batch * len(case.features)
    out = np.full((outputs, 3), np.nan, np.float32)
    _core.gather(batch, table.layout, 0, out, mean, weights)
    order = np.argsort(case.rows, kind="stable")  # a bag's positions are ascending
    offsets = np.searchsorted(case.rows[order], np.arange(outputs + 1))
    rows = table.initial(case.table_of, case.keys[case.used])[order]
    chosen = None if weights is None else weights[case.used][order]
    everyone = np.arange(len(order), dtype=np.int32)
    expected = naive.pool(rows, everyone, offsets.astype(np.int64), mean, chosen)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    grads = np.random.default_rng(1).standard_normal((outputs, 3), np.float32)
    of_weights = np.zeros(len(case.keys), np.float32)
    _core.weights_grad(batch, table.layout, 0, grads, of_weights, mean)
    wanted = np.zeros(len(case.keys), np.float32)
    wanted[case.used[order]] = naive.weights_grad(rows, everyone, offsets.astype(np.int64), grads, mean)
    np.testing.assert_array_equal(of_weights, wanted)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_many_ids_of_features_are_the_same_for_any_threads(threads: int) -> None:
    lengths = np.random.default_rng(2).integers(0, 30, 3 * 500).tolist()
    _core.set_threads(threads)
    try:
        check(Case(3, 500, [2, 0], lengths, 5, 3000), None)
        check(Case(3, 500, [2, 0], lengths, 5, 3000), None, [3000, 2999, 2**27])
        check(Case(3, 500, [2, 0], lengths, 5, 3000), None, [3000, 2999, 2**28])  # too many for numbers
    finally:
        _core.set_threads(1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.lists(st.booleans(), min_size=3))
def test_ids_beyond_the_last_are_padding_and_counted_or_the_first_is_told(
    given: list[tuple[int, int]], drops: list[bool]
) -> None:
    tables = np.array([table for table, _ in given], np.uint32)
    keys = np.array([key for _, key in given], np.uint64)
    last = np.array([4, 7, 2**64 - 1], np.uint64)
    batch = _core.Batch([(keys, tables, None)], TABLES, None, last, drops[:3])
    bad = keys > last[tables]
    expected = naive.unique(keys[~bad], tables[~bad])
    np.testing.assert_array_equal(batch.keys, expected.keys)
    np.testing.assert_array_equal(batch.inverse >= 0, ~bad)
    strict = [(table, key) for table, key in given if key > last[table] and not drops[table]]
    assert batch.illegal == (strict[0] if strict else None)
    dropped = [sum(table == t and key > last[t] for table, key in given) if drops[t] else 0 for t in range(3)]
    assert batch.dropped == dropped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: np.array([0, 0], np.uint32)}, "each feature once"),
        ({3: np.array([0, 5], np.uint32)}, "each feature once"),
        ({1: np.zeros(3, np.uint32)}, "one table id for each bag, or for each feature"),
        ({1: None}, "features need offsets and table ids"),
        ({2: 4}, "features need offsets and table ids"),
    ],
)
def test_features_that_cannot_be_are_refused(change: dict[int, object], message: str) -> None:
    segment = list(Case(2, 2, [1, 0], [1, 2, 0, 1], 0, 5).segment)
    for place, value in change.items():
        segment[place] = value
    with pytest.raises((TypeError, ValueError), match=message):
        _core.Batch([tuple(segment)], TABLES, None)
