"""Train one side of the disk benchmarks in its own process, whose memory can be limited.

PYTHONPATH=benchmarks python -m disk.training '{"store": "cached_ssd", ...}'     # takes a `Case`, prints an `Outcome`
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from contenders import FILL_ROWS, OPTIMIZERS, make_embedding
from models import Batch, Dense, GraphStep, Model, hash_batches, make_batches
from timing import read_io_bytes, wait_until_idle
from torch import Tensor
from traces import LogUniform, hash_rows

from .memory_mapped import MemoryMapped

CHECKED_ROWS = 1000  # rows per table whose checksums are in the outcome
MEMORY_MAPPED = "memory-mapped"


@dataclass(frozen=True)
class Case:
    """What to train.

    store: a store of tierbed, or "memory-mapped". rows: rows per table. cached: the cache's size as a fraction of all
    rows. limit: bytes of memory and page cache, or None. reuse_folder: True to keep the rows that another case stored
    in `folder`. first_step: the first step's number; it determines the ids.
    """

    store: str
    rows: int
    folder: str
    tables: int = 8
    dim: int = 16
    optimizer: str = "adagrad"
    batch: int = 2048
    cached: float = 0.1
    warm_up: int = 500
    steps: int = 1000
    ahead: int = 31
    limit: int | None = None
    reuse_folder: bool = False
    first_step: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return Model(self.rows, self.tables, self.batch, (256, 64), self.optimizer, "sgd", self.dim)

    def batches(self) -> Iterator[Batch]:
        for step in range(self.first_step, self.first_step + self.warm_up + self.steps):
            yield make_batches(self.model, 1, step, LogUniform)[0]


@dataclass(frozen=True)
class Outcome:
    """What was measured.

    `seconds` has one value per timed step, and `row_checksums` covers some rows. All other fields are sums over the
    timed steps. `bytes_read` and `bytes_written` count the disk. `bytes_moved` counts all file reads and writes, even
    in the page cache. `ssd_counters` has the increase of each RocksDB counter.
    """

    seconds: list[float]
    losses: list[float]
    cpu_seconds: float
    bytes_read: int
    bytes_written: int
    bytes_moved: int
    misses: int = 0
    row_checksums: list[int] = field(default_factory=list)
    ssd_counters: dict[str, float] = field(default_factory=dict)


class StepClock:
    """Records when each step ends, and what the process uses from the end of the warm-up on."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._ends: list[float] = []
        self._losses: list[float] = []
        self._before: tuple[float, int, int, int] = (0.0, 0, 0, 0)

    def step(self, loss: Tensor) -> bool:
        """Record a step. Returns True for the last warm-up step."""
        self._ends.append(time.perf_counter())
        self._losses.append(float(loss))
        if len(self._ends) == self._warm_up:
            self._before = _read_usage()
            return True
        return False

    def outcome(self, **more: Any) -> Outcome:
        used = (now - then for now, then in zip(_read_usage(), self._before, strict=True))
        seconds = [end - begin for begin, end in pairwise(self._ends[self._warm_up - 1 :])]
        return Outcome(seconds, self._losses, *used, **more)  # type: ignore[arg-type]


def _read_usage() -> tuple[float, int, int, int]:
    counts = read_io_bytes()
    return time.process_time(), counts["read_bytes"], counts["write_bytes"], counts["rchar"] + counts["wchar"]


def _settle(graph: GraphStep | None = None) -> None:
    """Wait until threads, compactions and the disk have finished the work that filling caused."""
    wait_until_idle()
    while graph is not None and graph.embedding.metrics().get("ssd", {}).get("running_compactions"):
        time.sleep(0.1)  # wait_until_idle misses a compaction that waits for the disk
    os.sync()


def train(case: Case) -> Outcome:
    """Train on one tierbed store."""
    options = {} if case.store == "device_mem" else {"open": "resume" if case.reuse_folder else "fresh", **case.options}
    cached = int(case.rows * case.tables * case.cached)
    graph = GraphStep(case.model, Path(case.folder), case.store, cached, **options)
    clock = StepClock(case.warm_up)
    with graph.embedding as embedding:
        _settle(graph)
        before = embedding.metrics()
        for loss in graph.run((hash_batches([batch])[0] for batch in case.batches()), ahead=case.ahead):
            if clock.step(loss):
                before = embedding.metrics()
        after = embedding.metrics()
        ssd = {name: after["ssd"][name] - before["ssd"][name] for name in after.get("ssd", {})}
        misses = after["device"]["misses"] - before["device"]["misses"]
        outcome = clock.outcome(misses=misses, ssd_counters=ssd)
        keys = hash_rows(torch.arange(0, case.rows, max(1, case.rows // CHECKED_ROWS)))
        for table in range(case.tables):
            outcome.row_checksums.extend(_checksums(embedding.get(keys, table)))
    return outcome


def train_memory_mapped(case: Case) -> Outcome:
    peer = MemoryMapped(Path(case.folder, MEMORY_MAPPED), case.model)
    with make_embedding(case.tables, dim=case.dim) as initial:
        for table in range(case.tables):
            for numbers in torch.arange(case.rows).split(FILL_ROWS):
                peer.put(table, numbers, initial.get(hash_rows(numbers), table))
    _settle()
    dense, clock = Dense(case.model), StepClock(case.warm_up)
    optimizer = OPTIMIZERS["sgd"](dense.parameters())
    for numbers, labels in case.batches():
        clock.step(peer.step(numbers, lambda rows, labels=labels: dense(rows, labels), optimizer))
    return clock.outcome()


def train_case(case: Case) -> Outcome:
    return train_memory_mapped(case) if case.store == MEMORY_MAPPED else train(case)


def _checksums(rows: Tensor) -> list[int]:
    """Return a weighted sum of each row's bits, to compare rows."""
    return rows.contiguous().view(torch.int32).long().mul(torch.arange(1, rows.shape[1] + 1)).sum(1).tolist()


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    torch.set_num_threads(2)
    json.dump(asdict(train_case(case)), sys.stdout)


if __name__ == "__main__":
    main()
