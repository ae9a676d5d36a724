"""The update is what build leaves in `grad` when it returns, for dense parameters and for rows; the rest is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.graphs import DIM, Train, assert_same_state, batches, dense_copy, embedding, graph_of, id_batches
from tierbed import MultiTableEmbedding


def test_a_gradient_changed_in_place_after_backward_does_not_change_the_update() -> None:
    def build(graph: Any, ids: Tensor) -> Tensor:
        out = graph.rows(ids)
        out.retain_grad()
        (out * 3).sum().backward()
        out.grad.mul_(100)
        return out.grad

    rows, net, optimizer = rows_and_net()
    before = rows.get([3])
    assert graph_of(build, optimizer, rows=rows, net=net)(torch.tensor([3])).tolist() == [[300.0] * DIM]
    torch.testing.assert_close(rows.get([3]), before - 0.3)


def rows_and_net() -> tuple[MultiTableEmbedding, nn.Module, torch.optim.Optimizer]:
    rows, net = embedding(), nn.Linear(DIM, 1)
    return rows, net, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.1)


def cleared(graph: Any, ids: Tensor) -> Tensor:
    graph.net(graph.rows(ids)).square().mean().backward()
    graph.zero_grad()
    loss: Tensor = graph.net(graph.rows(ids + 1 - 1)).mean()
    loss.backward()
    return loss


def only_computed(graph: Any, ids: Tensor) -> Tensor:
    loss: Tensor = graph.net(graph.rows(ids)).square().mean()
    torch.autograd.grad(loss, list(graph.parameters()), retain_graph=True)
    loss.backward()
    return loss


def several_backwards_and_a_higher_order(graph: Any, ids: Tensor) -> Tensor:
    out = graph.net(graph.rows(ids))
    out.mean().backward(retain_graph=True)
    loss: Tensor = out.square().mean() + graph.rows(ids).square().mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a reference cycle
        loss.backward(create_graph=True)
    return loss


def cleared_by_the_optimizer(graph: Any, ids: Tensor) -> Tensor:
    graph.optimizer.zero_grad()
    graph.net(graph.rows(ids)).square().mean().backward()
    graph.optimizer.zero_grad()
    loss: Tensor = graph.net(graph.rows(ids)).mean()
    loss.backward()
    return loss


def clipped_through_the_optimizer(graph: Any, ids: Tensor) -> Tensor:
    loss: Tensor = graph.net(graph.rows(ids)).sum() * 100
    loss.backward()
    parameters = [p for group in graph.optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters[1:], 1e-3)
    return loss


def with_a_param_group_taken_before(graph: Any, ids: Tensor) -> Tensor:
    loss: Tensor = graph.net(graph.rows(ids)).sum() + sum(one.square().sum() for one in graph.group["params"][1:])
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "build",
    [
        cleared,
        only_computed,
        several_backwards_and_a_higher_order,
        cleared_by_the_optimizer,
        clipped_through_the_optimizer,
        with_a_param_group_taken_before,
    ],
)
def test_rows_and_net_move_as_with_a_dense_table_in_eager_torch(build: Callable[..., Tensor]) -> None:
    rows, net, optimizer = rows_and_net()
    graph = graph_of(build, optimizer, rows=rows, net=net)
    graph.optimizer, graph.group = optimizer, optimizer.param_groups[0]
    dense, other = dense_copy(rows), copy.deepcopy(net)
    theirs = torch.optim.SGD([*dense.parameters(), *other.parameters()], lr=0.1)
    both = nn.ModuleList([dense, other])
    eager = SimpleNamespace(
        rows=dense,
        net=other,
        optimizer=theirs,
        group=theirs.param_groups[0],
        parameters=both.parameters,
        zero_grad=both.zero_grad,
    )
    for ids in id_batches(8, steps=3):
        graph(ids)
        theirs.zero_grad()
        build(eager, ids)
        theirs.step()
    assert_same_state(net, other)
    torch.testing.assert_close(rows.get(torch.arange(50)), dense.weight.detach())
    assert graph.group["params"][1] is net.weight


def test_a_gradient_of_rows_that_build_sets_to_none_trains_nothing() -> None:
    def build(graph: Any, ids: Tensor) -> None:
        graph.rows(ids).sum().backward()
        graph.rows.shadow.grad = None

    rows, net, optimizer = rows_and_net()
    graph_of(build, optimizer, rows=rows, net=net)(torch.tensor([1]))
    assert rows.size() == 0


def then(use: Callable[[Any, Tensor], Any], graph: Any, ids: Tensor) -> Any:
    """What `use` makes of a graph and its loss, after backward."""
    loss = graph.net(graph.rows(ids)).sum()
    loss.backward()
    return use(graph, loss)


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "norm": lambda graph, loss: nn.utils.clip_grad_norm_(graph.parameters(), 1.0),
    "value": lambda graph, loss: nn.utils.clip_grad_value_(graph.parameters(), 1.0),
    "in place": lambda graph, loss: [p.grad.mul_(0) for p in graph.parameters()],
    "through a view": lambda graph, loss: [p.grad.view(-1)[:1].zero_() for p in graph.parameters()],
    "scaled": lambda graph, loss: setattr(graph.rows.shadow, "grad", graph.rows.shadow.grad * 2),
    "returned": lambda graph, loss: graph.rows.shadow.grad,
    "penalty": lambda graph, loss: sum(p.square().sum() for p in graph.parameters()).backward(),
    "penalty value": lambda graph, loss: loss + sum(p.square().sum() for p in graph.parameters()),
    "write": lambda graph, loss: [p.data.clamp_(-1, 1) for p in graph.parameters()],
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("use", USES)
@pytest.mark.rotated("train")
def test_the_parameter_of_rows_and_its_gradient_are_refused_not_ignored(use: str, train: bool) -> None:
    rows, net, optimizer = rows_and_net()
    graph = graph_of(partial(then, USES[use]), optimizer, rows=rows, net=net).train(train)
    if not train and use in ("value", "scaled", "penalty"):
        graph(torch.tensor([1]))  # dead code there: nothing trains
    else:
        with pytest.raises(tierbed.GraphError, match=r"embedding 'rows'.*clip_grad_norm_"):
            graph(torch.tensor([1]))
    assert rows.size() == 0


FOREIGN: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-6),
    "penalty": lambda parameters: sum(p.square().sum() for p in parameters),
    "clear": lambda parameters: torch.optim.SGD(parameters, lr=0.1).zero_grad(),
}


@pytest.mark.parametrize("use", FOREIGN)
def test_parameters_in_a_list_made_before_build_are_refused_not_skipped(use: str) -> None:
    rows, net, optimizer = rows_and_net()
    kept, grad = list(net.parameters()), torch.ones(1, DIM)
    graph = graph_of(partial(then, lambda graph, loss: FOREIGN[use](kept)), optimizer, rows=rows, net=net)
    net.weight.grad = grad.clone()
    with pytest.raises(tierbed.GraphError, match=r"through self"):
        graph(torch.tensor([1]))
    assert torch.equal(net.weight.grad, grad)


@pytest.mark.parametrize("missing", ["rows", "net"])
def test_a_gradient_without_an_optimizer_is_refused_not_dropped(missing: str) -> None:
    rows, net, _ = rows_and_net()
    has, lacks = (net, rows) if missing == "rows" else (rows, net)
    graph = graph_of(cleared, torch.optim.SGD(has.parameters(), lr=0.1), rows=rows, net=net)
    named = rf"{rows.name}.*add_optimizer" if missing == "rows" else r"parameter 'net\.weight'.*requires_grad_\(False\)"
    with pytest.raises(tierbed.OptimizerError, match=named):
        graph(torch.tensor([1]))
    assert rows.size() == 0
    lacks.requires_grad_(False)
    graph(torch.tensor([1]))
    assert rows.size() == (missing == "net")


def test_a_sparse_gradient_and_sparse_adam_equal_eager() -> None:
    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = graph.table(ids).square().sum()
        loss.backward()
        return loss

    table = nn.Embedding(10, 2, sparse=True)
    eager = SimpleNamespace(table=copy.deepcopy(table))
    graph = graph_of(build, torch.optim.SparseAdam(table.parameters(), lr=0.1), table=table)
    theirs = torch.optim.SparseAdam(eager.table.parameters(), lr=0.1)
    for ids in torch.tensor([[1, 2, 2], [0, 2, 9]]):
        graph(ids)
        theirs.zero_grad()
        build(eager, ids)
        theirs.step()
    assert_same_state(table, eager.table)


def test_an_optimizer_whose_step_takes_no_closure_trains() -> None:
    class Plain(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(parameter.grad)

    model = nn.Linear(6, 1)
    before = model.bias.item()
    Train(model, Plain(model.parameters(), {}))(*batches(1)[0])
    assert model.bias.item() != before
