"""The passes remove what nothing needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import embedding, graph_of, training
from tierbed import Graph


def compiled(graph: Graph) -> str:
    return str(graph).partition("# compiled step 0")[2]


def test_an_evaluation_step_holds_no_backward_though_it_accumulates_in_place() -> None:
    def build(graph: Any, x: Tensor) -> None:
        out = graph.net(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    graph = graph_of(build, torch.optim.SGD(net.parameters(), lr=0.1), net=net)
    words = ("threshold_backward", "add_.Tensor", "square", "dense_step")
    graph(torch.ones(2, 3))
    assert all(word in compiled(graph) for word in words[:2])
    graph.eval()(torch.ones(2, 3))
    code = str(graph).partition("# compiled step 1")[2]
    assert "# outputs" in code
    assert not any(word in code for word in words)


def test_a_linear_layer_is_transposed_once_a_direction() -> None:
    graph = training(lambda graph, x: graph.net(x).sum(), net=nn.Linear(3, 1))
    graph(torch.ones(2, 3))
    assert compiled(graph).count("aten.t.default") == 2


def test_writes_that_outlive_a_call_stay() -> None:
    seen, total = torch.zeros(2), torch.zeros(())

    def build(graph: Any, x: Tensor) -> Tensor:
        graph.calls.add_(1)
        seen.view(2, 1)[1, 0].copy_(x.sum())
        torch.add(total, x.sum(), out=total)
        scratch = torch.zeros(2)
        scratch[0] = 7
        x[0].zero_()
        return x.sum()

    graph, x = graph_of(build), torch.ones(3)
    graph.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    assert graph(x) == 2
    assert graph(x) == 2
    assert (graph.calls.item(), seen.tolist(), total.item(), x.tolist()) == (2, [0, 2], 5, [0, 1, 1])
    assert "zeros" not in compiled(graph)


def test_a_random_draw_that_nobody_reads_still_moves_the_stream() -> None:
    graph = graph_of(lambda graph: [torch.rand(2), torch.rand(2)][1])
    torch.manual_seed(1)
    ours = graph()
    torch.manual_seed(1)
    torch.rand(2)
    assert torch.equal(ours, torch.rand(2))


def test_ids_of_a_closure_or_attribute_train_like_an_argument() -> None:
    ids, rows = torch.tensor([1, 2]), embedding()
    graph = training(lambda graph: graph.rows(ids).sum() + graph.rows(graph.more).sum(), lr=1.0, rows=rows)
    graph.more = torch.tensor([2])
    before = rows.get(ids)
    graph()
    torch.testing.assert_close(rows.get(ids), before - torch.tensor([[1.0], [2.0]]))


def test_a_sparse_argument_is_read() -> None:
    graph = graph_of(lambda graph, x: x.to_dense() * 2)
    assert torch.equal(graph(torch.eye(2).to_sparse()), torch.eye(2) * 2)
    assert torch.equal(graph(torch.eye(2)[:1].to_sparse()), torch.eye(2)[:1] * 2)


@torch.library.custom_op("tierbed_test::sample", mutates_args=())
def sample(ids: torch.Tensor) -> torch.Tensor:
    """Of a user, who knows what it does."""
    return ids.clone()


sample.register_fake(torch.empty_like)


IDS: dict[str, Callable[[Tensor], Tensor]] = {
    "given": lambda ids: ids,
    "shifted": lambda ids: ids + 1,
    "drawn": lambda ids: torch.randint(9, ids.shape),
    "of the user": torch.ops.tierbed_test.sample.default,
}


@pytest.mark.parametrize(
    ("made", "other", "shared"),
    [
        ("given", {}, True),
        ("shifted", {}, True),
        ("drawn", {}, False),
        ("of the user", {}, False),
        ("given", {"padding_idx": 0}, False),
        ("given", {"tables": 2}, False),
    ],
)
def test_ids_that_are_the_same_are_shared_and_made_ahead_and_no_others(
    made: str, other: dict[str, int], shared: bool
) -> None:
    def loss(graph: Any, ids: Tensor) -> Tensor:
        first = graph.rows(IDS[made](ids))
        return (first * graph.others(IDS[made](ids), **({"table_ids": 0} if "tables" in other else {}))).sum()

    graph = training(loss, rows=embedding(), others=embedding(**other))
    list(graph.run([torch.arange(4)] * 3, ahead=2))
    assert ("], pin)" in str(graph)) == shared
    hits = [rows.metrics()["table"]["prefetch_hits"] for rows in (graph.rows, graph.others)]
    assert hits == [0 if made in ("drawn", "of the user") else 3] * 2
