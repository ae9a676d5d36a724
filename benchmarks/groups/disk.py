"""Training if the table is larger than the memory, and if the page cache has all of it."""

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

from contenders import STORED_ROW
from disk.floor import Floor, forget, measure
from disk.memory_limit import may_limit, memory_limit
from disk.training import MEMORY_MAPPED, Case, Outcome, train_case
from report import Figure, listed
from workload import Mismatch, NotMeasured, figure, workload

CLOSE = 1e-4  # of a loss: torch sums the gradients of a row in another order
TINY = {"batch": 64, "warm_up": 4, "repeats": 12, "limit": None, "floor_seconds": 0.05, "apart": False}


FIELDS = {"batch": 2048, "warm_up": 500, "repeats": 2000}  # of a `Case`
LIMITED = {**FIELDS, "floor_seconds": 2.0, "apart": True}  # apart: each side in a process of its own


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
    """D=16 in limited memory: of what the disk alone takes, of plain torch on memory-mapped files, and by the limit.

    rows: of each of 8 tables. curve: limits, as shares of the table.
    """
    case = Case("cached_ssd", folder=str(folder / "rows"), steps=repeats, **fields)
    if case.limit is not None and (reason := may_limit()):
        print(f"all but the floor by direct reads is not measured: memory cannot be limited, {reason}")
        case = replace(case, limit=None, options={"read_mode": "direct"}, steps=min(500, repeats))
        taken = run(case, apart)
        if not taken.read:
            raise Mismatch("nothing was read from the disk")
        yield of_floor("direct reads", case, taken, floor_of(case, floor_seconds), 0.6)
        return
    ours = run(case, apart)
    floor = floor_of(case, floor_seconds)
    memory = run(replace(case, store="device_mem", limit=None), apart)
    check_same(ours, memory)
    few = replace(case, store=MEMORY_MAPPED, warm_up=2, steps=peer_steps, folder=str(folder / "peer"))
    peer = run(few, apart)
    check_close(ours, peer)
    shutil.rmtree(few.folder)
    yield of_floor(f"{case.rows * case.tables / 1e6:g} M rows of D=16", case, ours, floor, 0.6)
    notes = f"{case.batch / step_of(ours):,.0f}/s to {case.batch / step_of(peer):,.0f}/s"
    faster = step_of(peer) / step_of(ours)
    yield figure("samples/s of memory-mapped torch", faster, "x", bar=40.0, notes=notes)
    bar = max(3.0, 1.5 * slowest_of(memory))
    notes = f"of device_mem {slowest_of(memory):.2f}, slowest step {1e3 * max(ours.seconds):.0f} ms"
    yield figure("p99 of a step, in medians", slowest_of(ours), "x", bar=bar, at_most=True, notes=notes)
    yield from _curve(case, curve, floor, apart)


def _curve(case: Case, curve: Sequence[float], floor: Floor, apart: bool) -> Iterator[Figure]:
    """The same table under other limits: a halving may cost no more than the reads that it adds."""
    before: tuple[float, float] | None = None
    table = case.rows * case.tables * STORED_ROW
    options = {"overflow_mb": 64}
    case = replace(case, cached=0.05, keep=True, steps=min(300, case.steps), options=options)
    for number, share in enumerate(curve, 1):
        # ids that no case before has brought into recent files
        under = replace(case, limit=int(table * share) if apart else None, first=number * 100_000)
        taken = run(under, apart)
        step, read = step_of(taken), taken.read / 4096 / under.steps
        notes = _parts(under, taken)
        what = f"samples/s with {share:g} of the table as memory"
        yield figure(what, under.batch / step, "/s", notes=notes)
        if before is not None:
            allowed = before[0] + (read - before[1]) / floor.reads / 0.6
            what = f"step with {share:g}, of what its reads explain"
            yield figure(what, step / allowed, "x", bar=1.1, at_most=True)
        before = step, read


@workload({**TINY, "rows": 1000}, **{**LIMITED, "rows": 375_000, "limit": 1 << 30, "repeats": 500})
def wide(folder: Path, repeats: int, floor_seconds: float, apart: bool, **fields: Any) -> Iterator[Figure]:
    """D=128 with row-wise Adagrad in limited memory, of what the disk alone takes."""
    place = str(folder / "rows")
    case = Case("cached_ssd", folder=place, dim=128, optimizer="rowwise_adagrad", steps=repeats, **fields)
    if case.limit is not None and (reason := may_limit()):
        raise NotMeasured(f"memory cannot be limited, {reason}")
    taken = run(case, apart)
    name = f"{case.rows * case.tables / 1e6:g} M rows of D=128"
    yield of_floor(name, case, taken, floor_of(case, floor_seconds), 0.7)


