"""Steps on bags of dense ids, against FBGEMM and TorchRec, for several dims, bag lengths and row counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import CHECKED_STEPS, EPS, LR, OPTIMIZERS, Collection, Fbgemm, check, initial_rows
from floor import Floor
from models import cycle
from report import Figure
from timing import time_in_turns
from torch import Tensor, nn
from traces import ALPHA, Shape, make_batches
from workload import check_losses, figure, workload

from tierbed import Graph

BARS = (1.0, 1.2, 1.3)  # bars for FBGEMM / tierbed: minimum with one id, minimum with bags, median of all
TINY = {"dims": [8], "lengths": [1, 3], "rows": [500], "tables": 3, "ids": 200, "repeats": 2, "calls": 2}


def dense_ids(
    folder: Path,
    dims: Sequence[int] = (16, 32, 64, 128),
    lengths: Sequence[int] = (1, 10, 40),
    rows: Sequence[int] = (100_000, 1_000_000),
    alphas: Sequence[float | None] = (None, ALPHA),
    tables: int = 8,
    ids: int = 10_240,
    optimizer: str = "rowwise_adagrad",
    repeats: int = 12,
    calls: int = 12,
    bars: tuple[float | None, ...] = (None, None, None),
) -> Iterator[Figure]:
    """Step time, FBGEMM relative to an EmbeddingBagCollection, with the same optimizer.

    lengths: average ids per bag. ids: approximate ids per table and batch. alphas: Zipf exponents; None for uniform
    ids. calls: steps per turn.
    """
    ratios: dict[int, list[float]] = {length: [] for length in lengths}
    for dim, length, count, alpha in product(dims, lengths, rows, alphas):
        shape = Shape(tables, count, dim, max(1, ids // length), length, alpha, optimizer, ragged=length > 1)
        batches = make_batches(shape)
        ours, peer = Collection(shape, batches), Fbgemm(shape, batches)
        check(ours, [peer])
        times = time_in_turns({side.name: side.step for side in (ours, peer)}, repeats, 1, calls=calls)
        ratios[length].append(times.ratio(peer.name, ours.name))
        law = "uniform" if alpha is None else f"zipf {alpha}"
        what = f"time, FBGEMM / tierbed: D={dim}, {length} ids, {count:,} rows, {law}"
        yield figure(what, ratios[length][-1], "x", notes=str(times))
    one_hot = ratios.get(1, [])
    bags = [ratio for length, length_ratios in ratios.items() if length > 1 for ratio in length_ratios]
    for what, values, bar in zip(("one id", "bags"), (one_hot, bags), bars, strict=False):
        if values:
            yield figure(f"worst with {what}", min(values), "x", bar=bar)
    yield figure("median of all", median(one_hot + bags), "x", bar=bars[2])


workload(TINY, passive=False, name="rowwise", bars=BARS)(dense_ids)
FEWER = {"dims": (16, 32, 128), "lengths": (1, 10), "rows": (100_000,)}
workload(TINY, passive=False, name="adagrad", optimizer="adagrad", **FEWER)(dense_ids)
workload(TINY, passive=False, name="sgd", optimizer="sgd", **FEWER)(dense_ids)


@workload({"dims": [128], "rows": 500, "batch": 32, "length": 3, "repeats": 2, "calls": 2}, passive=False)
def floor(
    folder: Path,
    dims: Sequence[int] = (32, 128),
    rows: int = 100_000,
    tables: int = 8,
    batch: int = 1024,
    length: int = 10,
    repeats: int = 16,
    calls: int = 12,
) -> Iterator[Figure]:
    """Time relative to the memory floor when only rows are trained: row-wise Adagrad, equally long bags.

    calls: steps per turn.
    """
    for dim, alpha in product(dims, (None, ALPHA)):
        shape = Shape(tables, rows, dim, batch, length, alpha, "rowwise_adagrad")
        batches = make_batches(shape)
        ours, least = Collection(shape, batches), Floor(shape, batches)
        check(ours, [least])
        times = time_in_turns({side.name: side.step for side in (ours, least)}, repeats, 1, calls=calls)
        what = f"time, tierbed / floor: D={dim}, {length} ids, {'uniform' if alpha is None else f'zipf {alpha}'}"
        yield figure(what, times.ratio(ours.name, least.name), "x", bar=1.7, at_most=True, notes=str(times))


class Linear(nn.Module):
    """A collection with a linear layer on its pooled rows and the layer's loss."""

    def __init__(self, rows: nn.Module, width: int) -> None:
        super().__init__()
        self.rows, self.top = rows, nn.Linear(width, 1)
        nn.init.constant_(self.top.weight, 0.1)
        nn.init.zeros_(self.top.bias)

    def forward(self, features: Any, labels: Tensor) -> Tensor:
        pooled = self.rows(features).values()
        return nn.functional.binary_cross_entropy_with_logits(self.top(pooled).flatten(), labels)


