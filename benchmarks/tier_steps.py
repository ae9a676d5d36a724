"""Steps of the embedding alone: tiers in memory against device_mem, and cached_ssd over tables of growing size."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tier_report import Figure, listed
from tier_stores import (
    DIM,
    EmbeddingStep,
    Mismatch,
    Turn,
    check_results,
    check_rows,
    fill,
    make_embedding,
    make_options,
    run,
    wait_until_idle,
)
from torch import Tensor
from traces import Cycles, Trace, Zipf, ids

MEMORY, SCALE = "memory", "scale"
HIT_RATE = 0.99  # of the cache that has a bar
OVERFLOW_MB = 1
SPARE = 1.5  # of the disk that a table takes, for compaction
STORED_ROW = 160  # bytes on the disk, with what RocksDB adds


@dataclass(frozen=True)
class MemorySizes:
    """rows: of one table. cached: sizes of the caches, as shares of all rows. Stores take turns of one step."""

    rows: int = 38_462
    tables: int = 26
    batch: int = 4096
    cached: tuple[float, ...] = (2.0, 1.5, 1.0, 0.8, 0.6, 0.4, 0.25, 0.15)
    warm_up: int = 40
    steps: int = 60


@dataclass(frozen=True)
class ScaleSizes:
    rows: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    batch: int = 8192
    cached: float = 0.4
    turn: int = 40
    rounds: int = 3
    tolerance: float = 0.03  # that hit rates may differ by; a small table hits most, which counts against the others

    def warm_up(self, rows: int) -> int:
        """Until the small cycle has been through, and the cache has been filled by what passes it."""
        return -(-rows // self.batch) + self.turn


MEMORY_QUICK = MemorySizes(rows=2000, tables=2, batch=64, cached=(2.0, 0.3), warm_up=3, steps=3)
SCALE_QUICK = ScaleSizes(rows=(20_480, 40_960), batch=2048, turn=3, rounds=1, tolerance=0.1)


def memory(folder: Path, sizes: MemorySizes) -> list[Figure]:
    """host_mem, and cached_host_mem with caches that hit more and less, against device_mem."""
    trace = Zipf(sizes.tables, sizes.rows, sizes.batch)
    rows = sizes.rows * sizes.tables
    stores = {"device_mem": make_options("device_mem", folder), "host_mem": make_options("host_mem", folder)}
    for share in sizes.cached:
        stores[f"cache {share:.0%}"] = make_options("cached_host_mem", folder, int(rows * share))
    grad = _gradient(trace)
    with ExitStack() as stack:
        embeddings = {
            name: stack.enter_context(make_embedding("rows", sizes.tables, options)) for name, options in stores.items()
        }
        graphs = {name: EmbeddingStep(embedding) for name, embedding in embeddings.items()}
        for embedding in embeddings.values():
            fill(embedding, sizes.rows)
        turns: dict[str, list[Turn]] = {name: [] for name in stores}
        for step in range(sizes.warm_up + sizes.steps):
            batch = [(ids(trace, step), grad)]
            first = step % len(stores)  # which finds the batch in no cache of the processor
            order = [*stores][first:] + [*stores][:first]
            taken = {name: run(graphs[name], embeddings[name], batch) for name in order}
            for name, turn in taken.items():
                check_results(f"{name}, step {step}", turn, taken["device_mem"])
                if step >= sizes.warm_up:
                    turns[name].append(turn.without_results())
        for name, embedding in embeddings.items():
            check_rows(name, trace, embedding, embeddings["device_mem"], 1000)
    return _memory_figures(turns)


def _memory_figures(turns: dict[str, list[Turn]]) -> list[Figure]:
    seconds = {name: median(turn.seconds for turn in taken) for name, taken in turns.items()}
    cpu = {name: sum(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    figures = []
    gated = _smallest_that_hits(turns)
    for name, taken in turns.items():
        if name == "device_mem":
            continue
        hits, misses = sum(turn.hits for turn in taken), sum(turn.misses for turn in taken)
        what = f"cached_host_mem, {name} of the rows" if name.startswith("cache") else name
        bar = 0.95 if name == "host_mem" else 0.9 if name == gated else None
        notes = [
            ("hit rate", f"{hits / (hits + misses):.2%}"),
            ("ms", f"{1e3 * seconds[name]:.2f} of {1e3 * seconds['device_mem']:.2f}"),
            ("CPU", f"{cpu['device_mem'] / cpu[name]:.2f}"),
        ]
        speed = seconds["device_mem"] / seconds[name]
        figures.append(Figure(MEMORY, f"steps/s of device_mem, {what}", speed, bar=bar, notes=listed(notes)))
    return figures


def _smallest_that_hits(turns: dict[str, list[Turn]]) -> str:
    """The cache with the fewest hits that are still HIT_RATE of what it was asked for."""
    rates = {
        name: sum(turn.hits for turn in taken) / sum(turn.hits + turn.misses for turn in taken)
        for name, taken in turns.items()
        if name.startswith("cache")
    }
    enough = {name: rate for name, rate in rates.items() if rate >= HIT_RATE}
    if not enough:
        raise Mismatch(f"no cache hits {HIT_RATE:.0%}: {rates}")
    return min(enough, key=lambda name: enough[name])


def scale(folder: Path, sizes: ScaleSizes) -> list[Figure]:
    """The time of an id by the size of the table, at one hit rate."""
    tables = {}
    with ExitStack() as stack:
        for rows in sizes.rows:
            tables[rows] = _Table(stack, folder, rows, sizes)
        turns: dict[int, list[Turn]] = {rows: [] for rows in sizes.rows}
        for _ in range(sizes.rounds):
            for rows, table in tables.items():
                turns[rows].append(table.turn(sizes.turn))
        filled = {rows: table.filled for rows, table in tables.items()}
    smallest = min(sizes.rows)
    nanoseconds = {
        rows: 1e9 * median(turn.seconds for turn in taken) / (sizes.turn * sizes.batch) for rows, taken in turns.items()
    }
    cpu = {
        rows: 1e9 * median(turn.cpu_seconds for turn in taken) / (sizes.turn * sizes.batch)
        for rows, taken in turns.items()
    }
    figures = []
    for rows, taken in turns.items():
        notes = listed(
            [
                ("hit rate", f"{median(turn.hit_rate for turn in taken):.2%}"),
                ("CPU", f"{cpu[rows]:,.0f} ns"),
                ("backlog", f"{median(turn.backlog for turn in taken):.2f} s"),
                ("filled in", f"{filled[rows]:.1f} s"),
            ]
        )
        figures.append(Figure(SCALE, f"an id of cached_ssd, {rows:,} rows", nanoseconds[rows], "ns", notes=notes))
    rates = [median(turn.hit_rate for turn in taken) for taken in turns.values()]
    if max(rates) - min(rates) > sizes.tolerance:
        raise Mismatch(f"hit rates differ: {rates}")
    worst = max(nanoseconds.values()) / nanoseconds[smallest]
    return [*figures, Figure(SCALE, f"slowest of them, of the {smallest:,} rows", worst, "x", 1.5, at_most=True)]


def once(folder: Path, rows: int, sizes: ScaleSizes) -> list[Figure]:
    """One table of any size, with what it read from the disk and wrote to it. Raises OSError where it has no room."""
    free, needed = shutil.disk_usage(folder).free, int(rows * STORED_ROW * SPARE)
    if free < needed:
        raise OSError(f"{rows:,} rows take up to {needed / 2**30:.0f} GiB; {folder} has {free / 2**30:.0f} GiB")
    with ExitStack() as stack:
        before = _moved()
        table = _Table(stack, folder, rows, sizes)
        between = _moved()
        turns = [table.turn(sizes.turn) for _ in range(sizes.rounds)]
        after = _moved()
    count = sizes.rounds * sizes.turn * sizes.batch
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    notes = listed(
        [
            ("hit rate", f"{median(turn.hit_rate for turn in turns):.2%}"),
            ("filled in", f"{table.filled:.0f} s"),
            ("fill and warm-up wrote", f"{(between['write_bytes'] - before['write_bytes']) / 2**30:.1f} GiB"),
            ("on disk", f"{on_disk / 2**30:.1f} GiB"),
            *((name, f"{(after[name] - between[name]) / count:,.0f} bytes an id") for name in after),
        ]
    )
    nanoseconds = 1e9 * median(turn.seconds for turn in turns) / (sizes.turn * sizes.batch)
    return [Figure(SCALE, f"an id of cached_ssd, {rows:,} rows, once", nanoseconds, "ns", notes=notes)]


class _Table:
    """A filled table on disk with its cache warm, checked against rows in memory that nobody filled.

    They agree because `fill` writes the values that rows begin with.
    """

    def __init__(self, stack: ExitStack, folder: Path, rows: int, sizes: ScaleSizes) -> None:
        self._trace = Cycles(rows, sizes.batch)
        # the area beside the cache would hold much of a small table
        options = make_options("cached_ssd", folder, int(rows * sizes.cached), open="fresh", overflow_mb=OVERFLOW_MB)
        # initial values follow from the seed and not from the name
        self._embedding = stack.enter_context(make_embedding(f"rows_{rows}", 1, options))
        self._twin = stack.enter_context(make_embedding(f"rows_{rows}", 1, make_options("device_mem", folder)))
        self._graphs = EmbeddingStep(self._embedding), EmbeddingStep(self._twin)
        self._grad = _gradient(self._trace)
        self._step = 0
        self.filled = fill(self._embedding, rows)
        wait_until_idle()
        for _ in range(-(-sizes.warm_up(rows) // sizes.turn)):
            self.turn(sizes.turn)

    def turn(self, steps: int) -> Turn:
        batches = [(ids(self._trace, step), self._grad) for step in range(self._step, self._step + steps)]
        self._step += steps
        taken = run(self._graphs[0], self._embedding, batches)
        check_results(f"steps to {self._step}", taken, run(self._graphs[1], self._twin, batches))
        return taken.without_results()


def _gradient(trace: Trace) -> Tensor:
    return torch.rand(trace.batch, trace.tables, DIM, generator=torch.Generator().manual_seed(1)) - 0.5


def _moved() -> dict[str, int]:
    """Bytes that this process asked to read and write, and those that went to and from a disk."""
    lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return {name: int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")}
