"""What counting costs a step: timed and counted calls of tiers, and a call of `metrics()`."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tier_report import Figure, listed
from tier_stores import DIM, EmbeddingStep, make_embedding, make_options, run, wait_until_idle
from traces import Zipf, ids

from tierbed import MultiTableEmbedding

SECTION = "counting"
CALLS = 64  # of tiers in a step, each timed and counted: more than a step over any stack makes
_SOURCE = Path(__file__).with_name("counting.cpp")


@dataclass(frozen=True)
class Sizes:
    """rows: of one table."""

    rows: int = 38_462
    tables: int = 26
    batch: int = 4096
    cached: float = 0.1
    steps: int = 40
    calls: int = 1 << 20


QUICK = Sizes(rows=2000, tables=2, batch=64, cached=0.6, steps=3, calls=1 << 12)


def measure(folder: Path, sizes: Sizes) -> list[Figure]:
    """Against a step of the embedding alone over cached_ssd."""
    trace = Zipf(sizes.tables, sizes.rows, sizes.batch)
    grad = torch.rand(trace.batch, trace.tables, DIM) - 0.5
    cached = int(sizes.rows * sizes.tables * sizes.cached)
    with make_embedding("rows", sizes.tables, make_options("cached_ssd", folder, cached)) as embedding:
        graph = EmbeddingStep(embedding)
        batches = [(ids(trace, step), grad) for step in range(2 * sizes.steps)]
        run(graph, embedding, batches[: sizes.steps])
        seconds = run(graph, embedding, batches[sizes.steps :]).seconds / sizes.steps
        wait_until_idle()
        asked = median(_seconds_of_metrics(embedding) for _ in range(20))
    nanoseconds = _counted_call(sizes.calls)
    share = 100 * CALLS * nanoseconds * 1e-9 / seconds
    notes = listed([("a call", f"{nanoseconds:.0f} ns"), ("calls", f"{CALLS}"), ("a step", f"{1e3 * seconds:.1f} ms")])
    return [
        Figure(SECTION, "counted and timed calls of a step", share, "% of it", 1.0, at_most=True, notes=notes),
        Figure(SECTION, "metrics() of cached_ssd", 1e3 * asked, "ms", notes="where it is called"),
    ]


def _seconds_of_metrics(embedding: MultiTableEmbedding) -> float:
    begin = time.perf_counter()
    embedding.metrics()
    return time.perf_counter() - begin


def _counted_call(calls: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "counting.so")
        flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra"]
        subprocess.run(["g++", *flags, "-o", str(library), str(_SOURCE)], check=True)
        native = ctypes.CDLL(str(library))
    native.counted_call.restype = ctypes.c_double
    native.counted_call.argtypes = [ctypes.c_int64]
    return min(float(native.counted_call(calls)) for _ in range(5))
