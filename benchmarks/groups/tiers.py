"""Measures the tiers: training on SSD, caches in front of host memory, look-ahead, and tables of growing size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import DIM, STORED_ROW_BYTES, Collection, RowsStep, fill, make_embedding, make_options
from models import GraphStep, Model, hash_batches, make_batches
from report import Figure, join_pairs
from timing import Turn, disable_gc, format_times, measure_turn, read_io_bytes, read_top_tier, wait_until_idle
from torch import Tensor
from traces import ALPHA, Cycles, Shape, Trace, Zipf, draw_ids, hash_rows
from traces import make_batches as make_bags
from workload import Mismatch, NotMeasured, check_losses, check_same, figure, workload

import tierbed
from tierbed import MultiTableEmbedding

# for cached_ssd, the fastest of those tried: the trace has no drift, and the table is in the page cache
OPTIONS = {"cache_policy": "lfu", "read_mode": "mmap", "shards": 2}
HIT_RATE = 0.99  # a bar applies to the smallest host-memory cache with this hit rate
SPARE = 1.5  # disk space relative to a table's size, for compaction


def train(
    folder: Path,
    ahead: int = 31,
    options: Mapping[str, Any] = OPTIONS,
    bar: float | None = 0.65,
    rows: int = 10_000_000,
    tables: int = 26,
    batch: int = 4096,
    cached: float = 0.1,
    warm_up: int = 200,
    turn: int = 60,
    repeats: int = 3,
) -> Iterator[Figure]:
    """Samples/s in training on cached_ssd, relative to device_mem. Turns with and without look-ahead alternate.

    rows: rows in all tables. cached: the cache's size as a fraction of them. turn: steps on one store before the other.
    """
    model = Model(rows // tables, tables, batch, (512, 256), "adagrad")
    memory = GraphStep(model, folder)
    ssd = GraphStep(model, folder, "cached_ssd", int(rows * cached), open="fresh", **options)
    turns: dict[int, list[tuple[Turn, Turn]]] = {ahead: [], 0: []}
    with memory.embedding, ssd.embedding, disable_gc():
        wait_until_idle()
        for number in range(-1, 2 * repeats):  # the first warms up
            announced = 0 if number % 2 and number > 0 else ahead
            first, count = (warm_up + number * turn, turn) if number >= 0 else (0, warm_up)
            batches = hash_batches(make_batches(model, count, first))
            steps = ssd.run(batches, ahead=announced) if announced else (ssd(*each) for each in batches)
            ssd_turn = measure_turn(ssd.embedding, steps)
            memory_turn = measure_turn(memory.embedding, (memory(*each) for each in batches))
            check_losses("cached_ssd and device_mem", ssd_turn.results, memory_turn.results)
            if number >= 0:
                turns[announced].append((ssd_turn, memory_turn))
        check_rows("cached_ssd", model.rows, memory.embedding, ssd.embedding)
        capacity = read_top_tier(ssd.embedding)["capacity"] / rows
    about = f"{rows:,} rows, cache for {capacity:.1%}, options {dict(options)}, filled in {ssd.fill_seconds:.0f} s"
    for announced, pairs in turns.items():
        mode = f"{announced} ahead" if announced else "nothing announced"
        ratio = median(memory_turn.seconds / ssd_turn.seconds for ssd_turn, memory_turn in pairs)
        ssd_turns, memory_turns = zip(*pairs, strict=True)
        notes = [
            ("cached_ssd", format_times(ssd_turns, turn)),
            ("device_mem", format_times(memory_turns, turn)),
            ("hit rate", f"{median(each.hit_rate for each in ssd_turns):.1%}"),
            ("misses", f"{median(each.misses for each in ssd_turns) / turn:,.0f} per step"),
            ("backlog", f"{median(each.backlog for each in ssd_turns):.2f} s"),
            (about, ""),
        ]
        what, mode_bar = f"samples/s, cached_ssd / device_mem, {mode}", bar if announced else None
        yield figure(what, ratio, bar=mode_bar, notes=join_pairs(notes))


TINY = {"rows": 4000, "tables": 4, "batch": 64, "warm_up": 4, "turn": 3, "repeats": 1}
workload(TINY)(train)
workload(TINY, name="train-defaults", options={}, ahead=4, bar=None)(train)


def check_rows(what: str, rows: int, one: MultiTableEmbedding, other: MultiTableEmbedding) -> None:
    """Raise Mismatch unless 1,000 random rows per table are bit-identical."""
    random = torch.Generator().manual_seed(0)
    keys = hash_rows(torch.randint(rows, (1000, one.spec.num_tables), generator=random))
    check_same(f"{what}: rows", one.get(keys), other.get(keys))


@workload({"rows": 2000, "tables": 2, "batch": 64, "cached": (2.0, 0.3), "warm_up": 3, "repeats": 3})
def memory(
    folder: Path,
    rows: int = 38_462,
    tables: int = 26,
    batch: int = 4096,
    cached: Sequence[float] = (2.0, 1.5, 1.0, 0.8, 0.6, 0.4, 0.25, 0.15),
    warm_up: int = 40,
    repeats: int = 60,
) -> Iterator[Figure]:
    """Steps/s of host_mem and of caches in front of it, relative to device_mem.

    cached: the caches' sizes as fractions of the rows.
    """
    trace = Zipf(tables, rows, batch)
    stores = {"device_mem": make_options("device_mem", folder), "host_mem": make_options("host_mem", folder)}
    for fraction in cached:
        stores[f"cache {fraction:.0%}"] = make_options("cached_host_mem", folder, int(rows * tables * fraction))
    grad = make_gradient(trace)
    turns: dict[str, list[Turn]] = {name: [] for name in stores}
    with ExitStack() as stack:
        stack.enter_context(disable_gc())
        graphs = {
            name: RowsStep(stack.enter_context(make_embedding(tables, options))) for name, options in stores.items()
        }
        for graph in graphs.values():
            fill(graph.embedding, rows)
        for step in range(warm_up + repeats):
            batches = [(draw_ids(trace, step), grad)]
            first = step % len(stores)  # the first store does not find the batch in the processor's caches
            for name in [*stores][first:] + [*stores][:first]:
                turns[name].append(measure_turn(graphs[name].embedding, (graphs[name](*each) for each in batches)))
            expected = turns["device_mem"][-1].results.pop()
            for name in graphs:
                if name != "device_mem":
                    check_same(f"{name}: outputs of step {step}", turns[name][-1].results.pop(), expected)
        for name, graph in graphs.items():
            check_rows(name, rows, graph.embedding, graphs["device_mem"].embedding)
    turns = {name: timed[warm_up:] for name, timed in turns.items()}
    seconds = {name: median(turn.seconds for turn in timed) for name, timed in turns.items()}
    hits = {name: sum(turn.hits for turn in timed) for name, timed in turns.items()}
    rates = {name: hits[name] / (hits[name] + sum(turn.misses for turn in timed)) for name, timed in turns.items()}
    large_enough = [name for name, rate in rates.items() if name.startswith("cache") and rate >= HIT_RATE]
    if not large_enough:
        raise Mismatch(f"no cache reaches a hit rate of {HIT_RATE:.0%}: {rates}")
    bars = {"host_mem": 0.95, min(large_enough, key=rates.__getitem__): 0.9}
    for name in stores:
        if name != "device_mem":
            ms = f"ms {1e3 * seconds[name]:.2f}, device_mem {1e3 * seconds['device_mem']:.2f}"
            notes = f"hit rate {rates[name]:.2%}, {ms}"
            speed = seconds["device_mem"] / seconds[name]
            yield figure(f"steps/s, {name} / device_mem", speed, bar=bars.get(name), notes=notes)


SLOWER = 1.02  # largest time of a run with batches ahead, relative to plain calls


@workload({"shapes": ((32, 1), (8, 3)), "ahead": ("default", 2), "rows": 400, "cache_mb": 0.2, "turn": 3, "repeats": 2})
def lookahead(
    folder: Path,
    shapes: Sequence[tuple[int, int]] = ((4096, 1), (1024, 10)),
    reads: Sequence[str] = ("buffered", "direct"),
    ahead: Sequence[int | str] = ("default", 0, 8, 15, 31),
    rows: int = 100_000,
    tables: int = 8,
    dim: int = 32,
    cache_mb: float = 16,
    alpha: float | None = ALPHA,
    turn: int = 120,
    repeats: int = 5,
) -> Iterator[Figure]:
    """Steps that only train rows, on a cache: `graph.run` with batches ahead, relative to plain calls.

    shapes: samples per batch and ids per bag. reads: "buffered" and "direct" are read modes of cached_ssd; "memory"
    means cached_host_mem. alpha: Zipf exponent; None for uniform ids. turn: steps per side and turn, several times
    `ahead`, because the look-ahead runs empty when a turn ends.
    """
    for (batch, length), read_mode in product(shapes, reads):
        shape = Shape(tables, rows, dim, batch, length, alpha, "rowwise_adagrad", ragged=length > 1)
        batches = make_bags(shape, 64)
        turns: dict[int | str | None, list[Turn]] = {None: [], **{number: [] for number in ahead}}
        with ExitStack() as stack, disable_gc():
            sides = {}
            for number in turns:
                path = folder / f"{length} {read_mode} {number}"
                if read_mode == "memory":
                    store = tierbed.make_cached_host_mem_store_options(cache_mb)
                else:
                    store = tierbed.make_cached_ssd_store_options(cache_mb, path, read_mode=read_mode)
                sides[number] = Collection(shape, batches, store)
                stack.enter_context(sides[number].embedding)
            for turn_number in range(repeats + 1):  # the first warms up
                first = turn_number % len(turns)
                for number in [*turns][first:] + [*turns][:first]:
                    steps = enumerate(sides[number].steps(turn_number * turn, turn, number), 1)
                    outputs = (out if count == turn else torch.empty(0) for count, out in steps)  # keep only the last
                    turns[number].append(measure_turn(sides[number].embedding, outputs))
                for side_turns in turns.values():
                    check_same("outputs", turns[None][-1].results[-1], side_turns[-1].results[-1])
        for number in ahead:
            run, plain = turns[number][1:], turns[None][1:]
            ratio = median(one.seconds / other.seconds for one, other in zip(run, plain, strict=True))
            missed = [
                (median(one.misses for one in side), median(one.hit_rate for one in side)) for side in (run, plain)
            ]
            misses = [f"{count / turn:,.0f} ({1 - hit_rate:.1%})" for count, hit_rate in missed]
            what = f"time, {number} ahead / plain calls, {length} ids, {read_mode} reads"
            run_times, plain_times = format_times(run, turn), format_times(plain, turn)
            notes = [("ahead", run_times), ("plain", plain_times), ("misses", " and ".join(misses))]
            yield figure(what, ratio, "x", bar=SLOWER, at_most=True, notes=join_pairs(notes))


def make_gradient(trace: Trace) -> Tensor:
    return torch.rand(trace.batch, trace.tables, DIM, generator=torch.Generator().manual_seed(1)) - 0.5


@workload({"rows": (20_480, 40_960), "batch": 2048, "turn": 3, "repeats": 1, "apart": 0.1})
def scale(
    folder: Path,
    rows: Sequence[int] = (100_000, 1_000_000, 10_000_000),
    batch: int = 8192,
    cached: float = 0.4,
    turn: int = 40,
    repeats: int = 3,
    apart: float = 0.03,
) -> Iterator[Figure]:
    """Nanoseconds per id on cached_ssd for several row counts, at one hit rate. `--set rows=[100000000]` is one table.

    apart: how much hit rates may differ. The smallest table's hit rate is the highest, so this table gains.
    """
    free, needed = shutil.disk_usage(folder).free, int(sum(rows) * STORED_ROW_BYTES * SPARE)
    if free < needed:
        raise NotMeasured(f"rows need up to {needed / 2**30:.0f} GiB, but {folder} has {free / 2**30:.0f} GiB free")
    with ExitStack() as stack:
        stack.enter_context(disable_gc())
        tables = {count: _Table(stack, folder, count, batch, cached, turn) for count in rows}
        for _ in range(repeats):
            for table in tables.values():
                table.run_turn()
    nanoseconds = {}
    for count, table in tables.items():
        turns, turn_ids = table.turns, turn * batch
        nanoseconds[count] = 1e9 * median(each.seconds for each in turns) / turn_ids
        notes = [
            ("hit rate", f"{median(each.hit_rate for each in turns):.2%}"),
            ("CPU", f"{1e9 * median(each.cpu for each in turns) / turn_ids:,.0f} ns"),
            ("backlog", f"{median(each.backlog for each in turns):.2f} s"),
            ("filled in", f"{table.fill_seconds:.1f} s"),
            *((name, f"{moved / turn_ids / repeats:,.0f} bytes per id") for name, moved in table.moved.items()),
        ]
        yield figure(f"an id on cached_ssd, {count:,} rows", nanoseconds[count], "ns", notes=join_pairs(notes))
    rates = [median(each.hit_rate for each in table.turns) for table in tables.values()]
    if max(rates) - min(rates) > apart:
        raise Mismatch(f"hit rates differ: {rates}")
    if len(rows) > 1:
        worst = max(nanoseconds.values()) / nanoseconds[min(rows)]
        yield figure(f"time of an id, slowest / {min(rows):,} rows", worst, "x", bar=1.5, at_most=True)


class _Table:
    """A filled table on disk with a warm cache, and an unfilled twin in memory that checks its outputs.

    They agree because `fill` writes the rows' initial values.
    """

    def __init__(self, stack: ExitStack, folder: Path, rows: int, batch: int, cached: float, steps: int) -> None:
        self._trace, self._steps, self._step = Cycles(rows, batch), steps, 0
        # a default overflow area would hold much of a small table
        options = make_options("cached_ssd", folder, int(rows * cached), open="fresh", overflow_mb=1)
        self._ssd = RowsStep(stack.enter_context(make_embedding(1, options, name=f"rows_{rows}")))
        self._twin = RowsStep(stack.enter_context(make_embedding(1)))
        self._grad = make_gradient(self._trace)
        self.fill_seconds = fill(self._ssd.embedding, rows)
        wait_until_idle()
        # run until the small cycle is complete and rows from the large one have filled the cache
        for _ in range(-(-(-(-rows // batch) + steps) // steps)):
            self.run_turn()
        self.turns: list[Turn] = []
        self.moved = dict.fromkeys(read_io_bytes(), 0)

    def run_turn(self) -> None:
        """Run a turn of steps and record it, with the bytes read and written meanwhile."""
        batches = [(draw_ids(self._trace, step), self._grad) for step in range(self._step, self._step + self._steps)]
        self._step += self._steps
        before = read_io_bytes()
        turn = measure_turn(self._ssd.embedding, (self._ssd(*each) for each in batches))
        after = read_io_bytes()
        for number, (each, out) in enumerate(zip(batches, turn.results, strict=True)):
            check_same(f"outputs of step {number} of a turn", out, self._twin(*each))
        turn.results.clear()
        if hasattr(self, "turns"):
            self.turns.append(turn)
            self.moved = {name: moved + after[name] - before[name] for name, moved in self.moved.items()}
