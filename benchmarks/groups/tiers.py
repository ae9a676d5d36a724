"""The tiers: whole steps over SSD, caches against memory, tables of growing size, look-ahead, the cost of counting."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from contenders import DIM, RowsStep, fill, make_embedding, make_options
from models import GraphStep, Model, keyed, make_batches
from replacement import misses
from report import Figure, listed
from timing import Turn, seconds_of, top_tier, turn_of, wait_until_idle, without_garbage_collection
from torch import Tensor
from traces import Cycles, ScanMixed, Trace, WrappedZipf, Zipf, hashed, ids
from workload import Mismatch, NotMeasured, check_losses, check_same, figure, workload

from tierbed import MultiTableEmbedding, plan

# of cached_ssd, the best of those tried: this trace has no drift, and its table is in the page cache
OPTIONS = {"cache_policy": "lfu", "read_mode": "mmap", "shards": 2}
DRAWS = {"zipf": Zipf, "wrapped": WrappedZipf, "scan-mixed": ScanMixed}
HIT_RATE = 0.99  # of the cache in memory that has a bar
STORED_ROW = 160  # bytes on the disk, with what RocksDB adds
SPARE = 1.5  # of the disk that a table takes, for compaction
WINDOW = 8
CALLS = 64  # of tiers in a step, each timed and counted: more than a step over any stack makes


def train(
    folder: Path,
    draw: str = "zipf",
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
            batches = keyed(make_batches(model, count, first, DRAWS[draw]))
            steps = ssd.run(batches, ahead=announced) if announced else (ssd(*each) for each in batches)
            ours, theirs = turn_of(ssd.embedding, steps), turn_of(memory.embedding, (memory(*each) for each in batches))
            check_losses("cached_ssd and device_mem", ours.results, theirs.results)
            if number >= 0:
                turns[announced].append((ours, theirs))
        check_rows("cached_ssd", model.rows, memory.embedding, ssd.embedding)
        capacity = top_tier(ssd.embedding)["capacity"] / rows
    about = (
        f"{draw}, {rows:,} rows, cache {capacity:.1%} of them, options {dict(options)}, filled in {ssd.filled:.0f} s"
    )
    for announced, pairs in turns.items():
        how = f"{announced} ahead" if announced else "nothing announced"
        ratio = median(theirs.seconds / ours.seconds for ours, theirs in pairs)
        mine, others = zip(*pairs, strict=True)
        parts = [
            ("cached_ssd", _split(mine, turn)),
            ("device_mem", _split(others, turn)),
            ("hit rate", f"{median(each.hit_rate for each in mine):.1%}"),
            ("misses", f"{median(each.misses for each in mine) / turn:,.0f} a step"),
            ("backlog", f"{median(each.backlog for each in mine):.2f} s"),
            (about, ""),
        ]
        yield figure(f"samples/s of device_mem, {how}", ratio, bar=bar if announced else None, notes=listed(parts))


TINY = {"rows": 4000, "tables": 4, "batch": 64, "warm_up": 4, "turn": 3, "repeats": 1}
workload(TINY)(train)
workload(TINY, name="train-wrapped", draw="wrapped", bar=None)(train)
workload(TINY, name="train-defaults", options={}, ahead=4, bar=None)(train)


def _split(turns: Sequence[Turn], steps: int) -> str:
    """Milliseconds of a step by part, and of all processors."""
    parts = {part: median(1e3 * turn.parts[part] / steps for turn in turns) for part in turns[0].parts}
    whole = median(1e3 * turn.seconds / steps for turn in turns)
    cpu = median(1e3 * turn.cpu / steps for turn in turns)
    shown = " + ".join(f"{part} {value:.1f}" for part, value in parts.items())
    return f"{whole:.1f} ms = {shown} + dense {whole - sum(parts.values()):.1f} (CPU {cpu:.1f})"


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
        self.moved = dict.fromkeys(_moved(), 0)

    def take(self) -> None:
        """A turn of steps; bytes that were read and written meanwhile, of all files and of the disk."""
        batches = [(ids(self._trace, step), self._grad) for step in range(self._step, self._step + self._steps)]
        self._step += self._steps
        before = _moved()
        turn = turn_of(self._ssd.embedding, (self._ssd(*each) for each in batches))
        after = _moved()
        for number, (each, out) in enumerate(zip(batches, turn.results, strict=True)):
            check_same(f"outputs of step {number} of a turn", out, self._twin(*each))
        turn.results.clear()
        if hasattr(self, "turns"):
            self.turns.append(turn)
            self.moved = {name: moved + after[name] - before[name] for name, moved in self.moved.items()}


def _moved() -> dict[str, int]:
    """Bytes that this process asked to read and write, and those that went to and from a disk."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")}


