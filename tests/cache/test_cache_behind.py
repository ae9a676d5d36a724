"""The write-behind thread: its errors, its end, and rows that are needed again while they wait for write-back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from support.caches import TABLE, HostCache, Model, Row, batch_of, cache_over, places
from support.limits import file_size_limit
from tierbed.engine import _core
from tierbed.engine.store.rocksdb import RocksDB

ROWS = [(table, key) for table in range(2) for key in range(2500)]
MakeCache = Callable[..., HostCache]
SMALL = "write_buffer_size=64k;min_write_buffer_number_to_merge=1;max_write_buffer_number=2"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[RocksDB]:
    database = RocksDB(tmp_path / "db", TABLE.width, new_shards=1, options=SMALL)
    yield database
    database.close()


@pytest.fixture
def make_cache(database: RocksDB) -> Iterator[MakeCache]:
    """Caches over the database, or over a tier, which end before it does."""
    with contextlib.ExitStack() as caches:

        def make(sets: int, overflow_rows: int = 10_000, below: HostCache | None = None) -> HostCache:
            cache = HostCache(database.native if below is None else below.native, sets, overflow_rows=overflow_rows)
            caches.callback(cache.close)
            return cache

        yield make


def step(cache: HostCache, rows: list[Row]) -> None:
    cache.step(batch_of(rows))


def some(random: np.random.Generator, count: int = 300) -> list[Row]:
    return [ROWS[at] for at in random.integers(0, len(ROWS), count)]


def check_all(cache: HostCache) -> None:
    for begin in range(0, len(ROWS), 1000):
        cache.peek(batch := batch_of(ROWS[begin : begin + 1000]))
        cache.model.check(batch)


def is_clean(cache: HostCache) -> bool:
    return not any(is_dirty for _, is_dirty in places(cache.native, ROWS).values())


def test_rows_that_are_on_their_way_down_are_served(make_cache: MakeCache) -> None:
    cache, random = make_cache(4, overflow_rows=500), np.random.default_rng(0)
    for _ in range(40):
        step(cache, some(random))
    check_all(cache)
    metrics = cache.metrics()
    assert metrics["bytes_out"] > 0
    assert metrics["write_seconds_max"] > 0
    cache.flush()
    assert is_clean(cache)


def test_an_error_is_raised_by_the_next_call_and_no_row_is_lost(make_cache: MakeCache, tmp_path: Path) -> None:
    cache, random = make_cache(4, overflow_rows=2000), np.random.default_rng(1)
    for _ in range(20):
        step(cache, some(random))
    failures = 0
    with file_size_limit(1 << 16):
        deadline = time.monotonic() + 30
        while failures < 3 and time.monotonic() < deadline:
            try:
                step(cache, some(random))
            except RuntimeError:
                failures += 1
        check_all(cache)  # reading goes on
        with pytest.raises(RuntimeError, match=str(tmp_path)):
            cache.flush()
        check_all(cache)
    assert failures == 3
    with contextlib.suppress(RuntimeError):  # what the thread met before
        step(cache, some(random))
    step(cache, some(random))
    cache.flush()
    check_all(cache)
    assert is_clean(cache)


def test_a_prefetch_raises_what_the_thread_met(make_cache: MakeCache) -> None:
    cache, random = make_cache(4, overflow_rows=1000), np.random.default_rng(2)

    def step_until_it_fails() -> None:
        for _ in range(1000):
            cache.announce(batch := batch_of(some(random)))
            cache.prefetch(batch)
            cache.step(batch)

    with file_size_limit(1 << 16):
        with pytest.raises(RuntimeError):
            step_until_it_fails()
        cache.cancel_announced()
        check_all(cache)


def test_closing_beside_a_busy_thread_ends(make_cache: MakeCache) -> None:
    for seed in range(5):
        cache, random = make_cache(4), np.random.default_rng(seed)
        for _ in range(5):
            step(cache, some(random, 2000))
        cache.close()
        cache.close()


def test_a_large_batch_goes_down_though_no_step_follows(make_cache: MakeCache) -> None:
    cache = make_cache(1, overflow_rows=100)
    step(cache, ROWS)
    while cache.metrics()["overflow_rows"] > 100:
        time.sleep(0.01)


def test_rows_that_gave_way_come_back_without_a_read_while_nothing_needs_their_room(
    make_cache: MakeCache, database: RocksDB
) -> None:
    cache = make_cache(1, overflow_rows=1000)
    for _ in range(3):
        for begin in range(0, 400, 50):
            step(cache, ROWS[begin : begin + 50])
    assert database.metrics()["ssd"]["rows_written"] == 0
    assert cache.metrics()["misses"] == 400


def test_rows_that_gave_way_first_go_down_first_and_half_of_the_overflow_stays(
    make_cache: MakeCache, database: RocksDB
) -> None:
    cache = make_cache(1, overflow_rows=1000)
    for begin in range(0, 1500, 50):
        step(cache, ROWS[begin : begin + 50])
    while cache.metrics()["overflow_rows"] > 500:
        time.sleep(0.01)
    assert cache.metrics()["overflow_rows"] == 500
    is_down = [bool(database.locate(*row)) for row in ROWS[:1500]]
    assert sum(is_down) == 1500 - 64 - 500
    assert all(is_down[:800])
    check_all(cache)


@pytest.mark.parametrize("coming", [20, 30, 50])
def test_rows_that_announced_steps_need_give_way_to_the_rows_of_the_next_step(
    make_cache: MakeCache, coming: int
) -> None:
    cache = make_cache(1, overflow_rows=100)
    large, between, later = (batch_of(rows) for rows in (ROWS[:139], ROWS[1000 : 1000 + coming], ROWS[:139]))
    cache.announce(large, between, later)  # 75 rows find no set
    for batch in (large, between, later):
        if batch is between:
            while not cache.prefetch(between):
                time.sleep(0.01)
        cache.step(batch)
        if batch is not later:
            assert cache.metrics()["overflow_peak_rows"] <= 100 + 1
    check_all(cache)


def test_steps_wait_at_the_cap_of_the_overflow(make_cache: MakeCache) -> None:
    cache, random = make_cache(4, overflow_rows=400), np.random.default_rng(3)
    for _ in range(40):
        step(cache, some(random, 250))
    assert cache.metrics()["overflow_peak_rows"] <= 400 + 2 * 250


@pytest.mark.parametrize("middle", [False, True])
def test_reading_prefetching_and_training_threads(make_cache: MakeCache, middle: bool) -> None:
    """A thread announces and prefetches, one trains, one reads rows that are not trained."""
    below = make_cache(20, overflow_rows=3000) if middle else None
    cache, random = make_cache(8, 3000, below), np.random.default_rng(4)
    fixed = [(0, key) for key in range(5000, 5400)]
    step(cache, fixed)
    reads = Model()
    reads.updates = dict.fromkeys(fixed, 1)
    batches = [batch_of(some(random)) for _ in range(30)]
    announced, ended, wrong = threading.Semaphore(0), threading.Semaphore(4), list[BaseException]()

    def prefetch() -> None:
        _core.use_own_pool(2)
        for batch in batches:
            ended.acquire()
            cache.announce(batch)
            announced.release()
            cache.prefetch(batch)

    def read() -> None:
        try:
            while not done.is_set():
                cache.peek(batch := batch_of(fixed))
                reads.check(batch)
        except BaseException as error:
            wrong.append(error)

    done = threading.Event()
    threads = [threading.Thread(target=task) for task in (prefetch, read)]
    for thread in threads:
        thread.start()
    for batch in batches:
        announced.acquire()
        cache.step(batch)
        ended.release()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    check_all(cache)
    cache.flush()


def test_a_forked_child_lets_go_of_a_cache_with_a_thread(database: RocksDB) -> None:
    cache = cache_over(database.native, 4)
    cache.pin(batch := batch_of(ROWS[:300]))
    Model().write(batch)
    cache.unpin(batch)
    child = os.fork()
    if child == 0:
        del cache
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    cache.close()