class GraphStep(Graph):
    def __init__(self, rows: nn.Module, width: int) -> None:
        super().__init__()
        self.model = Linear(rows, width)
        self.add_optimizer(OPTIMIZERS["rowwise_adagrad"](rows.parameters()))
        self.add_optimizer(OPTIMIZERS["sgd"](self.model.top.parameters()))

    def build(self, features: Any, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(features, labels)
        loss.backward()
        return loss


class FusedStep:
    """TorchRec's side. FusedEmbeddingBagCollection updates rows in its backward pass."""

    def __init__(self, shape: Shape, keys: list[str]) -> None:
        from torchrec import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad

        configs = [EmbeddingBagConfig(shape.rows, shape.dim, f"t{key}", feature_names=[key]) for key in keys]
        rows = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, {"lr": LR, "eps": EPS})
        with torch.no_grad():
            for key, initial in zip(keys, initial_rows(shape), strict=True):
                rows.embedding_bags[f"t{key}"].weight.copy_(initial)
        self._model = Linear(rows, shape.tables * shape.dim)
        self._sgd = OPTIMIZERS["sgd"](self._model.top.parameters())

    def __call__(self, features: Any, labels: Tensor) -> Tensor:
        self._sgd.zero_grad()
        loss: Tensor = self._model(features, labels)
        loss.backward()
        self._sgd.step()
        return loss.detach()


@workload({"rows": 500, "batch": 32, "length": 3, "repeats": 2, "calls": 2}, passive=False)
def fused(
    folder: Path,
    rows: int = 100_000,
    tables: int = 8,
    dim: int = 32,
    batch: int = 1024,
    length: int = 10,
    repeats: int = 16,
    calls: int = 12,
) -> Iterator[Figure]:
    """Time of a step with a linear layer and row-wise Adagrad. Compares TorchRec's fused collection with tierbed.

    calls: steps per turn.
    """
    from torchrec import KeyedJaggedTensor

    for alpha in (None, ALPHA):
        shape = Shape(tables, rows, dim, batch, length, alpha, "rowwise_adagrad", ragged=True)
        batches, keys = make_batches(shape), [f"f{table}" for table in range(tables)]
        labels = [(each.grad[:, 0, 0] > 1).float() for each in batches]
        collection = Collection(shape, batches)
        peer_features = [KeyedJaggedTensor(keys, each.flat, offsets=each.offsets) for each in batches]
        sides = {
            "tierbed": cycle(
                GraphStep(collection.bags, tables * dim), [*zip(collection.features, labels, strict=True)]
            ),
            "TorchRec": cycle(FusedStep(shape, keys), [*zip(peer_features, labels, strict=True)]),
        }
        for index in range(CHECKED_STEPS):
            check_losses("tierbed and TorchRec", *([step(index)] for step in sides.values()), tolerance=1e-5)
        times = time_in_turns(sides, repeats, 1, calls=calls)
        what = f"time, TorchRec / tierbed: {length} ids, {'uniform' if alpha is None else f'zipf {alpha}'}"
        yield figure(what, times.ratio("TorchRec", "tierbed"), "x", bar=1.3, notes=str(times))
