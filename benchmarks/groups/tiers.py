"""The tiers: whole steps over SSD, caches against memory, tables of growing size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import DIM, STORED_ROW, Collection, RowsStep, fill, make_embedding, make_options
from models import GraphStep, Model, keyed, make_batches
from report import Figure, listed
from timing import Turn, io_bytes, split, top_tier, turn_of, wait_until_idle, without_garbage_collection
from torch import Tensor
from traces import ALPHA, Cycles, Shape, Trace, Zipf, hashed, ids
from traces import make_batches as make_bags
from workload import Mismatch, NotMeasured, check_losses, check_same, figure, workload

import tierbed
from tierbed import MultiTableEmbedding

# of cached_ssd, the best of those tried: this trace has no drift, and its table is in the page cache
OPTIONS = {"cache_policy": "lfu", "read_mode": "mmap", "shards": 2}
HIT_RATE = 0.99  # of the cache in memory that has a bar
SPARE = 1.5  # of the disk that a table takes, for compaction


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
    """Samples/s of a training step on cached_ssd, of those on device_mem; every other turn announces nothing.

    rows: of all tables. cached: the share of them that the cache has room for. turn: steps of one store before the
    other's.
    """
    model = Model(rows // tables, tables, batch, (512, 256), "adagrad")
    memory = GraphStep(model, folder)
    ssd = GraphStep(model, folder, "cached_ssd", int(rows * cached), open="fresh", **options)
    turns: dict[int, list[tuple[Turn, Turn]]] = {ahead: [], 0: []}
    with memory.embedding, ssd.embedding, without_garbage_collection():
        wait_until_idle()
        for number in range(-1, 2 * repeats):  # the first warms up
            announced = 0 if number % 2 and number > 0 else ahead
            first, count = (warm_up + number * turn, turn) if number >= 0 else (0, warm_up)
            batches = keyed(make_batches(model, count, first))
            steps = ssd.run(batches, ahead=announced) if announced else (ssd(*each) for each in batches)
            ours, theirs = turn_of(ssd.embedding, steps), turn_of(memory.embedding, (memory(*each) for each in batches))
            check_losses("cached_ssd and device_mem", ours.results, theirs.results)
            if number >= 0:
                turns[announced].append((ours, theirs))
        check_rows("cached_ssd", model.rows, memory.embedding, ssd.embedding)
        capacity = top_tier(ssd.embedding)["capacity"] / rows
    about = f"{rows:,} rows, cache {capacity:.1%} of them, options {dict(options)}, filled in {ssd.filled:.0f} s"
    for announced, pairs in turns.items():
        how = f"{announced} ahead" if announced else "nothing announced"
        ratio = median(theirs.seconds / ours.seconds for ours, theirs in pairs)
        mine, others = zip(*pairs, strict=True)
        parts = [
            ("cached_ssd", split(mine, turn)),
            ("device_mem", split(others, turn)),
            ("hit rate", f"{median(each.hit_rate for each in mine):.1%}"),
            ("misses", f"{median(each.misses for each in mine) / turn:,.0f} a step"),
            ("backlog", f"{median(each.backlog for each in mine):.2f} s"),
            (about, ""),
        ]
        yield figure(f"samples/s of device_mem, {how}", ratio, bar=bar if announced else None, notes=listed(parts))


TINY = {"rows": 4000, "tables": 4, "batch": 64, "warm_up": 4, "turn": 3, "repeats": 1}
workload(TINY)(train)
workload(TINY, name="train-defaults", options={}, ahead=4, bar=None)(train)


def check_rows(what: str, rows: int, one: MultiTableEmbedding, other: MultiTableEmbedding) -> None:
    """Raises Mismatch unless 1,000 random rows of each table have the same bits."""
    random = torch.Generator().manual_seed(0)
    keys = hashed(torch.randint(rows, (1000, one.spec.num_tables), generator=random))
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
    """Steps/s of host_mem, and of caches of these shares of the rows in front of it, of those of device_mem."""
    trace = Zipf(tables, rows, batch)
    stores = {"device_mem": make_options("device_mem", folder), "host_mem": make_options("host_mem", folder)}
    for share in cached:
        stores[f"cache {share:.0%}"] = make_options("cached_host_mem", folder, int(rows * tables * share))
    grad = gradient(trace)
    turns: dict[str, list[Turn]] = {name: [] for name in stores}
    with ExitStack() as stack:
        stack.enter_context(without_garbage_collection())
        graphs = {name: RowsStep(stack.enter_context(make_embedding(tables, made))) for name, made in stores.items()}
        for graph in graphs.values():
            fill(graph.embedding, rows)
        for step in range(warm_up + repeats):
            batches = [(ids(trace, step), grad)]
            first = step % len(stores)  # which finds the batch in no cache of the processor
            for name in [*stores][first:] + [*stores][:first]:
                turns[name].append(turn_of(graphs[name].embedding, (graphs[name](*each) for each in batches)))
            expected = turns["device_mem"][-1].results.pop()
            for name in graphs:
                if name != "device_mem":
                    check_same(f"{name}: outputs of step {step}", turns[name][-1].results.pop(), expected)
        for name, graph in graphs.items():
            check_rows(name, rows, graph.embedding, graphs["device_mem"].embedding)
    turns = {name: taken[warm_up:] for name, taken in turns.items()}
    seconds = {name: median(turn.seconds for turn in taken) for name, taken in turns.items()}
    hits = {name: sum(turn.hits for turn in taken) for name, taken in turns.items()}
    rates = {name: hits[name] / (hits[name] + sum(turn.misses for turn in taken)) for name, taken in turns.items()}
    enough = [name for name, rate in rates.items() if name.startswith("cache") and rate >= HIT_RATE]
    if not enough:
        raise Mismatch(f"no cache hits {HIT_RATE:.0%}: {rates}")
    bars = {"host_mem": 0.95, min(enough, key=rates.__getitem__): 0.9}
    for name in stores:
        if name != "device_mem":
            ms = f"ms {1e3 * seconds[name]:.2f} of {1e3 * seconds['device_mem']:.2f}"
            notes = f"hit rate {rates[name]:.2%}, {ms}"
            speed = seconds["device_mem"] / seconds[name]
            yield figure(f"steps/s of device_mem, {name}", speed, bar=bars.get(name), notes=notes)


SLOWER = 1.02  # the most that a run with batches ahead may take, of plain calls


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
    """Steps of rows alone on a cache: `graph.run` with batches ahead, of the time of plain calls.

    shapes: samples of a batch, and ids of a bag. reads: of cached_ssd, from files that the page cache has or from the
    disk; or from "memory", of cached_host_mem. alpha: of the zipf law of ids; None for uniform ones. turn: steps of one
    side before the next, several times as many as are ahead, since the window is empty at the end of each.
    """
    for (batch, length), read_mode in product(shapes, reads):
        shape = Shape(tables, rows, dim, batch, length, alpha, "rowwise_adagrad", ragged=length > 1)
        batches = make_bags(shape, 64)
        turns: dict[int | str | None, list[Turn]] = {None: [], **{number: [] for number in ahead}}
        with ExitStack() as stack, without_garbage_collection():
            sides = {}
            for number in turns:
                place = folder / f"{length} {read_mode} {number}"
                if read_mode == "memory":
                    store = tierbed.make_cached_host_mem_store_options(cache_mb)
                else:
                    store = tierbed.make_cached_ssd_store_options(cache_mb, place, read_mode=read_mode)
                sides[number] = Collection(shape, batches, store)
                stack.enter_context(sides[number].embedding)
            for turn_number in range(repeats + 1):  # the first warms up
                first = turn_number % len(turns)
                for number in [*turns][first:] + [*turns][:first]:
                    steps = enumerate(sides[number].steps(turn_number * turn, turn, number), 1)
                    outputs = (out if count == turn else torch.empty(0) for count, out in steps)  # the last alone
                    turns[number].append(turn_of(sides[number].embedding, outputs))
                for taken in turns.values():
                    check_same("outputs", turns[None][-1].results[-1], taken[-1].results[-1])
        for number in ahead:
            mine, plain = turns[number][1:], turns[None][1:]
            ratio = median(one.seconds / other.seconds for one, other in zip(mine, plain, strict=True))
            missed = [
                (median(one.misses for one in side), median(one.hit_rate for one in side)) for side in (mine, plain)
            ]
            misses = [f"{count / turn:,.0f} ({1 - hit_rate:.1%})" for count, hit_rate in missed]
            what = f"{number} ahead, of plain calls, {length} ids, {read_mode} reads"
            parts = [("ahead", split(mine, turn)), ("plain", split(plain, turn)), ("misses", " and ".join(misses))]
            notes = listed(parts)
            yield figure(what, ratio, "x", bar=SLOWER, at_most=True, notes=notes)


def gradient(trace: Trace) -> Tensor:
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
    """Nanoseconds an id of cached_ssd by the number of rows, at one hit rate; `--set rows=[100000000]` for one table.

    apart: what hit rates may differ by; a small table hits most, which counts against the others.
    """
    free, needed = shutil.disk_usage(folder).free, int(sum(rows) * STORED_ROW * SPARE)
    if free < needed:
        raise NotMeasured(f"rows take up to {needed / 2**30:.0f} GiB, and {folder} has {free / 2**30:.0f} GiB")
    with ExitStack() as stack:
        stack.enter_context(without_garbage_collection())
        tables = {count: _Table(stack, folder, count, batch, cached, turn) for count in rows}
        for _ in range(repeats):
            for table in tables.values():
                table.take()
    nanoseconds = {}
    for count, table in tables.items():
        taken, ids_of = table.turns, turn * batch
        nanoseconds[count] = 1e9 * median(each.seconds for each in taken) / ids_of
        notes = [
            ("hit rate", f"{median(each.hit_rate for each in taken):.2%}"),
            ("CPU", f"{1e9 * median(each.cpu for each in taken) / ids_of:,.0f} ns"),
            ("backlog", f"{median(each.backlog for each in taken):.2f} s"),
            ("filled in", f"{table.filled:.1f} s"),
            *((name, f"{moved / ids_of / repeats:,.0f} bytes an id") for name, moved in table.moved.items()),
        ]
        yield figure(f"an id of cached_ssd, {count:,} rows", nanoseconds[count], "ns", notes=listed(notes))
    rates = [median(each.hit_rate for each in table.turns) for table in tables.values()]
    if max(rates) - min(rates) > apart:
        raise Mismatch(f"hit rates differ: {rates}")
    if len(rows) > 1:
        worst = max(nanoseconds.values()) / nanoseconds[min(rows)]
        yield figure(f"slowest of them, of the {min(rows):,} rows", worst, "x", bar=1.5, at_most=True)


class _Table:
    """A filled table on disk with its cache warm, checked against rows in memory that were not written.

    They agree because `fill` writes the values that rows start with.
    """

    def __init__(self, stack: ExitStack, folder: Path, rows: int, batch: int, cached: float, steps: int) -> None:
        self._trace, self._steps, self._step = Cycles(rows, batch), steps, 0
        # the overflow area would hold much of a small table
        options = make_options("cached_ssd", folder, int(rows * cached), open="fresh", overflow_mb=1)
        self._ssd = RowsStep(stack.enter_context(make_embedding(1, options, name=f"rows_{rows}")))
        self._twin = RowsStep(stack.enter_context(make_embedding(1)))
        self._grad = gradient(self._trace)
        self.filled = fill(self._ssd.embedding, rows)
        wait_until_idle()
        # until the small cycle has been through, and the cache has been filled by what passes it
        for _ in range(-(-(-(-rows // batch) + steps) // steps)):
            self.take()
        self.turns: list[Turn] = []
        self.moved = dict.fromkeys(io_bytes(), 0)

    def take(self) -> None:
        """A turn of steps; bytes that were read and written meanwhile, of all files and of the disk."""
        batches = [(ids(self._trace, step), self._grad) for step in range(self._step, self._step + self._steps)]
        self._step += self._steps
        before = io_bytes()
        turn = turn_of(self._ssd.embedding, (self._ssd(*each) for each in batches))
        after = io_bytes()
        for number, (each, out) in enumerate(zip(batches, turn.results, strict=True)):
            check_same(f"outputs of step {number} of a turn", out, self._twin(*each))
        turn.results.clear()
        if hasattr(self, "turns"):
            self.turns.append(turn)
            self.moved = {name: moved + after[name] - before[name] for name, moved in self.moved.items()}
