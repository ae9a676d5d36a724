"""Steps of a graph that are the same on every device, and all that they return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.embeddings import DIM, make
from support.optimizers import OPTIMIZERS
from support.stores import options
from tierbed import Graph, MultiTableEmbedding

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "capacity": ("device", {"capacity": 1000}),
    "host_capacity": ("host", {"capacity": 1000}),
    "cached_capacity": ("cached_host", {"capacity": 1000}),
    "cached_lfu": ("cached_host", {"cache_policy": "lfu"}),
}
PADDING = 3
STEPS = 7


class Step(Graph):
    """Two lookups, one of them pooled; gradients of results are given, so that all processors have the same."""

    def __init__(self, rows: MultiTableEmbedding, optimizer: torch.optim.Optimizer, pooling: str | None) -> None:
        super().__init__()
        self.rows, self.pooling = rows, pooling
        self.add_optimizer(optimizer)

    def build(self, ids: Tensor, tables: Tensor, grad: Tensor, bags: Tensor, weights: Tensor, ends: Tensor) -> Any:
        out = self.rows(ids, tables)
        loss = (out * grad).sum()
        if self.pooling is None:
            loss.backward()
            return out
        weights = (weights * 1).requires_grad_()
        dense = self.rows(bags, 1, pooling=self.pooling, weights=weights)
        jagged = self.rows(ids.flatten(), 2, ends, self.pooling)
        loss = loss + (dense * grad[: len(bags), 0]).sum() + (jagged * grad[: len(ends) - 1, 1]).sum()
        slope, shadow = torch.autograd.grad(loss, [weights, self.rows.shadow])
        self.rows.shadow.grad = shadow
        return out, dense, jagged, slope


@dataclass
class Run:
    graph: Step
    place: torch.device
    seen: list[Tensor] = field(default_factory=list)

    def steps(self, seed: int, count: int = STEPS) -> None:
        for given in self.batches(seed, count):
            out = self.graph(*given)
            self.seen += [value.cpu() for value in (out if isinstance(out, tuple) else (out,))]

    def batches(self, seed: int, count: int = STEPS) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        rows = self.graph.rows
        for number in range(count):
            size = (60, 60, 0, 20)[number % 4]
            ids = torch.randint(-90, 90, (size, 2), generator=generator) * (2**40 + 1)
            tables = torch.randint(0, 3, (size, 2), generator=generator)
            ids[tables == 1] = PADDING
            grad = torch.randn(size, 2, DIM, generator=generator).to(rows.output_dtype)
            bags = torch.randint(-5, 5, (size // 2, 4), generator=generator)
            weights = torch.randn(size // 2, 4, generator=generator)
            ends = torch.randint(0, 2 * size + 1, (max(size, 1) // 2,), generator=generator).sort().values
            ends = torch.cat([torch.tensor([0]), ends, torch.tensor([2 * size])])[: size + 1 if size else 1]
            ends[-1] = 2 * size
            yield tuple(given.to(self.place) for given in (ids, tables, grad, bags, weights, ends))


def started(
    store: str, optimizer: str, path: Path | None, place: torch.device, pooling: str | None = None, **more: Any
) -> Run:
    kind, settings = OPTIMIZERS[optimizer]
    known, given = VARIANTS.get(store, (store, {}))
    rows = make(options(known, path, **given), padding_idx=PADDING, **more)
    run = Run(Step(rows, kind(rows.parameters(), **settings), pooling), place)
    run.graph.to(place)
    return run
