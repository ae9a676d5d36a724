"""Training with tables larger than memory, and with tables that fit the page cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from contenders import STORED_ROW_BYTES
from disk.floor import Floor, evict_file, measure
from disk.memory_limit import find_limit_problem, memory_limit
from disk.training import MEMORY_MAPPED, Case, Outcome, train_case
from report import Figure, join_pairs
from workload import Mismatch, NotMeasured, figure, workload

LOSS_TOLERANCE = 1e-4  # allowed difference between losses, because torch sums a row's gradients in another order
TINY = {"batch": 64, "warm_up": 4, "repeats": 12, "limit": None, "floor_seconds": 0.05, "apart": False}
FIELDS = {"batch": 2048, "warm_up": 500, "repeats": 2000}  # of a `Case`
LIMITED = {**FIELDS, "floor_seconds": 2.0, "apart": True}  # apart: each side in its own process


@workload(
    {**TINY, "rows": 2000, "peer_steps": 4, "curve": (1.0, 0.5, 0.25)},
    name="beyond-memory",
    **{**LIMITED, "rows": 2_500_000, "limit": 1_288_490_188},
)
def beyond_memory(
    folder: Path,
    repeats: int,
    floor_seconds: float,
    apart: bool,
    peer_steps: int = 10,
    curve: Sequence[float] = (1.5, 1.0, 0.5, 0.25),
    **fields: Any,
) -> Iterator[Figure]:
    """Steps with D=16 in limited memory, relative to the disk's reads and to memory-mapped torch. Varies the limit.

    rows: rows in each of 8 tables. curve: memory limits as fractions of the table's size.
    """
    case = Case("cached_ssd", folder=str(folder / "rows"), steps=repeats, **fields)
    if case.limit is not None and (reason := find_limit_problem()):
        print(f"measuring only direct reads: memory cannot be limited, {reason}")
        case = replace(case, limit=None, options={"read_mode": "direct"}, steps=min(500, repeats))
        outcome = run(case, apart)
        if not outcome.bytes_read:
            raise Mismatch("nothing was read from the disk")
        yield disk_ratio("direct reads", case, outcome, measure_floor(case, floor_seconds), 0.6)
        return
    ours = run(case, apart)
    floor = measure_floor(case, floor_seconds)
    memory = run(replace(case, store="device_mem", limit=None), apart)
    check_same(ours, memory)
    peer_case = replace(case, store=MEMORY_MAPPED, warm_up=2, steps=peer_steps, folder=str(folder / "peer"))
    peer = run(peer_case, apart)
    check_close(ours, peer)
    shutil.rmtree(peer_case.folder)
    yield disk_ratio(f"{case.rows * case.tables / 1e6:g} M rows of D=16", case, ours, floor, 0.6)
    notes = f"{case.batch / find_median(ours):,.0f}/s to {case.batch / find_median(peer):,.0f}/s"
    faster = find_median(peer) / find_median(ours)
    yield figure("samples/s, ours / memory-mapped torch", faster, "x", bar=40.0, notes=notes)
    bar = max(3.0, 1.5 * find_p99_ratio(memory))
    notes = f"device_mem {find_p99_ratio(memory):.2f}, slowest step {1e3 * max(ours.seconds):.0f} ms"
    yield figure("step time, p99 / median", find_p99_ratio(ours), "x", bar=bar, at_most=True, notes=notes)
    yield from _curve(case, curve, floor, apart)


def _curve(case: Case, curve: Sequence[float], floor: Floor, apart: bool) -> Iterator[Figure]:
    """Vary the memory limit: a smaller one may cost no more time than its additional reads."""
    before: tuple[float, float] | None = None
    table = case.rows * case.tables * STORED_ROW_BYTES
    options = {"overflow_mb": 64}
    case = replace(case, cached=0.05, reuse_folder=True, steps=min(300, case.steps), options=options)
    for number, fraction in enumerate(curve, 1):
        # new ids, since earlier cases moved theirs into recent files
        limited = replace(case, limit=int(table * fraction) if apart else None, first_step=number * 100_000)
        outcome = run(limited, apart)
        step, read = find_median(outcome), outcome.bytes_read / 4096 / limited.steps
        notes = _details(limited, outcome)
        what = f"samples/s, memory {fraction:g} of the table's size"
        yield figure(what, limited.batch / step, "/s", notes=notes)
        if before is not None:
            allowed = before[0] + (read - before[1]) / floor.reads_per_second / 0.6
            what = f"step time with {fraction:g} / time its reads explain"
            yield figure(what, step / allowed, "x", bar=1.1, at_most=True)
        before = step, read


@workload({**TINY, "rows": 1000}, **{**LIMITED, "rows": 375_000, "limit": 1 << 30, "repeats": 500})
def wide(folder: Path, repeats: int, floor_seconds: float, apart: bool, **fields: Any) -> Iterator[Figure]:
    """Steps with D=128 and row-wise Adagrad in limited memory, relative to the time of the disk's reads."""
    path = str(folder / "rows")
    case = Case("cached_ssd", folder=path, dim=128, optimizer="rowwise_adagrad", steps=repeats, **fields)
    if case.limit is not None and (reason := find_limit_problem()):
        raise NotMeasured(f"memory cannot be limited, {reason}")
    outcome = run(case, apart)
    name = f"{case.rows * case.tables / 1e6:g} M rows of D=128"
    yield disk_ratio(name, case, outcome, measure_floor(case, floor_seconds), 0.7)


