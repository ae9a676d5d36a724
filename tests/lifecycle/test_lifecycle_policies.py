"""Every policy against the plain model: after any calls the table has the same rows. tests/table has their values."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from support.embeddings import DIM, TABLES, make, train
from support.examples import examples
from support.lifecycle_model import Model, NoRoomError, Row, unsigned, written
from support.rows import SPECIAL_KEYS
from support.stores import options
from tierbed import CapacityError, MultiTableEmbedding
from tierbed.engine import _core

KEYS = [*SPECIAL_KEYS, *range(20, 40)]
POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"eviction": "lru", "capacity": 12},
    "lru-sweeps": {"eviction": "lru", "capacity": 12, "ttl_steps": 5},
    "lfu": {"eviction": "lfu", "capacity": 12},
    "ttl": {"eviction": "ttl", "capacity": 20, "ttl_steps": 2},
    "distance_lfu": {"eviction": "distance_lfu", "capacity": 12},
    "sweeps": {"ttl_steps": 3},
    "sweeps-at-capacity": {"ttl_steps": 2, "capacity": 20},
    "sights": {"admission": 3},
    "sights-lfu": {"admission": 2, "eviction": "lfu", "capacity": 9},
    "chance": {"admission": 0.4},
    "chance-lru-sweeps": {"admission": 0.7, "eviction": "lru", "capacity": 9, "ttl_steps": 4},
    "capacity": {"capacity": 25},
}
any_row = st.tuples(st.integers(0, len(TABLES) - 1), st.sampled_from(KEYS))
calls = st.tuples(st.sampled_from(["train", "train", "train", "put", "delete"]), st.lists(any_row, max_size=8))


def ids(rows: list[Row]) -> tuple[Tensor, Tensor]:
    keys = torch.tensor([key - (key >> 63 << 64) for _, key in rows], dtype=torch.int64)
    return keys, torch.tensor([table for table, _ in rows], dtype=torch.int64)


def call(name: str, embedding: MultiTableEmbedding, model: Model, rows: list[Row]) -> None:
    """The same on both, which have room for it or not."""
    keys, tables = ids(rows)
    given = (keys, tables) if name == "delete" else (keys, torch.zeros(len(rows), DIM), tables)
    act = partial(train, embedding, keys, tables) if name == "train" else partial(getattr(embedding, name), *given)
    try:
        getattr(model, name)(rows)
    except NoRoomError:
        with pytest.raises(CapacityError):
            act()
    else:
        act()
    assert written(embedding) == model.rows


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@examples(0.3)
@given(sequence=st.lists(calls, max_size=25), seed=st.integers(-(2**63), 2**64 - 1))
def test_any_calls_leave_the_rows_that_the_policy_says(
    policy: dict[str, Any], sequence: list[tuple[str, list[Row]]], seed: int
) -> None:
    embedding, model = make(options("device", **policy), "sgd", seed=seed), Model(**policy, seed=seed)
    for name, rows in sequence:
        call(name, embedding, model, rows)
        figures = embedding.metrics()["table"]
        assert {name: figures[name] for name in model.counts} == model.counts
        assert (figures["rows"], figures["step"]) == (len(model.rows), model.step)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "distance_lfu", "ttl"])
@pytest.mark.rotated("threads")
def test_many_rows_leave_at_once_in_the_order_of_the_policy(eviction: str, threads: int) -> None:
    """More than a 64th of the capacity is one row: rows leave that the batch alone did not ask for."""
    policy = {"eviction": eviction, "capacity": 1000, **({"ttl_steps": 3} if eviction == "ttl" else {})}
    embedding, model = make(options("device", **policy), "sgd"), Model(**policy)
    random = torch.Generator().manual_seed(1)
    for _ in range(25):
        keys = (torch.rand(200, generator=random) ** 3 * 4000).to(torch.int64).tolist()
        call("train", embedding, model, [(key % 3, key) for key in keys])
    assert model.counts["evicted"] > 500
    assert embedding.metrics()["table"]["evicted"] == model.counts["evicted"]


def test_rows_of_equal_rank_leave_by_table_and_hash() -> None:
    embedding, model = make(options("device", eviction="lru", capacity=640), "sgd"), Model("lru", 640)
    for begin in (0, 640, 1280):
        call("train", embedding, model, [(key % 3, key) for key in range(begin, begin + 640 - begin // 5)])


def test_ages_are_counted_up_to_the_largest_step() -> None:
    """`distance_lfu` squares them: 2^31 steps are as exact as one."""
    embedding, model = make(options("device", eviction="distance_lfu", capacity=8), "sgd"), Model("distance_lfu", 8)
    for step in (1, 2, 3, 2**31 - 1, 2**31, 2**32 - 3):
        embedding.table_handle().table.step = model.step = step
        rows = [(0, key) for key in range(step % 11, step % 11 + 5)]
        model.train(rows)
        train(embedding, *ids(rows))
        assert written(embedding) == model.rows


def embedding_of(**policy: Any) -> MultiTableEmbedding:
    return make(options("device", **policy), "sgd", tables=1)


def test_memory_of_the_policies_is_reported_and_a_capacity_is_counted_in_64_bits() -> None:
    def ledger_bytes(rows: int, **policy: Any) -> int:
        embedding = embedding_of(**policy)
        train(embedding, range(rows))
        assert embedding.size() == (0 if "admission" in policy else rows)
        return int(embedding.metrics()["table"]["ledger_bytes"])

    assert ledger_bytes(9, capacity=10) == 0
    assert 30 * 50_000 <= ledger_bytes(50_000, capacity=2**33, eviction="lru") <= 38.5 * 50_000
    assert ledger_bytes(9, admission=2) >= 16 << 20


def test_a_new_row_that_is_not_kept_is_initial_and_learns_nothing() -> None:
    embedding = embedding_of(admission=3)
    initial = embedding.get([5, 6])
    for _ in range(2):
        assert torch.equal(train(embedding, [5, 6]), initial)
        assert embedding.size() == 0
    assert torch.equal(embedding.get([5, 6]), initial)
    assert embedding.metrics()["device"]["resident_rows"] == 0
    assert torch.equal(train(embedding, [5, 7])[0], initial[0])
    assert written(embedding) == {(0, 5): (1, 3)}
    assert not torch.equal(embedding.get([5]), initial[:1])
    assert embedding.metrics()["table"]["refused"] == 5


def test_chances_are_those_asked_for_and_of_the_seed() -> None:
    one, other = (make(options("device", admission=0.25), "sgd", tables=1, seed=seed) for seed in (1, 2))
    for embedding in (one, other):
        train(embedding, range(20_000))
        assert 4700 < embedding.size() < 5300
    both = len(set(written(one)) & set(written(other)))
    assert 1000 < both < 1500  # a sixteenth of all: the seeds draw by themselves
    train(one, range(20_000))
    assert 8400 < one.size() < 9100  # 1 - 0.75^2: each step draws again


def test_sights_are_forgotten_after_two_million_others() -> None:
    embedding = embedding_of(admission=2)
    early = torch.arange(1000)
    train(embedding, early)
    others = torch.arange(2**40, 2**40 + 2_400_000)
    for part in others.split(200_000):
        train(embedding, part)
    assert embedding.size() < 0.01 * len(others)  # taken for rows that were seen
    before = embedding.size()
    train(embedding, early)
    assert embedding.size() - before < 300
    train(embedding, early)
    assert {row[1] for row in written(embedding)} >= set(unsigned(early))


def test_a_batch_above_the_capacity_is_not_told_to_evict_earlier() -> None:
    embedding = embedding_of(capacity=100, eviction="ttl", ttl_steps=10)
    with pytest.raises(CapacityError, match=r"capacity=100 of embedding 'rows', eviction='ttl'.*or split the batch"):
        train(embedding, range(101))
    train(embedding, range(100))
    with pytest.raises(CapacityError, match="or lower ttl_steps=10"):
        train(embedding, range(100, 101))


def ledger(ttl_steps: int = 0) -> _core.Ledger:
    return _core.Ledger(eviction="none", capacity=None, ttl_steps=ttl_steps, min_lookups=0, probability=1.0, seed=0)


def steps_of(rows: _core.Ledger, steps: Iterable[int]) -> dict[tuple[int, int], int]:
    """The rows of a ledger of `ttl_steps=0`, and the step of each, one of `steps`."""
    found = dict[tuple[int, int], int]()
    for step in sorted(set(steps), reverse=True):  # the earlier, the fewer steps after it find the row
        tables, keys = rows.find_expired(step + 1)
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
            rows.add_rows(tables, keys, np.ones(len(keys), np.uint32), np.full(len(keys), step, np.uint32))
            kept |= dict.fromkeys(chosen, step)
        assert rows.num_rows == len(kept)
        assert steps_of(rows, kept.values()) == {(0, int(CROWDED[row])): step for row, step in kept.items()}
    assert rows.erase(np.zeros(60, np.uint32), CROWDED) == len(kept)


def test_many_rows_and_what_they_take(threads: int) -> None:
    random = np.random.default_rng(0)
    rows = ledger()
    keys = np.unique(random.integers(0, 2**64, 60_000, np.uint64))
    tables = (keys % np.uint64(5)).astype(np.uint32)
    steps = random.integers(0, 2**32, len(keys), np.uint32)
    rows.add_rows(tables, keys, np.ones(len(keys), np.uint32), steps)
    assert 30 <= rows.bytes / len(keys) <= 38.5
    gone = random.permutation(len(keys))[:40_000]
    assert rows.erase(tables[gone], keys[gone]) == len(gone)
    assert rows.num_rows == len(keys) - len(gone)
    there = np.delete(np.arange(len(keys)), gone)
    for now in (1, 2**30, 2**31, 3 * 2**30, 2**32 - 1):
        before = there[steps[there] < now]
        found = np.sort(np.stack([part.astype(np.uint64) for part in rows.find_expired(now)]))
        np.testing.assert_array_equal(found, np.sort(np.stack([tables[before].astype(np.uint64), keys[before]])))
    assert rows.erase(tables + np.uint32(1), keys) == 0
    assert rows.erase(tables, keys) == len(there)
    assert rows.num_rows == 0


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
