"""Rows, hits and misses of each table: those of a model in Python, whatever the store, and kept across runs."""

from __future__ import annotations

import copy
import os
import signal
from collections import Counter
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from support.embeddings import TABLES, make, train
from support.examples import examples
from support.lifecycle_model import Model, Row
from support.stores import STORES, options
from support.warm import Child
from tierbed import MultiTableEmbedding
from tierbed.engine.durable import read_record_bytes, seal, unseal
from tierbed.engine.store.table_counts import TABLE_ROWS

every_store = pytest.mark.parametrize("store", STORES)
few_runs = examples(0.15, suppress_health_check=[HealthCheck.function_scoped_fixture])
POLICIES = [
    {},
    {"eviction": "lru", "capacity": 60},
    {"eviction": "lfu", "capacity": 60, "ttl_steps": 4},
    {"admission": 0.5, "ttl_steps": 2},
]
ENOUGH_MB = 1.0  # for all rows of a test

rows_of_a_call = st.lists(st.tuples(st.integers(0, len(TABLES) - 1), st.integers(0, 99)), min_size=1, max_size=30)
calls = st.one_of(
    st.tuples(st.sampled_from(["train", "train", "train", "announced", "put", "read", "delete"]), rows_of_a_call),
    st.tuples(st.sampled_from(["save", "load", "reopen"]), st.just([])),
)


def call(embedding: MultiTableEmbedding, kind: str, rows: list[Row]) -> None:
    tables, ids = torch.tensor(rows).T
    if kind == "announced":
        embedding.prefetch(ids, tables)
    if kind in ("train", "announced"):
        train(embedding, ids, tables)
    elif kind == "put":
        embedding.put(ids, torch.ones(len(ids), embedding.dim), tables)
    elif kind == "read":
        embedding.get(ids, tables)
    else:
        embedding.delete(ids, tables)


def counted(embedding: MultiTableEmbedding) -> dict[str, list[int]]:
    """What `metrics` has of the tables, once it is known to sum to the rest."""
    metrics, store = embedding.metrics(), embedding.table_handle().table.prepare_top_tier()
    tables, top = metrics["tables"], next(iter(store.metrics().values()))  # as the store counts all of them together
    assert list(tables) == list(embedding.spec.labels)
    found = {name: [numbers[name] for numbers in tables.values()] for name in ("rows", "hits", "misses")}
    assert sum(found["rows"]) == metrics["table"]["rows"] == embedding.size()
    assert (sum(found["hits"]), sum(found["misses"])) == (top["hits"], top["misses"])
    return found


def by_table(counts: Counter[int]) -> list[int]:
    return [counts[table] for table in range(len(TABLES))]


@every_store
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(policy) or "all")
@few_runs
@given(st.lists(calls, min_size=1, max_size=12))
@pytest.mark.rotated("policy")
def test_rows_of_each_table_are_those_that_were_written_and_did_not_leave(store, policy, script) -> None:
    model, saved = Model(**policy), None
    with TemporaryDirectory() as folder:
        embedding = make(options(store, Path(folder), **policy), "adagrad")
        for number, (kind, rows) in enumerate(script):
            if kind == "reopen":
                embedding.close()
                embedding = make(options(store, Path(folder), **policy), "adagrad")
            elif kind == "save":
                embedding.save_snapshot(f"s{number}")
                saved = f"s{number}", copy.deepcopy(model)
            elif kind == "load" and saved is not None:
                embedding.load_snapshot(saved[0])
                model = copy.deepcopy(saved[1])
            elif rows:
                call(embedding, kind, rows)
                if kind != "read":
                    getattr(model, "train" if kind == "announced" else kind)(rows)
            assert counted(embedding)["rows"] == by_table(Counter(table for table, _ in model.rows))
        embedding.close()


@every_store
@few_runs
@given(st.lists(calls, min_size=1, max_size=12))
def test_each_row_that_is_asked_for_is_a_hit_or_a_miss_of_its_table(store, script) -> None:
    there: set[Row] = set()  # in the top tier, which has room for all
    hits, misses = Counter[int](), Counter[int]()
    with TemporaryDirectory() as folder, make(options(store, Path(folder), ENOUGH_MB), "adagrad") as embedding:
        for kind, rows in script:
            if not rows:
                continue
            call(embedding, kind, rows)
            for row in set(rows):
                (hits if row in there else misses)[row[0]] += 1
            if kind == "delete":
                there -= set(rows)
            elif kind != "read":
                there |= set(rows)
            found = counted(embedding)
            assert (found["hits"], found["misses"]) == (by_table(hits), by_table(misses))


