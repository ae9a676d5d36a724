"""Compare `graph.run` over SSD by default with runs that look a fixed number of batches ahead.

    python benchmarks/look_ahead.py --folder FOLDER [--workloads dense crowded ...] [--turns 5] [--depths 0 8 15 31]

Each workload runs in a process of its own, and has one store per depth. All stores train the same batches in turns. A
turn's first steps are not timed, because the prefetch thread filled the window during the other stores' turns. The
default run chooses its depth during the first turns, which are not timed either.

The table shows each depth's samples/s divided by those of the fastest fixed depth (the median over turns), and in
brackets the last turn's misses and milliseconds of processor time per step. `chosen` is the default run's depth after
each turn. `bags` reads past the page cache, so that its rows come from the disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import cycle, islice
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import wait_until_idle
from torch import Tensor, nn

import tierbed

PUT_ROWS = 1 << 11
REFILL_STEPS = 35  # untimed steps at the start of a turn: more than the largest depth


@dataclass(frozen=True)
class Workload:
    """What to train.

    samples: per batch. length: ids per sample and embedding. power: `rows * random ** power` is an id, so 1 is uniform.
    width: of the two dense layers, 0 for none. steps: timed steps of a turn. options: store options.
    """

    samples: int
    length: int
    power: float
    cache_mb: float
    rows: int = 100_000
    embeddings: int = 1
    width: int = 0
    steps: int = 40
    options: Any = ()


WORKLOADS = {
    "one id": Workload(2048, 1, 3, 2),
    "bags": Workload(128, 20, 3, 2, options={"read_mode": "direct"}),
    "dense": Workload(256, 8, 3, 2, embeddings=2, width=512),
    "small batches": Workload(64, 4, 2, 2, steps=160),
    "cached": Workload(1024, 4, 4, 32),
    "crowded": Workload(1024, 4, 1, 2, options={"overflow_mb": 2}),
}


class Trained(tierbed.Graph):
    """A graph that trains a workload's embeddings in a folder."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(1)
        options = tierbed.make_cached_ssd_store_options(workload.cache_mb, str(folder), **dict(workload.options))
        self.rows = nn.ModuleList(
            tierbed.MultiTableEmbedding(f"rows_{number}", 32, torch.float32, torch.int64, None, options)
            for number in range(workload.embeddings)
        )
        self.dense = nn.Sequential(nn.Identity())
        if workload.width:
            layers = nn.Linear(32 * workload.embeddings, workload.width), nn.Linear(workload.width, workload.width)
            self.dense = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU())
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, *ids: Tensor) -> Tensor:
        pooled = [rows(each).sum(1) for rows, each in zip(self.rows, ids, strict=True)]
        loss = self.dense(torch.cat(pooled, 1)).square().mean()
        loss.backward()
        return loss


def make_batches(workload: Workload) -> list[tuple[Tensor, ...]]:
    generator, size = torch.Generator().manual_seed(1), (workload.samples, workload.length)
    count = 2 * (workload.steps + REFILL_STEPS) + 1
    return [
        tuple(
            (torch.rand(size, generator=generator, dtype=torch.float64) ** workload.power * workload.rows).long()
            for _ in range(workload.embeddings)
        )
        for _ in range(count)
    ]


def start(workload: Workload, folder: Path, batches: list[tuple[Tensor, ...]], ahead: int | None) -> Any:
    graph = Trained(workload, folder)
    graph(*batches[0])
    for rows in graph.rows:
        for ids in torch.arange(workload.rows).split(PUT_ROWS):
            rows.put(ids, torch.zeros(len(ids), 32))
    return graph, graph.run(cycle(batches), ahead=ahead)


def measure(workload: Workload, folder: Path, depths: list[int], turns: int) -> dict[str, Any]:
    """Return each turn's samples/s and default depth, and the last turn's misses and processor milliseconds a step."""
    torch.set_num_threads(2)
    logging.getLogger("tierbed").setLevel(logging.ERROR)
    batches, order = make_batches(workload), random.Random(1)
    keys = {"default": None, **{str(depth): depth for depth in depths}}
    runs = {key: start(workload, folder / key, batches, depth) for key, depth in keys.items()}
    rates: dict[str, list[float]] = {key: [] for key in keys}
    chosen, misses, cpus, losses = [], {}, {}, {key: [] for key in keys}
    for turn in range(-3, turns):
        for key in order.sample([*runs], len(runs)):
            graph, run = runs[key]
            wait_until_idle()  # the other stores' threads fill their windows, write rows back and compact files
            losses[key] += islice(run, REFILL_STEPS)
            before, begin = sum(rows.metrics()["device"]["misses"] for rows in graph.rows), time.perf_counter()
            cpu = time.process_time()
            losses[key] += islice(run, workload.steps)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            misses[key] = (sum(r.metrics()["device"]["misses"] for r in graph.rows) - before) / workload.steps
            cpus[key] = 1000 * cpu / workload.steps
            if turn >= 0:
                rates[key].append(workload.samples * workload.steps / seconds)
        chosen.append(runs["default"][1]._look_ahead.depth)
        assert all(each == losses["default"] for each in losses.values()), "losses differ"
    return {"rates": rates, "chosen": chosen, "misses": misses, "cpus": cpus}


def run_child(name: str, folder: Path, depths: list[int], turns: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--turns", str(turns)]
    child = subprocess.run([*command, "--depths", *map(str, depths)], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(child.stdout.strip().rpartition("\n")[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 8, 15, 31])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--child", choices=WORKLOADS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(WORKLOADS[arguments.child], arguments.folder, arguments.depths, arguments.turns)))
        return
    for name in arguments.workloads:
        folder = arguments.folder / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        figures = run_child(name, folder, arguments.depths, arguments.turns)
        shutil.rmtree(folder)
        rates = figures["rates"]
        best = max(map(str, arguments.depths), key=lambda depth: median(rates[depth]))
        columns = [
            f"{key:>9}{median(map(truediv, rates[key], rates[best])):6.2f}"
            f" ({figures['misses'][key]:.0f}, {figures['cpus'][key]:.1f})"
            for key in rates
        ]
        print(f"{name:14}{median(rates[best]):11,.0f}{''.join(columns)}  chosen {figures['chosen']}", flush=True)


if __name__ == "__main__":
    main()
