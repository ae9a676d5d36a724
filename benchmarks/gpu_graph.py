"""Time `Graph.run`, with rows fetched on a second stream, against the plain loop on an NVIDIA GPU; README.md here.

    python benchmarks/gpu_graph.py [--folder F] [--json FILE]      the workload gpu/graph of run.py

There are figures only where all losses, of both, are those of the same steps on `device_mem`, bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from models import Batch, GraphStep, Model, keyed, make_batches
from report import Figure
from torch import Tensor
from workload import check_same, figure

AHEAD = 8
MODEL = Model(rows=200_000, tables=26, batch=16_384, hidden=(1024, 1024, 512), optimizer="adagrad")


@dataclass(frozen=True)
class Sizes:
    """cached: share of the rows that the cache has room for; turn: steps of one kind before the other's."""

    model: Model = MODEL
    cached: float = 0.5
    warm_up: int = 30
    turn: int = 20
    repeats: int = 5


def figures(place: torch.device, folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A step of `run` over one of the plain loop, by store; Mismatch where stores do not give the same."""
    seen: list[Tensor] = []
    cached = int(sizes.cached * sizes.model.rows * sizes.model.tables)
    for store in ("device_mem", "cached_host_mem", "cached_ssd"):
        graph = GraphStep(sizes.model, folder / store, store, cached).to(place)
        losses, ratio, shown = _turns(graph, place, sizes)
        seen.append(torch.stack(losses).cpu())
        graph.embedding.close()
        check_same(f"losses on {store} and on device_mem", seen[-1], seen[0])
        yield figure(f"a step of graph.run, of the plain loop's, {store}", ratio, notes=shown)


def _turns(graph: GraphStep, place: torch.device, sizes: Sizes) -> tuple[list[Tensor], float, str]:
    """All losses, the median ratio of a step of `run`, and both times."""
    losses = [graph(*batch) for batch in _batches(sizes.model, place, sizes.warm_up, 0)]
    plain, ahead = [], []
    for first in range(sizes.warm_up, sizes.warm_up + 2 * sizes.turn * sizes.repeats, 2 * sizes.turn):
        batches = _batches(sizes.model, place, 2 * sizes.turn, first)
        for times, steps in (
            (plain, (graph(*batch) for batch in batches[: sizes.turn])),
            (ahead, graph.run(batches[sizes.turn :], ahead=AHEAD)),
        ):
            seconds, found = _timed(place, steps)
            times.append(seconds / sizes.turn)
            losses += found
    ratio = median(one / other for one, other in zip(ahead, plain, strict=True))
    return losses, ratio, f"{1e3 * median(ahead):.2f} ms to {1e3 * median(plain):.2f}"


def _timed(place: torch.device, steps: Iterable[Tensor]) -> tuple[float, list[Tensor]]:
    _wait(place)
    begin = time.perf_counter()
    losses = list(steps)
    _wait(place)
    return time.perf_counter() - begin, losses


def _batches(model: Model, place: torch.device, count: int, first: int) -> list[Batch]:
    return [(ids.to(place), labels.to(place)) for ids, labels in keyed(make_batches(model, count, first))]


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


if __name__ == "__main__":
    import run

    sys.exit(run.main(["gpu/graph", *sys.argv[1:]]))
