"""Rows depart from the dense step of their optimizer, or that of an optimizer of our own from its formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.arithmetic import power
from support.embeddings import make, train
from support.refusals import check_refusal
from support.stores import options
from tierbed.engine.errors import OptimizerError
from tierbed.engine.optim import (
    LAMB,
    CatchUpAdam,
    Ftrl,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from tierbed.engine.optim.row_optimizer import row_optimizer

pytestmark = pytest.mark.optimizer


CASES = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3},
    ),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "weight_decay": 0.5, "foreach": False}),
    (RowWiseAdagrad, {"lr": 0.1}),
    (RowWiseAdagrad, {"lr": 0.1, "eps": 0.0, "weight_decay": 0.2, "initial_accumulator_value": 0.1}),
    (RowWiseAdagrad, {"lr": torch.tensor(0.1), "weight_decay": 0.2, "weight_decay_mode": "decoupled"}),
    (Ftrl, {"lr": 0.1}),
    (Ftrl, {"lr": 0.1, "weight_decay": 0.1, "lambda1": 0.5, "lambda2": 0.3, "beta": 1.0}),
    (Ftrl, {"lr": 0.1, "lr_power": -0.2, "initial_accumulator_value": 0.0}),
    (Ftrl, {"lr": 0.1, "lr_power": -0.5, "power_sign": "lr_power"}),
    (PartialRowWiseAdam, {"lr": 0.01}),
    (PartialRowWiseAdam, {"lr": 0.01, "betas": (0.5, 0.8), "eps": 0.0, "weight_decay": 0.1, "maximize": True}),
    (LAMB, {"lr": 0.01}),
    (LAMB, {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    (PartialRowWiseLAMB, {"lr": torch.tensor(0.01), "weight_decay": 0.1}),
    (LarsSGD, {"lr": 0.1, "eta": 0.02}),
    (LarsSGD, {"lr": 0.1, "eta": 0.02, "momentum": 0.5, "weight_decay": 0.1, "maximize": True}),
    (CatchUpAdam, {"lr": 0.01}),
    (CatchUpAdam, {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3, "maximize": True}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_rows_in_every_batch_equal_the_dense_step(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    is_torchs = kind.__module__.startswith("torch")
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 5, generator=generator))
    optimizer = kind([parameter], **options)
    rows = row_optimizer(optimizer, optimizer.param_groups[0])
    state = rows.make_row_state(5)
    initial = np.repeat(np.array(state.initial_values, np.float32), state.widths)
    values = np.concatenate([parameter.detach().numpy().copy(), np.tile(initial, (8, 1))], axis=1)
    updates = np.zeros(8, np.uint32)
    for step in range(1, 9):
        parameter.grad = torch.randn(8, 5, generator=generator) * 10.0 ** -(step % 4)
        naive.update(values, updates, parameter.grad.numpy(), rows.rule, rows.compute_hyperparams(step), step)
        optimizer.step()
        rtol, atol = (2e-6, 1e-6) if is_torchs else (1e-5, 2e-6)
        np.testing.assert_allclose(values[:, :5], parameter.detach().numpy(), rtol=rtol, atol=atol)
    ends = np.cumsum([5, *state.widths])
    for name, begin, end in zip(state.names, ends, ends[1:], strict=False):
        rtol, atol = (1e-5, 1e-7) if is_torchs else (1e-4, 1e-5)
        wanted = optimizer.state[parameter][name].numpy()
        np.testing.assert_allclose(values[:, begin:end], wanted, rtol=rtol, atol=atol)
    assert updates.tolist() == [8] * 8


def test_ftrl_is_its_formula_in_double_and_takes_small_weights_to_zero() -> None:
    w, n, z = np.array([1.0, -2.0, 0.5, 0.01]), np.full(4, 0.1), np.zeros(4)
    parameter = torch.nn.Parameter(torch.tensor(w, dtype=torch.float32))
    optimizer = Ftrl([parameter], lr=0.5, lr_power=-0.7, lambda1=1.0, lambda2=0.1, beta=0.2)
    for step in range(4):
        g = np.cos(np.arange(4.0) * 2 + step)
        parameter.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        before, n = n**0.7, n + g**2
        z = z + g - (n**0.7 - before) / 0.5 * w
        w = np.where(abs(z) <= 1.0, 0.0, -(z - np.sign(z)) / ((0.2 + n**0.7) / 0.5 + 0.1))
    assert (w == 0).any()
    assert (w != 0).any()
    np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=1e-5, atol=1e-7)


def test_power_of_no_number_is_no_number() -> None:
    with np.errstate(invalid="ignore"):
        assert np.isnan(power(np.array([-1.0, math.nan, -math.inf], np.float32), np.float32(0.3))).all()
    assert power(np.float32(math.inf), np.float32(0.3)) == math.inf


@given(st.floats(0, 2.0**127, width=32), st.floats(-8, 8, width=32))
def test_power_is_rounded_from_the_exact_one(x: float, exponent: float) -> None:
    with np.errstate(all="ignore"):
        wanted = np.float32(np.float64(x) ** np.float64(exponent))
        found = power(np.float32(x), np.float32(exponent))
    assert abs(int(np.float32(found).view(np.int32)) - int(wanted.view(np.int32))) <= 1


def test_without_eps_a_row_without_gradient_stays_and_nan_is_not_hidden() -> None:
    optimizer = RowWiseAdagrad([torch.nn.Parameter(torch.ones(1))], lr=0.1, eps=0.0)
    rows = row_optimizer(optimizer, optimizer.param_groups[0])
    values = np.array([[1, 2, 0], [1, 2, 0], [1, 2, 0]], np.float32)
    grads = np.array([[0, 0], [1e-30, 0], [math.nan, 0]], np.float32)
    naive.update(values, np.zeros(3, np.uint32), grads, rows.rule, rows.compute_hyperparams(1))
    assert values[:2].tolist() == [[1, 2, 0], [1, 2, 0]]  # the square of 1e-30 is 0 in float32
    assert np.isnan(values[2]).all()
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.zeros(2, 2)
    RowWiseAdagrad([parameter], eps=0.0).step()
    assert parameter.tolist() == [[1, 1], [1, 1]]


def test_ftrl_does_not_divide_by_an_accumulator_that_underflowed() -> None:
    parameter = torch.nn.Parameter(torch.tensor([[1.0, -2.0, 3.0]]))
    optimizer = Ftrl([parameter], lr=0.1, initial_accumulator_value=0.0)
    rows = row_optimizer(optimizer, optimizer.param_groups[0])
    values = np.array([[1, -2, 3, 0, 0, 0, 0, 0, 0]], np.float32)
    grads = np.array([[1e-24, -1e-24, 0]], np.float32)  # whose squares are 0 in float32
    naive.update(values, np.zeros(1, np.uint32), grads, rows.rule, rows.compute_hyperparams(1))
    parameter.grad = torch.from_numpy(grads)
    optimizer.step()
    assert values[0, :3].tolist() == parameter[0].tolist() == [1, -2, 0]
    assert values[0, 6:].tolist() == optimizer.state[parameter]["z"][0].tolist() == grads[0].tolist()
    embedding = make(options("device"), tables=1)
    before = embedding.get([1, 2])
    optimizer = Ftrl(embedding.parameters(), lr=0.1, initial_accumulator_value=0.0)
    embedding.attach(optimizer, optimizer.param_groups[0])
    train(embedding, [1, 2], grad=1e-24)
    assert torch.equal(embedding.get([1, 2]), before)


@pytest.mark.parametrize("kind", [RowWiseAdagrad, Ftrl])
def test_a_sparse_gradient_is_refused_before_a_parameter_moved(kind: Any) -> None:
    before, sparse = torch.nn.Linear(1, 1), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = kind([*before.parameters(), *sparse.parameters()], lr=0.1)
    (before(torch.ones(1)) * sparse(torch.tensor([1])).sum()).sum().backward()
    values = [p.clone() for p in (*before.parameters(), *sparse.parameters())]
    with pytest.raises(OptimizerError, match=r"shape \(5, 3\) has a gradient of layout torch.sparse_coo; use dense"):
        optimizer.step()
    assert all(map(torch.equal, values, (*before.parameters(), *sparse.parameters())))


OWN = [RowWiseAdagrad, Ftrl, CatchUpAdam, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB, LarsSGD]


@pytest.mark.parametrize("kind", OWN)
def test_the_dense_step_moves_any_shape_runs_a_closure_and_is_saved(kind: type[torch.optim.Optimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3, 4), (5,), ())]
    untouched = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([*parameters, untouched], lr=0.1)

    def loss() -> float:
        optimizer.zero_grad()
        total = sum((p - 3.0).square().sum() for p in parameters)
        total.backward()
        return float(total.detach())

    before = optimizer.step(loss)
    for _ in range(20):
        optimizer.step(loss)
    assert loss() < before
    assert untouched.tolist() == [1, 1]
    again = kind([*parameters, untouched], lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert again.state_dict().keys() == optimizer.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "name", "value", "remedy"),
    [
        (RowWiseAdagrad, "lr", -1.0, "at least 0"),
        (RowWiseAdagrad, "lr", 1e39, "below 1.7"),
        (RowWiseAdagrad, "eps", math.nan, ""),
        (RowWiseAdagrad, "weight_decay_mode", "cowclip", "'l2', 'decoupled'"),
        (RowWiseAdagrad, "initial_accumulator_value", -0.1, ""),
        (Ftrl, "lambda1", 10**400, ""),
        (Ftrl, "lr", 0.0, ""),
        (Ftrl, "lr_power", "x", ""),
        (Ftrl, "lr_power", -9.0, "at least -8.0 and below 8.0"),
        (Ftrl, "power_sign", "+", ""),
        (PartialRowWiseAdam, "lr", -1.0, "at least 0"),
        (PartialRowWiseAdam, "betas", (0.9, 1.0), "two numbers"),
        (LAMB, "betas", 0.9, "two numbers"),
        (LAMB, "eps", -1e-3, ""),
        (PartialRowWiseLAMB, "weight_decay", math.inf, ""),
        (LarsSGD, "eta", -1.0, ""),
        (LarsSGD, "momentum", "x", ""),
        (CatchUpAdam, "eps", 0.0, ""),
        (CatchUpAdam, "eps", 1e-50, ""),
        (CatchUpAdam, "weight_decay", -1, ""),
    ],
)
def test_wrong_settings_are_refused_by_name(kind: Any, name: str, value: Any, remedy: str) -> None:
    group = [{"params": [torch.nn.Parameter(torch.zeros(1))], name: value}]
    check_refusal((lambda: kind(group), ValueError, f"{name}={value!r}"[:30], remedy))


def test_settings_that_do_not_go_together_are_refused() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    check_refusal((lambda: Ftrl(parameter, lr_power=0.5, initial_accumulator_value=0.0), ValueError, "value=0.0"))
    check_refusal((lambda: CatchUpAdam(parameter, lr=-1.0), ValueError, "-1.0"))  # torch's own
    optimizer = CatchUpAdam(parameter)
    rows = row_optimizer(optimizer, optimizer.param_groups[0])
    optimizer.param_groups[0]["weight_decay"] = 0.1  # it stays zero or not
    check_refusal((lambda: rows.compute_hyperparams(2), OptimizerError, "weight_decay"))
