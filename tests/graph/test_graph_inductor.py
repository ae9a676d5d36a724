"""A step whose dense part Inductor compiled is the plain one, to rounding; what must keep its order does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import DIM, embedding, graph_of, id_batches, training
from tierbed import Graph, GraphError, MultiTableEmbedding

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own, at its import


def graph_over(rows: MultiTableEmbedding, layers: nn.Module) -> Graph:
    def loss(graph: Any, ids: Tensor) -> Tensor:
        found = torch.cat([graph.rows(ids[:, 0]), graph.rows(ids[:, 1:]).sum(1)], 1)
        return (graph.layers(found).squeeze(1) - ids[:, 0] / 50).square().mean()

    return training(loss, rows=rows, layers=layers)


@pytest.mark.slow
def test_a_compiled_dense_part_trains_as_the_plain_one() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    rows = [embedding(), embedding()]
    plain, compiled = graph_over(rows[0], copy.deepcopy(layers)), graph_over(rows[1], layers)
    compiled.compile_dense()
    losses = []
    for graph in (plain, compiled):
        torch.manual_seed(1)
        losses.append(torch.stack(list(graph.run(list(id_batches(12, 3)), ahead=8))))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled.layers.state_dict(), plain.layers.state_dict(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows[1].get(range(50)), rows[0].get(range(50)), rtol=1e-4, atol=1e-5)
    shown = str(compiled)
    assert "dense_" in shown
    assert "bernoulli" in shown or "dropout" in shown  # drawn by torch, as in eager
    assert rows[1].metrics()["table"]["prefetch_hits"] == 10
    compiled.draw("/dev/null")
    assert "dense" in str(compiled.profile(list(id_batches(12, 3, steps=2))))


def test_options_that_inductor_does_not_know_are_refused() -> None:
    layer = nn.Linear(3, 1)
    graph = graph_of(lambda graph, x: graph.layer(x), layer=layer)
    graph.compile_dense(no_such_option=1)
    with pytest.raises(GraphError, match=r"compile_dense: TorchInductor could not compile.*no_such_option"):
        graph(torch.ones(2, 3))


def test_a_step_for_many_sizes_that_is_not_compiled_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", 1)
    rows, layer = embedding(), nn.Linear(DIM, DIM, bias=False)  # products alone: Inductor calls no C++ compiler

    def build(graph: Any, ids: Tensor) -> Tensor:
        found = layer(rows(ids))
        found.backward(found.detach())
        return found

    graph = graph_of(build, torch.optim.SGD([*rows.parameters(), *layer.parameters()], lr=0.1), rows=rows, layer=layer)
    graph.compile_dense(**{"cpp.simdlen": 1})
    for mode in (True, False):
        graph.train(mode)
        for size in (12, 20):
            graph(id_batches(size)[0])
    assert str(graph).count("# compiled step") == 4
    assert str(graph).count("= self.dense_0(") == 2
    assert len([record for record in caplog.records if "compile_dense" in record.message]) == 1
