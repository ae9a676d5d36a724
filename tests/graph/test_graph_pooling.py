"""Graphs train pooled lookups and their weights as dense torch would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import DIM, dense_copy, embedding, graph_of, mlp, training
from tierbed import Graph, GraphError

OFFSETS = torch.tensor([0, 3, 3, 4, 8, 10])
Lookup = Callable[..., Tensor]


def plain(rows: nn.Embedding) -> Lookup:
    """What a lookup without padding gives, of torch's own ops."""

    def lookup(ids: Tensor, offsets: Any = None, pooling: Any = None, weights: Any = None) -> Tensor:
        out = rows(ids)
        if pooling is None:
            return out
        scaled = out if weights is None else out * weights[..., None]
        if offsets is None:
            return scaled.sum(-2) / (ids.shape[-1] if pooling == "mean" else 1)
        bags = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
        total = torch.zeros(len(offsets) - 1, DIM).index_add(0, bags, scaled)
        return total / offsets.diff().clamp(min=1)[:, None] if pooling == "mean" else total

    return lookup


def sgd(rows: nn.Module, *others: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in (rows, *others) for p in module.parameters()], lr=lr)


def compiled(graph: Graph) -> str:
    return str(graph).partition("# compiled step 0")[2]


def mixed(lookup: Lookup, gate: nn.Module, net: nn.Module, ids: Tensor, bags: Tensor, features: Tensor) -> Tensor:
    """Jagged and dense bags, plain rows, weights from a layer and weights from rows of another lookup."""
    rows = lookup(bags[:, 0])
    attention = (lookup(bags) * rows[:, None]).sum(-1).softmax(-1)
    parts = [
        lookup(ids, offsets=OFFSETS, pooling="mean", weights=gate(features).squeeze(-1)),
        lookup(bags, pooling="sum", weights=attention),
        lookup(bags, pooling="mean"),
        lookup(bags, pooling="sum"),
        lookup(ids, offsets=OFFSETS, pooling="sum"),
        rows,
    ]
    loss = net(torch.cat(parts, 1)).square().mean()
    loss.backward()
    return loss


def test_steps_of_mixed_lookups_equal_plain_torch() -> None:
    torch.manual_seed(0)
    rows, gate, net = embedding(), nn.Linear(2, 1), mlp(6 * DIM)
    dense, gate_copy, net_copy = dense_copy(rows), copy.deepcopy(gate), copy.deepcopy(net)

    def optimizers(rows: nn.Module, gate: nn.Module, net: nn.Module) -> list[torch.optim.Optimizer]:
        adam = torch.optim.Adam([*gate.parameters(), *net.parameters()], lr=0.01)
        return [torch.optim.Adagrad(rows.parameters(), lr=0.1), adam]

    graph = graph_of(
        lambda graph, *args: mixed(graph.rows, graph.gate, graph.net, *args),
        *optimizers(rows, gate, net),
        rows=rows,
        gate=gate,
        net=net,
    )
    theirs = optimizers(dense, gate_copy, net_copy)
    for _ in range(12):
        args = torch.randint(0, 50, (10,)), torch.randint(0, 50, (5, 3)), torch.randn(10, 2)
        for each in theirs:
            each.zero_grad()
        expected = mixed(plain(dense), gate_copy, net_copy, *args).detach()
        for each in theirs:
            each.step()
        torch.testing.assert_close(graph(*args), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows.get(torch.arange(50)), dense.weight.detach(), rtol=1e-5, atol=1e-5)
    for ours, other in ((gate, gate_copy), (net, net_copy)):
        torch.testing.assert_close(ours.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-5)
    code = compiled(graph)
    assert (code.count(".pin("), code.count(".update("), code.count(".weights_grad(")) == (1, 1, 2)


def pooled_sum(graph: Any, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    out = graph.rows(ids, pooling="sum", weights=weights)
    out.sum().backward()
    return out


def test_weights_that_are_a_parameter_train_with_the_rows() -> None:
    rows, module = embedding(padding_idx=0), nn.Module()
    module.weights = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    graph = training(
        lambda graph, ids: graph.rows(ids, pooling="sum", weights=graph.module.weights).sum(), rows=rows, module=module
    )
    before = rows.get([1])
    graph(torch.tensor([[1, 0]]))
    torch.testing.assert_close(rows.get([1]), before - 0.1 * 2)  # the update saw the weights of the lookup
    torch.testing.assert_close(module.weights.data, torch.tensor([[2.0 - 0.1 * float(before.sum()), -1.0]]))
    assert rows.size() == 1


@pytest.mark.parametrize("how", ["frozen rows", "eval"])
def test_weights_train_though_rows_are_only_read(how: str) -> None:
    rows, gate = embedding(), nn.Linear(1, 2)
    rows.requires_grad_(how != "frozen rows")
    graph = training(
        lambda graph, ids, x: graph.rows(ids, pooling="mean", weights=graph.gate(x)).sum(), rows=rows, gate=gate
    )
    if how == "eval":
        graph.eval()
    bias, ids = gate.bias.detach().clone(), torch.tensor([[3, 4]])
    graph(ids, torch.ones(1, 1))
    code = compiled(graph)
    assert "pin(" not in code
    assert rows.size() == 0
    if how == "eval":
        assert "weights_grad" not in code
        assert torch.equal(gate.bias, bias)
    else:
        assert code.count("rows.read_weights_grad(Lookup(args,") == 1
        torch.testing.assert_close(gate.bias.detach(), bias - 0.1 * rows.get(ids).sum(-1)[0] / 2)


def test_weights_changed_in_place_count_as_they_were() -> None:
    def build(graph: Any, ids: Tensor, weights: Tensor) -> Tensor:
        pooled_sum(graph, ids, weights)
        weights.mul_(3)
        pooled_sum(graph, ids, weights)
        return weights.zero_()

    rows, weights = embedding(), torch.tensor([[2.0, -1.0]])
    graph = graph_of(build, sgd(rows), rows=rows)
    before = rows.get([1, 2])
    assert not graph(torch.tensor([[1, 2]]), weights).any()
    torch.testing.assert_close(rows.get([1, 2]), before - 0.5 * 4 * torch.tensor([[2.0], [-1.0]]))
    assert "weights_grad" not in compiled(graph)  # which nobody asks for


def slopes(graph: Any, ids: Tensor, x: Tensor, again: bool) -> Tensor:
    """The gradient of weights, which a lookup takes then, or which is differentiated again."""
    weights = (x * 1).requires_grad_()
    out = graph.rows(ids, pooling="sum", weights=weights)
    (slope,) = torch.autograd.grad(out.sum(), weights, create_graph=again)
    (out.sum() + slope.sum()).backward() if again else pooled_sum(graph, ids, slope)
    return slope


def test_a_gradient_of_weights_before_the_first_trained_lookup_is_read_and_none_of_a_gradient() -> None:
    rows = embedding()
    graph = graph_of(slopes, sgd(rows), rows=rows)
    before = rows.get([1, 2])
    slope = graph(torch.tensor([[1, 2]]), torch.ones(1, 2), False)
    torch.testing.assert_close(slope[0], before.sum(-1))
    torch.testing.assert_close(rows.get([1, 2]), before - 0.5 * slope[0][:, None])
    with pytest.raises(GraphError, match="no second derivative"):
        graph(torch.tensor([[1, 2]]), torch.ones(1, 2), True)
