"""One contender of the benchmark of disks, in a process of its own whose memory can be limited.

PYTHONPATH=benchmarks python -m disk.training '{"store": "cached_ssd", ...}'     # a `Case`; prints an `Outcome`
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tier_stores import bytes_of_a_cached_row, make_options, wait_until_idle
from torch import Tensor, nn
from traces import LogUniform
from workloads import EPS, LR, hashed

import tierbed
from tierbed import Graph, MultiTableEmbedding, make_table_options, make_uniform_initializer

from .memory_mapped import MemoryMapped

CHUNK = 1 << 17  # rows that are filled at once
MLP = (256, 64, 1)
SAMPLE = 1000  # rows of each table whose bits are told


@dataclass(frozen=True)
class Case:
    """rows: of one table. cached: the cache, as a share of all rows. store: of tierbed, or "memory-mapped".

    limit: bytes of memory and page cache, or None. keep: go on with the folder that another case has filled. first: the
    number of the first step, which says what its ids are.
    """

    store: str
    rows: int
    folder: str
    tables: int = 8
    dim: int = 16
    row_wise: bool = False
    batch: int = 2048
    cached: float = 0.1
    warm_up: int = 500
    steps: int = 1000
    ahead: int = 31
    limit: int | None = None
    keep: bool = False
    first: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """seconds: of each step. sample: bits of rows. While steps were timed: read, written, bytes to and from the disk;
    moved, bytes of all reads and writes of files, the page cache's as well; ssd, the growth of RocksDB's counters.
    """

    seconds: list[float]
    losses: list[float]
    filled: float
    backlog: float
    misses: int
    read: int
    written: int
    moved: int
    cpu: float
    sample: list[int]
    ssd: dict[str, float]


class Dense(nn.Module):
    """An MLP on the rows of a sample, and the loss of its labels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (width, *MLP)
        layers: list[nn.Module] = []
        for size, following in pairwise(sizes):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Flatten(0))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.layers(rows.flatten(1)), labels)


