"""A graph with embeddings trains their rows as dense torch would, and evaluation changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from support.graphs import (
    DIM,
    Rating,
    compiled_steps,
    dense_copy,
    embedding,
    graph_of,
    id_batches,
    mlp,
    train,
    training,
)


def test_one_embedding_twice_in_a_graph_gets_both_gradients_at_the_rate_of_a_scheduler() -> None:
    rows, net = embedding(), mlp(5 * DIM)
    dense, other = dense_copy(rows), copy.deepcopy(net)
    ours = torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.5)
    theirs = torch.optim.SGD([*dense.parameters(), *other.parameters()], lr=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (ours, theirs)]
    graph = Rating(rows, net, ours)
    for ids in id_batches(8, 3):
        first, second = ids, (ids[:, :1] + 1) % 50
        theirs.zero_grad()
        train(dense, other, first, second, second)
        theirs.step()
        graph(first, second, second)
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(rows.get(torch.arange(50)), dense.weight.detach(), rtol=1e-5, atol=1e-6)
    code = str(graph)
    assert (code.count(".pin("), code.count(".update("), compiled_steps(graph)) == (1, 1, 1)


def test_two_embeddings_in_one_graph_train_apart() -> None:
    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = (graph.users(ids) * graph.items(ids)).sum()
        loss.backward()
        return loss

    users, items, ids = embedding(seed=1), embedding(seed=2), torch.tensor([7])
    groups = [{"params": users.parameters(), "lr": 0.1}, {"params": items.parameters(), "lr": 0.3}]
    graph = graph_of(build, torch.optim.SGD(groups), users=users, items=items)
    of_users, of_items = users.get(ids), items.get(ids)
    graph(ids)
    torch.testing.assert_close(users.get(ids), of_users - 0.1 * of_items)
    torch.testing.assert_close(items.get(ids), of_items - 0.3 * of_users)


@pytest.mark.parametrize("how", ["eval", "no backward"])
def test_evaluation_changes_no_row_inserts_none_and_sees_what_training_learned(how: str) -> None:
    rows, net, ids = embedding(), mlp(3 * DIM), id_batches(8, 3)[0]
    optimizer = torch.optim.Adam([*rows.parameters(), *net.parameters()], lr=0.1)
    trains = Rating(rows, net, optimizer)
    score = trains.eval() if how == "eval" else graph_of(lambda graph, ids: graph.rows(ids), rows=rows)
    state = copy.deepcopy(net.state_dict())
    before = score(ids)
    assert torch.equal(score(ids), before)
    assert rows.size() == 0
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert "pin(" not in str(score)
    trains.train()(ids)
    if how == "eval":
        trains.eval()
    assert not torch.equal(score(ids), before)


def test_a_read_under_no_grad_takes_no_part_in_the_update() -> None:
    def build(graph: Any, ids: Tensor, others: Tensor) -> Tensor:
        graph.rows(ids).sum().backward()
        with torch.no_grad():
            return graph.rows(others)

    rows, one, both = embedding(), torch.tensor([1]), torch.tensor([1, 2])
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=1.0), rows=rows)
    initial = rows.get(both)
    assert torch.equal(graph(one, both), initial)
    assert rows.size() == 1
    assert torch.equal(graph(one, both), torch.stack([initial[0] - 1, initial[1]]))


def test_tables_and_padding_pass_through_the_graph() -> None:
    rows = embedding(tables=2, padding_idx=0)
    graph = training(lambda graph, ids, tables: graph.rows(ids, tables).sum(), lr=1.0, rows=rows)
    first, second = rows.get([6], [0]), rows.get([6], [1])
    torch.testing.assert_close(graph(torch.tensor([6, 0, 6]), torch.tensor([0, 0, 1])), (first + second).sum())
    torch.testing.assert_close(rows.get([6], [0]), first - 1)
    torch.testing.assert_close(rows.get([6], [1]), second - 1)
