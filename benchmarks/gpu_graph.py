"""Time `Graph.run` with its second stream for fetching rows, against the plain loop on an NVIDIA GPU.

    python benchmarks/gpu_graph.py [--folder F] [--json FILE]      same as the workload gpu/graph of run.py

A figure is reported only if all losses equal `device_mem`'s bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from models import Batch, GraphStep, Model, hash_batches, make_batches
from report import Figure
from torch import Tensor
from workload import check_same, figure

AHEAD = 8
MODEL = Model(rows=200_000, tables=26, batch=16_384, hidden=(1024, 1024, 512), optimizer="adagrad")


@dataclass(frozen=True)
class Sizes:
    """cached: cache size as a fraction of all rows. turn: steps per turn; plain and `run` turns alternate."""

    model: Model = MODEL
    cached: float = 0.5
    warm_up: int = 30
    turn: int = 20
    repeats: int = 5


def figures(device: torch.device, folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Measure a step of `run` relative to the plain loop, on each store. Raises Mismatch if losses differ."""
    losses_by_store: list[Tensor] = []
    cached = int(sizes.cached * sizes.model.rows * sizes.model.tables)
    for store in ("device_mem", "cached_host_mem", "cached_ssd"):
        graph = GraphStep(sizes.model, folder / store, store, cached).to(device)
        losses, ratio, notes = _time_turns(graph, device, sizes)
        losses_by_store.append(torch.stack(losses).cpu())
        graph.embedding.close()
        check_same(f"losses on {store} and on device_mem", losses_by_store[-1], losses_by_store[0])
        yield figure(f"time of a step, graph.run / plain loop, {store}", ratio, notes=notes)


def _time_turns(graph: GraphStep, device: torch.device, sizes: Sizes) -> tuple[list[Tensor], float, str]:
    """Return all losses, the median time of a `run` step relative to a plain one, and both times as text."""
    losses = [graph(*batch) for batch in _draw_batches(sizes.model, device, sizes.warm_up, 0)]
    plain, ahead = [], []
    for first in range(sizes.warm_up, sizes.warm_up + 2 * sizes.turn * sizes.repeats, 2 * sizes.turn):
        batches = _draw_batches(sizes.model, device, 2 * sizes.turn, first)
        for times, steps in (
            (plain, (graph(*batch) for batch in batches[: sizes.turn])),
            (ahead, graph.run(batches[sizes.turn :], ahead=AHEAD)),
        ):
            seconds, step_losses = _time_steps(device, steps)
            times.append(seconds / sizes.turn)
            losses += step_losses
    ratio = median(one / other for one, other in zip(ahead, plain, strict=True))
    return losses, ratio, f"{1e3 * median(ahead):.2f} ms to {1e3 * median(plain):.2f}"


def _time_steps(device: torch.device, steps: Iterable[Tensor]) -> tuple[float, list[Tensor]]:
    _synchronize(device)
    begin = time.perf_counter()
    losses = list(steps)
    _synchronize(device)
    return time.perf_counter() - begin, losses


def _draw_batches(model: Model, device: torch.device, count: int, first: int) -> list[Batch]:
    return [(ids.to(device), labels.to(device)) for ids, labels in hash_batches(make_batches(model, count, first))]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    import run

    sys.exit(run.main(["gpu/graph", *sys.argv[1:]]))
