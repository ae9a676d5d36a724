"""The ledger itself: any rows come and go, and the search for victims finds the lowest wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.embeddings import make, train
from support.lifecycle_model import Model, written
from support.stores import options
from tierbed.engine import _core


def ledger(ttl_steps: int = 0) -> _core.Ledger:
    return _core.Ledger(eviction="none", capacity=None, ttl_steps=ttl_steps, min_lookups=0, chance=1.0, seed=0)


def steps_of(rows: _core.Ledger, steps: Iterable[int]) -> dict[tuple[int, int], int]:
    """The rows of a ledger of `ttl_steps=0`, and the step of each, one of `steps`."""
    found = dict[tuple[int, int], int]()
    for step in sorted(set(steps), reverse=True):  # the earlier, the fewer steps after it find the row
        tables, keys = rows.expired(step + 1)
        found |= dict.fromkeys(zip(tables.tolist(), keys.tolist(), strict=True), step)
    return found


def keys_of(bucket: int, count: int) -> NDArray[np.uint64]:
    """Keys of table 0 in one bucket."""
    keys = np.arange(100 * count + 2000, dtype=np.uint64)
    return keys[_core.buckets(np.zeros(len(keys), np.uint32), keys) == bucket][:count]


CROWDED = keys_of(63, 60)  # of table 0; where they are in other tables does not matter


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 59), unique=True, max_size=30), st.integers(0, 2**32 - 2)),
        max_size=20,
    )
)
def test_rows_that_share_a_bucket_come_and_go(calls: list[tuple[bool, list[int], int]]) -> None:
    rows, kept = ledger(), dict[int, int]()  # the step of each
    for erases, chosen, step in calls:
        keys, tables = CROWDED[chosen], np.zeros(len(chosen), np.uint32)
        if erases:
            assert rows.erase(tables, keys) == len(kept.keys() & set(chosen))
            kept = {row: step for row, step in kept.items() if row not in chosen}
        else:
            rows.load(tables, keys, np.ones(len(keys), np.uint32), np.full(len(keys), step, np.uint32))
            kept |= dict.fromkeys(chosen, step)
        assert rows.rows == len(kept)
        assert steps_of(rows, kept.values()) == {(0, int(CROWDED[row])): step for row, step in kept.items()}
    assert rows.erase(np.zeros(60, np.uint32), CROWDED) == len(kept)


def test_many_rows_and_what_they_take(threads: int) -> None:
    random = np.random.default_rng(0)
    rows = ledger()
    keys = np.unique(random.integers(0, 2**64, 100_000, np.uint64))
    tables = (keys % np.uint64(5)).astype(np.uint32)
    steps = random.integers(0, 2**32, len(keys), np.uint32)
    rows.load(tables, keys, np.ones(len(keys), np.uint32), steps)
    assert 30 <= rows.bytes / len(keys) <= 38.5
    gone = random.permutation(len(keys))[:70_000]
    assert rows.erase(tables[gone], keys[gone]) == len(gone)
    assert rows.rows == len(keys) - len(gone)
    there = np.delete(np.arange(len(keys)), gone)
    for now in (1, 2**30, 2**31, 3 * 2**30, 2**32 - 1):
        before = there[steps[there] < now]
        found = np.sort(np.stack([part.astype(np.uint64) for part in rows.expired(now)]))
        np.testing.assert_array_equal(found, np.sort(np.stack([tables[before].astype(np.uint64), keys[before]])))
    assert rows.erase(tables + np.uint32(1), keys) == 0
    assert rows.erase(tables, keys) == len(there)
    assert rows.rows == 0


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
