"""Steps of an EmbeddingBagCollection from a KeyedJaggedTensor, in a Graph: against FBGEMM's CPU operator, and against
lookups of plain tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from tier_report import Figure, listed
from tier_stores import Mismatch
from torch import Tensor
from workloads import LR

from tierbed import Graph, MultiTableEmbedding, make_device_mem_store_options, make_table_options
from tierbed.engine.optim import RowWiseAdagrad
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # MLPerf's DLRM
EPS = 1e-10  # far below every gradient
TOLERANCE = 2e-6  # of the largest magnitude
CHECKED_STEPS = 3
BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """Bags of `lengths[t]` ids of table t for each sample. alpha: the exponent of a zipf law, None for uniform ids.

    bar: how many times faster than FBGEMM a step must be.
    """

    name: str
    lengths: Sequence[int]
    ids: int
    dim: int
    batch: int
    alpha: float | None
    optimizer: str
    bar: float | None
    turns: int = 40

    @property
    def tables(self) -> int:
        return len(self.lengths)


STEPS = (
    Workload("T32 E1e5 D128 B512 L20", [20] * 32, 100_000, 128, 512, None, "rowwise_adagrad", 1.0),
    Workload("T26 E1e5 D128 B2048 L1 zipf", [1] * 26, 100_000, 128, 2048, 1.05, "rowwise_adagrad", 1.2),
    Workload("MLPerf's multi-hot sizes, E38,462 D16 B512", MULTI_HOT, 38_462, 16, 512, None, "adagrad", 1.5),
)
# against plain tensors: the most that a step may take of their time
PLAIN = (
    (replace(STEPS[1], name="T26 D16 B64 L2", lengths=[2] * 26, dim=16, batch=64, bar=None, turns=400), 1.3),
    (replace(STEPS[1], name="T26 D16 B2048 L2", lengths=[2] * 26, dim=16, bar=None), 1.05),
)


@dataclass(frozen=True)
class Batch:
    """ids [n] and offsets [tables * batch + 1], feature by feature; grad [batch, tables * dim], of the output."""

    ids: Tensor
    offsets: Tensor
    grad: Tensor


class Contender(Protocol):
    """Tables that begin with `initial_rows`."""

    name: str

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward and update: the forward's output [batch, tables * dim]."""

    def rows(self, table: int) -> Tensor:
        """All rows of a table as they are now [ids, dim]."""


class FromKeyed(Graph):
    """A step of a collection, given a KeyedJaggedTensor."""

    name = "tierbed"

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.keys = [f"f{table}" for table in range(work.tables)]
        tables = [
            EmbeddingBagConfig(work.ids, work.dim, f"t{table}", feature_names=[key])
            for table, key in enumerate(self.keys)
        ]
        self.bags = EmbeddingBagCollection(tables, make_device_mem_store_options())
        for table in range(work.tables):
            self.bags.embedding_of(f"t{table}").put(torch.arange(work.ids), initial_rows(work, table), table)
        self.add_optimizer(_optimizer(work, self.bags))
        self._made: dict[int, KeyedJaggedTensor] = {}

    def build(self, features: KeyedJaggedTensor, grad: Tensor) -> Tensor:
        out = self.bags(features).values()
        out.backward(grad)
        return out

    def step(self, batch: Batch) -> Tensor:
        features = self._made.get(id(batch))
        if features is None:
            features = self._made[id(batch)] = KeyedJaggedTensor(self.keys, batch.ids, offsets=batch.offsets)
        out: Tensor = self(features, batch.grad)
        return out

    def rows(self, table: int) -> Tensor:
        embedding = self.bags.embedding_of(f"t{table}")
        return embedding.get(torch.arange(int(embedding.spec.tables[table].ids or 0)), table)


