"""A graph with embeddings trains their rows as dense torch would, and evaluation changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.graphs import (
    DIM,
    Rating,
    compiled_steps,
    dense_copy,
    embedding,
    id_batches,
    mlp,
    train,
)
from tierbed import Graph


def test_one_embedding_twice_in_a_graph_gets_both_gradients() -> None:
    rows, net = embedding(), mlp(5 * DIM)
    dense, other = dense_copy(rows), copy.deepcopy(net)
    graph = Rating(rows, net, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.5))
    theirs = torch.optim.SGD([*dense.parameters(), *other.parameters()], lr=0.5)
    for ids in id_batches(8, 3):
        first, second = ids, (ids[:, :1] + 1) % 50
        theirs.zero_grad()
        train(dense, other, first, second, second)
        theirs.step()
        graph(first, second, second)
    torch.testing.assert_close(rows.get(torch.arange(50)), dense.weight.detach(), rtol=1e-5, atol=1e-6)
    code = str(graph)
    assert code.count(".pin(") == 1
    assert code.count(".update(") == 1
    assert compiled_steps(graph) == 1


def test_two_embeddings_in_one_graph_train_apart() -> None:
    class Two(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = embedding(seed=1), embedding(seed=2)
            groups = [{"params": self.users.parameters(), "lr": 0.1}, {"params": self.items.parameters(), "lr": 0.3}]
            self.add_optimizer(torch.optim.SGD(groups))

        def build(self, users: Tensor, items: Tensor) -> Tensor:
            loss = (self.users(users) * self.items(items)).sum()
            loss.backward()
            return loss

    graph = Two()
    users, items = graph.users.get([7]), graph.items.get([7])
    graph(torch.tensor([7]), torch.tensor([7]))
    torch.testing.assert_close(graph.users.get([7]), users - 0.1 * items)
    torch.testing.assert_close(graph.items.get([7]), items - 0.3 * users)


def test_a_scheduler_moves_the_rate_of_rows_without_a_warning() -> None:
    rows = embedding()
    optimizer = torch.optim.SGD(rows.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    class Sum(Rating):
        def build(self, ids: Tensor) -> Tensor:
            loss = self.rows(ids).sum()
            loss.backward()
            return loss

    graph = Sum(rows, nn.Identity(), optimizer)
    before = rows.get([1])
    for _ in range(3):
        graph(torch.tensor([1]))
        scheduler.step()
    torch.testing.assert_close(rows.get([1]), before - (1.0 + 0.5 + 0.25))


def test_backward_without_an_optimizer_for_the_rows_is_refused() -> None:
    rows, net = embedding(), mlp(3 * DIM)
    graph = Rating(rows, net, torch.optim.SGD(net.parameters(), lr=0.1))
    ids = id_batches(8, 3)[0]
    with pytest.raises(tierbed.OptimizerError, match=rf"{rows.name}.*add_optimizer"):
        graph(ids)
    graph.add_optimizer(torch.optim.SGD(rows.parameters(), lr=0.1))
    graph(ids)
    assert rows.size() > 0


def test_an_optimizer_that_rows_cannot_follow_is_refused_when_added() -> None:
    rows = embedding()
    with pytest.raises(tierbed.OptimizerError):
        Rating(rows, mlp(DIM), torch.optim.Rprop(rows.parameters()))


def test_an_embedding_in_two_optimizers_is_named() -> None:
    rows = embedding()
    optimizers = [torch.optim.SGD(rows.parameters(), lr=0.1), torch.optim.Adam(rows.parameters())]
    with pytest.raises(tierbed.OptimizerError, match=r"'rows\.shadow' is in two optimizers"):
        Rating(rows, mlp(DIM), *optimizers)


def test_frozen_rows_are_read_and_the_rest_trains() -> None:
    rows, net = embedding(), mlp(3 * DIM)
    rows.requires_grad_(False)
    graph = Rating(rows, net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = net[0].weight.clone()
    graph(id_batches(8, 3)[0])
    assert rows.size() == 0
    assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize("how", ["eval", "no backward"])
def test_evaluation_changes_no_row_and_inserts_none(how: str) -> None:
    class Score(Rating):
        def build(self, ids: Tensor) -> Tensor:
            return self.mlp(self.rows(ids).flatten(1))

    rows, net = embedding(), mlp(3 * DIM)
    optimizer = torch.optim.Adam([*rows.parameters(), *net.parameters()], lr=0.1)
    graph = Rating(rows, net, optimizer).eval() if how == "eval" else Score(rows, net)
    state = copy.deepcopy(net.state_dict())
    ids = id_batches(8, 3)[0]
    assert torch.equal(graph(ids), graph(ids))
    assert rows.size() == 0
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert "pin(" not in str(graph)


def test_an_evaluation_graph_sees_what_a_training_graph_learned() -> None:
    class Read(Graph):
        def __init__(self, rows: nn.Module) -> None:
            super().__init__()
            self.rows = rows

        def build(self, ids: Tensor) -> Tensor:
            return self.rows(ids)

    rows, net = embedding(), mlp(3 * DIM)
    graph, read = Rating(rows, net, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.5)), Read(rows)
    ids = id_batches(8, 3)[0]
    before = read(ids)
    graph(ids)
    assert not torch.equal(read(ids), before)
    assert torch.equal(read(ids), rows.get(ids))


def test_a_read_under_no_grad_takes_no_part_in_the_update() -> None:
    class Metric(Rating):
        def build(self, ids: Tensor, others: Tensor) -> Tensor:
            loss = self.rows(ids).sum()
            loss.backward()
            with torch.no_grad():
                return self.rows(others)

    rows = embedding()
    graph = Metric(rows, nn.Identity(), torch.optim.SGD(rows.parameters(), lr=1.0))
    initial = rows.get([1, 2])
    assert torch.equal(graph(torch.tensor([1]), torch.tensor([1, 2])), initial)
    assert rows.size() == 1
    assert torch.equal(graph(torch.tensor([1]), torch.tensor([1, 2])), torch.stack([initial[0] - 1, initial[1]]))


def test_ids_changed_in_place_between_lookups_are_refused() -> None:
    class Change(Rating):
        def build(self, ids: Tensor) -> Tensor:
            loss = self.rows(ids + 1).sum()
            ids.add_(1)
            loss = loss + self.rows(ids * 2).sum()
            loss.backward()
            return loss

    rows = embedding()
    graph = Change(rows, nn.Identity(), torch.optim.SGD(rows.parameters(), lr=0.1))
    with pytest.raises(tierbed.GraphError, match="changed in place"):
        graph(torch.tensor([3]))


def test_a_full_capacity_raises_before_anything_changes() -> None:
    rows, net = embedding(capacity=64), mlp(8 * DIM)
    graph = Rating(rows, net, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.1))
    state, size = copy.deepcopy(net.state_dict()), rows.size()
    with pytest.raises(tierbed.CapacityError):
        graph(torch.arange(8000).reshape(-1, 8))
    assert rows.size() == size
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    graph(torch.arange(8).reshape(-1, 8))


def test_an_empty_and_a_smaller_batch_train() -> None:
    rows, net = embedding(), mlp(3 * DIM)
    graph = Rating(rows, net, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.1))
    graph(id_batches(8, 3)[0])
    graph(id_batches(5, 3)[0])
    size = rows.size()
    graph(torch.empty((0, 3), dtype=torch.int64))
    assert rows.size() == size


def test_tables_and_padding_pass_through_the_graph() -> None:
    class Tables(Rating):
        def build(self, ids: Tensor, table_ids: Tensor) -> Tensor:
            out = self.rows(ids, table_ids)
            out.sum().backward()
            return out

    rows = embedding(tables=2, padding_idx=0)
    graph = Tables(rows, nn.Identity(), torch.optim.SGD(rows.parameters(), lr=1.0))
    first, second = rows.get([6], [0]), rows.get([6], [1])
    out = graph(torch.tensor([6, 0, 6]), torch.tensor([0, 0, 1]))
    assert torch.equal(out, torch.cat([first, torch.zeros(1, DIM), second]))
    torch.testing.assert_close(rows.get([6], [0]), first - 1)
    torch.testing.assert_close(rows.get([6], [1]), second - 1)