def trained(embedding: MultiTableEmbedding, ahead: int) -> dict[str, list[int]]:
    random = torch.Generator().manual_seed(5)
    batches = [(torch.randint(0, 400, (300,), generator=random), torch.arange(300) % 3) for _ in range(8)]
    for batch in batches[:ahead]:
        embedding.prefetch(*batch)
    for number, batch in enumerate(batches):
        if ahead and number + ahead < len(batches):
            embedding.prefetch(*batches[number + ahead])
        train(embedding, *batch)
    embedding.get(torch.arange(500), torch.arange(500) % 3)
    return counted(embedding)


@every_store
def test_counts_depend_on_no_threads_and_no_prefetch(tmp_path, store, native_threads) -> None:
    for budget_mb, depths in ((0.02, (0,)), (ENOUGH_MB, (0, 3))):
        if "ssd" in store and budget_mb != ENOUGH_MB:
            continue  # the writing thread decides when a row has left
        found = []
        for threads, ahead in product((1, 16), depths):
            native_threads(threads)
            path = tmp_path / f"{budget_mb}-{threads}-{ahead}"
            with make(options(store, path, budget_mb), "adagrad") as embedding:
                found.append(trained(embedding, ahead))
        assert all(other == found[0] for other in found)
        assert min(found[0]["hits"]) > 0


def _killed_after_a_snapshot(store: str, path: Path) -> None:
    embedding = make(options(store, path), "adagrad")
    train(embedding, range(70), [number % 2 for number in range(70)])
    embedding.save_snapshot("base")
    train(embedding, range(70, 300), 2)
    embedding.metrics()
    os.kill(os.getpid(), signal.SIGKILL)


@every_store
def test_a_killed_run_leaves_the_counts_of_its_snapshot(tmp_path, store) -> None:
    assert Child(_killed_after_a_snapshot, store, tmp_path).wait() == -signal.SIGKILL
    for _ in range(2):
        with make(options(store, tmp_path), "adagrad") as embedding:
            assert counted(embedding)["rows"] == [35, 35, 0]


@pytest.mark.parametrize("store", ["ssd", "ssd_host"])
@pytest.mark.parametrize(("wrong", "capacity"), [(None, None), ([1, 2, 3], 1000), ([40, -1, 30], None), ("all", 1000)])
@pytest.mark.rotated("store")
def test_a_mark_without_counts_of_its_rows_is_made_good_by_reading_them(
    tmp_path, store, capacity, wrong, monkeypatch
) -> None:
    policy = {} if capacity is None else {"eviction": "lru", "capacity": capacity}
    marker = tmp_path / "rows" / "MARK"
    with make(options(store, tmp_path, **policy), "adagrad") as embedding:
        train(embedding, range(69), [number % 3 for number in range(69)])
    with make(options(store, tmp_path, **policy), "adagrad") as embedding, monkeypatch.context() as patch:
        assert embedding.size() == 69
        patch.setattr(embedding.table_handle().table, "scan", None)  # the store knows them without
        assert counted(embedding)["rows"] == [23, 23, 23]
    content: dict[str, Any] = unseal(read_record_bytes(marker))
    assert content.pop(TABLE_ROWS) == [23, 23, 23]
    marker.write_bytes(seal(content if wrong is None else {**content, TABLE_ROWS: wrong}))
    with make(options(store, tmp_path, **policy), "adagrad") as embedding:
        train(embedding, [1, 2, 500, 501], [1, 2, 0, 0])
        embedding.delete([0, 3, 4, 999], [0, 0, 1, 1])
        assert counted(embedding)["rows"] == [23, 22, 23]
        train(embedding, [700], [2])
        assert counted(embedding)["rows"] == [23, 22, 24]
    assert unseal(read_record_bytes(marker))[TABLE_ROWS] == [23, 22, 24]
