"""Rows that come and go are the same on every store, for any number of threads, and across runs and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.embeddings import contents, make, train
from support.killed import copy_as_killed
from support.lifecycle_model import POLICIES, Model, NoRoomError, batches, written
from support.small_snapshots import keys_of_few_files
from support.stores import STORES, options
from tierbed import CapacityError, MultiTableEmbedding, StoreError
from tierbed.engine.options.lookup import Lookup

DETERMINED = [name for name in POLICIES if name != "sights"]  # by the rows: counts of admission restart with each run
KEYS = torch.stack([keys_of_few_files(212, table) for table in range(3)])
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
stores = pytest.mark.parametrize("store", STORES)


def go_on(embedding: MultiTableEmbedding, begin: int, end: int) -> list[Tensor]:
    """Steps, puts and deletes; what the steps saw."""
    seen = []
    for number, (at, tables) in [*enumerate(batches())][begin:end]:
        ids = KEYS[tables, at]
        seen.append(train(embedding, ids, tables))
        if number % 4 == 1:
            embedding.put(KEYS[tables, at + 7][:20], torch.full((20, 5), float(number)), tables[:20])
        if number % 4 == 2:
            embedding.delete(ids[:15], tables[:15])
        assert embedding.size() == len(contents(embedding))
    return seen


def state(embedding: MultiTableEmbedding) -> tuple[bytes, dict[str, int]]:
    figures = embedding.metrics()["table"]
    return contents(embedding).tobytes(), {
        name: figures[name] for name in ("refused", "evicted", "expired", "deleted", "rows", "step")
    }


@policies
@stores
@pytest.mark.rotated("store")
def test_rows_do_not_depend_on_the_store(tmp_path: Path, policy: dict[str, Any], store: str) -> None:
    with make(options("device", **policy), "adam") as first, make(options(store, tmp_path, **policy), "adam") as second:
        expected = go_on(first, 0, 12)
        for row, other in zip(go_on(second, 0, 12), expected, strict=True):
            assert torch.equal(row, other)
        assert state(second) == state(first)
        assert sum(state(first)[1][name] for name in ("refused", "evicted", "expired")) > 50


@policies
def test_rows_do_not_depend_on_threads(policy: dict[str, Any], native_threads: Callable[[int], None]) -> None:
    found = set()
    for threads in (1, 16):
        native_threads(threads)
        with make(options("device", **policy), "adagrad") as embedding:
            go_on(embedding, 0, 8)
            found.add(repr(state(embedding)))
    assert len(found) == 1


@pytest.mark.parametrize("policy", DETERMINED)
@stores
@pytest.mark.rotated("store")
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(tmp_path: Path, policy: str, store: str) -> None:
    with make(options("device", **POLICIES[policy]), "adam") as whole:
        expected = go_on(whole, 0, 12)
        final = contents(whole).tobytes()
    seen = []
    for begin in range(0, 12, 4):
        with make(options(store, tmp_path, **POLICIES[policy]), "adam") as part:
            seen += go_on(part, begin, begin + 4)
    assert all(torch.equal(row, other) for row, other in zip(seen, expected, strict=True))
    with make(options(store, tmp_path, **POLICIES[policy]), "adam") as last:
        assert contents(last).tobytes() == final
        assert last.size() == len(contents(last))


@pytest.mark.parametrize("policy", DETERMINED)
@pytest.mark.parametrize("store", ["host", "cached_host", "ssd_host"])
@pytest.mark.rotated("store")
def test_a_snapshot_holds_the_rows_that_are_there_and_brings_them_back(tmp_path: Path, policy: str, store: str) -> None:
    with make(options(store, tmp_path, **POLICIES[policy]), "adam") as embedding:
        go_on(embedding, 0, 5)
        embedding.save_snapshot("half")
        there = contents(embedding).tobytes()
        expected, final = go_on(embedding, 5, 12), contents(embedding).tobytes()
        assert final != there
        embedding.load_snapshot("half")
        assert contents(embedding).tobytes() == there
        again = go_on(embedding, 5, 12)
        assert all(torch.equal(row, other) for row, other in zip(again, expected, strict=True))
        assert contents(embedding).tobytes() == final


def test_sights_begin_anew_with_a_run_and_a_snapshot(tmp_path: Path) -> None:
    how = options("host", tmp_path, admission=3)
    with make(how, "sgd") as embedding:
        train(embedding, [1, 2])
        train(embedding, [1, 2])
        embedding.save_snapshot("s")
        embedding.load_snapshot("s")
        train(embedding, [1])
        assert embedding.size() == 0
    with make(how, "sgd") as embedding:
        train(embedding, [1, 2])
        train(embedding, [1])
        train(embedding, [1])
        assert {row[1] for row in written(embedding)} == {1}


@stores
def test_a_policy_that_begins_with_a_later_run_knows_the_rows(tmp_path: Path, store: str) -> None:
    """Of more rows than its capacity, those above it leave at the next new row."""
    model = Model("lfu", 30)

    def both(embedding: MultiTableEmbedding, keys: range) -> None:
        model.train((0, key) for key in keys)
        train(embedding, keys)

    with make(options(store, tmp_path), "sgd") as embedding:
        for begin in (0, 3, 11, 30):
            both(embedding, range(begin, begin + 12))
    with make(options(store, tmp_path, capacity=30, eviction="lfu"), "sgd") as embedding:
        both(embedding, range(35, 42))  # existing rows stay
        for begin in (20, 40, 5):
            both(embedding, range(begin, begin + 12))
            assert written(embedding) == model.rows
        both(embedding, range(90, 120))
        assert written(embedding) == model.rows
    with make(options(store, tmp_path, capacity=20, eviction="ttl", ttl_steps=5), "sgd") as embedding:
        train(embedding, range(90, 105))
        with pytest.raises(CapacityError, match=r"capacity=30.*ttl_steps=5"):
            train(embedding, [500])
        assert embedding.size() == 30


@pytest.mark.parametrize("policy", [{}, {"eviction": "ttl", "ttl_steps": 5}, {"eviction": "lru"}])
def test_stored_rows_above_the_capacity_are_told_where_none_leaves(
    tmp_path: Path, policy: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with make(options("host", tmp_path), "sgd") as embedding:
        train(embedding, range(40))
    with make(options("host", tmp_path, capacity=40, **policy), "sgd") as embedding:
        train(embedding, range(40))
    assert caplog.messages == []
    with make(options("host", tmp_path, capacity=20, **policy), "sgd") as embedding:
        assert embedding.size() == 40
    warning = "embedding 'rows': 40 stored rows exceed capacity=20; all of them stay"
    said = [message[: len(warning)] for message in caplog.messages]
    assert said == ([] if policy.get("eviction") == "lru" else [warning])


@policies
@stores
@pytest.mark.rotated("store")
def test_a_step_that_is_released_changes_no_row_that_stays(tmp_path: Path, policy: dict[str, Any], store: str) -> None:
    """It inserts no row, and later steps have room as if it had never been requested."""
    with make(options(store, tmp_path, **policy), "adam") as embedding:
        go_on(embedding, 0, 4)
        before = {row.tobytes() for row in contents(embedding)}
        sights = embedding.metrics()["table"]["refused"]
        others = torch.arange(1000, 1060)
        pinned = embedding.pin([Lookup(others, others % 3)])
        assert torch.equal(pinned.gather(0), embedding.get(others, others % 3))
        embedding.unpin_rows()
        after = contents(embedding)
        assert {row.tobytes() for row in after} <= before
        assert embedding.metrics()["table"]["refused"] == sights
        assert embedding.size() == len(after)
        with pytest.raises(StoreError, match="no longer pinned"):
            pinned.gather(0)
        go_on(embedding, 4, 12)


@stores
def test_a_row_that_left_and_comes_back_begins_anew(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path, capacity=20, eviction="lru"), "adagrad") as embedding:
        initial = embedding.get(range(20), 0)
        for begin in (0, 0, 0, *range(100, 200, 20)):
            train(embedding, range(begin, begin + 20))
        assert torch.equal(embedding.get(range(20), 0), initial)
        assert torch.equal(train(embedding, range(20)), initial)
        with make(options("device"), "adagrad", name="new") as fresh:
            fresh.table_handle().table.step = embedding.table_handle().table.step - 1
            train(fresh, range(20))
            assert contents(embedding).tobytes() == contents(fresh).tobytes()


@stores
def test_a_batch_that_finds_no_room_leaves_everything(tmp_path: Path, store: str) -> None:
    policy = {"capacity": 50, "eviction": "lfu", "admission": 0.9}
    model = Model(**policy)
    with make(options(store, tmp_path, **policy), "sgd") as embedding:
        model.train((0, key) for key in range(40))
        train(embedding, range(40))
        before = state(embedding)
        with pytest.raises(NoRoomError):
            model.train((0, key) for key in range(100, 180))
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"75 new rows.*there is room for 50"):
                train(embedding, range(100, 180))
            assert state(embedding) == before
        model.train((0, key) for key in range(100, 130))
        train(embedding, range(100, 130))
        assert written(embedding) == model.rows


@stores
def test_an_announced_step_that_finds_no_room_is_in_nobodys_way(tmp_path: Path, store: str) -> None:
    policy = {"eviction": "lru", "capacity": 90, "ttl_steps": 8}
    steps = [*batches()]
    large = torch.arange(500, 600), torch.zeros(100, dtype=torch.int64)
    steps[3:3] = [large] * 2
    steps[7:7] = [large]
    with make(options("device", **policy), "adam") as plain, make(options(store, tmp_path, **policy), "adam") as hinted:
        for step in steps[:9]:
            hinted.prefetch(*step)
        for number, step in enumerate(steps):
            if step is large:
                for embedding in (plain, hinted):
                    with pytest.raises(CapacityError):
                        train(embedding, *step)
            else:
                assert torch.equal(train(hinted, *step), train(plain, *step))
            if number == 9:
                for coming in steps[10:]:
                    hinted.prefetch(*coming)
            assert hinted.size() == plain.size()
        assert contents(hinted).tobytes() == contents(plain).tobytes()


def test_after_an_unclean_end_lost_puts_and_deletes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    running, ended = tmp_path / "running", tmp_path / "ended"
    with make(options("ssd", running), "sgd") as embedding:
        train(embedding, range(20))
        embedding.save_snapshot("s")
        embedding.put([30], torch.ones(1, 5), [0])
        assert embedding.delete(range(5), 0) == 5
        copy_as_killed(running, ended)
    with make(options("ssd", ended), "sgd") as embedding:
        assert embedding.size() == 20
    assert "'s', of step 1; no training step is lost, but writes after the snapshot by put or delete" in caplog.text
