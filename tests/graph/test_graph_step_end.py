"""Clipping, loss scaling, accumulation and schedules: a graph against the eager loop, rows and dense parts together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from support.embeddings import contents, make
from support.graphs import dense_copy, embedding, graph_of, id_batches
from support.stores import options
from tierbed import Graph, GraphError, MultiTableEmbedding, OptimizerError
from tierbed.engine.options.lookup import Lookup

STEPS = 8
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


class Rating(Graph):
    """Two lookups of one embedding, the second pooled, and an MLP; `scaled` is how the loss is scaled."""

    def __init__(self, rows: nn.Module, kind: str = "sgd") -> None:
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


def pair(kind: str = "sgd") -> tuple[Rating, Rating]:
    """The same model over our rows, with its optimizer added, and over a dense table, for an eager loop."""
    rows = embedding()
    graph, eager = Rating(rows, kind), Rating(dense_copy(rows), kind)
    return graph, eager


IDS = id_batches(12, 3, steps=STEPS)
ONE = torch.ones(())


def assert_same(graph: Rating, eager: Rating) -> None:
    assert isinstance(graph.rows, MultiTableEmbedding)
    assert isinstance(eager.rows, nn.Embedding)
    torch.testing.assert_close(graph.rows.get(torch.arange(50)), eager.rows.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(graph.mlp.state_dict(), eager.mlp.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [0.05, 0.5, 1e6])
@pytest.mark.rotated("kind")
def test_the_norm_of_all_gradients_is_clipped_as_in_eager(kind: str, max_norm: float) -> None:
    graph, eager = pair(kind)
    graph.add_optimizer(graph.optimizer)
    graph.clip_grad_norm(max_norm)
    for ids in IDS:
        eager.optimizer.zero_grad()
        expected = eager.build(ids, ONE)
        nn.utils.clip_grad_norm_(eager.optimizer.param_groups[0]["params"], max_norm)
        eager.optimizer.step()
        torch.testing.assert_close(graph(ids, ONE), expected.detach())
    assert_same(graph, eager)


@pytest.mark.parametrize("clip_value", [0.001, 0.05])
def test_values_of_all_gradients_are_clipped_as_in_eager(clip_value: float) -> None:
    graph, eager = pair("adagrad")
    graph.add_optimizer(graph.optimizer)
    graph.clip_grad_value(clip_value)
    for ids in IDS:
        eager.optimizer.zero_grad()
        eager.build(ids, ONE)
        nn.utils.clip_grad_value_(eager.optimizer.param_groups[0]["params"], clip_value)
        eager.optimizer.step()
        graph(ids, ONE)
    assert_same(graph, eager)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotated("kind")
def test_gradients_accumulate_as_in_eager_and_leave_the_rest_of_a_window(kind: str, mean: bool) -> None:
    graph, eager = pair(kind)
    graph.add_optimizer(graph.optimizer)
    graph.accumulate_grads(3, mean)
    graph.clip_grad_norm(0.05)
    for step, ids in enumerate(IDS, 1):  # the last two wait for a third
        torch.testing.assert_close(graph(ids, ONE), eager.build(ids, ONE).detach())
        if step % 3 == 0:
            parameters = eager.optimizer.param_groups[0]["params"]
            for parameter in parameters:
                parameter.grad /= 3 if mean else 1
            nn.utils.clip_grad_norm_(parameters, 0.05)
            eager.optimizer.step()
            eager.optimizer.zero_grad()
    assert_same(graph, eager)
    assert isinstance(graph.rows, MultiTableEmbedding)
    assert graph.rows.metrics()["table"]["step"] == STEPS // 3


def test_ids_that_build_changes_after_backward_are_accumulated_as_they_were() -> None:
    rows = embedding()

    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = graph.rows(ids).sum()
        loss.backward()
        ids.add_(10)
        return loss

    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=1.0), rows=rows)
    graph.accumulate_grads(2)
    before = rows.get([1, 2, 11, 12])
    for _ in range(2):
        graph(torch.tensor([1, 2]))
    torch.testing.assert_close(before - rows.get([1, 2, 11, 12]), torch.tensor([2.0, 2, 0, 0])[:, None].expand(-1, 4))


def test_accumulation_over_shapes_shares_one_window() -> None:
    graph, eager = pair()
    graph.add_optimizer(graph.optimizer)
    graph.accumulate_grads(2)
    for ids in (IDS[0], IDS[1, :5]):
        graph(ids, ONE)
        eager.build(ids, ONE)
    eager.optimizer.step()
    assert_same(graph, eager)


def test_a_graph_that_clips_may_begin_to_accumulate_after_its_first_step() -> None:
    graph, _ = pair()
    graph.add_optimizer(graph.optimizer)
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
    for model in (graph, eager):
        model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    graph.add_optimizer(graph.optimizer)
    graph.set_grad_scaler(graph.scaler)
    graph.clip_grad_norm(0.3)
    assert isinstance(graph.rows, MultiTableEmbedding)
    for step, ids in enumerate(IDS):
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
    assert graph.scaler.get_scale() != 2.0**10
    assert_same(graph, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_build_trains_as_in_eager(dtype: torch.dtype) -> None:
    class Cast(Rating):
        def loss(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return super().loss(ids)

    rows = embedding()
    graph, eager = Cast(rows), Cast(dense_copy(rows))
    graph.add_optimizer(graph.optimizer)
    for ids in IDS:
        eager.optimizer.zero_grad()
        expected = eager.build(ids, ONE)
        eager.optimizer.step()
        torch.testing.assert_close(graph(ids, ONE), expected.detach(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(rows.get(torch.arange(50)), eager.rows.weight.detach(), rtol=1e-2, atol=1e-3)


def test_a_schedule_makes_a_step_after_each_of_its_optimizer() -> None:
    graph, eager = pair()
    schedules = [lr_scheduler.StepLR(model.optimizer, 2, 0.5) for model in (graph, eager)]
    graph.add_optimizer(graph.optimizer, schedules[0])
    for ids in IDS:
        eager.optimizer.zero_grad()
        eager.build(ids, ONE)
        eager.optimizer.step()
        schedules[1].step()
        graph(ids, ONE)
        assert graph.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]
    assert_same(graph, eager)
    graph.eval()
    before = schedules[0].last_epoch
    graph(IDS[0], ONE)
    assert schedules[0].last_epoch == before


def test_a_schedule_waits_for_accumulated_gradients_and_for_finite_ones() -> None:
    graph, _ = pair()
    schedule = lr_scheduler.StepLR(graph.optimizer, 1, 0.5)
    graph.add_optimizer(graph.optimizer, schedule)
    graph.scaler = torch.amp.GradScaler("cpu")
    graph.set_grad_scaler(graph.scaler)
    graph.accumulate_grads(2)
    counts = []
    for boost in (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0):
        graph(IDS[0], torch.tensor(boost))
        counts.append(schedule.last_epoch)
    assert counts == [0, 1, 1, 1, 1, 2]


def test_another_scaler_is_followed() -> None:
    graph, eager = pair()
    graph.add_optimizer(graph.optimizer)
    for scale in (4.0, 64.0):
        graph.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        graph.set_grad_scaler(graph.scaler)
        for ids in IDS[:2]:
            eager.optimizer.zero_grad()
            eager.build(ids, ONE)
            eager.optimizer.step()
            graph(ids, ONE)
    assert_same(graph, eager)


def test_a_loss_that_is_not_scaled_is_refused() -> None:
    graph, _ = pair()
    graph.add_optimizer(graph.optimizer)
    graph.set_grad_scaler(torch.amp.GradScaler("cpu"))
    with pytest.raises(GraphError, match="build does not scale its loss"):
        graph(IDS[0], ONE)
    graph.set_grad_scaler(None)
    graph(IDS[0], ONE)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_scaled_step_of_no_ids_is_finite(accumulated: int) -> None:
    rows = embedding()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = scaler.scale(rows(ids).sum())
        loss.backward()
        return loss

    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=1.0), rows=rows)
    graph.set_grad_scaler(scaler)
    graph.accumulate_grads(accumulated)
    for _ in range(accumulated):
        graph(torch.zeros(0, dtype=torch.int64))
    assert rows.metrics()["table"]["step"] == 1
    assert scaler.get_scale() == 4.0


def test_a_window_cannot_change_while_gradients_wait() -> None:
    graph, _ = pair()
    graph.add_optimizer(graph.optimizer)
    graph.accumulate_grads(2)
    graph(IDS[0], ONE)
    with pytest.raises(OptimizerError, match=r"gradients of 1 of 2 calls wait.*drop_grads\(\)"):
        graph.accumulate_grads(1)
    graph(IDS[0], ONE)
    graph.accumulate_grads(1)


def test_gradients_of_a_remainder_can_be_dropped() -> None:
    graph, _ = pair()
    graph.add_optimizer(graph.optimizer)
    graph.accumulate_grads(2)
    graph(IDS[0], ONE)
    graph(IDS[0], ONE)
    before = contents(graph.rows).tobytes()
    graph(IDS[1], ONE)
    with pytest.raises(GraphError, match=r"gradients of 1 of 2 accumulated calls wait.*drop_grads\(\)"):
        graph.state_dict()
    graph.drop_grads()
    graph.state_dict()
    assert contents(graph.rows).tobytes() == before
    other, _ = pair()
    other.add_optimizer(other.optimizer)
    other.accumulate_grads(2)
    for ids in (IDS[0], IDS[0], IDS[0], IDS[0]):
        other(ids, ONE)
    graph(IDS[0], ONE)
    graph(IDS[0], ONE)
    assert contents(graph.rows).tobytes() == contents(other.rows).tobytes()


def test_the_printed_step_shows_its_end() -> None:
    graph, _ = pair()
    graph.add_optimizer(graph.optimizer, lr_scheduler.StepLR(graph.optimizer, 2))
    graph(IDS[0], ONE)
    assert "schedule(steplr)" in str(graph)
    graph.clip_grad_norm(1.0)
    graph(IDS[0], ONE)
    assert "apply_gradients(step_end, [RowGrads(" in str(graph)


@settings(max_examples=25)
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
            found = pinned.square_gradients([grad, 2 * grad])
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
    graph, _ = pair()
    optimizer = graph.optimizer
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    foreign = lr_scheduler.StepLR(torch.optim.SGD(graph.mlp.parameters()), 1)
    for call, message in (
        (lambda: graph.clip_grad_norm(0), r"max_norm=0: give a number from"),
        (lambda: graph.clip_grad_value("1"), r"clip_value='1'"),
        (lambda: graph.clip_grad_value(1e-50), r"clip_value=1e-50"),
        (lambda: graph.clip_grad_norm(1e300), r"max_norm=1e\+300"),
        (lambda: graph.accumulate_grads(0), r"steps=0: give a whole number"),
        (lambda: graph.accumulate_grads(True), r"steps=True"),
        (lambda: graph.accumulate_grads(2, mean=1), r"mean=1: give True or False"),
        (lambda: graph.set_grad_scaler(2.0), r"scaler=float: give a torch\.amp\.GradScaler"),
        (lambda: graph.add_optimizer(optimizer, 0.1), r"lr_sch=float"),
        (lambda: graph.add_optimizer(optimizer, plateau), r"ReduceLROnPlateau: its step\(\) needs a metric"),
        (lambda: graph.add_optimizer(optimizer, foreign), r"lr_sch=StepLR is of another optimizer"),
    ):
        with pytest.raises(OptimizerError, match=message):
            call()  # type: ignore[no-untyped-call]
    graph.add_optimizer(graph.optimizer)  # nothing was kept
    graph(IDS[0], ONE)
