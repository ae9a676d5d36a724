"""Tables for the figures of snapshots, and the figures: saves, loads, what they cost a training loop, and checks."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from graph_steps import GraphStep, Model, cycle, keyed, make_batches
from snapshot_disk import MB, forget, peak_bytes, read_seconds, timed, write_seconds
from tier_report import Figure, listed
from tier_stores import Mismatch
from torch import Tensor

import tierbed
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots import Snapshot

DIM, ROW_BYTES = 16, 4 + 8 + 4 * 3 * 16 + 4 + 4
FILL = 1 << 18  # rows a step
SAVE_BAR, MEMORY_BAR_MB, CHANGED_BAR, CHECKPOINT_BAR, TRAINING_BAR, VERIFY_BAR = 0.6, 256, 0.05, 1.5, 0.8, 0.6


@dataclass(frozen=True)
class Sizes:
    """rows: of the table in memory, dim 16 with Adam's state; on_disk: of the smaller cached_ssd table.

    batch: ids of a bare step; steps: timed ones before and after a background save; model_*: the same of a model.
    """

    rows: int = 10_000_000
    on_disk: int = 1_000_000
    pairs: int = 7
    batch: int = 32_768
    steps: int = 200
    model_batch: int = 4096
    model_steps: int = 20
    features: int = 26
    hidden: tuple[int, ...] = (512, 256)


QUICK = Sizes(
    rows=50_000, on_disk=500, pairs=1, batch=256, steps=3, model_batch=8, model_steps=3, features=2, hidden=(4,)
)


@contextmanager
def table(folder: Path, rows: int, **options: Any) -> Iterator[tierbed.MultiTableEmbedding]:
    """Trained once in every row; in host memory, or as a cached_ssd store where options are given."""
    make = tierbed.make_cached_ssd_store_options if options else tierbed.make_host_mem_store_options
    store = make(persistent_path=folder, **options)
    embedding = tierbed.MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, None, store)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.01)
    embedding.attach(optimizer, optimizer.param_groups[0])
    for begin in range(0, rows, FILL):
        step(embedding, torch.arange(begin, min(rows, begin + FILL)))
    try:
        yield embedding
    finally:
        shutil.rmtree(folder / "rows", onerror=_unless_gone)
        with suppress(tierbed.StoreError):  # it says that the folder is gone
            embedding.close()


def _unless_gone(function: Any, path: str, failure: Any) -> None:
    """RocksDB removes files of its own meanwhile."""
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def step(embedding: tierbed.MultiTableEmbedding, ids: Tensor) -> None:
    pinned = embedding.pin([Lookup(ids, None)])
    pinned.update([pinned.gather(0)])


def full(folder: Path, sizes: Sizes) -> list[Figure]:
    """A save and a load, each beside `dd` of as many bytes."""
    size = sizes.rows * ROW_BYTES
    disk, saves, loads, disk_again = [], [], [], []
    with table(folder, sizes.rows) as embedding:
        before = digest(embedding)
        for number in range(sizes.pairs + 1):  # the first is the warm-up
            disk.append(write_seconds(folder, size))
            saves.append(timed(lambda: embedding.save_snapshot("s"))[0])
            disk_again.append(write_seconds(folder, size))
            loads.append(timed(lambda: embedding.load_snapshot("s"))[0])
            if number < sizes.pairs:
                shutil.rmtree(folder / "rows" / "snapshots" / "s")
        if digest(embedding) != before:
            raise Mismatch("the rows that were loaded are not those that were saved")
        shutil.rmtree(folder / "rows" / "snapshots" / "s")
        overhead = peak_bytes(lambda: embedding.save_snapshot("s")) / MB
    saved, loaded = _ratio(disk[1:], saves[1:]), _ratio(disk_again[1:], loads[1:])
    return [
        Figure("full", "save, MB/s against dd", saved, "", SAVE_BAR, notes=_speeds(size, disk[1:], saves[1:])),
        Figure("full", "load, MB/s against dd", loaded, "", SAVE_BAR, notes=_speeds(size, disk_again[1:], loads[1:])),
        Figure("full", "memory that a save takes", overhead, "MB", MEMORY_BAR_MB, at_most=True),
    ]


def incremental(folder: Path, sizes: Sizes) -> list[Figure]:
    """A save after 1 % of the rows changed, against a full one of the same table."""
    changed = torch.from_numpy(np.random.default_rng(0).choice(sizes.rows, max(sizes.rows // 100, 1), replace=False))
    wholes, parts = [], []
    with table(folder, sizes.rows) as embedding:
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")  # from here on changes are noted
        for number in range(sizes.pairs):
            wholes.append(timed(partial(embedding.save_snapshot, f"whole{number}"))[0])
            step(embedding, changed)
            parts.append(timed(partial(embedding.save_snapshot, f"part{number}", "incremental"))[0])
            embedding.prune_snapshots(keep_last=1)
        before = digest(embedding)
        embedding.load_snapshot(f"part{sizes.pairs - 1}")
        if digest(embedding) != before:
            raise Mismatch("the chain does not read as the table that it was saved from")
    share = median(part / whole for part, whole in zip(parts, wholes, strict=True))
    notes = listed([("incremental", f"{median(parts):.3f} s"), ("full", f"{median(wholes):.3f} s")])
    return [Figure("incremental", "of the time of a full save", share, "", CHANGED_BAR, at_most=True, notes=notes)]


def checkpoint(folder: Path, sizes: Sizes) -> list[Figure]:
    """A checkpoint of a table on the disk, and of one of ten times its rows."""
    times = []
    for rows in (sizes.on_disk, 10 * sizes.on_disk):
        with table(folder, rows, cache_budget_mb=64) as embedding:
            seconds = []
            for number in range(sizes.pairs + 1):
                step(embedding, torch.arange(number * sizes.batch, (number + 1) * sizes.batch) % rows)
                seconds.append(timed(partial(embedding.save_snapshot, f"s{number}", "checkpoint"))[0])
            before = digest(embedding)
            embedding.load_snapshot(f"s{sizes.pairs}")
            if digest(embedding) != before:
                raise Mismatch("the rows of the checkpoint are not those of the table")
        times.append(median(seconds[1:]))
    notes = listed([("1x", f"{times[0]:.3f} s"), ("10x", f"{times[1]:.3f} s")])
    return [Figure("checkpoint", "of ten times the rows", times[1] / times[0], "x", CHECKPOINT_BAR, True, notes)]


def background(folder: Path, sizes: Sizes) -> list[Figure]:
    """Training steps a second while a full snapshot is written, against those before and after it.

    A model whose ids follow a power law, and bare updates of ids that are each hit once, which change
    the most rows in the shortest time.
    """
    model = Model(sizes.rows // sizes.features, sizes.features, sizes.model_batch, sizes.hidden, "adam")
    batches = keyed(make_batches(model, 16))
    saved = GraphStep(model, folder, "host_mem", persistent_path=folder / "saved")
    plain = GraphStep(model, folder, "host_mem")
    with saved.embedding, plain.embedding:
        shown = _beside(saved.embedding, sizes.pairs, cycle(saved, batches), cycle(plain, batches), sizes.model_steps)
        if digest(saved.embedding) != digest(plain.embedding):
            raise Mismatch("training beside saves did not give the rows of training without")
    random = np.random.default_rng(0)
    ids = [torch.from_numpy(random.integers(0, sizes.rows, sizes.batch)) for _ in range(16)]
    with table(folder, sizes.rows) as embedding:
        # once: a save takes longest here, and there is no bar
        bare = _beside(embedding, 1, lambda at: step(embedding, ids[at % len(ids)]), None, sizes.steps)
    return [
        Figure("background", "a model's steps a second, of those without", shown[0], "", TRAINING_BAR, notes=shown[1]),
        Figure("background", "bare updates a second, of those without", bare[0], notes=bare[1]),
    ]


def _beside(
    embedding: tierbed.MultiTableEmbedding,
    pairs: int,
    take: Callable[[int], object],
    take_again: Callable[[int], object] | None,
    steps: int,
) -> tuple[float, str]:
    """The share of the step rate that a save leaves, and notes. `take_again` takes the same steps without saves."""
    shares, lasted, number = [], [], 0

    def rate(running: Callable[[], bool]) -> float:
        nonlocal number
        begin, first = perf_counter(), number
        while running() or number == first:
            take(number)
            number += 1
        return (number - first) / (perf_counter() - begin)

    for pair in range(pairs + 1):
        end = number + steps
        before = rate(lambda: number < end)  # noqa: B023
        save = embedding.save_snapshot(f"s{pair}", background=True)
        assert save is not None
        begin = perf_counter()
        during = rate(lambda: not save.done)  # noqa: B023
        lasted.append(perf_counter() - begin)
        save.wait()
        end = number + steps
        shares.append(during / ((before + rate(lambda: number < end)) / 2))  # noqa: B023
        embedding.prune_snapshots(keep_last=1)
    if take_again is not None:
        for at in range(number):
            take_again(at)
    return median(shares[1:]), listed([("the save took", f"{median(lasted[1:]):.2f} s")])


def verify(folder: Path, sizes: Sizes) -> list[Figure]:
    """A verify of files that are not in memory, against reading them."""
    reads, checks = [], []
    with table(folder, sizes.rows) as embedding:
        embedding.save_snapshot("s")
        place = folder / "rows" / "snapshots" / "s"
        files = sorted(place.glob("*.npy"))
        size = sum(file.stat().st_size for file in files)
        for _ in range(sizes.pairs + 1):
            reads.append(read_seconds(files))
            for file in files:
                forget(file)
            checks.append(timed(Snapshot.open(place).verify)[0])
    notes = _speeds(size, reads[1:], checks[1:])
    return [
        Figure("verify", "MB/s against reading the files", _ratio(reads[1:], checks[1:]), "", VERIFY_BAR, notes=notes)
    ]


def digest(embedding: tierbed.MultiTableEmbedding) -> int:
    """Of all rows with their state and records."""
    checksum = 0
    for _, rows in embedding._table().scan():
        checksum = zlib.crc32(rows.view(np.uint8).data, checksum)
    return checksum


def _ratio(peer: list[float], ours: list[float]) -> float:
    return median(a / b for a, b in zip(peer, ours, strict=True))


def _speeds(size: int, peer: list[float], ours: list[float]) -> str:
    return listed(
        [("ours", f"{size / MB / median(ours):,.0f} MB/s"), ("peer", f"{size / MB / median(peer):,.0f} MB/s")]
    )
