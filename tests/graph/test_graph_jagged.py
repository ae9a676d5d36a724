"""Sizes that a container leaves open: one step for all of them from the first call on, with the bits of their own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from support.cuda_tables import on_one_device
from support.embeddings import contents, make
from support.graphs import FEW, compiled_steps, embedding, graph_of, training
from support.jagged_arguments import Jagged, jagged
from support.stores import options
from tierbed import Graph, MultiTableEmbedding
from tierbed.engine.errors import GraphError

FEATURES, MAX_LENGTH = 3, 4
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own, at its import


class Positions(nn.Module):
    """A learned weight for each place in a bag of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(FEATURES * MAX_LENGTH))

    def forward(self, features: Jagged) -> Tensor:
        place = torch.arange(features.values.shape[0])
        bag = torch.searchsorted(features.offsets, place, right=True) - 1
        inside = (place - features.offsets[bag]).clamp(max=MAX_LENGTH - 1)
        return self.weights[bag // features.stride * MAX_LENGTH + inside]


class Bags(Graph):
    """Weighted bags of features, the rows themselves, dropout, and a dense part."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows, self.positions = rows, Positions()
        width = FEATURES * rows.spec.dim
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.own = [*self.mlp.parameters(), *self.positions.parameters()]
        self.add_optimizer(torch.optim.Adagrad([*rows.parameters(), *self.own], lr=0.1))

    def build(self, features: Jagged, labels: Tensor) -> tuple[Tensor, Jagged]:
        weights = self.positions(features)
        tables = torch.arange(FEATURES).repeat_interleave(features.stride)
        bags = self.rows(features.values, tables, features.offsets, pooling="sum", weights=weights)
        bags = bags.view(FEATURES, features.stride, -1).transpose(0, 1).flatten(1)
        rows = self.rows(features.values, 0)
        penalty = (rows.tanh() * rows).sum() / 100 + F.layer_norm(rows, rows.shape[1:]).square().sum() / 1000
        loss = F.binary_cross_entropy_with_logits(self.mlp(bags).squeeze(1), labels) + penalty
        loss.backward()
        return loss, Jagged(features.keys, features.values + 1, weights, features.offsets)


def batches(totals: list[int], batch: int = 6) -> list[tuple[Jagged, Tensor]]:
    return [(jagged(total, batch, seed=i), torch.arange(batch) % 2 / 1.0) for i, total in enumerate(totals)]


def steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jagged, "open_leaves", frozenset())


def test_one_step_for_all_totals_has_the_bits_of_a_step_for_each() -> None:
    totals, found = [37, 0, 1], []
    for own in (False, True):
        with pytest.MonkeyPatch.context() as patched, make(options("cached_host"), None, tables=FEATURES) as rows:
            if own:
                steps_of_their_own(patched)
            graph = Bags(rows)
            torch.manual_seed(5)
            results = pytree.tree_leaves(list(graph.run(batches(totals), ahead=8)))
            found.append(([*results, *(p.detach() for p in graph.own)], contents(rows).tobytes()))
            assert rows.metrics()["table"]["prefetch_hits"] == len(totals)
            assert compiled_steps(graph) == (len(totals) if own else 1)
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def test_any_total_comes_first_and_build_is_traced_once_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    traced: list[int] = []

    def build(graph: Any, features: Jagged, scale: float) -> Jagged:
        traced.append(1)
        graph.rows(features.values).sum().backward()
        return Jagged(features.keys, features.values + 1, None, features.offsets)

    rows = embedding()
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    for total in (0, 5, 1, 2, 700):
        returned = graph(jagged(total), 1.0)
        assert isinstance(returned, Jagged)
        assert torch.equal(returned.values, jagged(total).values + 1)
    assert len(traced) == 1
    for total in (1, 9):
        graph(jagged(total), 2.0)  # another signature
    assert len(traced) == compiled_steps(graph) == 2
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    (reason,) = graph.why_recompiled()
    assert "shape" not in reason


def test_arguments_of_a_container_are_named_by_its_fields_and_shown_open() -> None:
    class Sum(Graph):
        def build(self, features: Jagged, labels: Tensor) -> Tensor:
            return self.rows(features.values, 0, features.offsets, pooling="sum").sum() + labels.sum()

    graph = Sum()
    graph.rows = embedding()
    for batch in (6, 4):
        graph(*batches([30], batch)[0])
    assert "features_values: int64 [s" in str(graph)
    (reason,) = graph.why_recompiled()
    assert "argument features.offsets: shape (13,), was (19,); argument labels: shape (4,), was (6,)" in reason
    assert "features.values" not in reason
    bad = jagged(5)
    bad.weights = {1}  # type: ignore[assignment]
    with pytest.raises(GraphError, match=r"argument features\.weights is a set"):
        graph(bad, torch.zeros(6))


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps_of_their_own")
def test_batches_of_many_sizes_share_a_step_as_well(caplog: pytest.LogCaptureFixture) -> None:
    graph = Bags(embedding(FEATURES))
    for size in range(2, FEW + 5):
        for batch in batches([0, 1, 50 + size], size):
            graph(*batch)
    assert compiled_steps(graph) == FEW + 1
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.usefixtures("few_steps_of_their_own")
def test_a_build_that_takes_an_open_size_for_a_number_keeps_a_step_for_each(caplog: pytest.LogCaptureFixture) -> None:
    rows = embedding()
    graph = training(lambda graph, features: graph.rows(features.values).sum() / (1 + len(features.values)), rows=rows)
    totals = [0, 9, 1, 9, 12, 13, 9]
    for total in totals:
        expected = rows.get(jagged(total).values).sum() / (1 + total)
        torch.testing.assert_close(graph(jagged(total)), expected)
    assert compiled_steps(graph) == len(set(totals))
    assert "is compiled again for each further size" in caplog.text


@pytest.mark.slow
def test_what_has_known_sizes_is_compiled_and_the_rest_runs_as_recorded(caplog: pytest.LogCaptureFixture) -> None:
    results, states = [], []
    for compiled in (False, True):
        rows = embedding(FEATURES)
        graph = Bags(rows)
        if compiled:
            graph.compile_dense()
        torch.manual_seed(1)
        results.append(torch.stack([loss for loss, _ in graph.run(batches([30, 40, 0, 1, 50]), ahead=8)]))
        states.append([rows.get(torch.arange(300).view(100, FEATURES)), *graph.own])
        assert ("self.dense_0" in str(graph)) == compiled
        assert compiled_steps(graph) == 1
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)
    assert "compile_dense" not in caplog.text


def test_a_step_without_known_sizes_says_once_that_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    graph = training(lambda graph, features: graph.rows(features.values).tanh().square().sum(), rows=embedding())
    graph.compile_dense()
    for features in (3, 2, 3):
        graph(jagged(30, features=features))
    assert compiled_steps(graph) == 2
    assert len([record for record in caplog.records if "compile_dense" in record.message]) == 1


@on_one_device
@pytest.mark.parametrize("store", ["device", "ssd"])
def test_on_a_gpu_one_step_has_the_bits_of_a_step_for_each(
    place: torch.device, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(graph: Any, features: Jagged, grad: Tensor) -> Tensor:
        bags = graph.rows(features.values, 0, features.offsets, pooling="sum", weights=features.weights)
        return (bags.view(grad.shape) * grad).sum()

    totals, found = [30, 0, 7], []
    for name in ("shared", "own"):
        if name == "own":
            steps_of_their_own(monkeypatch)
        path = tmp_path / name if store == "ssd" else None
        with make(options(store, path, **({"capacity": 500} if store == "device" else {})), tables=1) as rows:
            graph = training(loss, rows=rows).to(place)
            if store == "device" and name == "shared":
                graph.cuda_graph()
            given = [jagged(total, weighted=True).to(place) for total in totals]
            grad = torch.rand(18, rows.spec.dim, generator=torch.Generator().manual_seed(1)).to(place)
            results = [result.cpu() for result in graph.run([(features, grad) for features in given], ahead=8)]
            assert compiled_steps(graph) == (1 if name == "shared" else len(totals))
            found.append((results, contents(rows).tobytes()))
            assert rows.metrics()["table"]["prefetch_hits"] == len(totals)
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def of_any_dimensions(found: Tensor) -> Tensor:
    found = found.squeeze()  # of one id, the only dimension left is the row's
    return found.square().sum(1 if found.dim() > 1 else 0).sum()


def of_few_or_many(found: Tensor) -> Tensor:
    return found.sum() if found.shape[0] > 20 else found.square().sum()


@pytest.mark.parametrize(
    ("loss", "totals"), [(of_any_dimensions, (30, 1, 40, 1)), (of_few_or_many, (30, 40, 10, 50, 10, 60))]
)
def test_a_total_that_decides_what_build_does_has_a_step_of_its_own(
    loss: Callable[[Tensor], Tensor], totals: tuple[int, ...]
) -> None:
    rows = embedding()
    graph = training(lambda graph, features: loss(graph.rows(features.values)), rows=rows)
    for total in totals:
        expected = loss(rows.get(jagged(total).values))
        torch.testing.assert_close(graph(jagged(total)), expected)
    assert compiled_steps(graph) == 2


@pytest.mark.filterwarnings("ignore:.*was compiled for more than 2 signatures")
def test_signatures_whose_sizes_cannot_stay_open_are_forgotten_with_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierbed.graph.graph.MAX_CACHED_STEPS", 2)
    monkeypatch.setattr("tierbed.graph.run.step_cache.MAX_FAMILIES", 2)
    graph = graph_of(lambda graph, features, scale: scale(sum(features.values.unbind(), torch.zeros(()))))
    signatures = WeakSet[Any]()
    for number in range(4):
        scale = eval(f"lambda total: total * {number}")
        signatures.add(scale)
        features = jagged(2)
        assert graph(features, scale) == number * features.values.sum()
    del scale
    gc.collect()
    assert len(signatures) <= 3
