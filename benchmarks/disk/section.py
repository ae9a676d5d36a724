"""Training where the table is larger than the memory, and where the page cache has all of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from tier_report import Figure, listed
from tier_stores import Mismatch

from .floor import Floor
from .memory_limit import may_limit
from .run import check_close, check_same, floor_of, run, slowest_of, step_of
from .training import Case, Outcome

DISK, PAGE_CACHE = "disk", "page_cache"
STORED_ROW = 160  # bytes of a row of D=16 on the disk, with what RocksDB adds
LIMITS = (1.5, 1.0, 0.5, 0.25)  # of the table
GB = 10**9


@dataclass(frozen=True)
class Sizes:
    """rows: of each of 8 tables, D=16. wide_rows: the same, D=128. peer: steps of the memory-mapped peer."""

    rows: int = 2_500_000
    limit: int | None = 1_288_490_188
    wide_rows: int = 375_000
    wide_limit: int | None = 1 << 30
    in_memory_rows: int = 500_000
    batch: int = 2048
    warm_up: int = 500
    steps: int = 2000
    peer: int = 10
    curve: tuple[float, ...] = LIMITS
    floor_seconds: float = 2.0
    apart: bool = True  # a process for each contender


QUICK = Sizes(2000, None, 1000, None, 1000, 64, 4, 12, 4, (1.0, 0.5, 0.25), 0.05, False)


def disk(folder: Path, sizes: Sizes) -> list[Figure]:
    """Rows beyond memory, against the disk alone and against a memory-mapped peer."""
    if sizes.limit is not None and (reason := may_limit()):
        print(f"{DISK}: all but the floor by direct reads is not measured: memory cannot be limited, {reason}")
        return _direct(folder, sizes)
    case = _case("cached_ssd", folder, sizes.rows, sizes, limit=sizes.limit)
    ours = run(case, sizes.apart)
    floor = floor_of(case, sizes.floor_seconds)
    memory = run(replace(case, store="device_mem", limit=None), sizes.apart)
    check_same("device_mem", ours, memory)
    few = replace(case, store="memory-mapped", warm_up=2, steps=sizes.peer, folder=str(folder / "peer"))
    peer = run(few, sizes.apart)
    check_close("memory-mapped", ours, peer)
    shutil.rmtree(few.folder)
    name = f"{_millions(case)} of D=16, {_limit(case)}"
    figures = [
        _of_floor(f"the floor's time of the misses, {name}", case, ours, floor, 0.6),
        Figure(DISK, f"samples/s of memory-mapped torch, {name}", step_of(peer) / step_of(ours), "x", 40.0,
               notes=f"{case.batch / step_of(ours):,.0f}/s to {case.batch / step_of(peer):,.0f}/s"),
        _stalls(ours, memory),
    ]  # fmt: skip
    figures += _curve(case, sizes, floor)
    shutil.rmtree(case.folder)
    wide = _case("cached_ssd", folder, sizes.wide_rows, sizes, limit=sizes.wide_limit, dim=128, row_wise=True)
    wide = replace(wide, steps=min(500, sizes.steps))
    taken = run(wide, sizes.apart)
    named = f"the floor's time of the misses, {_millions(wide)} of D=128, {_limit(wide)}"
    return [*figures, _of_floor(named, wide, taken, floor_of(wide, sizes.floor_seconds), 0.7)]


def page_cache(folder: Path, sizes: Sizes) -> list[Figure]:
    """A cache of 10 % of the rows; the page cache has the files."""
    case = _case("cached_ssd", folder, sizes.in_memory_rows, sizes)
    case = replace(case, steps=min(1000, sizes.steps))
    ours = run(case, sizes.apart)
    memory = run(replace(case, store="device_mem"), sizes.apart)
    check_same("device_mem", ours, memory)
    peer = run(replace(case, store="memory-mapped", folder=str(folder / "peer")), sizes.apart)
    check_close("memory-mapped", replace(ours, losses=ours.losses[:10]), peer)
    notes = listed([("ms", f"{1e3 * step_of(ours):.1f}"), *_parts(case, ours)])
    return [
        Figure(PAGE_CACHE, f"samples/s of device_mem, {_millions(case)}", step_of(memory) / step_of(ours), "", 0.4,
               notes=notes),
        Figure(PAGE_CACHE, "samples/s of memory-mapped torch", step_of(peer) / step_of(ours), "", 0.6,
               notes=f"{1e3 * step_of(peer):.1f} ms; device_mem {1e3 * step_of(memory):.1f} ms"),
    ]  # fmt: skip


def _case(store: str, folder: Path, rows: int, sizes: Sizes, **more: object) -> Case:
    place = folder / f"rows-{rows}"
    given = {"batch": sizes.batch, "warm_up": sizes.warm_up, "steps": sizes.steps, **more}
    return Case(store, rows, str(place), **given)  # type: ignore[arg-type]


def _of_floor(what: str, case: Case, ours: Outcome, floor: Floor, bar: float) -> Figure:
    """How long the floor would read the blocks of a step's misses, of the time of the step."""
    misses = ours.misses / case.steps
    notes = listed([("ms", f"{1e3 * step_of(ours):.1f}"), *_parts(case, ours), ("floor", str(floor))])
    return Figure(DISK, what, misses / floor.reads / step_of(ours), "", bar, notes=notes)


