"""The sides that train whole models are one model, and one that differs has no figure"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.places import BENCHMARKS
from tierbed.engine import _core

sys.path.insert(0, str(BENCHMARKS))
import contenders
from graph_bytecodes import Executed, executed
from groups import dlrm, graph
from models import Eager, EagerStep, GraphStep, Model, TorchRecStep, cycle, keyed, make_batches
from timing import Stopwatch, timed_calls
from traces import hashed
from workload import Mismatch

MODEL = Model(rows=50, tables=2, batch=8, hidden=(4,))
DLRM = Model(rows=50, tables=3, batch=32, hidden=(8,), optimizer="adagrad", dense_optimizer="sgd", features=13)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_graph_and_the_eager_loop_are_one_model(tmp_path: Path, optimizer: str) -> None:
    model = replace(MODEL, optimizer=optimizer)
    step = GraphStep(model, tmp_path)
    eager = graph.check_eager(optimizer, model, step, make_batches(model, 3))
    keys = hashed(torch.arange(model.rows))
    for table, rows in enumerate(eager.tables):
        torch.testing.assert_close(step.embedding.get(keys, table), rows.weight.data, rtol=0, atol=1e-4)


def losses(model: Model, peer: type[Eager], folder: Path) -> dict[str, list[Tensor]]:
    """Of steps of tierbed, and of the peer."""
    ours, batches = GraphStep(model, folder), make_batches(model, 6)
    theirs = peer(model, ours)
    found = [theirs(*theirs.prepared(batch)) for batch in batches]
    return {"tierbed": [ours(*batch) for batch in keyed(batches)], "peer": found}


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
    step = cycle(GraphStep(MODEL, tmp_path), keyed(make_batches(MODEL, 2)))
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
    native = _core.gather
    watches = [Stopwatch() for _ in range(2)]
    with timed_calls(watches[0], _core, "gather"), timed_calls(watches[1], timed.optimizer, "step"):
        found = [timed(*batch) for batch in batches[1:]]
    assert all(watch.lap() > 0 for watch in watches)
    assert all(torch.equal(one, plain(*batch)) for one, batch in zip(found, batches[1:], strict=True))
    timed(*batches[0])
    assert not any(watch.lap() for watch in watches)
    assert _core.gather is native
    assert "step" not in vars(timed.optimizer)
