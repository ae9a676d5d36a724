"""Rows have the same bits on every store and for any number of threads, and no store loses one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from support.embeddings import DIM, contents, make, train
from support.optimizers import OPTIMIZERS
from support.refusals import check_refusal
from support.stores import ONE_SET_MB, STORES, options
from tierbed import CapacityError, MultiTableEmbedding, StoreError
from tierbed.engine._core import WAYS
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.store import rocksdb

pytestmark = pytest.mark.tier

KEYS = [0, 1, 2, 3, 10, 11, -1, -2, -(2**63), -(2**63) + 1, 2**63 - 1, 2**63 - 2, 2**32, 2**32 - 1, -(2**31)]


@pytest.fixture(autouse=True)
def two_rows_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of RocksDB comes in many chunks though tables are small."""
    monkeypatch.setattr(rocksdb, "SCAN_BYTES", 200)


def batches(steps: int = 12, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 0 to 120 ids over about 250 rows of three tables, the extreme keys among them."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor(KEYS)
    result = []
    for step in range(steps):
        size = (120, 40, 7, 0)[step % 4]
        ids = torch.randint(-40, 40, (size,), generator=generator)
        some = torch.randint(0, 3, (size,), generator=generator) == 0
        ids[some] = special[torch.randint(0, len(special), (int(some.sum()),), generator=generator)]
        result.append((ids, torch.randint(0, 3, (size,), generator=generator)))
    return result


def run(embedding: MultiTableEmbedding, **how: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """What every step saw and all that the table holds in the end."""
    with embedding:
        seen = [train(embedding, *batch) for batch in batches(**how)]
        rows = contents(embedding)
        assert embedding.size() == len(rows)
        figures = embedding.metrics()["table"]
        assert (figures["rows"], figures["step"]) == (len(rows), len(seen))
    return seen, rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_do_not_depend_on_the_store(tmp_path: Path, optimizer: str) -> None:
    expected, rows = run(make(options("device"), optimizer))
    assert len(rows) > 200
    for store in STORES[1:]:
        seen, others = run(make(options(store, tmp_path), optimizer, name=store))
        for step, (a, b) in enumerate(zip(seen, expected, strict=True)):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (store, step)
        assert others.tobytes() == rows.tobytes(), store


@pytest.mark.parametrize("store", STORES)
def test_rows_do_not_depend_on_threads(tmp_path: Path, store: str, native_threads: Callable[[int], None]) -> None:
    results = []
    for threads in (1, 2, 16):
        native_threads(threads)
        # enough sets that threads share the cache, and few enough that rows are evicted
        budget = 70 * ONE_SET_MB if threads == 16 else ONE_SET_MB
        results.append(run(make(options(store, tmp_path, budget), "adam", name=f"threads{threads}"), steps=6))
    for seen, rows in results[1:]:
        assert [row.numpy().tobytes() for row in seen] == [row.numpy().tobytes() for row in results[0][0]]
        assert rows.tobytes() == results[0][1].tobytes()


@pytest.mark.parametrize("store", STORES)
def test_reads_between_steps_and_within_one_change_no_row(tmp_path: Path, store: str) -> None:
    _, expected = run(make(options("device"), "adam"))
    unknown = torch.arange(10**6, 10**6 + 100)
    with make(options(store, tmp_path), "adam") as embedding:
        for ids, tables in batches():
            before, size = contents(embedding), embedding.size()
            initial = embedding.get(unknown, 1)
            with torch.no_grad():
                assert torch.equal(embedding(unknown, torch.tensor(1)), initial)
            assert len(list(embedding)) == embedding.size() == size
            assert contents(embedding).tobytes() == before.tobytes()
            pinned = embedding.pin([Lookup(ids, tables)])
            rows = pinned.gather(0)
            assert torch.equal(embedding.get(ids, tables), rows)
            embedding.get(torch.arange(500), 2)
            phase = (ids % 1009 + tables).to(torch.float32)[..., None] + torch.arange(DIM)
            pinned.update([torch.sin(phase) + rows / 8])
        assert contents(embedding).tobytes() == expected.tobytes()


@pytest.mark.parametrize("store", ["cached_host", "ssd", "ssd_host"])
def test_a_cache_of_one_set_evicts_and_overflows(tmp_path: Path, store: str) -> None:
    """Guards the other tests: with these budgets rows are written back and fetched again."""
    with make(options(store, tmp_path), "adam") as embedding:
        for ids, tables in batches():
            train(embedding, ids, tables)
        device = embedding.metrics()["device"]
        assert device["capacity"] == WAYS
        assert device["resident_rows"] <= WAYS
        assert device["bytes"] <= ONE_SET_MB * 2**20
        assert min(device[name] for name in ("hits", "misses", "evictions_dirty", "overflows")) > 0
        if store == "ssd_host":
            assert embedding.metrics()["host"]["evictions_dirty"] > 0
        if store != "cached_host":
            contents(embedding)  # rows go down behind the steps: now all did
            assert embedding.metrics()["ssd"]["rows_written"] > 200


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("key_type", [torch.int32, torch.int64, torch.uint64])
def test_extreme_and_neighbouring_keys_are_rows_of_their_own(tmp_path: Path, store: str, key_type: torch.dtype) -> None:
    limits = torch.iinfo(key_type)
    keys = [0, 1, 2, 3, 2**20, 2**20 + 1, limits.max - 1, limits.max]
    keys += [2**63 - 1, 2**63] if key_type is torch.uint64 else [-1, -2, limits.min, limits.min + 1]
    in_all_stores = torch.tensor(keys, dtype=key_type).repeat(3), torch.arange(3).repeat_interleave(len(keys))
    with make(options(store, tmp_path), "sgd", key_type=key_type) as embedding:
        train(embedding, *in_all_stores, grad=0)
        assert embedding.size() == 3 * len(keys)
        values = torch.arange(3.0 * len(keys))[:, None].expand(-1, DIM).contiguous()
        embedding.put(in_all_stores[0], values, in_all_stores[1])
        assert torch.equal(embedding.get(*in_all_stores), values)
        assert embedding.size() == 3 * len(keys)
        found = {(table, key): row[0].item() for table, key, row in embedding}
        assert found == {(t, key): float(len(keys) * t + i) for t in range(3) for i, key in enumerate(keys)}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("padding", [3, -1, -(2**63)])
def test_padding_is_zeros_gets_no_gradient_and_is_never_stored(tmp_path: Path, store: str, padding: int) -> None:
    with make(options(store, tmp_path), "adam", padding_idx=padding) as embedding:
        ids = torch.tensor([[padding, 1], [2, padding]])
        rows = train(embedding, ids, torch.tensor([0, 2]), grad=1.0)
        train(embedding, [padding] * 40, 1, grad=1.0)
        assert not rows[[0, 1], [0, 1]].any()
        assert rows[[0, 1], [1, 0]].all()
        assert not embedding.get([padding, padding, padding], [0, 1, 2]).any()
        assert [(table, key) for table, key, _ in embedding].count((0, padding)) == 0
        assert embedding.size() == 2


@pytest.mark.parametrize("store", STORES)
def test_a_full_capacity_raises_in_the_same_step_and_changes_nothing(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path, capacity=50), "adam") as embedding:
        train(embedding, range(49))
        before = contents(embedding)
        refused = CapacityError, "capacity=50", "'rows'", "2 new rows", "room for 1", "raise capacity"
        for _ in range(2):
            check_refusal((lambda: train(embedding, [0, 1000, 1000, 2000]), *refused))
        check_refusal((lambda: embedding.put([1000, 2000], torch.zeros(2, DIM), 0), *refused))
        assert contents(embedding).tobytes() == before.tobytes()
        assert (embedding.size(), embedding.metrics()["table"]["step"]) == (49, 1)
        train(embedding, [0, 1000, 1000])  # exactly full
        for ids, table in ((2000, 0), (1, 1)):
            check_refusal((lambda: train(embedding, [ids], table), CapacityError, "1 new rows", "room for 0"))  # noqa: B023
        train(embedding, range(49))  # old rows still train
        embedding.get(range(5000, 6000), 0)
        rows = contents(embedding)
        assert (len(rows), embedding.size(), set(rows["step"].tolist())) == (50, 50, {2, 3})


@pytest.mark.parametrize("store", STORES)
def test_a_step_that_fails_between_prefetch_and_update_loses_nothing(tmp_path: Path, store: str) -> None:
    _, expected = run(make(options("device"), "adam"))
    embedding = make(options(store, tmp_path), "adam")
    for step, (ids, tables) in enumerate(batches()):
        others = torch.arange(step * 30, step * 30 + 60)
        stale = embedding.pin([Lookup(others, others % 3), Lookup(ids, tables)])
        if step % 2:  # else the next prefetch drops the pin
            embedding.unpin_rows()
            embedding.unpin_rows()
        train(embedding, ids, tables)
        with pytest.raises(StoreError, match="no longer pinned"):
            stale.update([torch.ones(60, DIM), torch.ones(len(ids), DIM)])
    assert embedding.size() == len(expected)
    assert contents(embedding).tobytes() == expected.tobytes()
    embedding.close()


@pytest.mark.parametrize("store", STORES)
def test_a_nan_gradient_spoils_its_row_alone(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adam") as embedding:
        grad = torch.ones(40, DIM)
        grad[3, 2] = torch.nan
        train(embedding, range(40), grad=grad)
        nan = embedding.get(range(40), 0).isnan()
        assert nan[3, 2]
        assert nan.sum() == 1