class Train(Graph):
    """Rows, `Dense`, Adagrad on both."""

    def __init__(self, embedding: MultiTableEmbedding, row_wise: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.dense = Dense(embedding.spec.num_tables * embedding.spec.dim)
        rows = tierbed.optim.RowWiseAdagrad if row_wise else torch.optim.Adagrad
        self.add_optimizer(rows(embedding.parameters(), lr=LR, eps=EPS))
        self.add_optimizer(torch.optim.SGD(self.dense.parameters(), lr=LR))

    def build(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.dense(self.embedding(ids), labels)
        loss.backward()
        return loss


def _settle(embedding: MultiTableEmbedding | None = None) -> None:
    """Wait until nothing of the fill is left to do, for threads, for compactions of the embedding or for the disk."""
    wait_until_idle()
    while embedding is not None and embedding.metrics().get("ssd", {}).get("running_compactions"):
        time.sleep(0.1)  # a compaction that waits for the disk uses no processor
    os.sync()


def labels_of(numbers: Tensor) -> Tensor:
    return (numbers[:, 0] % 3 == 0).float()


class Clock:
    """When each step ended, and what its process has used between the end of the warm-up and that of the last step."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self.ends: list[float] = []
        self.losses: list[float] = []
        self._began: tuple[float, int, int, int] | None = None

    def step(self, loss: Tensor) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(float(loss))
        if len(self.ends) == self._warm_up:
            self._began = _used()

    def used(self) -> tuple[float, int, int, int]:
        assert self._began is not None
        cpu, read, written, moved = (now - then for now, then in zip(_used(), self._began, strict=True))
        return cpu, int(read), int(written), int(moved)

    @property
    def seconds(self) -> list[float]:
        ends = self.ends[self._warm_up - 1 :]
        return [end - begin for begin, end in pairwise(ends)]


def _used() -> tuple[float, int, int, int]:
    counts = {name: int(count) for name, count in map(str.split, Path("/proc/self/io").read_text().splitlines())}
    moved = counts["rchar:"] + counts["wchar:"]
    return time.process_time(), counts["read_bytes:"], counts["write_bytes:"], moved


def make_embedding(case: Case) -> MultiTableEmbedding:
    folder, name = Path(case.folder), "rows"
    initial = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * case.tables
    if case.store == "cached_ssd":
        options = dict(case.options)
        cached = int(case.rows * case.tables * case.cached * _row_bytes(case) / bytes_of_a_cached_row())
        made = make_options("cached_ssd", folder, cached, open="resume" if case.keep else "fresh", **options)
    else:
        made = make_options("device_mem", folder)
    return MultiTableEmbedding(name, case.dim, torch.float32, torch.int64, initial, made, seed=0)


def _row_bytes(case: Case) -> float:
    """Of a cached row with the cache's own records."""
    return 4 * (case.dim + (1 if case.row_wise else case.dim)) + bytes_of_a_cached_row() - 128


def fill(embedding: MultiTableEmbedding, case: Case, peer: MemoryMapped | None = None) -> float:
    """Write the initial value of every row. Returns seconds."""
    begin = time.perf_counter()
    for table in range(case.tables):
        for first in range(0, case.rows, CHUNK):
            keys = hashed(torch.arange(first, min(first + CHUNK, case.rows)))
            values = embedding.get(keys, table)
            if peer is None:
                embedding.put(keys, values, table)
            else:
                peer.put(table, first, values)
    return time.perf_counter() - begin


def train(case: Case) -> Outcome:
    trace = LogUniform(case.tables, case.rows, case.batch)
    clock = Clock(case.warm_up)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(case.first, case.first + case.warm_up + case.steps):
            numbers = torch.from_numpy(trace.numbers(step))
            yield hashed(numbers), labels_of(numbers)

    with make_embedding(case) as embedding:
        graph = Train(embedding, case.row_wise)
        filled = 0.0 if case.keep else fill(embedding, case)
        _settle(embedding)
        before = embedding.metrics()
        for step, loss in enumerate(graph.run(batches(), ahead=case.ahead)):
            clock.step(loss)
            if step + 1 == case.warm_up:
                before = embedding.metrics()
        cpu, read, written, moved = clock.used()
        after = embedding.metrics()
        backlog = wait_until_idle()
        keys = hashed(torch.arange(0, case.rows, max(1, case.rows // SAMPLE)))
        sample = torch.cat([embedding.get(keys, table) for table in range(case.tables)])
    misses = after["device"]["misses"] - before["device"]["misses"]
    ssd = {name: after["ssd"][name] - before["ssd"][name] for name in after.get("ssd", {})}
    return Outcome(clock.seconds, clock.losses, filled, backlog, misses, read, written, moved, cpu, _bits(sample), ssd)


def train_memory_mapped(case: Case) -> Outcome:
    trace = LogUniform(case.tables, case.rows, case.batch)
    clock = Clock(case.warm_up)
    peer = MemoryMapped(Path(case.folder, "memory-mapped"), case.tables, case.rows, case.dim, case.row_wise)
    with make_embedding(replace(case, store="device_mem")) as initial:
        filled = fill(initial, case, peer)
    _settle()
    dense = Dense(case.tables * case.dim)
    optimizer = torch.optim.SGD(dense.parameters(), lr=LR)
    for step in range(case.warm_up + case.steps):
        numbers = torch.from_numpy(trace.numbers(step))
        labels = labels_of(numbers)
        clock.step(peer.step(numbers, lambda rows, labels=labels: dense(rows, labels), optimizer))
    cpu, read, written, moved = clock.used()
    return Outcome(clock.seconds, clock.losses, filled, 0.0, 0, read, written, moved, cpu, [], {})


def train_case(case: Case) -> Outcome:
    return train_memory_mapped(case) if case.store == "memory-mapped" else train(case)


def _bits(rows: Tensor) -> list[int]:
    """A sum of each row's bits, which differs where a row does."""
    return rows.contiguous().view(torch.int32).long().mul(torch.arange(1, rows.shape[1] + 1)).sum(1).tolist()


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    torch.set_num_threads(2)
    json.dump(asdict(train_case(case)), sys.stdout)


if __name__ == "__main__":
    main()
