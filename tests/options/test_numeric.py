"""Numbers of NumPy work wherever a number is an option, as the plain number that they are; no other object does."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

import tierbed
from support.graphs import graph_of
from support.refusals import check_refusal
from support.stores import options
from tierbed import plan
from tierbed.embedding.modules.embedding import MultiTableEmbedding
from tierbed.engine.errors import OptionError, TierbedError
from tierbed.engine.options.lookup import check_row
from tierbed.engine.options.table_spec import check_columns
from tierbed.snapshots.store.retention import plan_prune


def ssd(**given: Any) -> Any:
    return tierbed.make_cached_ssd_store_options(**{"cache_budget_mb": 1, "persistent_path": "rows", **given})


def embedding(**given: Any) -> MultiTableEmbedding:
    arguments: dict[str, Any] = {"embedding_dim": 4, "tables": None, "store_options": options("device"), **given}
    return MultiTableEmbedding("rows", dtype=torch.float32, key_type=torch.int64, **arguments)


def planned(**given: Any) -> Any:
    trace = [torch.arange(600)] * 3
    return plan(trace, **{"dim": 4, "state": 4, **given})


PLAN = planned()
EMPTY = graph_of(lambda graph, x: x)

NUMBERS: dict[str, tuple[float, Callable[[Any], Any]]] = {
    "capacity": (100, lambda n: tierbed.make_device_mem_store_options(capacity=n).capacity),
    "size_factor": (2, lambda n: tierbed.make_host_mem_store_options(size_factor=n).size_factor),
    "storage_dim": (8, lambda n: tierbed.make_host_mem_store_options(storage_dim=n).storage_dim),
    "storage_dim unset": (-1, lambda n: tierbed.make_host_mem_store_options(storage_dim=n).storage_dim),
    "physical_block_size": (512, lambda n: tierbed.make_host_mem_store_options(physical_block_size=n)["store"]),
    "ttl_steps": (7, lambda n: tierbed.make_host_mem_store_options(ttl_steps=n).ttl_steps),
    "admission": (3, lambda n: tierbed.make_host_mem_store_options(admission=n).admission),
    "shards": (2, lambda n: ssd(shards=n).shards),
    "io_threads": (2, lambda n: ssd(io_threads=n).io_threads),
    "rocksdb_options": (100, lambda n: ssd(rocksdb_options={"max_open_files": n}).rocksdb_options),
    "embedding_dim": (4, lambda n: embedding(embedding_dim=n).spec.columns),
    "columns": (3, lambda n: check_columns([2, n])),
    "padding_idx": (7, lambda n: embedding(padding_idx=n).spec.padding_idx),
    "seed": (7, lambda n: embedding(seed=n).spec.seed),
    "key": (7, lambda n: check_row(embedding().spec, n, None)),
    "table": (0, lambda n: check_row(embedding().spec, 7, n)),
    "plan dim": (4, lambda n: planned(dim=n).line_bytes),
    "plan samples": (2000, lambda n: planned(samples=n).rate),
    "plan padding_idx": (5, lambda n: planned(padding_idx=n).seen.tolist()),
    "plan rows": (5000, lambda n: PLAN.hit_rate(rows=n)),
    "plan points": (4, lambda n: PLAN.curve(points=n).rows.tolist()),
    "keep_last": (2, lambda n: plan_prune([], n)),
    "accumulate_grads": (1, EMPTY.accumulate_grads),
    "ahead": (3, lambda n: EMPTY.run([], ahead=n)._look_ahead.depth),
    "cache_budget_mb": (0.5, lambda n: ssd(cache_budget_mb=n).cache_budget_mb),
    "overflow_mb": (0.5, lambda n: ssd(overflow_mb=n).overflow_mb),
    "host_cache_budget_mb": (0.5, lambda n: ssd(host_cache_budget_mb=n).host_cache_budget_mb),
    "index_mb": (1.5, lambda n: ssd(index_mb=n).index_mb),
    "rocksdb_cache_mb": (0.5, lambda n: ssd(rocksdb_cache_mb=n, read_mode="direct").rocksdb_cache_mb),
    "admission by chance": (0.5, lambda n: tierbed.make_host_mem_store_options(admission=n).admission),
    "budget_mb": (0.5, lambda n: PLAN.hit_rate(budget_mb=n)),
    "clip_grad_norm": (0.5, EMPTY.clip_grad_norm),
    "clip_grad_value": (0.5, EMPTY.clip_grad_value),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_taken_as_those_of_python(name: str) -> None:
    number, use = NUMBERS[name]
    whole = [kind for kind in (np.uint8, np.int64, np.uint64) if np.iinfo(kind).min <= number <= np.iinfo(kind).max]
    for kind in whole if isinstance(number, int) else (np.float16, np.float32, np.float64, Fraction):
        assert repr(use(kind(number))) == repr(use(number))


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused_by_value(name: str) -> None:
    use = NUMBERS[name][1]
    for value in (True, np.True_, np.array(4), np.array([4]), torch.tensor(4), "4", 4j):
        if name == "rocksdb_options" and isinstance(value, str | bool):
            continue
        with pytest.raises(TierbedError, match=r"give|tables run"):
            use(value)


def test_a_wrong_number_of_numpy_is_told_as_it_was_given() -> None:
    for value in (np.int64(0), np.uint64(2**63), np.float64(4.0)):
        call = partial(tierbed.make_device_mem_store_options, capacity=value)
        check_refusal((call, OptionError, "capacity=", repr(value)))


def test_rows_made_with_numbers_of_numpy_are_stored_and_resumed(tmp_path: Path) -> None:
    def rows(number: Any, real: Any) -> MultiTableEmbedding:
        store = tierbed.make_cached_ssd_store_options(
            real(0.5), tmp_path, number(1000), admission=number(2), ttl_steps=number(50), shards=number(2)
        )
        assert msgpack.packb(store.as_dict())
        return embedding(embedding_dim=number(8), padding_idx=number(3), seed=number(5), store_options=store)

    with rows(np.int64, np.float32) as first:
        first.put([1, 2], np.ones((2, 8), np.float32))
        first.save_snapshot("one")
        wanted = first.get(torch.arange(5))
    with rows(int, float) as second:
        assert torch.equal(second.get(torch.arange(5)), wanted)
