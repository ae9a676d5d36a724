from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.rows import SPECIAL_KEYS, any_key
from tierbed.engine import _core

pytestmark = pytest.mark.op

Segment = tuple[list[int], list[int] | None]


def check(segments: list[Segment], num_tables: int, padding: int | None = None) -> _core.Batch:
    """The native batch equals the naive one, whose segments' positions follow one another."""
    arrays = [
        (np.array(keys, np.uint64), None if tables is None else np.array(tables, np.uint32), None)
        for keys, tables in segments
    ]
    batch = _core.Batch(arrays, num_tables, padding)
    keys = np.concatenate([keys for keys, _, _ in arrays] or [np.zeros(0, np.uint64)])
    tables = [np.arange(len(keys), dtype=np.uint32) % num_tables if ids is None else ids for keys, ids, _ in arrays]
    expected = naive.unique(keys, np.concatenate([*tables, np.zeros(0, np.uint32)]).astype(np.uint32), padding)
    assert batch.size == len(keys)
    assert batch.unique == len(expected.keys)
    for name in ("keys", "tables", "inverse", "occurrences", "offsets"):
        actual, wanted = getattr(batch, name), getattr(expected, name)
        assert actual.dtype == wanted.dtype, name
        np.testing.assert_array_equal(actual, wanted, err_msg=name)
    assert batch.lines.shape == (batch.unique,)
    assert not batch.lines.any()
    return batch


def check_sibling(batch: _core.Batch) -> None:
    """It has the same rows, and lines of its own."""
    sibling = batch.sibling()
    for name in ("keys", "tables", "inverse", "occurrences", "offsets", "lines"):
        np.testing.assert_array_equal(getattr(sibling, name), getattr(batch, name), err_msg=name)
    assert (sibling.size, sibling.sources, sibling.unique) == (batch.size, batch.sources, batch.unique)
    sibling.lines.fill(7)
    assert not batch.lines.any()


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[Segment], int]:
    num_tables = draw(st.sampled_from([1, 2, 3, 26, 300, 1000]))
    ids = st.integers(0, num_tables - 1)
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        keys = draw(st.lists(any_key, max_size=40))
        tables = draw(st.none() | st.lists(ids, min_size=len(keys), max_size=len(keys)))
        parts.append((keys, tables))
    return parts, num_tables


@given(segments(), st.none() | st.sampled_from(SPECIAL_KEYS))
def test_batch_equals_the_reference(case: tuple[list[Segment], int], padding: int | None) -> None:
    check_sibling(check(*case, padding))


@pytest.mark.parametrize(
    ("keys", "unique"),
    [([], 0), ([5], 1), ([5] * 1000, 1), (list(range(1000)), 1000), (SPECIAL_KEYS * 3, len(SPECIAL_KEYS))],
    ids=["empty", "one", "all equal", "all new", "special"],
)
def test_extreme_batches(keys: list[int], unique: int) -> None:
    assert check([(keys, [0] * len(keys))], 1).unique == unique


def test_no_segments_and_only_empty_ones() -> None:
    assert check([], 1).size == 0
    assert check([([], None), ([], [])], 4).unique == 0


@pytest.mark.parametrize("key", [0, 2, 2**32, 2**63 - 2, 2**64 - 2])
def test_neighbouring_keys_are_two_rows(key: int) -> None:
    assert check([([key, key + 1, key], [0, 0, 0])], 1).unique == 2


def test_one_key_in_a_thousand_tables_is_a_thousand_rows() -> None:
    assert check([([2**64 - 1] * 2000, None)], 1000).unique == 1000


def test_padding_of_minus_one_is_the_largest_key_and_nothing_else() -> None:
    minus_one = 2**64 - 1
    batch = check([([minus_one, 0, minus_one, 1], [0, 0, 1, 1])], 2, minus_one)
    assert batch.inverse.tolist().count(-1) == 2
    assert len(batch.occurrences) == 2
    assert check([([minus_one] * 5, None)], 3, minus_one).unique == 0


def test_the_same_row_in_two_segments_is_one() -> None:
    batch = check([([1, 2], None), ([2, 1, 9], [1, 0, 0])], 2)
    assert batch.unique == 3


def test_a_large_skewed_batch_is_the_same_for_any_threads(threads: int) -> None:
    rng = np.random.default_rng(0)
    keys = (rng.zipf(1.2, 30_000) % 2**40).astype(np.uint64).tolist()
    tables = rng.integers(0, 26, 20_000).tolist()
    check([(keys[:20_000], tables), (keys[20_000:], None)], 26, padding=1)


def test_a_table_id_out_of_range_is_refused_with_its_position() -> None:
    keys = np.arange(5, dtype=np.uint64)
    with pytest.raises(IndexError, match="3"):
        _core.Batch([(keys, np.array([0, 1, 1, 2, 0], np.uint32), None)], 2, None)


def test_buckets_are_the_top_bits_of_the_hash() -> None:
    rng = np.random.default_rng(1)
    keys = np.concatenate([np.array(SPECIAL_KEYS, np.uint64), rng.integers(0, 2**64, 500, np.uint64)])
    tables = rng.integers(0, 1000, len(keys), np.uint32)
    expected = [naive.bucket(table, key) for table, key in zip(tables.tolist(), keys.tolist(), strict=True)]
    assert _core.buckets(tables, keys).tolist() == expected


def test_a_sibling_outlives_what_it_was_made_of() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    sibling = _core.Batch([(keys, None, None)], 1, None).sibling()
    _core.Batch([(keys + np.uint64(7), None, None)], 1, None)  # takes the memory of what is gone
    assert sorted(sibling.keys.tolist()) == keys.tolist()
