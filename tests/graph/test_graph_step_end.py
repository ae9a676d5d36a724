"""Clipping, loss scaling, accumulation and schedules: a graph against the eager loop, rows and dense parts together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from support.embeddings import contents, make
from support.examples import examples
from support.graphs import dense_copy, embedding, graph_of, id_batches, training
from support.refusals import check_refusal
from support.stores import options
from tierbed import Graph, GraphError, OptimizerError
from tierbed.engine.options.lookup import Lookup

STEPS = 8
IDS = id_batches(12, 3, steps=STEPS)
ONE = torch.ones(())
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


class Rating(Graph):
    """Two lookups of one embedding, the second pooled, and an MLP; `scaled` is how the loss is scaled."""

    def __init__(self, rows: Any, kind: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rows, self.mlp, self.scaler = rows, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), None
        self.optimizer = KINDS[kind]([*rows.parameters(), *self.mlp.parameters()])

    def build(self, ids: Tensor, boost: Tensor) -> Tensor:
        loss = self.loss(ids) * boost
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def loss(self, ids: Tensor) -> Tensor:
        rows = torch.cat([self.rows(ids[:, 0]), self.rows(ids[:, 1:]).sum(1)], 1)
        return F.mse_loss(self.mlp(rows).squeeze(1), ids[:, 0].float() / 10)


def pair(kind: str = "sgd", *schedules: Any) -> tuple[Rating, Rating]:
    """The same model over our rows, with its optimizer added, and over a dense table, for an eager loop."""
    rows = embedding()
    graph, eager = Rating(rows, kind), Rating(dense_copy(rows), kind)
    graph.add_optimizer(graph.optimizer, *(schedule(graph.optimizer) for schedule in schedules))
    return graph, eager


def eager_steps(eager: Rating, clip: Callable[[list[Tensor]], object], ids: Tensor = IDS) -> Iterator[Tensor]:
    """The losses of steps in eager torch."""
    for batch in ids:
        eager.optimizer.zero_grad()
        loss = eager.build(batch, ONE)
        clip(eager.optimizer.param_groups[0]["params"])
        eager.optimizer.step()
        yield loss.detach()


def assert_same(graph: Rating, eager: Rating) -> None:
    torch.testing.assert_close(graph.rows.get(torch.arange(50)), eager.rows.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(graph.mlp.state_dict(), eager.mlp.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("setting", "clip"),
    [
        (("clip_grad_norm", 0.05), lambda gradients: nn.utils.clip_grad_norm_(gradients, 0.05)),
        (("clip_grad_norm", 1e6), lambda gradients: None),
        (("clip_grad_value", 0.001), lambda gradients: nn.utils.clip_grad_value_(gradients, 0.001)),
    ],
    ids=["norm", "high norm", "value"],
)
@pytest.mark.rotated("kind")
def test_gradients_are_clipped_as_in_eager(kind: str, setting: tuple[str, float], clip: Any) -> None:
    graph, eager = pair(kind)
    getattr(graph, setting[0])(setting[1])
    for ids, expected in zip(IDS, eager_steps(eager, clip), strict=True):
        torch.testing.assert_close(graph(ids, ONE), expected)
    assert_same(graph, eager)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotated("kind")
def test_gradients_accumulate_as_in_eager_and_leave_the_rest_of_a_window(kind: str, mean: bool) -> None:
    graph, eager = pair(kind)
    graph.accumulate_grads(3, mean)
    graph.clip_grad_norm(0.05)
    for step, ids in enumerate([*IDS[:4], IDS[4, :5], *IDS[5:]], 1):  # of two sizes; the last two wait for a third
        torch.testing.assert_close(graph(ids, ONE), eager.build(ids, ONE).detach())
        if step % 3 == 0:
            parameters = eager.optimizer.param_groups[0]["params"]
            for parameter in parameters:
                parameter.grad /= 3 if mean else 1
            nn.utils.clip_grad_norm_(parameters, 0.05)
            eager.optimizer.step()
            eager.optimizer.zero_grad()
    assert_same(graph, eager)
    assert graph.rows.metrics()["table"]["step"] == STEPS // 3
    with pytest.raises(OptimizerError, match=r"gradients of 2 of 3 calls wait.*drop_grads\(\)"):
        graph.accumulate_grads(1)
    with pytest.raises(GraphError, match=r"gradients of 2 of 3 accumulated calls wait.*drop_grads\(\)"):
        graph.state_dict()
    eager.optimizer.zero_grad()
    graph.drop_grads()
    graph.state_dict()
    assert_same(graph, eager)
    graph.accumulate_grads(1)
    graph.clip_grad_norm(None)
    torch.testing.assert_close(graph(IDS[0], ONE), next(eager_steps(eager, len)))
    assert_same(graph, eager)


def test_ids_that_build_changes_after_backward_are_accumulated_as_they_were() -> None:
    def build(graph: Any, ids: Tensor) -> None:
        graph.rows(ids).sum().backward()
        ids.add_(10)

    rows, keys = embedding(), torch.tensor([1, 2, 11, 12])
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=1.0), rows=rows)
    graph.accumulate_grads(2)
    before = rows.get(keys)
    for _ in range(2):
        graph(torch.tensor([1, 2]))
    torch.testing.assert_close(before - rows.get(keys), torch.tensor([2.0, 2, 0, 0])[:, None].expand(-1, 4))


def test_a_graph_that_clips_may_begin_to_accumulate_after_its_first_step() -> None:
    graph, _ = pair()
    graph.clip_grad_norm(1.0)
    graph(IDS[0], ONE)
    graph.accumulate_grads(2)
    steps = []
    for _ in range(2):
        graph(IDS[0], ONE)
        steps.append(graph.rows.metrics()["table"]["step"])
    assert steps == [1, 2]


def test_a_scaled_loss_trains_as_in_eager_and_a_step_that_is_not_finite_changes_nothing() -> None:
    graph, eager = pair("adagrad")
    graph.clip_grad_norm(0.3)
    for step, ids in enumerate(IDS):
        if step in (0, 6):  # another one is followed
            for model in (graph, eager):
                model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 - step), growth_interval=3)
            graph.set_grad_scaler(graph.scaler)
        boost = torch.tensor(float("inf") if step in (2, 5) else 1.0)
        before = contents(graph.rows), graph.rows.metrics()["table"]["step"]
        eager.optimizer.zero_grad()
        eager.build(ids, boost)
        eager.scaler.unscale_(eager.optimizer)
        nn.utils.clip_grad_norm_(eager.optimizer.param_groups[0]["params"], 0.3)
        eager.scaler.step(eager.optimizer)
        eager.scaler.update()
        graph(ids, boost)
        assert graph.scaler.get_scale() == eager.scaler.get_scale()
        if step in (2, 5):
            assert contents(graph.rows).tobytes() == before[0].tobytes()
            assert graph.rows.metrics()["table"]["step"] == before[1]
    assert_same(graph, eager)


def test_autocast_in_build_trains_as_in_eager() -> None:
    class Cast(Rating):
        def loss(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().loss(ids)

    rows = embedding()
    graph, eager = Cast(rows), Cast(dense_copy(rows))
    graph.add_optimizer(graph.optimizer)
    for ids, expected in zip(IDS, eager_steps(eager, len), strict=True):
        torch.testing.assert_close(graph(ids, ONE), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(rows.get(torch.arange(50)), eager.rows.weight.detach(), rtol=1e-2, atol=1e-3)


def test_a_schedule_makes_a_step_after_each_of_its_optimizer() -> None:
    graph, eager = pair("sgd", lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5))
    schedule = lr_scheduler.StepLR(eager.optimizer, 2, 0.5)
    for ids, _ in zip(IDS, eager_steps(eager, len), strict=True):
        schedule.step()
        graph(ids, ONE)
        assert graph.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]
    assert_same(graph, eager)
    assert "schedule(steplr)" in str(graph)
    graph.eval()(IDS[0], ONE)
    assert graph.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]
    graph.clip_grad_norm(1.0)
    graph.train()(IDS[0], ONE)
    assert "apply_gradients(step_end, [RowGrads(" in str(graph)


def test_a_schedule_waits_for_accumulated_gradients_and_for_finite_ones() -> None:
    schedules: list[Any] = []
    graph, _ = pair("sgd", lambda optimizer: schedules.append(lr_scheduler.StepLR(optimizer, 1, 0.5)) or schedules[0])
    graph.scaler = torch.amp.GradScaler("cpu")
    graph.set_grad_scaler(graph.scaler)
    graph.accumulate_grads(2)
    counts = []
    for boost in (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0):
        graph(IDS[0], torch.tensor(boost))
        counts.append(schedules[0].last_epoch)
    assert counts == [0, 1, 1, 1, 1, 2]


def test_a_loss_that_is_not_scaled_is_refused() -> None:
    graph, _ = pair()
    graph.set_grad_scaler(torch.amp.GradScaler("cpu"))
    with pytest.raises(GraphError, match="build does not scale its loss"):
        graph(IDS[0], ONE)
    graph.set_grad_scaler(None)
    graph(IDS[0], ONE)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_scaled_step_of_no_ids_is_finite(accumulated: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    graph = training(lambda graph, ids: scaler.scale(graph.rows(ids).sum()), rows=embedding())
    graph.set_grad_scaler(scaler)
    graph.accumulate_grads(accumulated)
    for _ in range(accumulated):
        graph(torch.zeros(0, dtype=torch.int64))
    assert graph.rows.metrics()["table"]["step"] == 1
    assert scaler.get_scale() == 4.0


@examples(0.6)
@given(
    ids=st.lists(st.integers(0, 6), min_size=1, max_size=700),
    pooling=st.sampled_from([None, "sum", "mean"]),
    threads=st.sampled_from([1, 2]),
)
def test_squares_are_those_of_the_summed_gradients(ids: list[int], pooling: Any, threads: int) -> None:
    keys = torch.tensor(ids)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with make(options("device"), "sgd", tables=1) as rows:
            lookup = Lookup(keys if pooling is None else keys[:, None], torch.zeros_like(keys), None, pooling)
            pinned = rows.pin([lookup, lookup])
            grad = torch.sin(torch.arange(len(ids) * rows.dim, dtype=torch.float32)).view(-1, rows.dim)
            found = pinned.compute_squared_norm([grad, 2 * grad])
            pinned.update([grad, 2 * grad], scale=0.5, clip_value=0.75)
            moved = rows.get(torch.arange(7))
    finally:
        torch.set_num_threads(before)
    sums = torch.zeros(7, grad.shape[1], dtype=torch.float64).index_add_(0, keys, 3 * grad.double())
    assert found == pytest.approx(float(sums.square().sum()), rel=1e-4, abs=1e-6)
    with make(options("device"), "sgd", tables=1) as plain:
        start = plain.get(torch.arange(7))
    touched = torch.tensor(np.isin(np.arange(7), ids))[:, None]
    decay = torch.where(touched, start * 0.01, 0)
    expected = start - 0.1 * ((0.5 * sums).clamp(-0.75, 0.75) + decay)
    torch.testing.assert_close(moved, expected.float(), rtol=1e-4, atol=1e-5)


def test_wrong_settings_are_refused() -> None:
    rows = embedding()
    graph = Rating(rows)
    optimizer: Any = graph.optimizer
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    foreign = lr_scheduler.StepLR(torch.optim.SGD(graph.mlp.parameters()), 1)
    for method, values, *named in (
        ("clip_grad_norm", (0,), "max_norm=0"),
        ("clip_grad_value", ("1",), "clip_value='1'"),
        ("clip_grad_value", (1e-50,), "clip_value=1e-50"),
        ("clip_grad_norm", (1e300,), "max_norm=1e+300"),
        ("accumulate_grads", (0,), "steps=0"),
        ("accumulate_grads", (True,), "steps=True"),
        ("accumulate_grads", (2, 1), "mean=1"),
        ("set_grad_scaler", (2.0,), "scaler=float", "torch.amp.GradScaler"),
        ("add_optimizer", (optimizer, 0.1), "lr_sch=float"),
        ("add_optimizer", (optimizer, plateau), "ReduceLROnPlateau", "metric"),
        ("add_optimizer", (optimizer, foreign), "lr_sch=StepLR belongs to another optimizer"),
    ):
        check_refusal((lambda m=method, v=values: getattr(graph, m)(*v), OptimizerError, *named))
    graph.add_optimizer(optimizer)  # nothing was kept
    graph(IDS[0], ONE)
