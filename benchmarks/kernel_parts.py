"""Where the time of a step of the embedding alone goes: deduplication, lookup, gather, update, dispatch."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from contenders import Tierbed
from graph_stopwatch import Stopwatch, timed_calls
from workloads import BATCHES, Workload, make_batches

from tierbed.engine import _core

PARTS = {
    "deduplication": (_core, ("Batch",)),
    "lookup": (_core.FullTable, ("find", "insert_missing")),
    "gather": (_core, ("gather",)),
    "update": (_core, ("update",)),
}
# a product takes 3 cycles on every x86-64 processor of these years, and each waits for the one before
PRODUCTS, CYCLES_OF_PRODUCT = 100_000_000, 3
CLOCK = """
extern "C" unsigned products(long n) {
    unsigned x = 3, y = 5;
    for (; n > 0; --n) {
        asm volatile("" : "+r"(y));
        x *= y;
    }
    return x;
}
"""


def clock() -> float:
    """Cycles a second of a busy core, from a chain of products: the best of three, since other load only adds."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "clock.cpp"), Path(folder, "clock.so")
        source.write_text(CLOCK)
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        native = ctypes.CDLL(str(library))
    native.products.argtypes = [ctypes.c_long]
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        native.products(PRODUCTS)
        seconds.append(time.perf_counter() - begin)
    return PRODUCTS * CYCLES_OF_PRODUCT / min(seconds)


def parts_of(work: Workload, repeats: int) -> dict[str, float]:
    """Median seconds of each part of a step. Dispatch is what no other part has: Python, torch's ops, autograd."""
    gc.collect()
    ours = Tierbed(work, make_batches(work))
    watches = {name: Stopwatch() for name in PARTS}
    taken: dict[str, list[float]] = {name: [] for name in (*PARTS, "dispatch")}
    with ExitStack() as stack:
        for name, (place, calls) in PARTS.items():
            stack.enter_context(timed_calls(watches[name], place, *calls))
        gc.disable()
        for turn in range(BATCHES + repeats):
            begin = time.perf_counter()
            out = ours.step(turn % BATCHES)
            whole = time.perf_counter() - begin
            del out  # as in `kernels.py`
            laps = {name: watch.lap() for name, watch in watches.items()}
            if turn < BATCHES:
                continue
            for name, seconds in (*laps.items(), ("dispatch", whole - sum(laps.values()))):
                taken[name].append(seconds)
        gc.enable()
    return {name: median(seconds) for name, seconds in taken.items()}


def print_parts(works: list[Workload], repeats: int) -> None:
    """Cycles of all threads together for each id, as a table in Markdown."""
    threads, hertz = torch.get_num_threads(), clock()
    names = (*PARTS, "dispatch")
    print(f"cycles an id, of {threads} threads together, at {hertz / 1e9:.2f} GHz")
    print(f"| workload | {' | '.join(names)} | all |")
    print("|---" * (len(names) + 2) + "|")
    for work in works:
        cycles = [seconds * hertz * threads / work.ids for seconds in parts_of(work, repeats).values()]
        print(f"| `{work.name}` | {' | '.join(f'{each:.0f}' for each in cycles)} | {sum(cycles):.0f} |")
