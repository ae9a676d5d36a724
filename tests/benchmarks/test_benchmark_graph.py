"""benchmarks/graph.py at tiny sizes: every section runs and checks what it compares; what its stopwatches add up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from support.figures import check_quick_run
from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import graph_steps
from graph_bytecodes import Executed, executed
from graph_steps import EagerStep, GraphStep, Model, cycle, keyed, make_batches
from graph_stopwatch import Stopwatch, is_matmul, is_op, timed_calls, timed_natives, timed_ops
from tier_stores import Mismatch

import graph as benchmark
from tierbed.engine import _core

MODEL = Model(rows=50, tables=2, batch=8, hidden=(4,))


@pytest.mark.slow
def test_every_section_has_figures_for_sides_that_agree(tmp_path: Path) -> None:
    check_quick_run(benchmark, tmp_path)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_the_graph_and_the_eager_loop_are_one_model(tmp_path: Path, optimizer: str) -> None:
    model = Model(rows=50, tables=2, batch=8, hidden=(4,), optimizer=optimizer)
    batches = make_batches(model, 3)
    graph = GraphStep(model, tmp_path)
    eager = EagerStep(model, graph)
    graph_steps.check(optimizer, cycle(graph, keyed(batches)), cycle(eager, batches))
    keys = graph_steps.hashed(torch.arange(model.rows))
    for table, rows in enumerate(eager.tables):
        torch.testing.assert_close(graph.embedding.get(keys, table), rows.weight.data, rtol=0, atol=1e-4)


def test_losses_that_differ_have_no_figure() -> None:
    with pytest.raises(Mismatch, match=r"peer: loss 1\.0 of the graph's step 0, 1\.1"):
        graph_steps.check("peer", lambda _: torch.tensor(1.0), lambda _: torch.tensor(1.1))


def test_a_stopwatch_counts_a_call_within_another_once() -> None:
    watch = Stopwatch()
    sleep = watch.timed(time.sleep)
    begin = time.perf_counter()
    watch.timed(lambda: sleep(0.02))()
    taken = time.perf_counter() - begin
    assert 0.02 <= watch.lap() <= taken
    assert watch.lap() == 0


def test_python_of_the_project_is_counted_and_no_other(tmp_path: Path) -> None:
    batches = keyed(make_batches(MODEL, 2))
    graph = GraphStep(MODEL, tmp_path)
    step = cycle(graph, batches)
    for number in range(4):
        step(number)
    one = executed(step, 0)
    assert one.calls > 100
    assert one.bytecodes > 1000
    assert executed(step, 1) == one
    assert executed(lambda number: (step(number), step(number)), 0) == Executed(2 * one.calls, 2 * one.bytecodes)
    assert executed(lambda number: sorted(range(number)), 10) == Executed()


def test_timed_steps_compute_the_same_and_are_put_back(tmp_path: Path) -> None:
    batches = keyed(make_batches(MODEL, 4))
    timed, plain = GraphStep(MODEL, tmp_path), GraphStep(MODEL, tmp_path)
    assert torch.equal(timed(*batches[0]), plain(*batches[0]))
    code, native = str(timed), _core.gather
    watches = [Stopwatch() for _ in range(4)]
    with (
        timed_ops(watches[0], timed, is_matmul),
        timed_ops(watches[1], timed, is_op),
        timed_natives(watches[2]),
        timed_calls(watches[3], timed.optimizer, "step"),
    ):
        losses = [timed(*batch) for batch in batches[1:]]
    assert all(watch.lap() > 0 for watch in watches)
    assert all(torch.equal(one, plain(*batch)) for one, batch in zip(losses, batches[1:], strict=True))
    timed(*batches[0])
    assert not any(watch.lap() for watch in watches)
    assert str(timed) == code
    assert _core.gather is native
    assert "step" not in vars(timed.optimizer)
