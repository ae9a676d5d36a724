"""The area beside the sets: what it takes, and that it gives back what one large batch made it take."""

from __future__ import annotations

from collections import deque
from itertools import count, islice

import numpy as np
import pytest

from support.caches import KINDS, PLACE_BYTES, TABLE, Model, batch_of, cache_over, set_bytes, tier_below
from support.rows import Table
from tierbed.engine import _core
from tierbed.engine._core import WAYS


def most_bytes(overflow_rows: int) -> float:
    return 1.02 * overflow_rows * (TABLE.layout.line_bytes + PLACE_BYTES)


@pytest.mark.parametrize(("columns", "megabytes"), [(3, 0.5), (1000, 3.3)])
def test_prefetch_takes_the_cap_but_for_2_percent(columns: int, megabytes: float) -> None:
    table, cap, keys = Table([columns], [0.1]), int(megabytes * 2**20), count()
    below = _core.FullTable(table.layout)
    cache = _core.CacheTier(
        table.layout, below, budget_bytes=set_bytes(table), overflow_bytes=cap, policy="lru", io_threads=1
    )
    capacity = cache.metrics()["overflow_capacity"]
    assert capacity == cap // (table.layout.line_bytes + PLACE_BYTES)
    size, coming, full = capacity // 15, deque[_core.Batch](), 0
    for _ in range(36):
        coming.append(table.batch(list(islice(keys, size)), [0] * size))
        cache.announce(coming[-1])
        if not cache.prefetch(coming[-1]):
            full += 1
            assert cache.metrics()["overflow_bytes"] > 0.8 * cap
            cache.pin(coming[0])
            cache.unpin(coming.popleft())
            cache.cancel_announced()
            coming.clear()
        assert cache.metrics()["overflow_bytes"] <= 1.02 * cap
    assert full > 1


@KINDS
def test_rows_on_their_way_take_no_more(kind: str) -> None:
    rows, random = 2000, np.random.default_rng(0)
    with tier_below(kind) as below:
        cache, model, coming = cache_over(below, 4, overflow_rows=rows), Model(), deque[_core.Batch]()
        for _ in range(20):
            while len(coming) < 12:
                coming.append(batch_of([(0, int(key)) for key in random.integers(0, 4000, rows // 8)]))
                cache.announce(coming[-1])
            for batch in coming:
                if not cache.prefetch(batch):
                    break
            cache.pin(coming[0])
            assert cache.metrics()["overflow_bytes"] <= most_bytes(rows)
            model.check(coming[0])
            model.write(coming[0])
            cache.unpin(coming.popleft())
        assert cache.metrics()["overflow_peak_rows"] > rows / 2
        assert cache.metrics()["prefetch_waits"] > 0
        cache.close()


def test_what_a_large_batch_took_is_given_back_though_others_stay() -> None:
    cache, model = cache_over(_core.FullTable(TABLE.layout), 1, overflow_rows=200), Model()
    large, small, ahead = (
        batch_of([(0, key) for key in keys]) for keys in (range(5000), range(9000, 9100), range(9050, 9150))
    )
    cache.pin(large)
    model.write(large)
    assert cache.metrics()["overflow_bytes"] > 10 * most_bytes(200)
    cache.unpin(large)
    cache.pin(small)  # its rows come to where those of the large one are
    cache.announce(ahead)
    assert cache.prefetch(ahead)
    assert cache.metrics()["overflow_rows"] >= 150 - WAYS
    assert cache.metrics()["overflow_bytes"] <= most_bytes(200)
    for batch in (small, ahead):
        model.check(batch)
        model.write(batch)
        cache.unpin(batch)
        if batch is small:
            cache.pin(ahead)
    large = batch_of([(0, key) for key in range(5000)])
    cache.pin(large)
    model.check(large)
    cache.unpin(large)


def test_the_overflow_area_has_room_for_two_batches_where_its_size_is_not_given() -> None:
    cache = _core.CacheTier(
        TABLE.layout, _core.FullTable(TABLE.layout), budget_bytes=set_bytes() + 1, overflow_bytes=1, policy="lru",
        io_threads=1, grows_with_batch=True,
    )  # fmt: skip
    capacities = []
    for rows in (10, 1500, 200, 700, 2500):
        batch = batch_of([(0, key) for key in range(rows)])
        cache.pin(batch)
        metrics = cache.metrics()
        assert metrics["overflow_rows"] >= rows - 64
        capacities.append(metrics["overflow_capacity"])
        cache.unpin(batch)
    beyond = np.array(capacities) - (0, 3000, 3000, 3000, 5000)
    assert ((beyond >= 0) & (beyond < 1024)).all()
    row = TABLE.layout.line_bytes + PLACE_BYTES
    assert cache.metrics()["overflow_bytes"] <= 1.4 * row * (capacities[-1] + 1)  # a map doubles
