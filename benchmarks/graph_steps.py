"""The steps that benchmarks/graph.py times: rows of all tables and an MLP on them, by `Graph` and by hand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tier_stores import DIM, Mismatch, fill, make_embedding, make_options
from torch import Tensor, nn
from traces import Zipf
from workloads import EPS, hashed

from tierbed import Graph

LR = 0.01
CHECKED = 10  # steps

Batch = tuple[Tensor, Tensor]
Step = Callable[[int], Tensor]  # of a number, its loss


@dataclass(frozen=True)
class Model:
    """rows: of a table; hidden: widths of the MLP but the last, which is 1; optimizer: "sgd", "adagrad" or "adam"."""

    rows: int
    tables: int
    batch: int
    hidden: tuple[int, ...]
    optimizer: str = "sgd"


class GraphStep(Graph):
    """On a store of these options; `cached`: rows that its cache has room for."""

    def __init__(self, model: Model, folder: Path, store: str = "device_mem", cached: int = 0, **options: Any) -> None:
        super().__init__()
        self.embedding = make_embedding(store, model.tables, make_options(store, folder, cached, **options))
        self.mlp = make_mlp(model)
        self.optimizer = make_optimizer(model, [*self.embedding.parameters(), *self.mlp.parameters()])
        self.add_optimizer(self.optimizer)
        fill(self.embedding, model.rows)

    def build(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self.mlp(self.embedding(ids).flatten(1)), labels)
        loss.backward()
        return loss


class EagerStep(nn.Module):
    """By hand, from the rows that `like` has. Gradients of tables are sparse for all but SGD; Adam is SparseAdam."""

    def __init__(self, model: Model, like: GraphStep) -> None:
        super().__init__()
        keys, sparse = hashed(torch.arange(model.rows)), model.optimizer != "sgd"
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(like.embedding.get(keys, table), freeze=False, sparse=sparse)
            for table in range(model.tables)
        )
        torch.sparse.check_sparse_tensor_invariants.disable()  # as by default, which Adagrad warns of
        self.mlp = make_mlp(model)
        self.optimizers = (
            [
                torch.optim.SparseAdam(self.tables.parameters(), lr=LR, eps=EPS),
                make_optimizer(model, list(self.mlp.parameters())),
            ]
            if model.optimizer == "adam"
            else [make_optimizer(model, list(self.parameters()))]
        )

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        looked_up = torch.cat([table(rows[:, i]) for i, table in enumerate(self.tables)], 1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.mlp(looked_up), labels)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def make_mlp(model: Model) -> nn.Sequential:
    """With the same weights at each call."""
    torch.manual_seed(0)
    widths = [model.tables * DIM, *model.hidden]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1), nn.Flatten(0))


def make_optimizer(model: Model, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if model.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LR)
    kind = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[model.optimizer]
    return kind(parameters, lr=LR, eps=EPS)


def make_batches(model: Model, count: int, first: int = 0) -> list[Batch]:
    """Row numbers, int64 [batch, tables], and labels that follow from them, float32 [batch]."""
    trace = Zipf(model.tables, model.rows, model.batch)
    rows = [torch.from_numpy(trace.numbers(step)) for step in range(first, first + count)]
    return [(each, (each[:, 0] % 3 == 0).float()) for each in rows]


def keyed(batches: Sequence[Batch]) -> list[Batch]:
    """As tierbed takes them: 64-bit keys for row numbers."""
    return [(hashed(rows), labels) for rows, labels in batches]


def cycle(step: Callable[[Tensor, Tensor], Tensor], batches: Sequence[Batch]) -> Step:
    return lambda number: step(*batches[number % len(batches)])


def check(what: str, ours: Step, theirs: Step) -> None:
    """Raises Mismatch unless losses of the first steps agree, to 1e-5: gradients add up in other orders."""
    for number in range(CHECKED):
        one, other = float(ours(number)), float(theirs(number))
        if not abs(one - other) <= 1e-5 * abs(other):
            raise Mismatch(f"{what}: loss {one} of the graph's step {number}, {other} of the eager one's")


def seconds_of(step: Step, number: int) -> float:
    begin = time.perf_counter()
    step(number)
    return time.perf_counter() - begin
