"""Measure what it costs a step to list the keys of changed rows for incremental snapshots.

    python benchmarks/changed_keys.py [--rows 4000000]

A graph saves a snapshot, then trains in pairs of turns. One turn of each pair, drawn at random, keeps the list. The
first ratio is from steps that write each row for the first time since the snapshot. The second ratio is from the same
turns' next steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from operator import truediv
from pathlib import Path

import torch
from torch import Tensor, nn

import tierbed

DIM, BATCH, STEPS, CACHE_MB = 16, 8192, 4, 256
TURN = BATCH * STEPS  # how many rows a turn trains


class Trained(tierbed.Graph):
    def __init__(self, store: str, folder: Path) -> None:
        super().__init__()
        if store == "host_mem":
            options = tierbed.make_host_mem_store_options(persistent_path=str(folder))
        else:
            options = tierbed.make_cached_ssd_store_options(CACHE_MB, str(folder))
        self.rows = tierbed.MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, None, options)
        self.layer = nn.Linear(DIM, 1)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.layer(self.rows(ids)).square().mean()
        loss.backward()
        return loss


def measure(store: str, rows: int, folder: Path) -> list[float]:
    """Return the ratio of a step's time with the list to its time without, for first and for later writes."""
    graph = Trained(store, folder / store)
    for ids in torch.arange(rows).split(1 << 18):
        graph(ids)
    graph.save_snapshot("all")
    observers = graph.rows.table_handle().open_table.observers
    trackers = observers.trackers
    turns = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: rows // TURN * TURN].view(
        -1, STEPS, BATCH
    )
    is_second = torch.rand(len(turns) // 2 + 1, generator=torch.Generator().manual_seed(1)) < 0.5
    medians = []
    for _ in ("first", "later"):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn, batches in enumerate(turns):
            is_tracked = bool(is_second[turn // 2]) == (turn % 2 == 1)
            observers.trackers = trackers if is_tracked else {}
            begin = time.perf_counter()
            for ids in batches:
                graph(ids)
            seconds[is_tracked].append(time.perf_counter() - begin)
        medians.append(statistics.median(map(truediv, seconds[True], seconds[False])))
    graph.rows.close()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for store in ("host_mem", "cached_ssd"):
            first, later = measure(store, arguments.rows, Path(folder))
            print(f"{store}: {first:.3f} first writes, {later:.3f} later")


if __name__ == "__main__":
    main()
