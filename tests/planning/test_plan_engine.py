"""What `plan` predicts, against what the caches of the engine hit on the same trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from support.caches import PLACE_BYTES
from support.embeddings import DIM, attach, make, train
from support.stores import options
from tierbed import MultiTableEmbedding, plan
from tierbed.planning.plan import Plan

ROWS, IDS, BATCHES, WARMUP = 50_000, 5000, 30, 15
Trace = list[NDArray[np.int64]]


def zipf(seed: int = 0) -> Trace:
    random = np.random.default_rng(seed)
    mass = np.cumsum(np.arange(1, ROWS + 1) ** -1.05)
    numbers = random.permutation(ROWS)
    return [numbers[np.searchsorted(mass, random.random(IDS) * mass[-1])] for _ in range(BATCHES)]


def scan_mixed() -> Trace:
    """Every fourth id is of a scan over all rows."""
    trace = zipf(1)
    for number, ids in enumerate(trace):
        ids[::4] = np.arange(number * len(ids[::4]), (number + 1) * len(ids[::4])) % ROWS
    return trace


TRACES = {"zipf": zipf, "scan-mixed": scan_mixed}


def measured(embedding: MultiTableEmbedding, trace: Trace) -> float:
    counts = []
    for part in (trace[:WARMUP], trace[WARMUP:]):
        for ids in part:
            train(embedding, ids, ids % 3)
        device = embedding.metrics()["device"]
        counts.append((int(device["hits"]), int(device["misses"])))
    hits, misses = (after - before for before, after in zip(*counts, strict=True))
    return hits / (hits + misses)


def planned(trace: Trace) -> Plan:
    return plan([(ids, ids % 3) for ids in trace], DIM, DIM, tables=3, warmup=WARMUP)


# shares of all rows: of the benchmark, and more. Below, the overflow area holds rows as well, which a plan leaves out
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.rotated("name")
def test_the_predicted_hit_rate_is_within_two_points_of_the_measured(name: str, share: float) -> None:
    trace = TRACES[name]()
    made = planned(trace)
    budget = made.bytes(int(share * ROWS)) / 2**20
    with make(options("cached_host", budget_mb=budget)) as embedding:
        attach(embedding, "adagrad")
        hit_rate = measured(embedding, trace)
        assert embedding.metrics()["device"]["capacity"] == made.rows(budget)
    assert abs(made.hit_rate(budget_mb=budget) - hit_rate) < 0.02


# sizes in rows: of the smallest cache that is predicted, with batches of about as many rows, and larger ones
@pytest.mark.parametrize("rows", [4096, 10_000, 20_000])
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.rotated("name")
def test_the_overflow_area_is_part_of_the_prediction_above_rocksdb(name: str, rows: int, tmp_path: Path) -> None:
    trace = TRACES[name]()
    made = planned(trace)
    budget = made.bytes(rows) / 2**20
    with make(options("ssd", tmp_path, budget_mb=budget, overflow_mb=None)) as embedding:
        attach(embedding, "adagrad")
        hit_rate = measured(embedding, trace)
        metrics = embedding.metrics()
    device = metrics["device"]
    parts = sum(device[name] for name in ("bytes", "overflow_bytes", "window_bytes"))
    assert metrics["table"]["total_bytes"] == parts + metrics["ssd"]["bytes"]
    overflow = made.overflow_mb(budget)
    assert abs(made.hit_rate(budget_mb=budget, overflow_mb=overflow) - hit_rate) < 0.1
    assert 0 <= device["overflow_capacity"] - overflow * 2**20 // (made.line_bytes + PLACE_BYTES) < 1024
    assert device["overflow_bytes"] < 1.1 * max(overflow, 1024 * made.line_bytes / 2**20) * 2**20
