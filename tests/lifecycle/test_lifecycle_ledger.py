"""The ledger itself: any rows come and go, and the search for victims finds the lowest wherever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.embeddings import make, train
from support.lifecycle_model import Model, written
from support.stores import options
from tierbed.engine import _core


def ledger(**policy: Any) -> _core.Ledger:
    return _core.Ledger(
        **{"eviction": "none", "capacity": None, "ttl_steps": 0, "min_lookups": 0, "chance": 1.0, "seed": 0, **policy}
    )


def keys_of(bucket: int, count: int) -> NDArray[np.uint64]:
    """Keys of table 0 in one bucket."""
    keys = np.arange(100 * count + 2000, dtype=np.uint64)
    return keys[_core.buckets(np.zeros(len(keys), np.uint32), keys) == bucket][:count]


CROWDED = keys_of(63, 60)  # of table 0; where they are in other tables does not matter


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 59), unique=True, max_size=30), st.integers(1, 2**32 - 1)),
        max_size=20,
    )
)
def test_rows_that_share_a_bucket_come_and_go(calls: list[tuple[bool, list[int], int]]) -> None:
    rows, kept = ledger(), dict[int, tuple[int, int]]()
    for erases, chosen, number in calls:
        keys, tables = CROWDED[chosen], np.zeros(len(chosen), np.uint32)
        if erases:
            assert rows.erase(tables, keys) == len(kept.keys() & set(chosen))
            kept = {row: record for row, record in kept.items() if row not in chosen}
        else:
            rows.load(tables, keys, np.full(len(keys), number, np.uint32), np.full(len(keys), number // 2, np.uint32))
            kept |= dict.fromkeys(chosen, (number, number // 2))
        updates, steps = rows.find(np.zeros(60, np.uint32), CROWDED)
        assert rows.rows == len(kept)
        assert [record for record in zip(updates.tolist(), steps.tolist(), strict=True) if record[0]] == [
            kept[row] for row in range(60) if row in kept
        ]
        assert set(np.flatnonzero(updates).tolist()) == set(kept)


def test_many_rows_and_what_they_take() -> None:
    random = np.random.default_rng(0)
    rows = ledger()
    keys = np.unique(random.integers(0, 2**64, 300_000, np.uint64))
    tables = (keys % np.uint64(5)).astype(np.uint32)
    updates = random.integers(1, 2**32, len(keys), np.uint32)
    rows.load(tables, keys, updates, ~updates)
    assert 30 <= rows.bytes / len(keys) <= 38.5
    gone = random.permutation(len(keys))[:200_000]
    assert rows.erase(tables[gone], keys[gone]) == len(gone)
    assert rows.rows == len(keys) - len(gone)
    expected = updates.copy()
    expected[gone] = 0
    there = expected > 0
    found, steps = rows.find(tables, keys)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(steps[there], ~updates[there])
    assert rows.find(tables + np.uint32(1), keys)[0].max() == 0


def test_rows_past_their_time_are_found(threads: int) -> None:
    rows = ledger(ttl_steps=10)
    keys = np.arange(5000, dtype=np.uint64)
    tables, steps = np.zeros(5000, np.uint32), np.arange(5000, dtype=np.uint32)
    rows.load(tables, keys, np.ones(5000, np.uint32), steps)
    for now, last in ((10, -1), (11, 0), (2000, 1989), (2**32 - 1, 4999)):
        assert set(rows.expired(now)[1].tolist()) == set(range(last + 1))


@pytest.mark.parametrize("bucket", [0, 1, 63])
def test_victims_may_be_in_one_bucket_or_in_all_but_one(bucket: int, threads: int) -> None:
    """The search takes one bucket for a sample, and looks again where that was no good one."""
    apart = keys_of(bucket, 60).tolist()
    others = [key for key in range(10_000, 12_000) if key not in apart][:940]
    for first, second in ((apart, others), (others, apart)):
        embedding = make(options("device", eviction="lru", capacity=1000), "sgd", tables=1)
        model = Model("lru", 1000)
        for keys in (first, second, range(50_000, 50_120), range(60_000, 60_001)):
            model.train((0, key) for key in keys)
            train(embedding, list(keys))
            assert written(embedding) == model.rows
