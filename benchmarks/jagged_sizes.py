"""A step whose numbers of ids differ from batch to batch, against the same batches with steps of their own sizes.

A container says which of its leaves change their first dimension from batch to batch. The other graph gets the same
tensors from a container that does not say so, and therefore compiles a step for each total. Both run each batch in
turn, on one thread of torch; the figure is the median over batches of the ratio of their times.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import ClassVar, NamedTuple

import torch
from tier_report import Figure, listed
from tier_stores import Mismatch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tierbed import (
    Graph,
    MultiTableEmbedding,
    make_device_mem_store_options,
    make_table_options,
    make_uniform_initializer,
)
from tierbed.engine.optim import RowWiseAdagrad
from tierbed.graph.run import step_cache

SECTION = "sizes"
BAR = 1.15


@dataclass(frozen=True)
class Sizes:
    """ids: of each table. length: the most ids of a bag. own: how many batches have steps of their own."""

    features: int = 26
    ids: int = 100_000
    dim: int = 16
    batch: int = 2048
    length: int = 3
    batches: int = 100
    own: int = 50
    rounds: int = 5


QUICK = Sizes(3, 200, 4, 8, 3, 6, 4, 2)


class Batch(NamedTuple):
    """Bags of all features, one feature after the other, and a label for each sample."""

    values: Tensor
    offsets: Tensor
    labels: Tensor


class Features:
    """The bags of a batch, in a container whose number of ids is open."""

    open_leaves: ClassVar[frozenset[int]] = frozenset({0})

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values, self.offsets = values, offsets


class Closed(Features):
    """The same, in a container that says nothing of its sizes."""

    open_leaves: ClassVar[frozenset[int]] = frozenset()


for _kind in (Features, Closed):
    pytree.register_pytree_node(
        _kind,
        lambda features: ([features.values, features.offsets], None),
        lambda leaves, _, kind=_kind: kind(*leaves),  # type: ignore[misc]
        serialized_type_name=f"benchmarks.{_kind.__name__}",
    )


class Model(Graph):
    """Bags summed, [batch, features x dim], and a layer on them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [make_table_options(make_uniform_initializer(-0.05, 0.05))] * sizes.features
        store = make_device_mem_store_options()
        self.rows = MultiTableEmbedding("rows", sizes.dim, torch.float32, torch.int64, tables, store)
        self.layer = nn.Linear(sizes.features * sizes.dim, 1)
        self.features, self.dim = sizes.features, sizes.dim
        self.add_optimizer(RowWiseAdagrad(self.rows.parameters(), lr=0.05))
        self.add_optimizer(torch.optim.SGD(self.layer.parameters(), lr=0.01))

    def build(self, given: Features, labels: Tensor) -> Tensor:
        batch = labels.shape[0]
        tables = torch.arange(self.features).repeat_interleave(batch)
        bags = self.rows(given.values, tables, given.offsets, pooling="sum")
        logits = self.layer(bags.view(self.features, batch, self.dim).transpose(0, 1).flatten(1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


def measure(sizes: Sizes) -> list[Figure]:
    """Figures of steps compiled, and of time. Raises Mismatch unless losses and rows are equal to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _figures(sizes)
    finally:
        torch.set_num_threads(threads)


def _figures(sizes: Sizes) -> list[Figure]:
    counted = Model(sizes)
    for values, offsets, labels in _batches(sizes, sizes.batches):
        counted(Features(values, offsets), labels)
    steps = _steps_of(counted)
    del counted
    shared, each = Model(sizes), Model(sizes)
    batches = _batches(sizes, sizes.own)
    before = step_cache.MAX_STATIC_SHAPES
    step_cache.MAX_STATIC_SHAPES = sizes.own  # no step for many sizes among those of their own
    try:
        ratios, times = _timed(sizes, shared, each, batches)
    finally:
        step_cache.MAX_STATIC_SHAPES = before
    if (found := _steps_of(each)) != sizes.own:
        raise Mismatch(f"{found} steps for {sizes.own} sizes")
    _check_rows(sizes, shared, each)
    mine, own = (1e3 * median(column) for column in zip(*times, strict=True))
    what = f"{sizes.features} features, {sizes.dim} columns, batch {sizes.batch}"
    about = listed([("ms", f"{mine:.2f} to {own:.2f}"), ("steps of their own", str(sizes.own))])
    return [
        Figure(SECTION, f"compiled steps of {sizes.batches} batches, {what}", steps, "", 1, at_most=True),
        Figure(SECTION, f"time of a step to one of its own sizes, {what}", median(ratios), "x", BAR, True, about),
    ]


def _steps_of(graph: Graph) -> int:
    return str(graph).count("# compiled step")


def _timed(
    sizes: Sizes, shared: Model, each: Model, batches: list[Batch]
) -> tuple[list[float], list[tuple[float, float]]]:
    """Of each batch, the ratio of the two times, and the times in seconds."""
    ratios: list[float] = []
    times: list[tuple[float, float]] = []
    for turn in range(1 + sizes.rounds):  # the first compiles
        for number, (values, offsets, labels) in enumerate(batches):
            runs = [(shared, Features(values, offsets)), (each, Closed(values, offsets))]
            took, losses = {}, []
            for graph, given in runs if (turn + number) % 2 else runs[::-1]:
                begin = perf_counter()
                losses.append(graph(given, labels))
                took[graph] = perf_counter() - begin
            if not torch.equal(*losses):
                raise Mismatch(f"losses of batch {number} in turn {turn} are {losses[0]} and {losses[1]}")
            if turn:
                ratios.append(took[shared] / took[each])
                times.append((took[shared], took[each]))
    return ratios, times


def _batches(sizes: Sizes, count: int) -> list[Batch]:
    """Batches whose totals all differ."""
    generator = torch.Generator().manual_seed(1)
    made: dict[int, Batch] = {}
    while len(made) < count:
        lengths = torch.randint(0, sizes.length + 1, (sizes.features * sizes.batch,), generator=generator)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        values = torch.randint(sizes.ids, (int(offsets[-1]),), generator=generator)
        labels = torch.randint(2, (sizes.batch,), generator=generator).float()
        made.setdefault(len(values), Batch(values, offsets, labels))
    return list(made.values())


def _check_rows(sizes: Sizes, one: Model, other: Model) -> None:
    ids = torch.arange(sizes.ids)
    for table in range(sizes.features):
        if not torch.equal(one.rows.get(ids, table), other.rows.get(ids, table)):
            raise Mismatch(f"rows of table {table} differ")
