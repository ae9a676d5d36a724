"""The simulators of benchmarks/replacement.py: the optimum by exhaustion, LRU and the window by definition."""

from __future__ import annotations

import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import replacement

some_batches = st.lists(st.lists(st.integers(0, 6), max_size=5, unique=True), min_size=1, max_size=7)


def misses(batches: list[list[int]], capacity: int, window: int | None) -> list[int]:
    arrays = [np.array(batch, np.int64) for batch in batches]
    counts: list[int] = replacement.misses(arrays, capacity, window).tolist()
    return counts


def least_misses(batches: list[list[int]], capacity: int) -> int:
    """Over every choice of what to keep after every batch."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for batch in batches:
        after: dict[frozenset[int], int] = {}
        for kept_rows, cost in costs.items():
            total = cost + len(set(batch) - kept_rows)
            up = kept_rows | set(batch)
            for kept in map(frozenset, combinations(sorted(up), min(capacity, len(up)))):
                after[kept] = min(after.get(kept, total), total)
        costs = after
    return min(costs.values())


def by_definition(batches: list[list[int]], capacity: int, window: int) -> list[int]:
    """Keeps rows that the window needs, the nearest first, then the latest used."""
    kept_rows: list[int] = []  # the latest used first
    counts = []
    for number, batch in enumerate(batches):
        hits = [row for row in batch if row in kept_rows]
        counts.append(len(batch) - len(hits))
        stack = hits + [row for row in batch if row not in kept_rows] + [row for row in kept_rows if row not in batch]
        ahead = batches[number + 1 : number + 1 + window]

        def next_use(row: int, ahead: list[list[int]] = ahead) -> int:
            return next((distance for distance, coming in enumerate(ahead) if row in coming), len(batches))

        kept = sorted(stack, key=next_use)[:capacity]
        kept_rows = [row for row in stack if row in kept]
    return counts


@given(some_batches, st.integers(0, 5))
def test_the_optimum_is_the_least_of_all_choices(batches: list[list[int]], capacity: int) -> None:
    assert sum(misses(batches, capacity, None)) == least_misses(batches, capacity)


@given(some_batches, st.integers(0, 5), st.integers(0, 3))
@example([[0], [1], [0, 1], [], [0]], 1, 1)  # two rows that the window needs at once
def test_lru_and_windows_are_those_of_the_definition(batches: list[list[int]], capacity: int, window: int) -> None:
    assert misses(batches, capacity, window) == by_definition(batches, capacity, window)


@given(some_batches, st.integers(0, 5))
def test_a_window_over_all_batches_is_the_optimum(batches: list[list[int]], capacity: int) -> None:
    assert sum(misses(batches, capacity, len(batches))) == sum(misses(batches, capacity, None))


@pytest.mark.parametrize("window", [0, 4, None])
def test_a_cache_for_all_rows_misses_each_once(window: int | None) -> None:
    random = np.random.default_rng(0)
    batches = [random.choice(5000, 400, replace=False) for _ in range(30)]
    seen = len(np.unique(np.concatenate(batches)))
    assert replacement.misses(batches, seen, window).sum() == seen
    assert replacement.misses(batches, 0, window).tolist() == [400] * 30
