"""Snapshots: saves, loads and checks against what the disk does by itself, and what saves cost a training loop.

Rows are of D=16 with Adam's state. There are figures only if what was loaded has the bits of what was saved.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from contenders import DIM, RowsStep, make_embedding
from disk.floor import forget
from models import GraphStep, Model, cycle, keyed, make_batches
from report import Figure, listed
from timing import seconds_of
from torch import Tensor
from workload import Mismatch, figure, workload

import tierbed
from tierbed.snapshots import Snapshot

ROW_BYTES = 4 + 8 + 4 * 3 * DIM + 4 + 4
WRITTEN_AT_ONCE = 1 << 18  # rows a step
MB = 10**6
BLOCK = 1 << 20
TINY = {"rows": 50_000, "repeats": 1}


@contextmanager
def table(folder: Path, rows: int, **options: Any) -> Iterator[tierbed.MultiTableEmbedding]:
    """Trained once in every row; in host memory, or as a cached_ssd store with these options."""
    make = tierbed.make_cached_ssd_store_options if options else tierbed.make_host_mem_store_options
    embedding = make_embedding(1, make(persistent_path=folder, **options))
    train = trainer(embedding)
    for ids in torch.arange(rows).split(WRITTEN_AT_ONCE):
        train(ids)
    try:
        yield embedding
    finally:
        shutil.rmtree(folder / "rows", onerror=_unless_gone)
        with suppress(tierbed.StoreError):  # the folder does not exist any more
            embedding.close()


def _unless_gone(function: Any, path: str, failure: Any) -> None:
    """RocksDB removes files of its own meanwhile."""
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def trainer(embedding: tierbed.MultiTableEmbedding) -> Callable[[Tensor], object]:
    """A step of rows alone, of ids [n]."""
    graph = RowsStep(embedding, "adam")
    return lambda ids: graph(ids[:, None], torch.ones(len(ids), 1, DIM))


def digest(embedding: tierbed.MultiTableEmbedding) -> int:
    """Of all rows with their state and records."""
    checksum = 0
    for _, rows in embedding.table_handle().table.scan():
        checksum = zlib.crc32(rows.view(np.uint8).data, checksum)
    return checksum


@workload(TINY)
def full(folder: Path, rows: int = 10_000_000, repeats: int = 7) -> Iterator[Figure]:
    """MB/s of a save and of a load, of those of `dd` with as many bytes; by how much memory rises during a save."""
    size = rows * ROW_BYTES
    seconds: dict[str, list[float]] = {"dd": [], "save": [], "dd again": [], "load": []}
    with table(folder, rows) as embedding:
        before = digest(embedding)
        for _ in range(repeats + 1):  # the first is the warm-up
            shutil.rmtree(folder / "rows" / "snapshots" / "s", ignore_errors=True)
            seconds["dd"].append(write_seconds(folder, size))
            seconds["save"].append(seconds_of(lambda: embedding.save_snapshot("s")))
            seconds["dd again"].append(write_seconds(folder, size))
            seconds["load"].append(seconds_of(lambda: embedding.load_snapshot("s")))
        if digest(embedding) != before:
            raise Mismatch("the rows that were loaded are not those that were saved")
        shutil.rmtree(folder / "rows" / "snapshots" / "s")
        overhead = peak_bytes(lambda: embedding.save_snapshot("s")) / MB
    yield of_disk("save, MB/s against dd", size, seconds["dd"], seconds["save"])
    yield of_disk("load, MB/s against dd", size, seconds["dd again"], seconds["load"])
    yield figure("memory that a save takes", overhead, "MB", bar=256, at_most=True)


def of_disk(what: str, size: int, disk: Sequence[float], ours: Sequence[float]) -> Figure:
    pairs = list(zip(disk, ours, strict=True))[1:]
    speeds = {"disk": disk[1:], "ours": ours[1:]}
    notes = listed((name, f"{size / MB / median(seconds):,.0f} MB/s") for name, seconds in speeds.items())
    return figure(what, median(alone / mine for alone, mine in pairs), bar=0.6, notes=notes)


@workload(TINY)
def incremental(folder: Path, rows: int = 10_000_000, repeats: int = 7) -> Iterator[Figure]:
    """The time of a save after 1 % of the rows changed, of that of a full save."""
    changed = torch.from_numpy(np.random.default_rng(0).choice(rows, max(rows // 100, 1), replace=False))
    wholes, parts = [], []
    with table(folder, rows) as embedding:
        train = trainer(embedding)
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")  # from here on changes are noted
        for number in range(repeats):
            wholes.append(seconds_of(partial(embedding.save_snapshot, f"whole{number}")))
            train(changed)
            parts.append(seconds_of(partial(embedding.save_snapshot, f"part{number}", "incremental")))
            embedding.prune_snapshots(keep_last=1)
        before = digest(embedding)
        embedding.load_snapshot(f"part{repeats - 1}")
        if digest(embedding) != before:
            raise Mismatch("the chain does not read as the table that it was saved from")
    share = median(part / whole for part, whole in zip(parts, wholes, strict=True))
    notes = f"incremental {median(parts):.3f} s, full {median(wholes):.3f} s"
    yield figure("of the time of a full save", share, bar=0.05, at_most=True, notes=notes)


@workload({"rows": 500, "batch": 256, "repeats": 1})
def checkpoint(folder: Path, rows: int = 1_000_000, batch: int = 32_768, repeats: int = 7) -> Iterator[Figure]:
    """The time of a RocksDB checkpoint of ten times the rows."""
    times = []
    for count in (rows, 10 * rows):
        with table(folder, count, cache_budget_mb=64) as embedding:
            train, seconds = trainer(embedding), []
            for number in range(repeats + 1):
                train(torch.arange(number * batch, (number + 1) * batch) % count)
                seconds.append(seconds_of(partial(embedding.save_snapshot, f"s{number}", "checkpoint")))
            before = digest(embedding)
            embedding.load_snapshot(f"s{repeats}")
            if digest(embedding) != before:
                raise Mismatch("the rows of the checkpoint are not those of the table")
        times.append(median(seconds[1:]))
    notes = f"1x {times[0]:.3f} s, 10x {times[1]:.3f} s"
    yield figure("of ten times the rows", times[1] / times[0], "x", bar=1.5, at_most=True, notes=notes)


@workload({**TINY, "tables": 2, "batch": 8, "hidden": (4,), "steps": 3})
def background(
    folder: Path,
    rows: int = 10_000_000,
    tables: int = 26,
    batch: int = 4096,
    hidden: Sequence[int] = (512, 256),
    steps: int = 20,
    repeats: int = 7,
) -> Iterator[Figure]:
    """A model's training steps a second while a full snapshot is written, of those before and after it.

    steps: those before and after a save.
    """
    model = Model(rows // tables, tables, batch, tuple(hidden), "adam")
    batches = keyed(make_batches(model, 16))
    saved, plain = GraphStep(model, folder, "host_mem", persistent_path=folder / "saved"), GraphStep(model, folder)
    with saved.embedding, plain.embedding:
        share, took, made = during_saves(saved.embedding, repeats, cycle(saved, batches), steps)
        for number in range(made):
            cycle(plain, batches)(number)
        if digest(saved.embedding) != digest(plain.embedding):
            raise Mismatch("training during saves did not give the rows of training without")
    notes = f"the save took {took:.2f} s"
    yield figure("a model's steps a second, of those without", share, bar=0.8, notes=notes)


def during_saves(
    embedding: tierbed.MultiTableEmbedding, pairs: int, take: Callable[[int], object], steps: int
) -> tuple[float, float, int]:
    """The share of the step rate that a save leaves, the seconds of a save, and the steps that were made."""
    shares, lasted, made = [], [], 0

    def rate(running: Callable[[], bool]) -> float:
        nonlocal made
        begin, first = perf_counter(), made
        while running() or made == first:
            take(made)
            made += 1
        return (made - first) / (perf_counter() - begin)

    for pair in range(pairs + 1):
        end = made + steps
        before = rate(lambda: made < end)  # noqa: B023
        save = embedding.save_snapshot(f"s{pair}", background=True)
        assert save is not None
        begin = perf_counter()
        during = rate(lambda: not save.done)  # noqa: B023
        lasted.append(perf_counter() - begin)
        save.wait()
        end = made + steps
        shares.append(during / ((before + rate(lambda: made < end)) / 2))  # noqa: B023
        embedding.prune_snapshots(keep_last=1)
    return median(shares[1:]), median(lasted[1:]), made


@workload(TINY)
def verify(folder: Path, rows: int = 10_000_000, repeats: int = 7) -> Iterator[Figure]:
    """MB/s of a verify of files that are not in memory, of those of reading them."""
    reads, checks = [], []
    with table(folder, rows) as embedding:
        embedding.save_snapshot("s")
        place = folder / "rows" / "snapshots" / "s"
        files = sorted(place.glob("*.npy"))
        size = sum(file.stat().st_size for file in files)
        for _ in range(repeats + 1):
            for seconds, work in ((reads, lambda: read(files)), (checks, lambda: Snapshot.open(place).verify())):
                for file in files:
                    forget(file)
                seconds.append(seconds_of(work))
    yield of_disk("MB/s against reading the files", size, reads, checks)


def write_seconds(folder: Path, size: int) -> float:
    """Of `dd` that writes this many bytes of zeros and syncs them."""
    path = folder / "dd"
    blocks = -(-size // BLOCK)
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={BLOCK}", f"count={blocks}", "conv=fsync"]
    seconds = seconds_of(lambda: subprocess.run(command, check=True, capture_output=True))
    path.unlink()
    return seconds * size / (blocks * BLOCK)


def read(files: list[Path]) -> None:
    """One after the other, in blocks."""
    buffer = bytearray(BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the resident memory of this process was above what it was before, at most, while `work` ran."""
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier run left to the allocator would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
