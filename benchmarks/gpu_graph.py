"""Time `Graph.run`, with rows fetched on a second stream, against the plain loop on an NVIDIA GPU; README.md here.

    python benchmarks/gpu_graph.py [--folder F] [--json FILE]

A figure is printed only where all losses, of both, are those of the same steps on `device_mem`, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from gpu import machine
from models import Batch, GraphStep, Model, keyed, make_batches
from report import Figure, report
from torch import Tensor
from workload import Mismatch

SECTION = "pipeline"
AHEAD = 8
MODEL = Model(rows=200_000, tables=26, batch=16_384, hidden=(1024, 1024, 512), optimizer="adagrad")


@dataclass(frozen=True)
class Sizes:
    """cached: share of the rows that the cache has room for; turn: steps of one kind before the other's."""

    model: Model = MODEL
    cached: float = 0.5
    warm_up: int = 30
    turn: int = 20
    rounds: int = 5


def pipeline(place: torch.device, folder: Path, sizes: Sizes) -> list[Figure]:
    """A step of `run` over one of the plain loop, by store; Mismatch where stores do not give the same."""
    figures, seen = [], []
    cached = int(sizes.cached * sizes.model.rows * sizes.model.tables)
    for store in ("device_mem", "cached_host_mem", "cached_ssd"):
        graph = GraphStep(sizes.model, folder / store, store, cached).to(place)
        losses, ratios, shown = _turns(graph, place, sizes)
        seen.append(torch.stack(losses).cpu())
        graph.embedding.close()
        if not torch.equal(seen[-1].view(torch.int32), seen[0].view(torch.int32)):
            raise Mismatch(f"losses on {store} are not those on device_mem")
        figures.append(Figure(SECTION, f"a step of graph.run, of the plain loop's, {store}", ratios, notes=shown))
    return figures


def _turns(graph: GraphStep, place: torch.device, sizes: Sizes) -> tuple[list[Tensor], float, str]:
    """All losses, the median ratio of a step of `run`, and both times."""
    losses = [graph(*batch) for batch in _batches(sizes.model, place, sizes.warm_up, 0)]
    plain, ahead = [], []
    for first in range(sizes.warm_up, sizes.warm_up + 2 * sizes.turn * sizes.rounds, 2 * sizes.turn):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where RocksDB lives; a temporary one where it is left out")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU: nothing to measure", file=sys.stderr)
        return 2
    place = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = pipeline(place, Path(folder), Sizes())
    return 0 if report(figures, {"machine": machine()}, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
