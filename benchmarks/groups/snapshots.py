"""Snapshots: saves, loads and checks against the bare disk, and how much saves slow training down.

Rows store D=16 and Adam's state. A figure is reported only if loaded rows equal the saved ones bit for bit.
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
from disk.floor import evict_file
from models import GraphStep, Model, cycle, hash_batches, make_batches
from report import Figure, join_pairs
from timing import time_call
from torch import Tensor
from workload import Mismatch, figure, workload

import tierbed
from tierbed.snapshots import Snapshot

ROW_BYTES = 4 + 8 + 4 * 3 * DIM + 4 + 4
WRITE_ROWS = 1 << 18  # rows per step
MB = 10**6
BLOCK = 1 << 20
TINY = {"rows": 50_000, "repeats": 1}


@contextmanager
def open_table(folder: Path, rows: int, **options: Any) -> Iterator[tierbed.MultiTableEmbedding]:
    """Make an embedding and train each row once. It is a cached_ssd store if there are options, otherwise host_mem."""
    make = tierbed.make_cached_ssd_store_options if options else tierbed.make_host_mem_store_options
    embedding = make_embedding(1, make(persistent_path=folder, **options))
    train = make_trainer(embedding)
    for ids in torch.arange(rows).split(WRITE_ROWS):
        train(ids)
    try:
        yield embedding
    finally:
        shutil.rmtree(folder / "rows", onerror=_unless_gone)
        with suppress(tierbed.StoreError):  # its folder is gone
            embedding.close()


def _unless_gone(function: Any, path: str, failure: Any) -> None:
    """Ignore a missing file: RocksDB deletes files at the same time."""
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def make_trainer(embedding: tierbed.MultiTableEmbedding) -> Callable[[Tensor], object]:
    """Return a step that trains the rows of ids [n]."""
    graph = RowsStep(embedding, "adam")
    return lambda ids: graph(ids[:, None], torch.ones(len(ids), 1, DIM))


def digest(embedding: tierbed.MultiTableEmbedding) -> int:
    """Return a checksum over all rows, with their state and counters."""
    checksum = 0
    for _, rows in embedding.table_handle().table.scan():
        checksum = zlib.crc32(rows.view(np.uint8).data, checksum)
    return checksum


@workload(TINY)
def full(folder: Path, rows: int = 10_000_000, repeats: int = 7) -> Iterator[Figure]:
    """MB/s for a save and a load relative to `dd` with as many bytes, and the memory that a save needs."""
    size = rows * ROW_BYTES
    seconds: dict[str, list[float]] = {"dd": [], "save": [], "dd again": [], "load": []}
    with open_table(folder, rows) as embedding:
        before = digest(embedding)
        for _ in range(repeats + 1):  # the first is the warm-up
            shutil.rmtree(folder / "rows" / "snapshots" / "s", ignore_errors=True)
            seconds["dd"].append(time_dd(folder, size))
            seconds["save"].append(time_call(lambda: embedding.save_snapshot("s")))
            seconds["dd again"].append(time_dd(folder, size))
            seconds["load"].append(time_call(lambda: embedding.load_snapshot("s")))
        if digest(embedding) != before:
            raise Mismatch("the loaded rows differ from the saved rows")
        shutil.rmtree(folder / "rows" / "snapshots" / "s")
        memory = measure_peak_bytes(lambda: embedding.save_snapshot("s")) / MB
    yield disk_ratio("MB/s, save / dd", size, seconds["dd"], seconds["save"])
    yield disk_ratio("MB/s, load / dd", size, seconds["dd again"], seconds["load"])
    yield figure("memory that a save needs", memory, "MB", bar=256, at_most=True)


def disk_ratio(what: str, size: int, disk: Sequence[float], ours: Sequence[float]) -> Figure:
    pairs = list(zip(disk, ours, strict=True))[1:]
    speeds = {"disk": disk[1:], "ours": ours[1:]}
    notes = join_pairs((name, f"{size / MB / median(seconds):,.0f} MB/s") for name, seconds in speeds.items())
    return figure(what, median(alone / own for alone, own in pairs), bar=0.6, notes=notes)


@workload(TINY)
def incremental(folder: Path, rows: int = 10_000_000, repeats: int = 7) -> Iterator[Figure]:
    """Time for an incremental save after 1 % of the rows changed, relative to a full save."""
    changed = torch.from_numpy(np.random.default_rng(0).choice(rows, max(rows // 100, 1), replace=False))
    full_seconds, incremental_seconds = [], []
    with open_table(folder, rows) as embedding:
        train = make_trainer(embedding)
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")  # starts recording changes
        for number in range(repeats):
            full_seconds.append(time_call(partial(embedding.save_snapshot, f"whole{number}")))
            train(changed)
            incremental_seconds.append(time_call(partial(embedding.save_snapshot, f"part{number}", "incremental")))
            embedding.prune_snapshots(keep_last=1)
        before = digest(embedding)
        embedding.load_snapshot(f"part{repeats - 1}")
        if digest(embedding) != before:
            raise Mismatch("the rows loaded from the chain differ from the saved table")
    ratio = median(part / whole for part, whole in zip(incremental_seconds, full_seconds, strict=True))
    notes = f"incremental {median(incremental_seconds):.3f} s, full {median(full_seconds):.3f} s"
    yield figure("time, incremental / full save", ratio, bar=0.05, at_most=True, notes=notes)


@workload({"rows": 500, "batch": 256, "repeats": 1})
def checkpoint(folder: Path, rows: int = 1_000_000, batch: int = 32_768, repeats: int = 7) -> Iterator[Figure]:
    """Time for a RocksDB checkpoint with ten times the rows, relative to one."""
    times = []
    for count in (rows, 10 * rows):
        with open_table(folder, count, cache_budget_mb=64) as embedding:
            train, seconds = make_trainer(embedding), []
            for number in range(repeats + 1):
                train(torch.arange(number * batch, (number + 1) * batch) % count)
                seconds.append(time_call(partial(embedding.save_snapshot, f"s{number}", "checkpoint")))
            before = digest(embedding)
            embedding.load_snapshot(f"s{repeats}")
            if digest(embedding) != before:
                raise Mismatch("the checkpoint's rows differ from the table's")
        times.append(median(seconds[1:]))
    notes = f"1x {times[0]:.3f} s, 10x {times[1]:.3f} s"
    yield figure("time, ten times the rows / one", times[1] / times[0], "x", bar=1.5, at_most=True, notes=notes)


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
    """A model's training steps per second during a background save, relative to before and after it.

    steps: timed steps before and after each save.
    """
    model = Model(rows // tables, tables, batch, tuple(hidden), "adam")
    batches = hash_batches(make_batches(model, 16))
    saved, plain = GraphStep(model, folder, "host_mem", persistent_path=folder / "saved"), GraphStep(model, folder)
    with saved.embedding, plain.embedding:
        ratio, seconds, num_steps = during_saves(saved.embedding, repeats, cycle(saved, batches), steps)
        for number in range(num_steps):
            cycle(plain, batches)(number)
        if digest(saved.embedding) != digest(plain.embedding):
            raise Mismatch("training during saves and without saves gave different rows")
    notes = f"the save took {seconds:.2f} s"
    yield figure("steps/s, during a save / without", ratio, bar=0.8, notes=notes)


def during_saves(
    embedding: tierbed.MultiTableEmbedding, pairs: int, step: Callable[[int], object], steps: int
) -> tuple[float, float, int]:
    """Return the relative step rate during saves, a save's seconds, and the number of steps."""
    ratios, seconds, num_steps = [], [], 0

    def measure_rate(is_running: Callable[[], bool]) -> float:
        nonlocal num_steps
        begin, first = perf_counter(), num_steps
        while is_running() or num_steps == first:
            step(num_steps)
            num_steps += 1
        return (num_steps - first) / (perf_counter() - begin)

    for pair in range(pairs + 1):
        end = num_steps + steps
        before = measure_rate(lambda: num_steps < end)  # noqa: B023
        save = embedding.save_snapshot(f"s{pair}", background=True)
        assert save is not None
        begin = perf_counter()
        during = measure_rate(lambda: not save.done)  # noqa: B023
        seconds.append(perf_counter() - begin)
        save.wait()
        end = num_steps + steps
        ratios.append(during / ((before + measure_rate(lambda: num_steps < end)) / 2))  # noqa: B023
        embedding.prune_snapshots(keep_last=1)
    return median(ratios[1:]), median(seconds[1:]), num_steps


