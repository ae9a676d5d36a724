"""Which rows a cache keeps where nothing is announced: exactly those of the plain one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cache_model import Both
from support.caches import Row

many_rows = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 150)), max_size=120)


@given(
    how=st.lists(st.tuples(many_rows, st.booleans()), max_size=30),
    sets=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["lru", "lfu"]),
)
def test_it_keeps_the_rows_that_the_plain_one_keeps(how: list[tuple[list[Row], bool]], sets: int, policy: str) -> None:
    both = Both(sets, policy)
    for rows, written in how:
        both.step(rows, written)
        both.check()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("sets", "threads"), [(2, 1), (64, 2), (131, 16)], indirect=["threads"])
@pytest.mark.rotated("policy")
def test_long_runs_on_any_number_of_threads(sets: int, policy: str) -> None:
    both, random = Both(sets, policy), np.random.default_rng(sets)
    chances = np.arange(1, 240 * sets) ** -0.9
    for step in range(16):
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
