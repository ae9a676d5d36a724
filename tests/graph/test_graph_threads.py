"""Training steps of several threads over the same rows, which would take each other's pins, are refused by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from support.forked import in_process
from support.graphs import embedding, graph_of, training
from tierbed import EagerOptimizer, Graph, GraphError, MultiTableEmbedding
from tierbed.engine.table.row_step import run_row_step

IDS = torch.tensor([1, 2, 2])
ONCE = torch.tensor([[1.0], [2.0]]).expand(2, 4)  # by what a step moves rows 1 and 2
inside, go_on = threading.Event(), threading.Event()


@torch.library.custom_op("tierbed_tests::wait_here", mutates_args=())
def wait_here(wait: Tensor) -> Tensor:
    if wait:
        inside.set()
        assert go_on.wait()
    return torch.ones(())


wait_here.register_fake(lambda wait: torch.ones(()))
YES, NO = torch.tensor(True), torch.tensor(False)


def trains(rows: MultiTableEmbedding) -> Graph:
    return training(lambda graph, ids, wait: graph.rows(ids).sum() * wait_here(wait), lr=1.0, rows=rows)


@contextmanager
def in_the_middle(graph: Graph) -> Iterator[Future[Tensor]]:
    """While a step of the graph waits in the thread "first_0" with its rows pinned."""
    inside.clear()
    go_on.clear()
    with ThreadPoolExecutor(1, "first") as pool:
        step = pool.submit(graph, IDS, YES)
        try:
            assert inside.wait()
            yield step
        finally:
            go_on.set()


def test_steps_of_two_threads_over_the_same_rows_are_refused_and_the_first_goes_on() -> None:
    rows = embedding()
    graph, other = trains(rows), trains(rows)
    graph(IDS, NO)
    eager = EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=1.0), rows)
    rows(IDS).sum().backward()
    read = graph_of(lambda graph, ids: graph.rows(ids), rows=rows)
    before = rows.get([1, 2])
    with in_the_middle(graph) as step:
        for second in (graph, other):
            with pytest.raises(GraphError, match=r"Built in thread 'MainThread' .* of Built in thread 'first_0'"):
                second(IDS, NO)
        with pytest.raises(GraphError, match=r"an EagerOptimizer in thread 'MainThread' .* of Built in"):
            eager.step()
        assert torch.equal(read(IDS), before[[0, 1, 1]])  # reading is free
    step.result()
    torch.testing.assert_close(before - rows.get([1, 2]), ONCE)
    other(IDS, NO)
    rows(IDS).sum().backward()
    eager.step()
    torch.testing.assert_close(before - rows.get([1, 2]), 3 * ONCE)


def test_graphs_of_other_rows_train_at_the_same_time() -> None:
    first, second = trains(embedding()), trains(embedding())
    before = [graph.rows.get([1, 2]) for graph in (first, second)]
    with in_the_middle(first) as step:
        second(IDS, NO)
    step.result()
    for graph, then in zip((first, second), before, strict=True):
        torch.testing.assert_close(then - graph.rows.get([1, 2]), ONCE)


def test_a_step_that_failed_lets_other_threads_train() -> None:
    graph = trains(embedding(capacity=2))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(Exception, match="capacity"):
            pool.submit(graph, torch.arange(5), NO).result()
        graph(IDS, NO)
        pool.submit(graph, IDS, NO).result()
    assert graph.rows.metrics()["table"]["step"] == 2


@contextmanager
def traced(rows: MultiTableEmbedding, look_up_first: bool) -> Iterator[Future[Tensor]]:
    """While another thread waits in a trace of a lookup, after it or before it."""
    tracing, done = threading.Event(), threading.Event()

    def build(graph: Graph, ids: Tensor) -> Tensor:
        found = graph.rows(ids) if look_up_first else None  # type: ignore[operator]
        tracing.set()
        assert done.wait()
        return graph.rows(ids) if found is None else found  # type: ignore[operator]

    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(graph_of(build, rows=rows), IDS)
        try:
            assert tracing.wait()
            yield step
        finally:
            done.set()


@pytest.mark.parametrize("grad", [False, True], ids=["reads", "trains"])
def test_a_lookup_while_another_thread_traces_the_same_rows_has_their_values(grad: bool) -> None:
    rows = embedding()
    eager = EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=1.0), rows)
    expected = rows.get(IDS)
    with traced(rows, True) as step:
        with torch.set_grad_enabled(grad):
            found = rows(IDS)
        assert torch.equal(rows.get(IDS), expected)
    assert torch.equal(step.result(), expected)
    assert type(found) is Tensor
    assert torch.equal(found, expected)
    if grad:
        found.sum().backward()
        eager.step()
        assert not torch.equal(rows.get(IDS), expected)


def test_rows_that_another_thread_traces_are_not_trained_by_a_loop() -> None:
    rows = embedding()
    eager = EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=1.0), rows)
    with traced(rows, False) as step:
        for call in (rows(IDS).sum().backward, eager.step, eager.zero_grad):
            with pytest.raises(GraphError, match="cannot be trained while another thread traces a graph"):
                call()
    step.result()


def child_in_a_step() -> int:
    """The exit code of a process that is forked in the middle of another thread's step, and trains."""
    graph = trains(embedding())
    with in_the_middle(graph):
        child = os.fork()
        if child == 0:
            try:
                run_row_step([(graph.rows, graph.rows.row_optimizer)], "the child", os._exit, 0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_knows_of_no_step_of_its_parents_threads() -> None:
    assert in_process(child_in_a_step) == 0
