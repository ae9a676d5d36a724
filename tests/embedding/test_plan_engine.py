"""What `plan` predicts, against what the caches of the engine hit on the same trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from support.embeddings import DIM, attach, make, train
from support.stores import options
from tierbed import MultiTableEmbedding, plan
from tierbed.embedding.plan import Plan

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
    def counts() -> Iterator[int]:
        device = embedding.metrics()["device"]
        yield from (int(device["hits"]), int(device["misses"]))

    for ids in trace[:WARMUP]:
        train(embedding, ids, ids % 3)
    before = list(counts())
    for ids in trace[WARMUP:]:
        train(embedding, ids, ids % 3)
    hits, misses = (after - then for after, then in zip(counts(), before, strict=True))
    return hits / (hits + misses)


def planned(trace: Trace) -> Plan:
    return plan([(ids, ids % 3) for ids in trace], DIM, DIM, tables=3, warmup=WARMUP)


# shares of all rows: of the benchmark, and more. Below, the overflow area holds rows as well, which a plan leaves out
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("name", TRACES)
def test_the_predicted_hit_rate_is_within_two_points_of_the_measured(name: str, share: float) -> None:
    trace = TRACES[name]()
    made = planned(trace)
    budget = made.bytes(int(share * ROWS)) / 2**20
    with make(options("cached_host", budget_mb=budget)) as embedding:
        attach(embedding, "adagrad")
        hit_rate = measured(embedding, trace)
        assert embedding.metrics()["device"]["capacity"] == made.rows(budget)
    assert abs(made.hit_rate(budget_mb=budget) - hit_rate) < 0.02