@workload(TINY)
def verify(folder: Path, rows: int = 10_000_000, repeats: int = 7) -> Iterator[Figure]:
    """MB/s for `verify` relative to reading the files, which are not in the page cache."""
    reads, checks = [], []
    with open_table(folder, rows) as embedding:
        embedding.save_snapshot("s")
        path = folder / "rows" / "snapshots" / "s"
        files = sorted(path.glob("*.npy"))
        size = sum(file.stat().st_size for file in files)
        for _ in range(repeats + 1):
            for seconds, work in ((reads, lambda: read_files(files)), (checks, lambda: Snapshot.open(path).verify())):
                for file in files:
                    evict_file(file)
                seconds.append(time_call(work))
    yield disk_ratio("MB/s, verify / read", size, reads, checks)


def time_dd(folder: Path, size: int) -> float:
    """Return the seconds that `dd` needs to write `size` zero bytes and sync them."""
    path = folder / "dd"
    blocks = -(-size // BLOCK)
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={BLOCK}", f"count={blocks}", "conv=fsync"]
    seconds = time_call(lambda: subprocess.run(command, check=True, capture_output=True))
    path.unlink()
    return seconds * size / (blocks * BLOCK)


def read_files(files: list[Path]) -> None:
    buffer = bytearray(BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest increase of this process's resident memory while `work` runs."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator kept from earlier would hide part of the peak
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