@workload(
    {"rows": 1000, "batch": 64, "warm_up": 4, "repeats": 12, "apart": False},
    name="page-cache",
    **{**FIELDS, "rows": 500_000, "repeats": 1000},
)
def page_cache(folder: Path, repeats: int, apart: bool = True, **fields: Any) -> Iterator[Figure]:
    """Samples/s with all files in the page cache, relative to device_mem and to memory-mapped torch."""
    case = Case("cached_ssd", folder=str(folder / "rows"), steps=repeats, **fields)
    ours = run(case, apart)
    memory = run(replace(case, store="device_mem"), apart)
    check_same(ours, memory)
    peer = run(replace(case, store=MEMORY_MAPPED, folder=str(folder / "peer")), apart)
    check_close(replace(ours, losses=ours.losses[:10]), peer)
    memory_ratio, peer_ratio = (find_median(other) / find_median(ours) for other in (memory, peer))
    notes = f"{1e3 * find_median(peer):.1f} ms; device_mem {1e3 * find_median(memory):.1f} ms"
    yield figure("samples/s, ours / device_mem", memory_ratio, bar=0.4, notes=_details(case, ours))
    yield figure("samples/s, ours / memory-mapped torch", peer_ratio, bar=0.6, notes=notes)


def disk_ratio(what: str, case: Case, ours: Outcome, floor: Floor, bar: float) -> Figure:
    """Return the time the disk alone needs to read a step's misses, relative to the step's time."""
    ratio = ours.misses / case.steps / floor.reads_per_second / find_median(ours)
    limit = "no limit" if case.limit is None else f"{case.limit / 10**9:.1f} GB"
    what = f"time, disk alone / step, {what}, {limit}"
    return figure(what, ratio, bar=bar, notes=f"{_details(case, ours)}, floor {floor}")


def _details(case: Case, outcome: Outcome) -> str:
    steps, ssd = case.steps, outcome.ssd_counters
    merged = ssd["compaction_read_bytes"] + ssd["compaction_bytes"]
    return join_pairs(
        [
            ("ms", f"{1e3 * find_median(outcome):.1f}"),
            ("misses", f"{outcome.misses / steps:,.0f} per step"),
            ("CPU", f"{1e3 * outcome.cpu_seconds / steps:.1f} ms"),
            ("from the disk", f"{outcome.bytes_read / steps / 1e3:,.0f} kB"),
            ("to it", f"{outcome.bytes_written / steps / 1e3:,.0f} kB"),
            ("compactions' part of all file bytes", f"{merged / outcome.bytes_moved:.0%}"),
            ("write amplification", f"{(ssd['flush_bytes'] + ssd['compaction_bytes']) / max(1, ssd['bytes_in']):.2f}"),
            ("stalled", f"{ssd['stall_seconds']:.2f} s"),
        ]
    )


def run(case: Case, apart: bool) -> Outcome:
    """Train in a new process with the case's memory limit or, without `apart`, in this process and without a limit.

    Raises OSError if the process fails or its memory cannot be limited.
    """
    folder = Path(case.folder)
    folder.mkdir(exist_ok=True)
    if not apart:
        return train_case(case)
    _evict_files(folder)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with memory_limit(case.limit) as enter:
        done = subprocess.run(
            [sys.executable, "-m", "disk.training", json.dumps(asdict(case))],
            env=os.environ | {"PYTHONPATH": paths},
            preexec_fn=enter,
            stdout=subprocess.PIPE,
            check=False,
        )
    if done.returncode:
        raise OSError(f"{case.store} with {case.rows} rows per table exited with {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def measure_floor(case: Case, seconds: float) -> Floor:
    """Measure the disk's limit on the store's files, for `seconds` at each depth."""
    return measure([file for file in Path(case.folder).rglob("*.sst") if file.stat().st_size >= 4096], seconds)


def check_same(ours: Outcome, memory: Outcome) -> None:
    """Raise Mismatch unless losses and rows are bit-identical."""
    if (ours.losses, ours.row_checksums) != (memory.losses, memory.row_checksums):
        raise Mismatch("losses or rows of cached_ssd and device_mem differ")


def check_close(ours: Outcome, peer: Outcome) -> None:
    """Raise Mismatch unless the losses are close in the steps that both made."""
    worst = max(abs(a - b) for a, b in zip(ours.losses, peer.losses, strict=False))
    if worst > LOSS_TOLERANCE:
        raise Mismatch(f"losses of memory-mapped torch differ by up to {worst:.3g}")


def find_median(outcome: Outcome) -> float:
    """Return a step's median seconds."""
    return median(outcome.seconds)


def find_p99_ratio(outcome: Outcome) -> float:
    """Return the 99th percentile of a step's time relative to the median."""
    return quantiles(outcome.seconds, n=100, method="inclusive")[98] / find_median(outcome)


def _evict_files(folder: Path) -> None:
    """Remove the files from the page cache. A limit does not count pages that another process read."""
    for path in folder.rglob("*"):
        if path.is_file():
            evict_file(path)