def _parts(case: Case, outcome: Outcome) -> list[tuple[str, str]]:
    steps, ssd = case.steps, outcome.ssd
    merged = ssd["compaction_read_bytes"] + ssd["compaction_bytes"]
    return [
        ("misses", f"{outcome.misses / steps:,.0f} a step"),
        ("CPU", f"{1e3 * outcome.cpu / steps:.1f} ms"),
        ("from the disk", f"{outcome.read / steps / 1e3:,.0f} kB"),
        ("to it", f"{outcome.written / steps / 1e3:,.0f} kB"),
        ("of all bytes of files compactions", f"{merged / outcome.moved:.0%}"),
        ("write amplification", f"{(ssd['flush_bytes'] + ssd['compaction_bytes']) / max(1, ssd['bytes_in']):.2f}"),
        ("stalled", f"{ssd['stall_seconds']:.2f} s"),
    ]


def _stalls(ours: Outcome, memory: Outcome) -> Figure:
    """The slowest steps: at most 3 medians, or 1.5 times what those of memory are."""
    bar = max(3.0, 1.5 * slowest_of(memory))
    notes = f"of device_mem {slowest_of(memory):.2f}, slowest step {1e3 * max(ours.seconds):.0f} ms"
    return Figure(DISK, "p99 of a step, in medians", slowest_of(ours), "x", bar, at_most=True, notes=notes)


def _curve(case: Case, sizes: Sizes, floor: Floor) -> list[Figure]:
    """The same table under other limits: a halving may cost no more than the reads that it adds."""
    figures: list[Figure] = []
    before: tuple[float, float] | None = None
    table = case.rows * case.tables * STORED_ROW
    for number, share in enumerate(sizes.curve, 1):
        # ids that no case before has brought into recent files
        under = replace(case, cached=0.05, limit=int(table * share), keep=True, first=number * 100_000,
                        steps=min(300, case.steps), options={"overflow_mb": 64})  # fmt: skip
        taken = run(under, sizes.apart)
        step, read = step_of(taken), taken.read / 4096 / under.steps
        notes = listed([("ms", f"{1e3 * step:.1f}"), *_parts(under, taken)])
        what = f"samples/s with {share:g} of the table as memory"
        figures.append(Figure(DISK, what, under.batch / step, "/s", notes=notes, at=share))
        if before is not None:
            allowed = before[0] + (read - before[1]) / floor.reads / 0.6
            what = f"step with {share:g}, of what its reads explain"
            figures.append(Figure(DISK, what, step / allowed, "x", 1.1, at_most=True, at=share))
        before = step, read
    return figures


def _direct(folder: Path, sizes: Sizes) -> list[Figure]:
    case = _case("cached_ssd", folder, sizes.rows, sizes)
    case = replace(case, options={"read_mode": "direct"}, steps=min(500, sizes.steps))
    taken = run(case, sizes.apart)
    floor = floor_of(case, sizes.floor_seconds)
    if not taken.read:
        raise Mismatch("nothing was read from the disk")
    named = f"the floor's time of the misses, {_millions(case)} of D=16, direct reads"
    return [_of_floor(named, case, taken, floor, 0.6)]


def _millions(case: Case) -> str:
    return f"{case.rows * case.tables / 1e6:g} M rows"


def _limit(case: Case) -> str:
    return "no limit" if case.limit is None else f"{case.limit / GB:.1f} GB"
