"""Which rows a cache keeps where nothing is announced: exactly those of a plain one that is written after its words."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cache_rows import TABLE, Row, batch_of, cache_over, identities

from tierbed.engine import _core
from tierbed.engine._core import GROUP, WAYS
from tierbed.engine.ops import naive

BUCKETS, NEVER = 64, 2**32


def set_of(row: Row, sets: int) -> int:
    hash = naive.hash_row(*row)
    low, bucket = hash % 2**32, hash >> 58
    if sets < BUCKETS:
        return low * sets >> 32
    first, end = (number * sets // BUCKETS for number in (bucket, bucket + 1))
    return first + (low * (end - first) >> 32)


@dataclass
class Way:
    row: Row
    last: int
    uses: int = 0
    updates: int = 0
    stored: int = 0


class Plain:
    """`below`: the updates of rows in the tier below."""

    def __init__(self, sets: int, policy: str) -> None:
        self.sets: list[list[Way | None]] = [[None] * WAYS for _ in range(sets)]
        self.overflow: dict[Row, Way] = {}
        self.below: dict[Row, int] = {}
        self.policy, self.counts = policy, Counter[str]()

    def find(self, row: Row) -> Way | None:
        ways = self.sets[set_of(row, len(self.sets))]
        return next((way for way in ways if way and way.row == row), None) or self.overflow.get(row)

    def admit(self, rows: list[Row], number: int, done: int) -> None:
        absent: list[tuple[Row, Way | None]] = []
        for row in rows:
            way = self.find(row)
            if way is None or row in self.overflow:
                absent.append((row, way))
            self.counts["misses" if way is None else "hits"] += 1
            if way:
                way.last, way.uses = number, way.uses + 1
        for row, way in list(self.overflow.items()):
            if way.last <= done:
                self.leave(way)
                del self.overflow[row]
        for row, held in absent:
            stored = self.below.get(row, 0)
            way = held or Way(row, number, 1, stored, stored)
            at = self.victim(row, done)
            if at is None:
                self.overflow[row] = way
                self.counts["overflows"] += 1
                continue
            ways = self.sets[set_of(row, len(self.sets))]
            if gone := ways[at]:
                self.counts["evictions_dirty" if gone.updates != gone.stored else "evictions_clean"] += 1
                self.leave(gone)
            ways[at] = way
            self.overflow.pop(row, None)
            self.counts["insertions"] += 1

    def victim(self, row: Row, done: int) -> int | None:
        ways = self.sets[set_of(row, len(self.sets))]
        home = (naive.hash_row(*row) >> 32) * GROUP % WAYS
        turns = [(home + turn) % WAYS for turn in range(WAYS)]
        for at in turns:
            if ways[at] is None:
                return at
        for those in (turns[:GROUP], turns):  # of all, only where no row of its home may go
            order = {
                at: (way.uses if self.policy == "lfu" else 0, way.last)
                for at in those
                if (way := ways[at]) and way.last <= done
            }
            if order:
                return min(order, key=order.__getitem__)
        return None

    def leave(self, way: Way) -> None:
        if way.updates != way.stored:
            self.below[way.row] = way.updates


class Both:
    def __init__(self, sets: int, policy: str) -> None:
        self.cache, self.plain = cache_over(_core.FullTable(TABLE.layout), sets, policy), Plain(sets, policy)
        self.number = 0

    def step(self, rows: list[Row], written: bool) -> None:
        batch = batch_of(rows)
        self.cache.pin(batch)
        self.plain.admit(identities(batch), self.number + 1, self.number)
        self.number += 1
        self.check()
        for row, line in zip(identities(batch), batch.lines, strict=True):
            way = self.plain.find(row)
            assert way is not None
            assert TABLE.view(line)[1][0] == way.updates
            TABLE.view(line)[1][0] += written
            way.updates += written
        self.cache.unpin(batch)

    def check(self) -> None:
        slots, tables, keys, dirty = (values.tolist() for values in self.cache.residents())
        held = {
            at: (*way.row, way.updates != way.stored)
            for at, way in enumerate(way for ways in self.plain.sets for way in ways)
            if way
        }
        rows = list(zip(tables, keys, dirty, strict=True))
        assert {slot: row for slot, row in zip(slots, rows, strict=True) if slot >= 0} == held
        beside = {(*way.row, way.updates != way.stored) for way in self.plain.overflow.values()}
        assert {row for slot, row in zip(slots, rows, strict=True) if slot < 0} == beside
        metrics = self.cache.metrics()
        names = ("hits", "misses", "insertions", "evictions_clean", "evictions_dirty", "overflows")
        assert {name: metrics[name] for name in names} == {name: self.plain.counts[name] for name in names}


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


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("sets", [2, 64, 131])
def test_long_runs(sets: int, policy: str) -> None:
    both, random = Both(sets, policy), np.random.default_rng(sets)
    chances = np.arange(1, 240 * sets) ** -0.9
    for step in range(45):
        keys = random.choice(len(chances), min(32 * sets, 1200), p=chances / chances.sum())
        both.step([(int(key) % 2, int(key)) for key in keys], step % 3 > 0)
    both.check()
    assert both.plain.counts["evictions_dirty"] > 0


@pytest.mark.parametrize("threads", [2, 16])
def test_threads_decide_nothing(threads: int) -> None:
    _core.set_threads(threads)
    test_long_runs(131, "lru")
    _core.set_threads(1)


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
