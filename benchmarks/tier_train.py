"""A whole training step with rows on SSD against the same step with all of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tier_report import Figure, listed
from tier_stores import (
    DIM,
    Turn,
    check_results,
    check_rows,
    fill,
    make_embedding,
    make_options,
    run,
    top_tier,
    wait_until_idle,
)
from torch import Tensor, nn
from traces import Trace, WrappedZipf, Zipf, ids
from workloads import EPS, LR

from tierbed import Graph, MultiTableEmbedding

SECTION = "train"
AHEAD = 31
# of cached_ssd, the best of those tried: this trace has no drift, and its table is in the page cache
OPTIONS = {"cache_policy": "lfu", "read_mode": "mmap", "shards": 2}
TRACES = {"zipf": Zipf, "wrapped": WrappedZipf}


@dataclass(frozen=True)
class Sizes:
    """rows: of all tables; turn: steps that a store takes before the others do; warm_up: steps before any is timed."""

    rows: int = 10_000_000
    tables: int = 26
    batch: int = 4096
    cached: float = 0.1
    warm_up: int = 200
    turn: int = 60
    rounds: int = 3


QUICK = Sizes(rows=4000, tables=4, batch=64, warm_up=4, turn=3, rounds=1)


class TrainStep(Graph):
    """Rows of all features, an MLP 512-256-1 on them, Adagrad on both."""

    def __init__(self, embedding: MultiTableEmbedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = embedding
        width = embedding.spec.num_tables * DIM
        self.mlp = nn.Sequential(
            nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1), nn.Flatten(0)
        )
        self.add_optimizer(torch.optim.Adagrad([*embedding.parameters(), *self.mlp.parameters()], lr=LR, eps=EPS))

    def build(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.mlp(self.embedding(ids).flatten(1))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


def batches(trace: Trace, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Of ids, and labels that follow from them."""
    made = [ids(trace, step) for step in range(first, first + count)]
    return [(each, (each[:, 0] % 3 == 0).float()) for each in made]


def measure(
    folder: Path, sizes: Sizes, draw: str = "zipf", ahead: int = AHEAD, options: Mapping[str, Any] | None = None
) -> list[Figure]:
    """Turns of the same steps: on SSD with store `options`, in memory; every other time steps on SSD are announced."""
    options = OPTIONS if options is None else options
    trace = TRACES[draw](sizes.tables, sizes.rows // sizes.tables, sizes.batch)
    cached = int(sizes.rows * sizes.cached)
    memory = make_embedding("memory", sizes.tables, make_options("device_mem", folder))
    ssd = make_embedding("ssd", sizes.tables, make_options("cached_ssd", folder, cached, open="fresh", **options))
    with memory, ssd:
        train_memory, train_ssd = TrainStep(memory), TrainStep(ssd)
        filled = fill(memory, trace.rows), fill(ssd, trace.rows)
        wait_until_idle()
        steps = _turns(trace, sizes)
        warm = next(steps)
        check_results("warm-up", run(train_memory, memory, warm), run(train_ssd, ssd, warm, ahead))
        turns: dict[int, list[tuple[Turn, Turn]]] = {ahead: [], 0: []}
        for number, part in enumerate(steps):
            announced = 0 if number % 2 else ahead
            ours, theirs = run(train_ssd, ssd, part, announced), run(train_memory, memory, part)
            check_results(f"turn {number}", ours, theirs)
            turns[announced].append((ours, theirs))
        check_rows("after all turns", trace, memory, ssd, 1000)
        capacity = top_tier(ssd)["capacity"] / sizes.rows
    notes = f"{draw}, {sizes.rows:,} rows, cache {capacity:.1%} of them, options {dict(options)}"
    fills = Figure(SECTION, "fill cached_ssd", filled[1], "s", notes=f"device_mem {filled[0]:.1f} s")
    return [
        *_figures(f"prefetch {ahead} ahead", turns[ahead], sizes, 0.65 if draw == "zipf" else None, notes),
        *_figures("prefetch off", turns[0], sizes, None, notes),
        fills,
    ]


def _turns(trace: Trace, sizes: Sizes) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The warm-up, then two turns a round; made when they are asked for, outside of the clock."""
    yield batches(trace, 0, sizes.warm_up)
    for turn in range(2 * sizes.rounds):
        yield batches(trace, sizes.warm_up + turn * sizes.turn, sizes.turn)


def _figures(how: str, turns: Sequence[tuple[Turn, Turn]], sizes: Sizes, bar: float | None, notes: str) -> list[Figure]:
    ours, theirs = zip(*turns, strict=True)
    samples = sizes.turn * sizes.batch
    return [
        Figure(
            SECTION,
            f"samples/s of device_mem, {how}",
            median(memory.seconds / ssd.seconds for ssd, memory in turns),
            bar=bar,
            notes=listed(
                [
                    ("cached_ssd", f"{median(samples / turn.seconds for turn in ours):,.0f}/s"),
                    ("device_mem", f"{median(samples / turn.seconds for turn in theirs):,.0f}/s"),
                    ("hit rate", f"{median(turn.hit_rate for turn in ours):.1%}"),
                    ("misses", f"{median(turn.misses for turn in ours) / sizes.turn:,.0f} a step"),
                    ("backlog", f"{median(turn.backlog for turn in ours):.2f} s"),
                    (notes, ""),
                ]
            ),
        ),
        Figure(
            SECTION,
            f"CPU seconds of device_mem, {how}",
            median(ssd.cpu_seconds / memory.cpu_seconds for ssd, memory in turns),
            notes=listed([("cached_ssd", _split(ours, sizes)), ("device_mem", _split(theirs, sizes))]),
        ),
    ]


def _split(turns: Sequence[Turn], sizes: Sizes) -> str:
    """Milliseconds of a step by part, and of all processors."""
    milliseconds = {
        part: median(1e3 * turn.parts[part] / sizes.turn for turn in turns) for part in ("pin", "gather", "update")
    }
    whole = median(1e3 * turn.seconds / sizes.turn for turn in turns)
    cpu = median(1e3 * turn.cpu_seconds / sizes.turn for turn in turns)
    shown = " + ".join(f"{part} {value:.1f}" for part, value in milliseconds.items())
    return f"{whole:.1f} ms = {shown} + dense {whole - sum(milliseconds.values()):.1f} (CPU {cpu:.1f})"
