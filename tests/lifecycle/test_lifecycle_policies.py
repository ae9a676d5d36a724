"""Every policy against the plain model: after any calls the table has the same rows, with the values of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.embeddings import TABLES, make, rows_by_key, train
from support.examples import examples
from support.lifecycle_model import Model, NoRoomError, Row, unsigned, written
from support.rows import SPECIAL_KEYS
from support.stores import options
from tierbed import CapacityError, MultiTableEmbedding

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


def values_of(rows: list[Row], call: int) -> Tensor:
    return torch.arange(len(rows) * 5, dtype=torch.float32).reshape(-1, 5) + call


class Checked:
    """An embedding, the model of which rows it holds, and one without a policy that is given those rows alone."""

    def __init__(self, policy: dict[str, Any], seed: int) -> None:
        self.embedding = make(options("device", **policy), "adagrad", seed=seed)
        self.model = Model(**policy, seed=seed)
        self.plain = make(options("device"), "adagrad", name="plain", seed=seed)
        self.calls = 0

    def train(self, rows: list[Row]) -> None:
        before = dict(self.model.rows)
        expected = self.plain.get(*ids(rows))
        try:
            refused = self.model.train(rows)
        except NoRoomError:
            with pytest.raises(CapacityError, match="Nothing was changed"):
                train(self.embedding, *ids(rows))
            return
        assert torch.equal(train(self.embedding, *ids(rows)), expected)
        kept = [row for row in rows if row not in refused]
        train(self.plain, *ids(kept))
        self._forget(before)

    def put(self, rows: list[Row]) -> None:
        before = dict(self.model.rows)
        values = values_of(rows, self.calls)
        try:
            self.model.put(rows)
        except NoRoomError:
            with pytest.raises(CapacityError):
                self.embedding.put(ids(rows)[0], values, ids(rows)[1])
            return
        for embedding in (self.embedding, self.plain):
            embedding.put(ids(rows)[0], values, ids(rows)[1])
        self._forget(before)

    def delete(self, rows: list[Row]) -> None:
        count = self.model.delete(rows)
        assert self.embedding.delete(*ids(rows)) == self.plain.delete(*ids(rows)) == count

    def check(self) -> None:
        self.calls += 1
        assert written(self.embedding) == self.model.rows
        assert rows_by_key(self.embedding) == rows_by_key(self.plain)
        assert self.embedding.size() == len(self.model.rows)
        figures = self.embedding.metrics()["table"]
        assert {name: figures[name] for name in self.model.counts} == self.model.counts
        assert (figures["rows"], figures["step"]) == (len(self.model.rows), self.model.step)

    def _forget(self, before: dict[Row, Any]) -> None:
        gone = list(set(before) - set(self.model.rows))
        assert self.plain.delete(*ids(gone)) == len(gone)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@examples(0.3)
@given(sequence=st.lists(calls, max_size=25), seed=st.integers(-(2**63), 2**64 - 1))
def test_any_calls_leave_the_rows_that_the_policy_says(
    policy: dict[str, Any], sequence: list[tuple[str, list[Row]]], seed: int
) -> None:
    checked = Checked(policy, seed)
    for name, rows in sequence:
        getattr(checked, name)(rows)
        checked.check()


@pytest.mark.parametrize("eviction", ["lru", "lfu", "distance_lfu", "ttl"])
@pytest.mark.rotated("threads")
def test_many_rows_leave_at_once_in_the_order_of_the_policy(eviction: str, threads: int) -> None:
    """More than a 64th of the capacity is one row: rows leave that the batch alone did not ask for."""
    policy = {"eviction": eviction, "capacity": 1000, **({"ttl_steps": 3} if eviction == "ttl" else {})}
    embedding, model = make(options("device", **policy), "sgd"), Model(**policy)
    random = torch.Generator().manual_seed(1)
    for _ in range(40):
        rows = [(int(key) % 3, int(key)) for key in (torch.rand(200, generator=random) ** 3 * 4000).to(torch.int64)]
        try:
            model.train(rows)
        except NoRoomError:
            with pytest.raises(CapacityError):
                train(embedding, *ids(rows))
            continue
        train(embedding, *ids(rows))
        assert written(embedding) == model.rows
    assert model.counts["evicted"] > 1000
    assert embedding.metrics()["table"]["evicted"] == model.counts["evicted"]


def test_rows_of_equal_rank_leave_by_table_and_hash() -> None:
    embedding, model = make(options("device", eviction="lru", capacity=640), "sgd"), Model("lru", 640)
    for begin in (0, 640, 1280):
        rows = [(key % 3, key) for key in range(begin, begin + 640 - begin // 5)]
        model.train(rows)
        train(embedding, *ids(rows))
        assert written(embedding) == model.rows


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


def test_a_capacity_is_full_at_that_many_rows() -> None:
    embedding = embedding_of(capacity=100, eviction="lru")
    train(embedding, range(100))
    assert (embedding.size(), embedding.metrics()["table"]["evicted"]) == (100, 0)
    train(embedding, range(99, 101))
    assert (embedding.size(), embedding.metrics()["table"]["evicted"]) == (100, 1)
    train(embedding, range(101, 151))
    assert (embedding.size(), embedding.metrics()["table"]["evicted"]) == (100, 51)
    assert {key for _, key in written(embedding)} >= set(range(99, 151))


@pytest.mark.parametrize("eviction", ["none", "lru"])
def test_a_batch_beyond_the_capacity_changes_nothing(eviction: str) -> None:
    embedding = embedding_of(capacity=100, eviction=eviction, ttl_steps=10)
    train(embedding, range(60))
    before = written(embedding)
    with pytest.raises(CapacityError, match=r"101 new rows.*there is room for"):
        train(embedding, range(1000, 1101))
    assert written(embedding) == before
    assert embedding.metrics()["table"]["evicted"] == 0
    if eviction == "lru":
        train(embedding, range(1000, 1100))
        assert {key for _, key in written(embedding)} == set(range(1000, 1100))


def test_memory_of_the_policies_is_reported() -> None:
    assert embedding_of(capacity=10).metrics()["table"]["ledger_bytes"] == 0
    embedding = embedding_of(ttl_steps=10)
    train(embedding, range(50_000))
    assert 30 * 50_000 <= embedding.metrics()["table"]["ledger_bytes"] <= 38.5 * 50_000
    assert embedding_of(admission=2).metrics()["table"]["ledger_bytes"] >= 16 << 20


def test_a_capacity_is_counted_in_64_bits() -> None:
    embedding = embedding_of(capacity=2**33, eviction="lru")
    train(embedding, range(50))
    embedding.put([7, 99], torch.ones(2, 5), 0)
    assert (embedding.size(), embedding.metrics()["table"]["evicted"]) == (51, 0)


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


def test_put_is_always_admitted() -> None:
    embedding = embedding_of(admission=9)
    embedding.put([1, 2], torch.zeros(2, 5))
    assert embedding.size() == 2
    train(embedding, [1, 3])
    assert {row[1] for row in written(embedding)} == {1, 2}


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
