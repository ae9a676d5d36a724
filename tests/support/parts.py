"""A graph that trains on parts of batches, one on each rank or all in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.optimizers import OPTIMIZERS
from support.stores import options
from tierbed import Graph, MultiTableEmbedding, World, make_constant_initializer, make_normal_initializer

PADDING = -1


class Case(NamedTuple):
    """How to train: `ranks` parts a step, whoever takes them."""

    ranks: int
    store: str
    optimizer: str
    output: torch.dtype
    threads: int
    ahead: int
    steps: int = 5
    uneven: bool = False  # whether parts differ in size, each size a compiled step
    types: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)  # of rows and of their state


class Trained(NamedTuple):
    losses: list[float]
    rows: dict[tuple[str, int, int], bytes]  # by embedding, table and key: embedding, state, counts
    dense: dict[str, Tensor]
    hits: int  # announced batches that steps took


class Parts(Graph):
    """Two embeddings that share their ids, bags with weights that are trained, padding, and a dense part."""

    def __init__(self, case: Case, path: Path, world: World | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [make_normal_initializer(0.0, 0.1), make_constant_initializer(0.5)]
        dtype, state = case.types

        def rows(name: str, dim: int, store: str) -> MultiTableEmbedding:
            given = options(store, path / name if store.startswith("ssd") else None)
            more = None, PADDING, 7, case.output, world, state
            return MultiTableEmbedding(name, dim, dtype, torch.int64, tables, given, *more)

        self.items, self.wide = rows("items", 8, case.store), rows("wide", 4, "host")
        self.scale = nn.Parameter(torch.ones(()))
        self.mlp = nn.Linear(2 * 8 + 8 + 2 * 4, 1)
        kind, numbers = OPTIMIZERS[case.optimizer]
        self.add_optimizer(kind([*self.items.parameters(), *self.wide.parameters()], **numbers))
        self.add_optimizer(torch.optim.Adam([self.scale, *self.mlp.parameters()], lr=0.01))

    def build(self, ids: Tensor, bags: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        bag = self.items(bags, 1, pooling="mean", weights=weights * self.scale)
        x = torch.cat([self.items(ids).flatten(1), bag, self.wide(ids).flatten(1)], 1).float()
        loss = F.binary_cross_entropy_with_logits(self.mlp(x).squeeze(1), y)
        loss.backward()
        return loss


def parts(case: Case) -> Iterator[tuple[Tensor, ...]]:
    """The parts of all steps, those of a step in the order of ranks, some with one id many times."""
    draw = torch.Generator().manual_seed(11)
    for number in range(case.steps * case.ranks):
        size = 1 + number % 4 * 5 if case.uneven else 12
        most = 2 if number % 5 == 3 else 400
        ids = torch.randint(-1, most, (size, 2), generator=draw)
        bags = torch.randint(-1, most, (size, 3), generator=draw)
        yield ids, bags, torch.rand((size, 3), generator=draw), torch.rand(size, generator=draw).round()


def train(case: Case, path: Path, world: World | None) -> Trained:
    """Train on this rank's parts, or without a world on all of them, `case.ranks` accumulated."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        graph = Parts(case, path, world)
        graph.accumulate_grads(case.ranks if world is None else 1, mean=True)
        mine = list(parts(case))
        if world is not None:
            mine = mine[world.rank :: world.size]
        losses = [loss.item() for loss in graph.run(mine, ahead=case.ahead)]
        found = Trained(losses, rows_of(graph), dense_of(graph), graph.items.metrics()["table"]["prefetch_hits"])
        for embedding in (graph.items, graph.wide):
            embedding.close()
        return found
    finally:
        torch.set_num_threads(before)


def rows_of(graph: Parts) -> dict[tuple[str, int, int], bytes]:
    """Every row that this process has, bit by bit."""
    found = {}
    for embedding in (graph.items, graph.wide):
        for _, rows in embedding.table_handle().open_table.scan():
            names = zip(rows["table"].tolist(), rows["key"].tolist(), strict=True)
            found.update(((embedding.name, *name), row.tobytes()) for name, row in zip(names, rows, strict=True))
    return found


def dense_of(graph: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in graph.named_parameters() if "shadow" not in name}
