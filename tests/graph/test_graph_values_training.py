"""Python values that change while a graph trains, runs over a loader, is copied, or is called by threads."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import dense_copy, embedding, graph_of
from tierbed import Graph
from tierbed.jagged import JaggedTensor

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_dropout_and_a_temperature_train_as_in_eager_torch() -> None:
    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = graph.net(graph.rows(ids)).square().mean() * graph.temp
        loss.backward()
        return loss

    rows, net, ids = embedding(), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 1)), torch.arange(32)
    graph = graph_of(build, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.1), rows=rows, net=net)
    for p, momentum, temp in ((0.9, 0.1, 1.0), (0.0, 0.5, 2.0), (0.5, 0.1, 1.0), (0.9, 0.1, 1.0)):
        net[1].p, net[0].momentum, graph.temp = p, momentum, temp
        eager = SimpleNamespace(net=copy.deepcopy(net), temp=temp, rows=dense_copy(rows))
        state = torch.get_rng_state()
        loss = graph(ids)
        torch.set_rng_state(state)
        torch.testing.assert_close(loss, build(eager, ids).detach())
        before, grad = eager.rows.weight.detach()[ids], eager.rows.weight.grad[ids]
        torch.testing.assert_close(rows.get(ids), before - 0.1 * grad)
        torch.testing.assert_close(net[0].running_mean, eager.net[0].running_mean)
    assert len(graph.why_recompiled()) == 2


class Counting(Graph):
    """Trains rows on a container of ids, and prints a counter of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.calls, self.temp = embedding(), 0, 1.0
        self.add_optimizer(torch.optim.SGD(self.rows.parameters(), lr=0.1))

    def build(self, features: JaggedTensor) -> Tensor:
        loss = (self.rows(features.values()) * WEIGHTS).square().sum() * self.temp
        print(f"step {self.calls}")
        loss.backward()
        return loss


def test_a_run_uses_the_values_of_each_step_though_it_draws_ahead_and_a_counter_costs_no_step() -> None:
    graph = Counting()
    batches = [JaggedTensor(torch.arange(n % 5 + 1), lengths=torch.tensor([n % 5 + 1])) for n in range(12)]
    run = graph.run(batches, ahead=4)
    for step, batch in enumerate(batches):
        graph.calls, graph.temp = step, float(step % 2 + 1)
        expected = (graph.rows.get(batch.values()) * WEIGHTS).square().sum() * graph.temp
        torch.testing.assert_close(next(run), expected)
    (reason,) = graph.why_recompiled()
    assert reason.startswith("step 1: value temp: 2.0, was 1.0")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch, of its own class
def test_a_copy_of_a_graph_has_values_of_its_own() -> None:
    graph = Reading()
    graph(X)
    other = copy.deepcopy(graph)
    for one, temp in ((other, 2.0), (graph, 3.0), (other, 4.0)):
        one.temp = temp
        assert graph(X).equal(X * graph.temp)
        assert other(X).equal(X * other.temp)


class Reading(Graph):
    temp = 1.0

    def build(self, x: Tensor) -> Tensor:
        return x * self.temp


def test_values_that_another_thread_writes_are_those_of_the_step() -> None:
    graph, stop = Reading(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            graph.temp = 3.0 - graph.temp

    graph.temp = 1.0
    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert {graph(X)[0, 0].item() for _ in range(100)} <= {1.0, 2.0}
    finally:
        stop.set()
        thread.join()
    for temp in (1.0, 2.0):
        graph.temp = temp
        assert graph(X).equal(X * temp)
