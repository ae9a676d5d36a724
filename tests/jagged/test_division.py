"""A store that embeddings of a collection share: one gets more than its part, or all together more than the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierbed
from support.refusals import check_refusal
from tierbed.engine.errors import OptionError
from tierbed.jagged.collections.store_split import BUDGETS, StoreRequest, assign_stores, divide_store, format_stores

NEEDS = {"ebc-d8": StoreRequest(8, 1000), "ebc-d120": StoreRequest(120, 3000)}


def cached(path=None, **options):
    return tierbed.make_cached_host_mem_store_options(**{"cache_budget_mb": 100, **options}, persistent_path=path)


def test_memory_goes_by_bytes_and_capacity_by_rows():
    stores = assign_stores(cached(overflow_mb=10, capacity=4000), NEEDS)
    small, large = stores.values()
    assert [small.capacity, large.capacity] == [1000, 3000]
    ratio = large.cache_budget_mb / small.cache_budget_mb
    assert ratio == pytest.approx(large.overflow_mb / small.overflow_mb, rel=1e-4)
    assert ratio == pytest.approx(3 * (4 * 120 + 16) / (4 * 8 + 16), rel=0.5)  # lines have metadata beside rows
    assert small.cache_budget_mb + large.cache_budget_mb == pytest.approx(100, abs=1e-5)


def test_an_unknown_number_of_rows_makes_equal_parts():
    stores = assign_stores(cached(capacity=7), {**NEEDS, "open": StoreRequest(64, None)})
    assert [options.cache_budget_mb for options in stores.values()] == [pytest.approx(100 / 3)] * 3
    assert [options.capacity for options in stores.values()] == [2, 2, 2]


def test_one_embedding_has_all():
    options = cached(cache_budget_mb="auto")
    assert assign_stores(options, {"ebc": StoreRequest(8, None)}) == {"ebc": options}
    assert assign_stores(dict(options), {"ebc": StoreRequest(8, None)}) == {"ebc": options}


@given(
    whole=st.floats(0.5, 1e6),
    rows=st.lists(st.integers(1, 10**9), min_size=2, max_size=6),
    capacity=st.integers(6, 10**12),
)
def test_parts_never_add_up_to_more_than_the_whole(whole, rows, capacity):
    needs = {str(i): StoreRequest(1 + i, n) for i, n in enumerate(rows)}
    options = cached(cache_budget_mb=whole, overflow_mb=whole, capacity=capacity)
    parts = assign_stores(options, needs).values()
    for name in ("cache_budget_mb", "overflow_mb", "capacity"):
        assert 0 < sum(part[name] for part in parts) <= options[name]
        assert min(part[name] for part in parts) > 0


OWN = {"ebc-d8": cached(), "ebc-d120": tierbed.make_host_mem_store_options()}


@pytest.mark.parametrize(
    "refusal",
    [
        (cached(cache_budget_mb=0.05), "cache_budget_mb=0.05", "2 embeddings, ebc-d8, ebc-d120"),
        (cached(cache_budget_mb="auto"), "cache_budget_mb='auto'", "2 share"),
        (cached(capacity=1), "capacity=1", "2 embeddings"),
        ({**OWN, "ebc-d80": cached()}, "store_options['ebc-d80']", "did you mean 'ebc-d8'"),
        ({"ebc-d8": cached()}, "none for embedding 'ebc-d120'"),
        ({**OWN, "ebc-d8": {"store": "tape"}}, "store_options['ebc-d8']"),
        (7, "make_device_mem_store_options"),
    ],
)
def test_a_store_that_cannot_be_divided_is_refused(refusal):
    given, *named = refusal
    check_refusal((lambda: assign_stores(given, NEEDS), OptionError, *named))


def test_a_mapping_gives_each_its_own():
    assert assign_stores(OWN, NEEDS) == OWN


def ssd(path, **options):
    return tierbed.make_cached_ssd_store_options(64, path, **options)


def test_rocksdb_takes_write_buffers_by_its_part(tmp_path):
    stores = divide_store(ssd(tmp_path, rocksdb_options={"max_background_jobs": 2}), NEEDS)
    most = {}
    for name, options in stores.items():
        embedding = tierbed.MultiTableEmbedding(name, NEEDS[name].dim, torch.float32, torch.int64, None, options)
        embedding.put([1], torch.ones(1, NEEDS[name].dim))
        most[name] = embedding.table_handle().table.stack.bottom.info()["memtable_bytes_max"]
        embedding.close()
    assert sum(most.values()) <= 64 << 20
    assert most["ebc-d120"] > 8 * most["ebc-d8"]
    own = ssd(tmp_path, rocksdb_options="write_buffer_size=1M")
    assert {options.rocksdb_options for options in divide_store(own, NEEDS).values()} == {"write_buffer_size=1M"}


def test_all_that_is_ssd_is_divided(tmp_path):
    options = ssd(tmp_path, host_cache_budget_mb=100, overflow_mb=64, read_mode="direct", rocksdb_cache_mb=0)
    parts = divide_store(options, NEEDS).values()
    for name in BUDGETS:
        assert sum(part[name] for part in parts) == pytest.approx(options[name], abs=1e-5)
    assert {part.persistent_path for part in parts} == {str(tmp_path)}


def test_the_division_is_shown_with_its_sums(tmp_path):
    shown = format_stores(divide_store(cached(capacity=4000, overflow_mb=64), NEEDS)).splitlines()
    assert shown[0].split() == ["embedding", "store", "cache_budget_mb", "overflow_mb", "capacity"]
    assert [line.split()[0] for line in shown[2:4]] == ["ebc-d8", "ebc-d120"]
    assert shown[-1].split() == ["100", "64", "4000"]
    assert "ebc" in format_stores({"ebc": tierbed.make_host_mem_store_options()})
