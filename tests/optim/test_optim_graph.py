"""Optimizers of our own in a graph: one holds rows and dense parameters, as torch's do."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from support.graphs import DIM, Rating, dense_copy, embedding, id_batches, mlp, train
from support.refusals import check_refusal
from tierbed.engine.errors import OptimizerError
from tierbed.engine.optim import CatchUpAdam, RowWiseAdagrad
from tierbed.engine.optim.row_optimizer import row_optimizer

pytestmark = pytest.mark.optimizer

IDS = torch.arange(50)


@pytest.mark.parametrize(("kind", "dense_kind"), [(RowWiseAdagrad, RowWiseAdagrad), (CatchUpAdam, torch.optim.Adam)])
def test_rows_and_dense_layers_equal_a_plain_model(kind: Any, dense_kind: Any) -> None:
    rows, net = embedding(), mlp(3 * DIM)
    dense, other = dense_copy(rows), copy.deepcopy(net)
    graph = Rating(rows, net, kind([*rows.parameters(), *net.parameters()], lr=0.05))
    optimizer = dense_kind([*dense.parameters(), *other.parameters()], lr=0.05)
    for ids in id_batches(4, 3, steps=30):
        optimizer.zero_grad()
        loss = train(dense, other, ids)
        optimizer.step()
        torch.testing.assert_close(graph(ids), loss.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rows.get(IDS), dense.weight.detach(), rtol=0, atol=2e-5)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def test_the_row_norm_of_a_step_is_limited_by_the_group() -> None:
    rows, net = embedding(), mlp(3 * DIM)
    groups = [{"params": rows.parameters(), "clip_grad_row_norm": 1e-4}, {"params": net.parameters(), "lr": 0.1}]
    graph = Rating(rows, net, torch.optim.SGD(groups, lr=1.0))
    before = rows.get(IDS)
    graph(id_batches(16, 3, steps=1)[0])
    moved = (rows.get(IDS) - before).norm(dim=1)
    assert 0 < moved.max() < 1.01e-4


def test_the_smaller_clip_by_value_of_group_and_graph_limits_a_step() -> None:
    rows, net = embedding(), mlp(3 * DIM)
    groups = [{"params": rows.parameters(), "clip_grad_value": 1e-4}, {"params": net.parameters(), "lr": 0.1}]
    graph = Rating(rows, net, torch.optim.SGD(groups, lr=1.0))
    for clip_value, limit in ((1.0, 1e-4), (1e-5, 1e-5)):
        graph.clip_grad_value(clip_value)
        before = rows.get(IDS)
        graph(id_batches(16, 3, steps=1)[0])
        assert 0 < (rows.get(IDS) - before).abs().max() < 1.01 * limit


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-39, 1e39, 10**400, "1", True])
@pytest.mark.parametrize("name", ["clip_grad_value", "clip_grad_row_norm"])
def test_clips_that_are_no_positive_numbers_of_float32_are_refused(name: str, value: Any) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], name: value}], lr=1.0)
    check_refusal((lambda: row_optimizer(optimizer, optimizer.param_groups[0]), OptimizerError, f"{name}=", "1.7e+38"))


def test_a_clip_may_be_any_real_number() -> None:
    for value in (1, np.float32(0.5), Fraction(1, 2)):
        optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "clip_grad_value": value}], lr=1.0)
        numbers = row_optimizer(optimizer, optimizer.param_groups[0]).compute_hyperparams(1)
        assert numbers[-3:] == [float(value), 0.0, 0.0]
