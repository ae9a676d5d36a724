"""Which rows a cache keeps where batches are announced: exactly those of the plain one, after every step."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cache_model import Both
from support.caches import TABLE, Row, batch_of, cache_over
from tierbed.engine import _core
from tierbed.engine._core import WAYS

AHEAD = 20  # batches

some_rows = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 120)), max_size=90)
actions = st.sampled_from(["announce", "announce", "prefetch", "pin", "unpin written", "unpin", "cancel"])


def act(both: Both, action: str, rows: list[Row]) -> None:
    if action == "announce" and len(both.announced) < AHEAD:
        both.announce(rows)
    elif action == "prefetch":
        both.prefetch()
    elif action == "pin" and not both.pinned:
        both.pin(rows)
    elif action.startswith("unpin") and both.pinned:
        both.unpin(action == "unpin written")
    elif action == "cancel":
        both.cancel()
    else:
        return
    both.check()


@given(
    how=st.lists(st.tuples(actions, some_rows), max_size=60),
    sets=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["lru", "lfu"]),
    overflow_rows=st.sampled_from([1, 30, 1000]),
)
def test_it_keeps_the_rows_that_the_plain_one_keeps(
    how: list[tuple[str, list[Row]]], sets: int, policy: str, overflow_rows: int
) -> None:
    both = Both(sets, policy, overflow_rows)
    for action, rows in how:
        act(both, action, rows)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(
    ("sets", "overflow_rows", "threads"),
    [(1, 400, 1), (2, 400, 1), pytest.param(67, 40_000, 2, marks=pytest.mark.slow), (67, 40_000, 16)],
    indirect=["threads"],
)
@pytest.mark.rotated("policy")
def test_long_runs_on_any_number_of_threads(sets: int, overflow_rows: int, policy: str) -> None:
    both, random = Both(sets, policy, overflow_rows), np.random.default_rng(sets)
    chances = np.arange(1, 200 * sets) ** -0.7
    steps, most = (200, 25 * sets) if sets < 3 else (34, 18 * sets)
    for _ in range(steps):
        for _ in range(random.integers(0, 4) if len(both.announced) < AHEAD else 0):
            keys = random.choice(len(chances), random.integers(1, most), p=chances / chances.sum())
            both.announce([(int(key) % 2, int(key)) for key in keys])
        act(both, "prefetch" if random.random() < 0.2 else "nothing", [])
        act(both, "pin", [(0, 0)])
        act(both, "prefetch" if random.random() < 0.2 else "nothing", [])
        act(both, "cancel" if random.random() < 0.03 else "nothing", [])
        act(both, "unpin written" if random.random() < 0.6 else "unpin", [])
    decided = ["victims that are needed", "kept beside the sets", "further groups"]
    assert all(both.plain.reached[what] > 0 for what in decided), both.plain.reached
    assert both.plain.counts["evictions_dirty"] > 0


def test_looking_ahead_keeps_what_is_needed_soonest() -> None:
    """A loop over a few rows more than there is room for: LRU misses often, Belady's rule those few."""
    misses, loop_rows, each = {}, WAYS + 4, 4
    for ahead in (0, 31):
        cache, loop = cache_over(_core.FullTable(TABLE.layout), 1, overflow_rows=1), deque[_core.Batch]()
        for step in range(20 * loop_rows // each + ahead):
            batch = batch_of([(0, (step * each + row) % loop_rows) for row in range(each)])
            if ahead:
                cache.announce(batch)
            loop.append(batch)
            if len(loop) > ahead:
                cache.pin(loop[0])
                cache.unpin(loop.popleft())
        misses[ahead] = cache.metrics()["misses"]
    assert misses[0] > 20 * 2 * each
    assert misses[31] <= loop_rows + 20 * (each + 1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("sets", "threads"), [(2, 1), (64, 2), (131, 16)], indirect=["threads"])
@pytest.mark.rotated("policy")
def test_long_runs_where_nothing_is_announced(sets: int, policy: str) -> None:
    both, random = Both(sets, policy), np.random.default_rng(sets)
    chances = np.arange(1, 240 * sets) ** -0.9
    for step in range(16 if sets > 2 else 60):
        keys = random.choice(len(chances), min(32 * sets, 800), p=chances / chances.sum())
        both.step([(int(key) % 2, int(key)) for key in keys], step % 3 > 0)
    both.check()
    assert both.plain.counts["evictions_dirty"] > 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_home_whose_rows_are_all_pinned_asks_the_next_groups(policy: str) -> None:
    both, random = Both(1, policy), np.random.default_rng(0)
    for _ in range(40):
        both.step([(0, int(key)) for key in random.choice(150, 50, replace=False)], True)
    assert both.plain.reached["further groups"] > 0
