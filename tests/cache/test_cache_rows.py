"""A cache shows the rows of a dict, whatever is resident, evicted, prefetched or written back behind steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.caches import (
    KEYS,
    KINDS,
    METADATA_BYTES,
    TABLE,
    HostCache,
    Row,
    batch_of,
    cache_over,
    set_bytes,
    tier_below,
)
from support.cuda_tables import EMULATED, GPU
from support.device_caches import DeviceCache
from support.examples import examples
from tierbed.engine import _core
from tierbed.engine._core import WAYS

ALL = [(table, key) for table in range(2) for key in KEYS]
some_rows = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(KEYS)), max_size=90)
ACTIONS = ["step", "step", "read only", "announce", "announce", "prefetch", "peek", "erase", "flush", "cancel"]
COMING = [(0, key) for key in range(100, 130)]
ERASED = [("step", COMING), ("announce", COMING), ("prefetch", []), ("erase", COMING[::2]), ("step", [])]
ON_DEVICES = [
    pytest.param(partial(DeviceCache, device.values[0], below), id=f"{device.id}-{below}", marks=device.marks)
    for device, below in zip([*EMULATED, *GPU], ["table", "tier"] * 2, strict=False)
]


@contextmanager
def opened(kind: Any, sets: int, policy: str = "lru", overflow_rows: int = 10_000) -> Iterator[Any]:
    """A cache of the core over a tier of that kind, or one of a device."""
    if isinstance(kind, str):
        with tier_below(kind) as below:
            yield (cache := HostCache(below, sets, policy, overflow_rows))
            cache.close()
    else:
        yield (cache := kind(sets, policy))
        cache.close()


@pytest.mark.parametrize("kind", ["memory", "disk", "cache", *ON_DEVICES])
@examples(0.5)
@example(how=ERASED, sets=1, policy="lru", overflow_rows=1000, threads=1)
@given(
    how=st.lists(st.tuples(st.sampled_from(ACTIONS), some_rows), max_size=25),
    sets=st.sampled_from([1, 2, 64]),
    policy=st.sampled_from(["lru", "lfu"]),
    overflow_rows=st.sampled_from([1, 20, 1000]),
    threads=st.sampled_from([1, 2, 16]),
)
def test_rows_are_those_of_a_dict(
    kind: Any, how: list[tuple[str, list[Row]]], sets: int, policy: str, overflow_rows: int, threads: int
) -> None:
    _core.set_num_threads(threads)
    with opened(kind, sets, policy, overflow_rows) as cache:
        coming: list[Any] = []
        for action, rows in how:
            batch = cache.batch(rows)
            if action in ("step", "read only"):
                batch = coming.pop(0) if coming else batch
                cache.pin(batch)
                cache.model.check(batch)
                if action == "step":
                    cache.model.write(batch)
                cache.unpin(batch, is_dirty=action == "step")
            elif action == "announce":
                cache.announce(batch)
                coming.append(batch)
            elif action == "prefetch":
                for ahead in coming:
                    if not cache.prefetch(ahead):
                        break
            elif action == "peek":
                before = cache.places(ALL[::7])
                cache.peek(batch)
                cache.model.check(batch)
                assert cache.places(ALL[::7]) == before
            elif action == "erase":
                cache.erase(list(dict.fromkeys(rows)))
            elif action == "flush":
                cache.flush()
            else:
                cache.cancel_announced()
                coming.clear()
        cache.cancel_announced()
        cache.check_stored()
    _core.set_num_threads(1)


@KINDS
def test_a_batch_larger_than_the_cache_stays_where_it_is_until_its_end(kind: str) -> None:
    with opened(kind, 1, overflow_rows=1) as cache:
        for _ in range(3):
            everything, looked_up = (batch_of([(0, key) for key in KEYS]) for _ in range(2))
            cache.pin(everything)
            assert len(set(everything.lines.tolist())) == len(KEYS)
            cache.model.check(everything)
            cache.model.write(everything)
            cache.peek(looked_up)
            cache.model.check(looked_up)
            cache.unpin(everything)
        metrics = cache.metrics()
        assert metrics["overflow_peak_rows"] >= len(KEYS) - WAYS
        assert metrics["resident_rows"] <= metrics["capacity"] == WAYS
        cache.check_stored()


def keys(*ranges: range) -> list[_core.Batch]:
    """Batches of rows of table 0."""
    return [batch_of([(0, key) for key in one]) for one in ranges]


def test_prefetched_rows_stay_until_their_step_though_others_come() -> None:
    with opened("memory", 1) as cache:
        batches = keys(range(100, 112), range(110, 150))
        cache.announce(*batches)
        assert all(cache.prefetch(batch) for batch in batches)
        lines = [batch.lines.tolist() for batch in batches]
        for batch, before in zip(batches, lines, strict=True):
            cache.step(batch)
            assert batch.lines.tolist() == before


def test_a_row_beside_the_sets_stays_where_a_coming_batch_has_it() -> None:
    with opened("memory", 1) as cache:
        first, second, third = keys(range(64), range(64, 100), range(70, 150))
        cache.announce(first, second, third)
        assert cache.prefetch(first)
        assert cache.prefetch(second)  # beside the set, which the first fills
        cache.step(first)
        assert cache.prefetch(third)  # the set has room by now
        cache.step(second)
        cache.step(third)


def test_prefetch_waits_at_the_cap_of_the_overflow_and_a_step_does_not() -> None:
    with opened("memory", 1, overflow_rows=20) as cache:
        small, large = keys(range(100, 110), range(110, 190))
        cache.announce(small, large)
        assert cache.prefetch(small)
        assert not cache.prefetch(large)
        assert cache.metrics()["overflow_rows"] == 0
        cache.step(small)
        cache.step(large)
        assert cache.metrics()["prefetch_waits"] == 1
        assert cache.metrics()["overflow_peak_rows"] == 80 - WAYS


def test_batches_are_pinned_in_the_order_in_which_they_are_announced() -> None:
    cache = cache_over(_core.FullTable(TABLE.layout), 1)
    first, second = batch_of([(0, 1)]), batch_of([(0, 2)])
    cache.announce(first)
    cache.announce(second)
    with pytest.raises(RuntimeError, match="announced"):
        cache.pin(second)
    cache.cancel_announced()
    cache.pin(second)
    with pytest.raises(RuntimeError, match="still pinned"):
        cache.pin(first)
    with pytest.raises(RuntimeError, match="not pinned"):
        cache.unpin(first)
    cache.unpin(second)


@KINDS
def test_batches_are_cancelled_while_they_come_up(kind: str) -> None:
    with opened(kind, 2, overflow_rows=3000) as cache, ThreadPoolExecutor(1) as pool:
        random = np.random.default_rng(0)
        for _ in range(30):
            rows = [(int(key) % 2, int(key)) for key in random.integers(0, 2500, 1000)]
            ahead, batch = batch_of(rows[:800]), batch_of(rows[400:])
            cache.announce(ahead)
            coming_up = pool.submit(cache.prefetch, ahead)
            time.sleep(random.random() * 2e-3)
            cache.cancel_announced()
            coming_up.result()
            cache.step(batch)


def test_rows_that_were_never_written_cost_nothing_below() -> None:
    below = _core.FullTable(TABLE.layout)
    cache = cache_over(below, 1)
    for begin in range(0, 60, 10):
        cache.pin(batch := batch_of([(0, key) for key in KEYS[begin : begin + 30]]))
        cache.unpin(batch)
    cache.flush()
    assert below.metrics()["resident_rows"] == 0
    metrics = cache.metrics()
    assert metrics["bytes_out"] == metrics["evictions_dirty"] == 0
    assert metrics["evictions_clean"] > 0


@pytest.mark.parametrize("megabytes", [0.05, 0.3, 1.0, 7.7])
def test_sets_take_the_budget_but_for_2_percent(megabytes: float) -> None:
    budget = int(megabytes * 2**20)
    below = _core.FullTable(TABLE.layout)
    cache = _core.CacheTier(TABLE.layout, below, budget_bytes=budget, overflow_bytes=1, policy="lru", io_threads=1)
    taken = cache.metrics()["bytes"]
    assert taken == cache.metrics()["capacity"] * (TABLE.layout.line_bytes + METADATA_BYTES)
    assert budget - max(0.02 * budget, set_bytes()) < taken <= budget
