"""Embeddings on every store for benchmarks/tiers.py: made, filled, run for a turn, and compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from traces import Trace
from workloads import EPS, LR, hashed

from tierbed import (
    Graph,
    MultiTableEmbedding,
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
    make_host_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)
from tierbed.engine.table.table import OpenTable, PinnedBatch

DIM = 16
CHUNK = 1 << 18  # rows that `fill` puts at once


class Mismatch(Exception):
    """Two stores gave different outputs, losses or rows."""


class EmbeddingStep(Graph):
    """A lookup, given gradients, Adagrad: a step without a dense model."""

    def __init__(self, embedding: MultiTableEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.Adagrad(embedding.parameters(), lr=LR, eps=EPS))

    def build(self, ids: Tensor, grad: Tensor) -> Tensor:
        out: Tensor = self.embedding(ids)
        out.backward(grad)
        return out


def make_options(store: str, folder: Path, cached_rows: int = 0, **more: Any) -> Any:
    """Options of a store by name; a cache has room for about `cached_rows` rows."""
    if store == "device_mem":
        return make_device_mem_store_options(**more)
    if store == "host_mem":
        return make_host_mem_store_options(**more)
    budget = (cached_rows + 1) * bytes_of_a_cached_row() / 2**20
    if store == "cached_host_mem":
        return make_cached_host_mem_store_options(budget, **more)
    return make_cached_ssd_store_options(budget, folder, **more)


def make_embedding(name: str, tables: int, options: Any) -> MultiTableEmbedding:
    initial = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * tables
    return MultiTableEmbedding(name, DIM, torch.float32, torch.int64, initial, options, seed=0)


@cache
def bytes_of_a_cached_row() -> float:
    """With its share of the cache's own records, and Adagrad's state."""
    with make_embedding("row", 1, make_cached_host_mem_store_options(16)) as embedding:
        EmbeddingStep(embedding)
        top = top_tier(embedding)
        return top["bytes"] / top["capacity"]


def top_tier(embedding: MultiTableEmbedding) -> dict[str, Any]:
    """The metrics of the tier that serves steps."""
    return next(counts for tier, counts in embedding.metrics().items() if tier != "table")


def fill(embedding: MultiTableEmbedding, rows: int) -> float:
    """Write the initial value of every row, so that all are stored, in the order of keys. Returns seconds."""
    begin = time.perf_counter()
    for table in range(embedding.spec.num_tables):
        for first in range(0, rows, CHUNK):
            keys = hashed(torch.arange(first, min(first + CHUNK, rows)))
            embedding.put(keys, embedding.get(keys, table), table)
    return time.perf_counter() - begin


@dataclass
class Turn:
    """What a run of steps took. Seconds of CPU are of all threads, until nothing is left to do in the background.

    backlog: seconds from the end of the last step until then. parts: seconds within pin, gather and update.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    backlog: float = 0.0
    hits: int = 0
    misses: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    results: list[Tensor] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Of rows that the tier on top was asked for: each distinct row of a step once."""
        return self.hits / max(self.hits + self.misses, 1)

    def without_results(self) -> Turn:
        return replace(self, results=[])


def run(
    graph: Callable[..., Tensor],
    embedding: MultiTableEmbedding,
    batches: Sequence[tuple[Tensor, ...]],
    ahead: int = 0,
    pauses: bool = False,
) -> Turn:
    """A step for each batch, whose first tensor is the ids; `ahead` steps are announced ahead, within the batches.

    `pauses`: each step waits until what was announced is known, so that misses do not depend on the machine's load.
    """
    turn = Turn()
    before = top_tier(embedding)
    with _parts(turn.parts):
        cpu, begin = time.process_time(), time.perf_counter()
        for ids, *_ in batches[:ahead]:
            embedding.prefetch(ids)
        for step, batch in enumerate(batches):
            for later, *_ in batches[step + ahead : step + ahead + 1] if ahead else ():
                embedding.prefetch(later)
            if pauses:
                wait_until_idle(0.04)
            turn.results.append(graph(*batch))
        turn.seconds = time.perf_counter() - begin
    turn.backlog = wait_until_idle()
    turn.cpu_seconds = time.process_time() - cpu
    after = top_tier(embedding)
    turn.hits, turn.misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
    return turn


def wait_until_idle(seconds: float = 0.02, longest: float = 60.0) -> float:
    """Wait until this process has used no processor for that long. Returns the seconds until that began."""
    begin = time.perf_counter()
    while (waited := time.perf_counter() - begin) < longest:
        used = time.process_time()
        time.sleep(seconds)
        if time.process_time() - used < 0.001:
            break
    return waited


@contextmanager
def _parts(taken: dict[str, float]) -> Iterator[None]:
    """Add up how long the calls of a step to its table take."""
    classes = {"pin": OpenTable, "gather": PinnedBatch, "update": OpenTable}
    methods: dict[str, Callable[..., Any]] = {name: getattr(holder, name) for name, holder in classes.items()}

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return methods[name](*args, **kwargs)
            finally:
                taken[name] = taken.get(name, 0.0) + time.perf_counter() - begin

        return call

    for name, holder in classes.items():
        setattr(holder, name, timed(name))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(classes[name], name, method)


def check_results(what: str, one: Turn, other: Turn) -> None:
    """Raises Mismatch unless all results of two turns have the same bits."""
    for step, (a, b) in enumerate(zip(one.results, other.results, strict=True)):
        if not torch.equal(a, b):
            raise Mismatch(f"{what}: results of step {step} differ by up to {float((a - b).abs().max()):.3g}")


def check_rows(what: str, trace: Trace, one: MultiTableEmbedding, other: MultiTableEmbedding, count: int) -> None:
    """Raises Mismatch unless `count` random rows of each table have the same bits."""
    random = torch.Generator().manual_seed(count)
    keys = hashed(torch.randint(trace.rows, (count, trace.tables), generator=random))
    a, b = one.get(keys), other.get(keys)
    if not torch.equal(a, b):
        raise Mismatch(f"{what}: rows differ by up to {float((a - b).abs().max()):.3g}")
