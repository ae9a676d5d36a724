"""Misses of a cache that knows the coming batches, against LRU, the optimum of the same window, and Belady's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from replacement import misses
from tier_report import Figure, listed
from tier_stores import (
    DIM,
    EmbeddingStep,
    Turn,
    check_results,
    check_rows,
    make_embedding,
    make_options,
    run,
    top_tier,
)
from torch import Tensor
from traces import ScanMixed, Trace, Zipf, ids

from tierbed import plan

SECTION = "lookahead"
WINDOW = 8
OVERFLOW_MB = 0.1  # so that misses are those of the cache, and not of rows that prefetch holds beside it
TRACES = {"zipf": Zipf, "scan-mixed": ScanMixed}


@dataclass(frozen=True)
class Sizes:
    """rows: of all tables, with bars for the first. Misses count from the end of the warm-up on."""

    rows: tuple[int, ...] = (1_000_000, 10_000_000)
    tables: int = 26
    batch: int = 4096
    cached: float = 0.05
    warm_up: int = 40
    steps: int = 40


QUICK = Sizes(rows=(100_000,), tables=2, batch=512, warm_up=8, steps=8)


def measure(folder: Path, sizes: Sizes) -> list[Figure]:
    figures = []
    for rows in sizes.rows:
        for name, kind in TRACES.items():
            trace = kind(sizes.tables, rows // sizes.tables, sizes.batch)
            what = f"{name}, {rows:,} rows"
            figures += _figures(what, trace, int(rows * sizes.cached), folder, sizes, gated=rows == sizes.rows[0])
    return figures


def _figures(what: str, trace: Trace, cached: int, folder: Path, sizes: Sizes, gated: bool) -> list[Figure]:
    count = sizes.warm_up + sizes.steps
    batches = [ids(trace, step) for step in range(count)]
    lru, ahead, capacity = _engine(what, trace, batches, cached, folder, sizes.warm_up)
    rows = [distinct_rows(trace, step) for step in range(count)]
    simulated = {window: int(misses(rows, capacity, window)[sizes.warm_up :].sum()) for window in (0, WINDOW, None)}
    planned = plan(batches, DIM, DIM, tables=trace.tables, warmup=sizes.warm_up).hit_rate(rows=capacity)
    notes = listed(
        [
            ("look-ahead", f"{ahead.misses:,}"),
            ("LRU", f"{lru.misses:,}"),
            ("fully associative: LRU", f"{simulated[0]:,}"),
            (f"optimum of {WINDOW} batches", f"{simulated[WINDOW]:,}"),
            ("Belady", f"{simulated[None]:,}"),
            (f"rows used in {sizes.steps} steps", f"{lru.hits + lru.misses:,}"),
            ("cache", f"{capacity:,} rows"),
        ]
    )
    saved = (lru.misses - ahead.misses) / max(lru.misses - simulated[WINDOW], 1)
    off = 100 * abs(planned - lru.hit_rate)
    rates = f"predicted {planned:.1%}, measured {lru.hit_rate:.1%}"
    return [
        Figure(
            SECTION, f"fewer misses than LRU, {what}", 1 - ahead.misses / lru.misses, "", _bar(gated, 0.25), notes=notes
        ),
        Figure(SECTION, f"of what the optimum of {WINDOW} batches saves, {what}", saved, "", _bar(gated, 0.9)),
        Figure(
            SECTION, f"plan() from the hit rate, {what}", off, "points", _bar(gated, 2.0), at_most=True, notes=rates
        ),
    ]


def _bar(gated: bool, bar: float) -> float | None:
    return bar if gated else None


def _engine(
    what: str, trace: Trace, batches: Sequence[Tensor], cached: int, folder: Path, warm_up: int
) -> tuple[Turn, Turn, int]:
    """The timed turns without and with look-ahead, and the rows that the caches hold."""
    grad = torch.rand(trace.batch, trace.tables, DIM, generator=torch.Generator().manual_seed(1)) - 0.5
    parts = [[(each, grad) for each in part] for part in (batches[:warm_up], batches[warm_up:])]
    options = make_options("cached_host_mem", folder, cached, overflow_mb=OVERFLOW_MB)
    with make_embedding("rows", trace.tables, options) as plain, make_embedding("rows", trace.tables, options) as told:
        turns = []
        for embedding, window in ((plain, 0), (told, WINDOW)):
            graph = EmbeddingStep(embedding)
            turns.append([run(graph, embedding, part, window, pauses=window > 0) for part in parts])
        for without, ahead in zip(*turns, strict=True):
            check_results(what, without, ahead)
        check_rows(what, trace, plain, told, 1000)
        return turns[0][1], turns[1][1], top_tier(told)["capacity"]


def distinct_rows(trace: Trace, step: int) -> NDArray[np.int64]:
    """The rows of a batch, each once, numbered over all tables."""
    return np.unique(trace.numbers(step) + np.arange(trace.tables) * trace.rows)
