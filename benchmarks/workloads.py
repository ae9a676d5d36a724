"""What is measured: the workloads, their bars, and the batches that all contenders are given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

LR = 0.01
# far below every gradient, so that SparseAdam, which adds it elsewhere than Adam, computes the same rows
EPS = 1e-10
BETAS = (0.9, 0.999)
BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """One step is a forward, a backward and an update of `batch` x `tables` bags of `length` ids each.

    rows: rows of one table. alpha: zipf exponent of the ids, or None for uniform ones. peer: who is compared with;
    "near" is tierbed itself with 1 M rows. bar: how many times faster than the peer it must be; on Intel's processors
    `bar_on_intel`, where that is given.
    """

    name: str
    tables: int
    rows: int
    dim: int
    batch: int
    length: int
    alpha: float | None
    optimizer: str
    peer: str
    bar: float
    bar_on_intel: float | None = None

    @property
    def ids(self) -> int:
        return self.batch * self.tables * self.length

    @property
    def floor_bar(self) -> float:
        """How many times the floor's time it may take."""
        return 1.8 if self.dim == 16 else 1.6

    def peer_bar(self, intel: bool) -> float:
        return self.bar if self.bar_on_intel is None or not intel else self.bar_on_intel

    @property
    def state(self) -> int:
        """Floats of optimizer state in a row."""
        return {"adagrad": self.dim, "rowwise_adagrad": 1, "adam": 2 * self.dim}[self.optimizer]


_UNIFORM = Workload("d16-uniform", 26, 38_462, 16, 4096, 1, None, "adagrad", "fbgemm", 3.0)
NEAR = replace(_UNIFORM, name="near")
_WIDE = replace(_UNIFORM, name="d128-uniform", dim=128)
WORKLOADS = (
    _UNIFORM,
    replace(_UNIFORM, name="d16-zipf", alpha=1.05),
    _WIDE,
    replace(_WIDE, name="d128-zipf", alpha=1.05),
    Workload("t26-l1-rowwise", 26, 100_000, 128, 2048, 1, 1.05, "rowwise_adagrad", "fbgemm", 1.3, 2.0),
    Workload("t32-l20-rowwise", 32, 100_000, 128, 512, 20, None, "rowwise_adagrad", "fbgemm", 1.3, 2.0),
    replace(_UNIFORM, name="torch-adagrad", peer="torch", bar=30.0),
    replace(_UNIFORM, name="torch-sparseadam", optimizer="adam", peer="torch", bar=30.0),
    replace(_UNIFORM, name="d16-20m", rows=769_231, peer="near", bar=1 / 3),
)


@dataclass(frozen=True)
class Batch:
    """rows: int64 [batch, tables, length], row numbers within a table. grad: float32 [batch, tables, dim]."""

    rows: Tensor
    grad: Tensor


def make_batches(work: Workload, seed: int = 0) -> list[Batch]:
    """Ids as FBGEMM's benchmarks draw them: zipf(alpha) - 1 modulo the rows, then a random renumbering of the rows.

    Gradients are positive, so that no sum cancels and optimizers that divide by its size agree on every element.
    """
    random = np.random.default_rng(seed)
    shape = (work.batch, work.tables, work.length)
    renumber = np.stack([random.permutation(work.rows) for _ in range(work.tables)])
    columns = np.arange(work.tables)[None, :, None]
    batches = []
    for _ in range(BATCHES):
        if work.alpha is None:
            drawn = random.integers(0, work.rows, shape)
        else:
            drawn = (random.zipf(work.alpha, shape) - 1) % work.rows
        grad = random.uniform(0.5, 1.5, (work.batch, work.tables, work.dim)).astype(np.float32)
        batches.append(Batch(torch.from_numpy(renumber[columns, drawn]), torch.from_numpy(grad)))
    return batches


def initial_rows(work: Workload, table: int) -> Tensor:
    """The rows that every contender's table begins with: float32 [rows, dim]."""
    return torch.rand(work.rows, work.dim, generator=torch.Generator().manual_seed(table)) * 0.1


def hashed(rows: Tensor) -> Tensor:
    """64-bit keys of row numbers, by splitmix64 (Steele et al. 2014): a bijection, so no two rows share one."""
    x = rows.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64))