class FromPlain(Graph):
    """The same lookup, given ids and offsets as two tensors."""

    name = "plain tensors"

    def __init__(self, work: Workload) -> None:
        super().__init__()
        tables = [make_table_options({"type": "uniform"}, ids=work.ids)] * work.tables
        store = make_device_mem_store_options()
        self.embedding = MultiTableEmbedding("plain", work.dim, torch.float32, torch.int64, tables, store)
        for table in range(work.tables):
            self.embedding.put(torch.arange(work.ids), initial_rows(work, table), table)
        self.features, self.ids = list(range(work.tables)), work.ids
        self.add_optimizer(_optimizer(work, self.embedding))

    def build(self, ids: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        out: Tensor = self.embedding(ids, None, offsets, "sum", features=self.features).flatten(1)
        out.backward(grad)
        return out

    def step(self, batch: Batch) -> Tensor:
        out: Tensor = self(batch.ids, batch.offsets, batch.grad)
        return out

    def rows(self, table: int) -> Tensor:
        return self.embedding.get(torch.arange(self.ids), table)


class Fbgemm:
    """FBGEMM's fused operator, without its bounds check: its fastest setting."""

    name = "fbgemm"

    def __init__(self, work: Workload) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizers = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(work.ids, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * work.tables,
            optimizer=optimizers[work.optimizer],
            learning_rate=LR,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self._weights = self._tbe.split_embedding_weights()
        for table, weights in enumerate(self._weights):
            weights.copy_(initial_rows(work, table))

    def step(self, batch: Batch) -> Tensor:
        out: Tensor = self._tbe(batch.ids, batch.offsets)
        out.backward(batch.grad)
        return out.detach()

    def rows(self, table: int) -> Tensor:
        weights: Tensor = self._weights[table]
        return weights


def against_fbgemm(quick: bool = False) -> list[Figure]:
    """How many times faster than FBGEMM's a step is, of each workload. Raises Mismatch."""
    figures = []
    for work in map(_small, STEPS) if quick else STEPS:
        gc.collect()  # gigabytes of the workload before
        mine, peer, ratio = _timed(FromKeyed(work), Fbgemm(work), work)
        notes = listed([("ms", f"{mine:.2f} to {peer:.2f}"), ("optimizer", work.optimizer)])
        figures.append(Figure("steps", f"FBGEMM's time to ours, {work.name}", 1 / ratio, "x", work.bar, notes=notes))
    return figures


def against_plain(quick: bool = False) -> list[Figure]:
    """What a step from a KeyedJaggedTensor takes of the time of one from plain tensors. Raises Mismatch."""
    figures = []
    for given, bar in PLAIN:
        work = _small(given) if quick else given
        mine, peer, ratio = _timed(FromKeyed(work), FromPlain(work), work)
        notes = f"ms {mine:.3f} to {peer:.3f}"
        figures.append(Figure("plain", f"time of plain tensors, {work.name}", ratio, "x", bar, True, notes))
    return figures


def _timed(ours: Contender, peer: Contender, work: Workload) -> tuple[float, float, float]:
    """(ms of ours, ms of the peer, the median of their ratios), in turns. Raises Mismatch."""
    batches = make_batches(work)
    _check(ours, peer, work, batches)
    times: list[tuple[float, float]] = []
    gc.disable()
    for turn in range(BATCHES + work.turns):
        batch, took = batches[turn % BATCHES], {}
        for each in (ours, peer) if turn % 2 else (peer, ours):
            begin = perf_counter()
            out = each.step(batch)
            took[each.name] = perf_counter() - begin
            del out  # freeing the output is no part of a step
        times.append((took[ours.name], took[peer.name]))
    gc.enable()
    warm = times[BATCHES:]
    mine, theirs = (1e3 * median(column) for column in zip(*warm, strict=True))
    return mine, theirs, median(one / other for one, other in warm)


def _check(ours: Contender, peer: Contender, work: Workload, batches: Sequence[Batch]) -> None:
    """Raises Mismatch unless outputs of some steps, and all rows after them, are those of the peer."""
    for batch in batches[:CHECKED_STEPS]:
        _same(f"{work.name}: outputs", ours.step(batch), peer.step(batch))
    for table in range(work.tables):
        _same(f"{work.name}: rows of table {table}", ours.rows(table), peer.rows(table))


def _same(what: str, one: Tensor, other: Tensor) -> None:
    apart = float((one - other).abs().max() / other.abs().max())
    if not apart <= TOLERANCE:
        raise Mismatch(f"{what} are {apart} of the largest magnitude apart")


def make_batches(work: Workload) -> list[Batch]:
    """Distinct batches of one size. Gradients are positive, so that no sum cancels."""
    random = np.random.default_rng(0)
    lengths = torch.tensor(work.lengths).repeat_interleave(work.batch)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    batches = []
    for _ in range(BATCHES):
        parts = [_drawn(random, work, work.batch * length) for length in work.lengths]
        grad = random.uniform(0.5, 1.5, (work.batch, work.tables * work.dim)).astype(np.float32)
        batches.append(Batch(torch.from_numpy(np.concatenate(parts)), offsets, torch.from_numpy(grad)))
    return batches


def _drawn(random: np.random.Generator, work: Workload, count: int) -> Any:
    """Ids as FBGEMM's benchmarks draw them: zipf(alpha) - 1 modulo the ids, then renumbered at random."""
    if work.alpha is None:
        return random.integers(0, work.ids, count)
    return random.permutation(work.ids)[(random.zipf(work.alpha, count) - 1) % work.ids]


def initial_rows(work: Workload, table: int) -> Tensor:
    """The rows that every contender's table begins with: float32 [ids, dim]."""
    return torch.rand(work.ids, work.dim, generator=torch.Generator().manual_seed(table)) * 0.1


def _optimizer(work: Workload, rows: torch.nn.Module) -> torch.optim.Optimizer:
    if work.optimizer == "adagrad":
        return torch.optim.Adagrad(rows.parameters(), lr=LR, eps=EPS)
    return RowWiseAdagrad(rows.parameters(), lr=LR, eps=EPS)


def _small(work: Workload) -> Workload:
    lengths = [min(length, 3) for length in work.lengths[:3]]
    return replace(work, lengths=lengths, ids=50, dim=8, batch=8, turns=2)
