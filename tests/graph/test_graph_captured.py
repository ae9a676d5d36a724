"""Steps that run as a CUDA graph have the bits of plain ones, whatever happens between them."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.captured import CAPTURED, Model, Pair, batches, bits
from support.cuda_tables import on_one_device
from support.embeddings import DIM, contents, make
from support.graphs import graph_of, training
from support.optimizers import OPTIMIZERS
from support.stores import options
from tierbed import CapacityError, Graph

SLOW = pytest.mark.slow
ELSEWHERE = ("sgd", "adam", "rowwise", "catch-up")  # other tests of this file record them


def moved(graph: Any) -> None:
    graph.mlp[0].weight.data = graph.mlp[0].weight.detach() * 2
    graph.mlp[1].running_mean = graph.mlp[1].running_mean + 1


@on_one_device
@pytest.mark.parametrize("optimizer", ["adagrad", *(pytest.param(name, marks=SLOW) for name in ELSEWHERE)])
def test_a_pair_of_graphs_trains_alike_whatever_happens(place: torch.device, optimizer: str) -> None:
    """Schedules, dropout, pooling, clipping; each size is captured; evaluations, profiles, moved parameters."""
    pair = Pair(place, lambda _: Model(optimizer))
    pair.each(lambda graph: graph.clip_grad_value(0.01))
    pair.steps(batches(3))
    assert not pair.is_captured
    pair.steps([batch for two in zip(batches(3, seed=1), batches(3, size=4), strict=True) for batch in two])
    pair.steps([*batches(2, seed=2), *batches(2, size=4)])
    assert repr(pair.graphs[1]).count(CAPTURED) == 2
    pair.each(lambda graph: graph.clip_grad_value(0.001))  # numbers are live, also those of clips
    pair.each(lambda graph: graph.rows.row_optimizer._optimizer.param_groups[0].update(clip_grad_row_norm=0.002))
    pair.steps(batches(2, seed=3))
    assert pair.is_captured
    pair.each(lambda graph: graph.eval())
    pair.steps(batches(2, seed=4))
    assert repr(pair.graphs[1]).count(CAPTURED) == 2
    pair.each(lambda graph: graph.train())
    given = [tuple(tensor.to(place) for tensor in batch) for batch in batches(3, seed=5)]
    pair.each(lambda graph: torch.manual_seed(1) and graph.profile(given))
    pair.check()
    pair.each(moved)
    for count, captured in ((2, 1), (3, 2)):
        pair.steps(batches(count, seed=6))
        assert repr(pair.graphs[1]).count(CAPTURED) == captured
    kept = [(rows, rows.clone()) for _, rows in (pair.graphs[1](*batch) for batch in given)]
    assert all(torch.equal(now, then) for now, then in kept)  # what it returned stays as it was


@on_one_device
@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=SLOW), "catch-up"])
def test_rows_that_are_put_deleted_and_loaded_in_between(place: torch.device, tmp_path: Path, optimizer: str) -> None:
    pair = Pair(place, lambda name: Model(optimizer, tmp_path / name))
    pair.steps(batches(1))
    pair.each(lambda g: g.rows.save_snapshot("begin"))  # from the first save on, changes are tracked
    pair.steps(batches(5))
    assert pair.is_captured
    keys = torch.arange(0, 20, 2)
    one, other = pair.each(lambda g: g.rows.get(keys, 0))
    assert bits(one) == bits(other)
    for act in (
        lambda g: g.rows.put(keys, torch.ones(10, DIM), 1),
        lambda g: g.rows.delete(torch.arange(40), 0),
        lambda g: g.rows.delete(torch.arange(30), 1),
        lambda g: g.rows.save_snapshot("first"),
    ):
        pair.each(act)
        pair.steps(batches(1, seed=1))
        assert pair.is_captured  # none of it moved what the captured graph uses
    pair.each(lambda g: g.rows.load_snapshot("first"))
    pair.steps(batches(3, seed=2))
    assert not pair.is_captured
    pair.steps(batches(3, seed=3))
    assert pair.is_captured


@on_one_device
def test_snapshots_of_what_captured_steps_changed(place: torch.device, tmp_path: Path) -> None:
    pair = Pair(place, lambda name: Model("adam", tmp_path / name))
    pair.each(lambda g: g.rows.save_snapshot("base"))
    pair.steps(batches(5))
    pair.each(lambda g: g.rows.save_snapshot("one", kind="incremental"))  # from here on changes are noted
    pair.steps(batches(5, seed=1))
    assert pair.is_captured
    pair.each(lambda g: g.rows.save_snapshot("two", kind="incremental"))
    expected = contents(pair.graphs[0].rows).tobytes()
    background = pair.each(lambda g: g.rows.save_snapshot("three", background=True))
    pair.steps(batches(2, seed=2))
    for save in background:
        save.wait()
    for name in ("two", "three"):
        for graph in pair.graphs:
            graph.rows.load_snapshot(name)
            assert contents(graph.rows).tobytes() == expected


@on_one_device
def test_a_snapshot_that_another_thread_asks_for_is_of_whole_steps(place: torch.device, tmp_path: Path) -> None:
    pair = Pair(place, lambda name: Model("rowwise", tmp_path / name))
    plain, recorded = pair.graphs
    pair.steps(batches(5))
    recorded.rows.save_snapshot("base")
    given = [tuple(tensor.to(place) for tensor in batch) for batch in batches(12, seed=1)]

    def save() -> None:
        for name in ("one", "two"):  # the second is of what changed since the first
            parts = {"name": name, "kind": "incremental", "overwrite": False, "stores": ()}
            made = SimpleNamespace(**parts, progress=lambda _: None, is_given_up=lambda: False)
            recorded.rows.table_handle().request_handler.save_between_steps(made)

    visitor = Thread(target=save)
    torch.manual_seed(5)
    for number, batch in enumerate(given):
        if number == 3:
            visitor.start()
        recorded(*batch)
    visitor.join()
    torch.manual_seed(5)
    for name in ("one", "two"):
        recorded.rows.load_snapshot(name)
        step, done = (graph.rows.metrics()["table"]["step"] for graph in (recorded, plain))
        for batch in given[done - 5 : step - 5]:
            plain(*batch)
        assert contents(recorded.rows).tobytes() == contents(plain.rows).tobytes()


def twins(_: str) -> Any:
    """Two embeddings that look up the same ids."""
    rows, others = (make(options("device", capacity=500), name=name, tables=2) for name in ("a", "b"))
    return training(lambda graph, ids: (graph.rows(ids) * graph.others(ids).cos()).sum(), rows=rows, others=others)


@on_one_device
def test_a_run_over_a_loader_is_captured_and_shares_a_deduplication(place: torch.device) -> None:
    pair = Pair(place, twins)
    given = [(ids.to(place),) for ids, _, _ in batches(8)]
    assert torch.equal(*pair.each(lambda graph: torch.stack(list(graph.run(given, ahead=3)))))
    pair.check()
    assert "pin_1 = others.pin([Lookup(args)], pin)" in repr(pair.graphs[1])
    assert pair.is_captured
    assert pair.each(lambda graph: graph.others.metrics()["table"]["prefetch_hits"]) == [8, 0]


@on_one_device
def test_rows_beyond_the_capacity_are_reported_by_a_later_step(place: torch.device) -> None:
    pair = Pair(place, lambda _: Model("sgd", capacity=30))
    few, many = batches(5, ids=8), batches(1, size=6, ids=10**6, seed=5)
    pair.steps(few)
    assert pair.is_captured
    raised = pair.steps([*many, *few[:3], *batches(2, ids=10**6, seed=6), *few[:3]], errors=(CapacityError,))
    assert raised
    assert "changed nothing" in raised[0]
    assert pair.is_captured
    assert pair.graphs[1].rows.size() <= 30


@on_one_device
def test_frozen_rows_with_trained_weights_and_rows_that_another_graph_trains(place: torch.device) -> None:
    class Frozen(Model):
        def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            bags = self.bags(ids, 0, pooling="sum", weights=self.weights.expand(ids.shape).contiguous())
            loss = ((bags.sum(1) - y) ** 2).mean() + self.rows(ids, 1).square().sum()
            loss.backward()
            return loss, bags

    def frozen(_: str) -> Frozen:
        model = Frozen("catch-up")
        model.bags.requires_grad_(False)
        return model

    def of_bags(graph: Any) -> Graph:
        optimizer = OPTIMIZERS["catch-up"][0](graph.bags.parameters(), lr=0.3)  # type: ignore[call-arg]
        return graph_of(lambda graph, ids: graph.bags(ids, 0).square().sum().backward(), optimizer, bags=graph.bags)

    pair = Pair(place, frozen)
    others = pair.each(of_bags)
    for number in range(6):
        for graph, other in zip(pair.graphs, others, strict=True):
            graph.bags.requires_grad_(True)
            other(batches(1, seed=number)[0][0].to(place))
            graph.bags.requires_grad_(False)
        pair.steps(batches(1, seed=20 + number))
    assert pair.is_captured