@workload({"rows": (100_000,), "tables": 2, "batch": 512, "warm_up": 8, "steps": 8})
def lookahead(
    folder: Path,
    rows: Sequence[int] = (1_000_000, 10_000_000),
    tables: int = 26,
    batch: int = 4096,
    cached: float = 0.05,
    warm_up: int = 40,
    steps: int = 40,
) -> Iterator[Figure]:
    """Misses with 8 batches known: fewer than LRU's, and of what the optimum of that window saves; plan()'s hit rate.

    rows: of all tables, with bars for the first. Misses count from the end of the warm-up on.
    """
    for count in rows:
        for name in ("zipf", "scan-mixed"):
            trace = DRAWS[name](tables, count // tables, batch)
            gated = count == rows[0]
            yield from _lookahead(f"{name}, {count:,} rows", trace, int(count * cached), folder, warm_up, steps, gated)


def _lookahead(
    what: str, trace: Trace, cached: int, folder: Path, warm_up: int, steps: int, gated: bool
) -> Iterator[Figure]:
    batches = [ids(trace, step) for step in range(warm_up + steps)]
    grad = gradient(trace)
    turns: dict[int, list[Turn]] = {}
    for window in (0, WINDOW):
        # misses are to be those of the cache, and not of rows that prefetch holds in the overflow area
        options = make_options("cached_host_mem", folder, cached, overflow_mb=0.1)
        with make_embedding(trace.tables, options) as embedding, without_garbage_collection():
            graph = RowsStep(embedding)
            parts = (batches[:warm_up], batches[warm_up:])
            turns[window] = [turn_of(embedding, announced(graph, part, grad, window)) for part in parts]
            capacity = top_tier(embedding)["capacity"]
    for one, other in zip(turns[0], turns[WINDOW], strict=True):
        for out, expected in zip(other.results, one.results, strict=True):
            check_same(f"{what}: outputs with and without look-ahead", out, expected)
    lru, ahead = turns[0][1], turns[WINDOW][1]
    distinct = [np.unique(trace.numbers(step) + np.arange(trace.tables) * trace.rows) for step in range(len(batches))]
    simulated = {window: int(misses(distinct, capacity, window)[warm_up:].sum()) for window in (0, WINDOW, None)}
    planned = plan(batches, DIM, DIM, tables=trace.tables, warmup=warm_up).hit_rate(rows=capacity)
    notes = [
        ("look-ahead", f"{ahead.misses:,}"),
        ("LRU", f"{lru.misses:,}"),
        ("fully associative: LRU", f"{simulated[0]:,}"),
        (f"optimum of {WINDOW} batches", f"{simulated[WINDOW]:,}"),
        ("Belady", f"{simulated[None]:,}"),
        (f"rows used in {steps} steps", f"{lru.hits + lru.misses:,}"),
        ("cache", f"{capacity:,} rows"),
    ]
    fewer, saved = 1 - ahead.misses / lru.misses, (lru.misses - ahead.misses) / max(lru.misses - simulated[WINDOW], 1)
    bars = (0.25, 0.9, 2.0) if gated else (None, None, None)
    yield figure(f"fewer misses than LRU, {what}", fewer, bar=bars[0], notes=listed(notes))
    yield figure(f"of what the optimum of {WINDOW} batches saves, {what}", saved, bar=bars[1])
    rates = f"predicted {planned:.1%}, measured {lru.hit_rate:.1%}"
    off = 100 * abs(planned - lru.hit_rate)
    yield figure(f"plan() from the hit rate, {what}", off, "points", bar=bars[2], at_most=True, notes=rates)


def announced(graph: RowsStep, batches: Sequence[Tensor], grad: Tensor, window: int) -> Iterator[Tensor]:
    """Steps that wait until what was announced is known, so that misses do not depend on the machine's load."""
    for batch in batches[:window]:
        graph.embedding.prefetch(batch)
    for step, batch in enumerate(batches):
        if window:
            for later in batches[step + window : step + window + 1]:
                graph.embedding.prefetch(later)
            wait_until_idle(0.04)
        yield graph(batch, grad)


@workload({"rows": 2000, "tables": 2, "batch": 64, "cached": 0.6, "repeats": 3, "calls": 1 << 12})
def counting(
    folder: Path,
    rows: int = 38_462,
    tables: int = 26,
    batch: int = 4096,
    cached: float = 0.1,
    repeats: int = 40,
    calls: int = 1 << 20,
) -> Iterator[Figure]:
    """64 counted and timed calls of tiers, of a step over cached_ssd; and a call of metrics()."""
    trace = Zipf(tables, rows, batch)
    grad = gradient(trace)
    with make_embedding(tables, make_options("cached_ssd", folder, int(rows * tables * cached))) as embedding:
        graph = RowsStep(embedding)
        batches = [(ids(trace, step), grad) for step in range(2 * repeats)]
        seconds = turn_of(embedding, (graph(*each) for each in batches), repeats).seconds / repeats
        metrics = median(seconds_of(embedding.metrics) for _ in range(20))
    nanoseconds = _counted_call(folder, calls)
    notes = f"a call {nanoseconds:.0f} ns, calls {CALLS}, a step {1e3 * seconds:.1f} ms"
    share = 100 * CALLS * nanoseconds * 1e-9 / seconds
    yield figure("counted and timed calls of a step", share, "% of it", bar=1.0, at_most=True, notes=notes)
    yield figure("metrics() of cached_ssd", 1e3 * metrics, "ms", notes="if it is called")


def _counted_call(folder: Path, calls: int) -> float:
    source, library = Path(__file__).resolve().parents[1] / "counting.cpp", folder / "counting.so"
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra"]
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
    native = ctypes.CDLL(str(library))
    native.counted_call.restype = ctypes.c_double
    native.counted_call.argtypes = [ctypes.c_int64]
    return min(float(native.counted_call(calls)) for _ in range(5))
