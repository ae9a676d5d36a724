"""Embeddings of a graph that look up the same ids deduplicate them once, and have the results of doing it each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cuda_tables import on_one_device, tables_on
from support.embeddings import DIM, TABLES, contents
from support.stores import STORES, options
from tierbed import CapacityError, Graph, InputError, MultiTableEmbedding
from tierbed.engine.ops.cuda.device import Device

CPU = torch.device("cpu")
STEPS = 6
Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]


class WideAndDeep(Graph):
    """A wide part of 1 column and a deep one of `DIM`. The deep part's ids are given apart, as equal tensors."""

    def __init__(self, shared: bool, where: Callable[[str], Any], place: torch.device = CPU) -> None:
        """where: the store options by the name of an embedding."""
        super().__init__()
        torch.manual_seed(0)
        self.shared = shared
        self.wide, self.deep = (
            MultiTableEmbedding(name, dim, torch.float32, torch.int64, TABLES, where(name), padding_idx=3)
            for name, dim in (("wide", 1), ("deep", DIM))
        )
        self.gate, self.net = nn.Linear(3, 1), nn.Linear(2 * DIM, 1)
        dense = [*self.gate.parameters(), *self.net.parameters()]
        self.add_optimizer(torch.optim.Adagrad([*self.deep.parameters(), *dense], lr=0.1))
        self.add_optimizer(torch.optim.Adam(self.wide.parameters(), lr=0.1))
        self.to(place)

    def build(self, one: tuple[Tensor, ...], same: tuple[Tensor, ...], features: Tensor) -> Tensor:
        weights = self.gate(features).squeeze(-1)
        wide = self.looked_up(self.wide, weights, *one)
        deep = self.looked_up(self.deep, weights, *(one if self.shared else same))
        loss = (wide.mean() + self.net(deep).squeeze(-1)).square().mean()
        loss.backward()
        return loss

    @staticmethod
    def looked_up(rows: MultiTableEmbedding, weights: Tensor, ids: Tensor, tables: Tensor, ends: Tensor) -> Tensor:
        plain = rows(ids % 50, tables).sum(1)  # [bags, dim]
        return torch.cat([plain, rows(ids.flatten(), 1, ends, "mean", weights=weights)], 1)


def batches(place: torch.device = CPU) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    result: list[Batch] = []
    for _ in range(STEPS):
        ids, tables, ends = (
            torch.randint(0, most, shape, generator=generator)
            for most, shape in ((90, (16, 2)), (3, (2,)), (33, (15,)))
        )
        offsets = torch.cat([torch.tensor([0]), ends.sort().values, torch.tensor([32])])
        one = tuple(part.to(place) for part in (ids, tables, offsets))
        features = torch.randn(32, 3, generator=generator).to(place)
        result.append((one, tuple(part.clone() for part in one), features))
    return result


def shares(graph: Graph) -> bool:
    return "], pin)" in str(graph)


def state(graph: WideAndDeep) -> list[bytes]:
    """All that training changes."""
    dense = [*graph.gate.parameters(), *graph.net.parameters()]
    rows = [contents(graph.wide).tobytes(), contents(graph.deep).tobytes()]
    return [*rows, *(parameter.detach().cpu().numpy().tobytes() for parameter in dense)]


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, list[bytes]]:
    graph = WideAndDeep(False, lambda _: options("device"))
    losses = torch.stack([graph(*batch) for batch in batches()])
    assert not shares(graph)
    return losses, state(graph)


@pytest.mark.parametrize("ahead", [0, 1, 8])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("ahead")
def test_a_run_is_that_without_sharing(
    tmp_path: Path, plain: tuple[Tensor, list[bytes]], store: str, ahead: int
) -> None:
    graph = WideAndDeep(True, lambda name: options(store, tmp_path))
    losses = torch.stack(list(graph.run(batches(), ahead=ahead)))
    assert torch.equal(losses, plain[0])
    assert state(graph) == plain[1]
    hits = [rows.metrics()["table"]["prefetch_hits"] for rows in (graph.wide, graph.deep)]
    assert hits == [STEPS if ahead else 0] * 2
    (line,) = [line for line in str(graph).splitlines() if "], pin)" in line]
    assert line.strip().startswith("pin_1 = deep.pin([")
    assert "], pin)  # deep in " in line


@on_one_device
def test_a_run_on_a_device_is_that_without_sharing(device: Device) -> None:
    with tables_on(device) as place:
        graphs = [WideAndDeep(shared, lambda _: options("cached_host"), place) for shared in (True, False)]
        losses = [[graph(*batch).item() for batch in batches(place)] for graph in graphs]
        assert [shares(graph) for graph in graphs] == [True, False]
        assert losses[0] == losses[1]
        assert state(graphs[0]) == state(graphs[1])
        for graph in graphs:
            graph.wide.close()
            graph.deep.close()


def test_what_ends_a_step_with_all_gradients_sees_the_same() -> None:
    results = []
    for shared in (True, False):
        graph = WideAndDeep(shared, lambda _: options("device"))
        graph.clip_grad_norm(0.1)
        losses = [float(loss) for loss in graph.run(batches(), ahead=2)]
        assert shares(graph) == shared
        results.append((losses, state(graph)))
    assert results[0] == results[1]
    graph = WideAndDeep(True, lambda _: options("device"))
    graph.accumulate_grads(3)
    graph(*batches()[0])
    assert not shares(graph)  # those lookups read


def test_a_step_that_one_embedding_refuses_changes_nothing_and_the_next_goes_on() -> None:
    def where(name: str) -> Any:
        return options("device", capacity=60 if name == "deep" else 1000)

    graph, plain = (WideAndDeep(shared, where) for shared in (True, False))
    for one in (graph, plain):
        steps = batches()
        one(*steps[0])
        before = state(one)
        with pytest.raises(CapacityError, match="deep"):
            one(*steps[1])
        (ids, tables, ends), _, features = steps[0]
        with pytest.raises(InputError, match="table_ids of embedding 'wide'"):  # of the first one
            one((ids, tables + 3, ends), (ids, tables + 3, ends), features)
        assert state(one) == before
        one(*steps[0])
    assert state(graph) == state(plain)


def test_a_step_that_serves_many_sizes_shares_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for shared in (False, True):
        graph, losses = WideAndDeep(shared, lambda _: options("device")), []
        if shared:
            monkeypatch.setattr("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", 1)
        for bags in (3, 5, 6):
            (ids, tables, ends), _, features = batches()[0]
            one = ids[:bags], tables, torch.cat([ends[:bags], torch.tensor([2 * bags])]).clamp(max=2 * bags)
            losses.append(float(graph(one, tuple(part.clone() for part in one), features[: 2 * bags])))
        last = str(graph).rpartition("# compiled step")[2]
        assert ("sym_size" in last, "], pin)" in last) == (shared, shared)
        results.append((losses, state(graph)))
    assert results[0] == results[1]
