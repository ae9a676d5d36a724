"""What a step gains where two embeddings that look up the same ids deduplicate them once."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from graph_steps import LR, Model, keyed, make_batches, seconds_of
from tier_report import Figure, listed
from tier_stores import DIM, Mismatch
from torch import Tensor, nn
from workloads import EPS

from tierbed import (
    Graph,
    MultiTableEmbedding,
    make_device_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)

SECTION = "sharing"
MODEL = Model(rows=38_462, tables=26, batch=4096, hidden=())


@dataclass(frozen=True)
class Sizes:
    model: Model = MODEL
    batches: int = 16
    steps: int = 150


QUICK = Sizes(Model(rows=200, tables=2, batch=16, hidden=()), batches=2, steps=3)


class WideAndDeep(Graph):
    """Rows of 1 and of `DIM` columns, with next to nothing dense on them. One that does not share has equal ids."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        tables = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * model.tables
        store = make_device_mem_store_options()
        self.wide = MultiTableEmbedding("wide", 1, torch.float32, torch.int64, tables, store)
        self.deep = MultiTableEmbedding("deep", DIM, torch.float32, torch.int64, tables, store)
        self.add_optimizer(torch.optim.Adagrad([*self.wide.parameters(), *self.deep.parameters()], lr=LR, eps=EPS))

    def build(self, ids: Tensor, same: Tensor, labels: Tensor, shared: bool) -> Tensor:
        logits = self.wide(ids).sum((1, 2)) + self.deep(ids if shared else same).sum((1, 2))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


def measure(sizes: Sizes) -> list[Figure]:
    """Raises Mismatch unless the losses of two graphs, one that shares and one that does not, are the same."""
    batches = [(ids, ids.clone(), labels) for ids, labels in keyed(make_batches(sizes.model, sizes.batches))]
    one, other = WideAndDeep(sizes.model), WideAndDeep(sizes.model)
    for batch in batches:
        losses = one(*batch, True), other(*batch, False)
        if not torch.equal(*losses):
            raise Mismatch(f"{SECTION}: loss {losses[0]} of a step that shares, {losses[1]} of one that does not")

    def step(number: int, shared: bool) -> float:
        return seconds_of(lambda n: one(*batches[n % sizes.batches], shared), number)

    pairs = [(step(number, True), step(number, False)) for number in range(sizes.steps + 1)][1:]  # the first traces
    shared, each = (1e3 * median(part) for part in zip(*pairs, strict=True))
    notes = listed([("deduplicated once", f"{shared:.1f} ms"), ("by each", f"{each:.1f}")])
    ratio = median(mine / theirs for mine, theirs in pairs)
    what = "two embeddings of the same ids, of the time without sharing"
    return [Figure(SECTION, what, ratio, bar=0.95, at_most=True, notes=notes)]
