"""Python values that change while a graph trains, runs over a loader, is copied, or is called by threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from tierbed import Graph, MultiTableEmbedding, make_device_mem_store_options
from tierbed.jagged import JaggedTensor

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]])


def test_dropout_and_a_temperature_train_as_in_eager_torch() -> None:
    class Train(Graph):
        def __init__(self) -> None:
            super().__init__()
            store = make_device_mem_store_options()
            self.rows = MultiTableEmbedding("rows", 4, torch.float32, torch.int64, None, store)
            self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 1))
            self.temp = 1.0
            self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

        def build(self, ids: Tensor) -> Tensor:
            loss = self.net(self.rows(ids)).square().mean() * self.temp
            loss.backward()
            return loss

    graph, ids = Train(), torch.arange(32)
    for p, momentum, temp in ((0.9, 0.1, 1.0), (0.0, 0.5, 2.0), (0.5, 0.1, 1.0), (0.9, 0.1, 1.0)):
        graph.net[2].p, graph.net[1].momentum, graph.temp = p, momentum, temp
        twin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Dropout(p), nn.Linear(4, 1))
        twin.load_state_dict(graph.net.state_dict())
        rows = graph.rows.get(ids).clone().requires_grad_()
        state = torch.get_rng_state()
        loss = graph(ids)
        torch.set_rng_state(state)
        expected = twin(rows).square().mean() * temp
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(graph.rows.get(ids), rows.detach() - 0.1 * rows.grad)
        torch.testing.assert_close(graph.net[1].running_mean, twin[1].running_mean)
    assert len(graph.why_recompiled()) == 2


class Counting(Graph):
    """Trains rows on a container of ids, and prints a counter of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = MultiTableEmbedding("rows", 4, torch.float32, torch.int64, None, make_device_mem_store_options())
        self.calls, self.temp = 0, 1.0
        self.add_optimizer(torch.optim.SGD(self.rows.parameters(), lr=0.1))

    def build(self, features: JaggedTensor) -> Tensor:
        loss = (self.rows(features.values()) * torch.tensor([1.0, 2.0, 3.0, 4.0])).square().sum() * self.temp
        print(f"step {self.calls}")
        loss.backward()
        return loss


def test_a_printed_counter_costs_no_steps_where_rows_train_and_sizes_differ() -> None:
    graph = Counting()
    for step in range(40):
        ids = torch.arange(step % 7 + 1)
        graph.calls, graph.temp = step, 1.0 + (step > 30)
        expected = (graph.rows.get(ids) * torch.tensor([1.0, 2.0, 3.0, 4.0])).square().sum() * graph.temp
        torch.testing.assert_close(graph(JaggedTensor(ids, lengths=torch.tensor([len(ids)]))), expected)
    assert graph.why_recompiled() == ["step 1: value temp: 2.0, was 1.0"]


def test_a_run_uses_the_values_of_each_step_though_it_draws_ahead() -> None:
    graph, plain = Counting(), Counting()
    batches = [JaggedTensor(torch.arange(step % 5 + 1), lengths=torch.tensor([step % 5 + 1])) for step in range(20)]
    run = graph.run(batches, ahead=4)
    for step, batch in enumerate(batches):
        graph.temp = plain.temp = float(step % 3 + 1)
        assert next(run).equal(plain(batch))
    assert len(graph.why_recompiled()) == 2


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
        assert {graph(X)[0, 0].item() for _ in range(300)} <= {1.0, 2.0}
    finally:
        stop.set()
        thread.join()
    for temp in (1.0, 2.0):
        graph.temp = temp
        assert graph(X).equal(X * temp)