@workload(
    {"rows": 1000, "batch": 64, "warm_up": 4, "repeats": 12, "apart": False},
    name="page-cache",
    **{**FIELDS, "rows": 500_000, "repeats": 1000},
)
def page_cache(folder: Path, repeats: int, apart: bool = True, **fields: Any) -> Iterator[Figure]:
    """A cache of 10 % of the rows, and files that the page cache has: of device_mem, of memory-mapped torch."""
    case = Case("cached_ssd", folder=str(folder / "rows"), steps=repeats, **fields)
    ours = run(case, apart)
    memory = run(replace(case, store="device_mem"), apart)
    check_same(ours, memory)
    peer = run(replace(case, store=MEMORY_MAPPED, folder=str(folder / "peer")), apart)
    check_close(replace(ours, losses=ours.losses[:10]), peer)
    of_memory, of_peer = (step_of(other) / step_of(ours) for other in (memory, peer))
    notes = f"{1e3 * step_of(peer):.1f} ms; device_mem {1e3 * step_of(memory):.1f} ms"
    yield figure("samples/s of device_mem", of_memory, bar=0.4, notes=_parts(case, ours))
    yield figure("samples/s of memory-mapped torch", of_peer, bar=0.6, notes=notes)


def of_floor(what: str, case: Case, ours: Outcome, floor: Floor, bar: float) -> Figure:
    """How long the disk alone would read the blocks of a step's misses, of the time of the step."""
    share = ours.misses / case.steps / floor.reads / step_of(ours)
    limit = "no limit" if case.limit is None else f"{case.limit / 10**9:.1f} GB"
    what = f"the disk alone, of a step, {what}, {limit}"
    return figure(what, share, bar=bar, notes=f"{_parts(case, ours)}, floor {floor}")


def _parts(case: Case, outcome: Outcome) -> str:
    steps, ssd = case.steps, outcome.ssd
    merged = ssd["compaction_read_bytes"] + ssd["compaction_bytes"]
    return listed(
        [
            ("ms", f"{1e3 * step_of(outcome):.1f}"),
            ("misses", f"{outcome.misses / steps:,.0f} a step"),
            ("CPU", f"{1e3 * outcome.cpu / steps:.1f} ms"),
            ("from the disk", f"{outcome.read / steps / 1e3:,.0f} kB"),
            ("to it", f"{outcome.written / steps / 1e3:,.0f} kB"),
            ("of all bytes of files compactions", f"{merged / outcome.moved:.0%}"),
            ("write amplification", f"{(ssd['flush_bytes'] + ssd['compaction_bytes']) / max(1, ssd['bytes_in']):.2f}"),
            ("stalled", f"{ssd['stall_seconds']:.2f} s"),
        ]
    )


def run(case: Case, apart: bool) -> Outcome:
    """Train in a process that is held to the memory of the case; not `apart`, in this one, which has no limit.

    Raises OSError if it ends early or cannot be limited.
    """
    folder = Path(case.folder)
    folder.mkdir(exist_ok=True)
    if not apart:
        return train_case(case)
    _leave_page_cache(folder)
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
        raise OSError(f"{case.store} with {case.rows} rows a table ended with {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def floor_of(case: Case, seconds: float) -> Floor:
    """Of the files that a store wrote, measured for that many seconds at each depth."""
    return measure([file for file in Path(case.folder).rglob("*.sst") if file.stat().st_size >= 4096], seconds)


def check_same(ours: Outcome, memory: Outcome) -> None:
    """Raises Mismatch unless both have the same losses and rows, bit for bit."""
    if (ours.losses, ours.sample) != (memory.losses, memory.sample):
        raise Mismatch("losses or rows of cached_ssd and device_mem differ")


def check_close(ours: Outcome, peer: Outcome) -> None:
    """Raises Mismatch unless the losses of the steps that both made are close."""
    worst = max(abs(a - b) for a, b in zip(ours.losses, peer.losses, strict=False))
    if worst > CLOSE:
        raise Mismatch(f"losses of memory-mapped torch differ by up to {worst:.3g}")


def step_of(outcome: Outcome) -> float:
    """The median, in seconds."""
    return median(outcome.seconds)


def slowest_of(outcome: Outcome) -> float:
    """The 99th percentile of the seconds of a step, in medians."""
    return quantiles(outcome.seconds, n=100, method="inclusive")[98] / step_of(outcome)


def _leave_page_cache(folder: Path) -> None:
    """A limit counts the pages that its own process read; those of others would be free."""
    for path in folder.rglob("*"):
        if path.is_file():
            forget(path)
