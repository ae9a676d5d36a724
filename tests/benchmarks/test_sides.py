"""The sides of benchmarks are one model to start with, and one that differs has no figure; ids and limits are real."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.places import BENCHMARKS
from tierbed.engine import _core

sys.path.insert(0, str(BENCHMARKS))
import contenders
from contenders import Collection, Fbgemm, Rows, Torch, check
from disk.memory_limit import find_limit_problem, memory_limit
from floor import Floor
from graph_bytecodes import Counts, count_executed
from groups import dlrm, graph, kernels, snapshots
from models import Eager, EagerStep, GraphStep, Model, TorchRecStep, cycle, hash_batches
from models import make_batches as model_batches
from ranks import run_on_ranks
from timing import Stopwatch, time_calls
from traces import Cycles, LogUniform, Shape, Zipf, draw_ids, hash_rows, make_batches
from workload import Mismatch

SHAPE = Shape(2, 100, 16, 16)


@pytest.mark.parametrize(
    ("shape", "ours", "others"),
    [
        (SHAPE, Rows, [Fbgemm, Floor]),
        (replace(SHAPE, length=3), Rows, [Fbgemm, Floor]),
        (replace(SHAPE, optimizer="rowwise_adagrad"), Rows, [Fbgemm, Floor]),
        (replace(SHAPE, length=(3, 1)), Collection, [Fbgemm]),
        (replace(SHAPE, optimizer="adagrad"), Rows, [Torch, Floor]),
        (replace(SHAPE, optimizer="adam"), Rows, [Torch, Floor]),
    ],
)
def test_all_sides_compute_the_same(shape: Shape, ours: type, others: list[type]) -> None:
    batches = make_batches(shape)
    check(ours(shape, batches), [other(shape, batches) for other in others])


def test_rows_of_another_rate_or_rule_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(SHAPE)
    ours, unfilled = Rows(SHAPE, batches), Rows(SHAPE, batches, is_filled=False)
    kernels.check_dense("adagrad", unfilled, batches[0])
    with pytest.raises(Mismatch, match="lamb: rows and the dense optimizer's"):
        kernels.check_dense("lamb", unfilled, batches[0])
    monkeypatch.setattr(contenders, "LR", 1.01 * contenders.LR)
    with pytest.raises(Mismatch, match=r"rows of batch 0 by tierbed and FBGEMM differ by .* of the largest magnitude"):
        check(ours, [Fbgemm(SHAPE, batches)])


def test_no_figure_of_a_load_that_gave_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter([1, 2])
    monkeypatch.setattr(snapshots, "digest", lambda embedding: next(digests))
    with pytest.raises(Mismatch, match="the loaded rows differ from the saved rows"):
        list(snapshots.full(tmp_path, rows=1000, repeats=1))


def fails_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank():
        raise Mismatch("on rank 1")


@pytest.mark.slow
def test_what_a_rank_raises_is_raised_by_all() -> None:
    with pytest.raises(Mismatch, match="on rank 1"):
        run_on_ranks(2, fails_on_rank_1)


def test_memory_counts_that_the_allocator_kept_of_what_ran_before() -> None:
    def blocks() -> list[bytes]:
        return [b"x" * (64 << 10) for _ in range(257)]  # each too small for the allocator to map it by itself

    last = blocks()[-1]  # nothing below it goes back to the system
    assert snapshots.measure_peak_bytes(blocks) > 8 << 20
    del last


def test_a_process_beyond_its_memory_limit_ends() -> None:
    if reason := find_limit_problem():
        pytest.skip(f"this user may make no memory cgroup: {reason}")
    for megabytes, limit, ends in ((16, 128 << 20, False), (256, 128 << 20, True), (256, None, False)):
        with memory_limit(limit) as enter:
            code = f"x = bytearray({megabytes} << 20); x[::4096] = b'1' * len(x[::4096])"
            done = subprocess.run([sys.executable, "-c", code], preexec_fn=enter, check=False)
            assert (done.returncode != 0) == ends


@pytest.mark.parametrize("kind", [Zipf, LogUniform])
def test_a_batch_follows_from_its_number(kind: type[Zipf]) -> None:
    trace = kind(3, 100, 32)
    assert torch.equal(draw_ids(trace, 5), draw_ids(kind(3, 100, 32), 5))
    assert not torch.equal(draw_ids(trace, 5), draw_ids(trace, 6))
    assert 0 <= trace.draw_rows(7).min() <= trace.draw_rows(7).max() < 100


def test_zipf_draws_ranks_by_their_power() -> None:
    trace = Zipf(1, 50, 1 << 17)
    drawn = np.bincount(trace.draw_ranks(np.random.default_rng(0), 0)[:, 0], minlength=50) / (1 << 17)
    wanted = np.arange(1, 51) ** -1.05
    np.testing.assert_allclose(drawn, wanted / wanted.sum(), atol=5e-3)


def test_cycles_visit_their_rows_in_turn() -> None:
    trace = Cycles(100, 20)
    batches = np.array([trace.draw_rows(step)[:, 0] for step in range(20)])
    assert all(len(np.unique(batch)) == 20 for batch in batches)
    assert len(np.unique(batches[:, :16])) == 20
    assert len(np.unique(batches[:, 16:])) == 80
    with pytest.raises(ValueError, match="rows twice"):
        Cycles(10, 20).draw_rows(0)


def test_parts_of_a_batch_are_its_samples() -> None:
    (batch,) = make_batches(Shape(tables=3, rows=50, dim=2, batch=8), 1)
    parts = [batch.take_part(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.rows for part in parts]), batch.rows)
    assert torch.equal(torch.cat([part.grad for part in parts]), batch.grad)


MODEL = Model(rows=50, tables=2, batch=8, hidden=(4,))
DLRM = Model(rows=50, tables=3, batch=32, hidden=(8,), optimizer="adagrad", dense_optimizer="sgd", features=13)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_graph_and_the_eager_loop_are_one_model(tmp_path: Path, optimizer: str) -> None:
    model = replace(MODEL, optimizer=optimizer)
    step = GraphStep(model, tmp_path)
    eager = graph.check_eager(optimizer, model, step, model_batches(model, 3))
    keys = hash_rows(torch.arange(model.rows))
    for table, rows in enumerate(eager.tables):
        torch.testing.assert_close(step.embedding.get(keys, table), rows.weight.data, rtol=0, atol=1e-4)


def losses(model: Model, peer: type[Eager], folder: Path) -> dict[str, list[Tensor]]:
    """Of steps of tierbed, and of the peer."""
    ours, batches = GraphStep(model, folder), model_batches(model, 6)
    theirs = peer(model, ours)
    found = [theirs(*theirs.prepare(batch)) for batch in batches]
    return {"tierbed": [ours(*batch) for batch in hash_batches(batches)], "peer": found}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of TorchRec and of sparse gradients
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.rotated("length")
@pytest.mark.parametrize("peer", [EagerStep, TorchRecStep])
def test_the_peers_train_the_same_dlrm(tmp_path: Path, peer: type[Eager], length: int) -> None:
    dlrm.check_turn(losses(replace(DLRM, length=length), peer, tmp_path), 1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of sparse gradients
def test_a_learning_rate_a_twentieth_off_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = losses(replace(DLRM, length=4), EagerStep, tmp_path)["tierbed"]
    monkeypatch.setattr(contenders, "LR", 1.05 * contenders.LR)
    theirs = losses(replace(DLRM, length=4), EagerStep, tmp_path)["peer"]
    with pytest.raises(Mismatch, match=r"tierbed and peer: loss of step \d is .* and .*"):
        dlrm.check_turn({"tierbed": ours, "peer": theirs}, 2e-5)


def test_python_of_the_project_is_counted_and_no_other(tmp_path: Path) -> None:
    step = cycle(GraphStep(MODEL, tmp_path), hash_batches(model_batches(MODEL, 2)))
    for number in range(4):
        step(number)
    one = count_executed(step, 0)
    assert one.calls > 100
    assert one.bytecodes > 1000
    assert count_executed(step, 1) == one
    assert count_executed(lambda number: (step(number), step(number)), 0) == Counts(2 * one.calls, 2 * one.bytecodes)
    assert count_executed(lambda number: sorted(range(number)), 10) == Counts()


def test_timed_steps_compute_the_same_and_are_put_back(tmp_path: Path) -> None:
    batches = hash_batches(model_batches(MODEL, 4))
    timed, plain = GraphStep(MODEL, tmp_path), GraphStep(MODEL, tmp_path)
    assert torch.equal(timed(*batches[0]), plain(*batches[0]))
    native = _core.gather
    watches = [Stopwatch() for _ in range(2)]
    with time_calls(watches[0], _core, "gather"), time_calls(watches[1], timed.optimizer, "step"):
        found = [timed(*batch) for batch in batches[1:]]
    assert all(watch.lap() > 0 for watch in watches)
    assert all(torch.equal(one, plain(*batch)) for one, batch in zip(found, batches[1:], strict=True))
    timed(*batches[0])
    assert not any(watch.lap() for watch in watches)
    assert _core.gather is native
    assert "step" not in vars(timed.optimizer)
