"""Whether a process grows over many steps: the slope of its resident memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from graph_steps import GraphStep, Model, keyed, make_batches
from numpy.typing import NDArray
from tier_report import Figure, listed
from tier_stores import Mismatch
from torch import Tensor

SECTION = "memory"
MODEL = Model(rows=10_000, tables=3, batch=64, hidden=(64,), optimizer="adam")
# a step that leaves the smallest object of Python behind leaves that much
BYTES = 16


@dataclass(frozen=True)
class Sizes:
    """every: steps between two looks at the memory."""

    model: Model = MODEL
    batches: int = 500
    warm_up: int = 1000
    steps: int = 20_000
    every: int = 100


QUICK = Sizes(Model(rows=200, tables=2, batch=8, hidden=(4,)), batches=4, warm_up=5, steps=40, every=10)


def measure(folder: Path, sizes: Sizes) -> list[Figure]:
    """A plain loop on device_mem and `graph.run` over a cache of half of the rows; both have the same losses."""
    model = sizes.model
    memory = GraphStep(model, folder)
    cached = GraphStep(model, folder, "cached_host_mem", cached=model.rows * model.tables // 2)
    some = keyed(make_batches(model, sizes.batches))
    batches = [some[step % len(some)] for step in range(sizes.warm_up + sizes.steps)]
    with memory.embedding, cached.embedding:
        plain, losses = _followed((memory(*batch) for batch in batches), sizes)
        run, others = _followed(cached.run(batches), sizes)
    if not torch.equal(losses, others):
        raise Mismatch(f"losses of {int((losses != others).sum())} steps differ between device_mem and cached_host_mem")
    return [
        _figure("a plain loop on device_mem", plain, sizes),
        _figure("graph.run on cached_host_mem", run, sizes),
    ]


def _followed(results: Iterable[Tensor], sizes: Sizes) -> tuple[NDArray[np.float64], Tensor]:
    """Resident bytes after every so many steps, the warm-up left out, and the losses of those steps."""
    steps = iter(results)
    for _ in islice(steps, sizes.warm_up):
        pass
    losses = torch.empty(sizes.steps)
    resident = np.zeros(sizes.steps // sizes.every)
    for step, loss in enumerate(steps):
        losses[step] = loss
        if (step + 1) % sizes.every == 0:
            resident[step // sizes.every] = _resident()
    return resident, losses


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _figure(what: str, resident: NDArray[np.float64], sizes: Sizes) -> Figure:
    steps = sizes.every * np.arange(1, len(resident) + 1)
    slope, start = np.polyfit(steps, resident, 1)
    notes = listed(
        [
            ("resident at first", f"{start / 2**20:.1f} MiB"),
            ("least to most", f"{(resident.max() - resident.min()) / 1024:.0f} KiB apart"),
            ("last over first", f"{(resident[-1] - resident[0]) / 1024:.0f} KiB"),
        ]
    )
    return Figure(SECTION, f"growth, {what}", float(slope), "bytes a step", BYTES, at_most=True, notes=notes)
