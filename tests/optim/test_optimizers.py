"""Row optimizers against torch.optim where every batch holds every row, else against a loop in double precision."""

from __future__ import annotations

import copy
import importlib
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from support import naive
from support.rows import Table
from tierbed.engine import _core
from tierbed.engine.errors import OptimizerError
from tierbed.engine.optim import CatchUpAdam
from tierbed.engine.optim.row_optimizer import RowOptimizer, row_optimizer
from tierbed.engine.optim.rule import all_rules

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
]


def rows_of(optimizer: torch.optim.Optimizer) -> RowOptimizer:
    return row_optimizer(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_rows_in_every_batch_equal_torch(kind: type[torch.optim.Optimizer], options: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 5, generator=generator))
    optimizer = kind([parameter], **options)
    rows = rows_of(optimizer)
    state = [np.full((8, 5), initial, np.float32) for initial in rows.initial]
    values = np.concatenate([parameter.detach().numpy().copy(), *state], axis=1)
    updates = np.zeros(8, np.uint32)
    for step in range(1, 9):
        parameter.grad = torch.randn(8, 5, generator=generator) * 10.0 ** -(step % 4)
        naive.update(values, updates, parameter.grad.numpy(), rows.rule, rows.hyper(step))
        optimizer.step()
        np.testing.assert_allclose(values[:, :5], parameter.detach().numpy(), rtol=2e-6, atol=1e-6)
    for index, name in enumerate(rows.states, 1):
        wanted = optimizer.state[parameter][name].numpy()
        np.testing.assert_allclose(values[:, 5 * index : 5 * index + 5], wanted, rtol=1e-5, atol=1e-7)
    assert updates.tolist() == [8] * 8


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sgd_and_adagrad_equal_dense_torch_even_when_batches_miss_rows(kind: type[torch.optim.Optimizer]) -> None:
    table = Table([4], rows_of(kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)).initial)
    store = _core.FullTable(table.layout)
    ids = np.arange(50, dtype=np.uint64)
    dense = torch.nn.Embedding.from_pretrained(
        torch.from_numpy(table.initial(np.zeros(50, np.uint32), ids)[:, :4].copy()), freeze=False
    )
    optimizer = kind(dense.parameters(), lr=0.1)
    rows = rows_of(optimizer)
    rng = np.random.default_rng(0)
    for step in range(1, 21):
        keys = rng.integers(0, 50, 16).astype(np.uint64)
        target = torch.from_numpy(rng.standard_normal((16, 4)).astype(np.float32))
        optimizer.zero_grad()
        output = dense(torch.from_numpy(keys.astype(np.int64)))
        output.retain_grad()
        (output - target).square().sum().backward()
        optimizer.step()
        batch = table.batch(keys, np.zeros(16, np.uint32))
        store.find(batch)
        store.insert_missing(batch, table.layout)
        table.update(batch, output.grad.numpy(), rows.rule, rows.hyper(step), step)
    batch = table.batch(ids, np.zeros(50, np.uint32))
    store.find(batch)
    _core.initialise_missing(batch, table.layout)
    wanted = dense.weight.detach().numpy()[batch.keys.astype(np.int64)]
    np.testing.assert_allclose(table.values(batch.lines)[:, :4], wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["max_norm", "max_gradient", "lr_scale"])
def test_a_setting_that_rows_would_ignore_is_refused_by_name(name: str) -> None:
    with pytest.raises(OptimizerError, match=f"{name}=0.5; Adagrad has no such setting.*clip_grad_row_norm"):
        rows_of(torch.optim.Adagrad([{"params": [torch.nn.Parameter(torch.zeros(1))], name: 0.5}], lr=0.1))


SCHEDULES = [
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=4),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_what_schedulers_of_torch_write_into_a_group_is_accepted(kind: type, schedule: Any) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    named = [{"params": [("w", torch.nn.Parameter(torch.zeros(1)))], "name": "rows"}]
    optimizer = kind(named, lr=0.1, **options)
    rows = rows_of(optimizer)
    scheduler = schedule(optimizer)
    for step in range(1, 4):
        optimizer.step()
        scheduler.step()
        rows.hyper(step)


NO_EPS = [(torch.optim.Adagrad, {}), (torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.5})]


@pytest.mark.parametrize(("kind", "options"), NO_EPS, ids=["adagrad", "adam", "adamw"])
def test_without_eps_a_gradient_of_zero_makes_no_nan(kind: type, options: dict) -> None:
    rows = rows_of(kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, eps=0.0, **options))
    table = Table([3], rows.initial, state_widths=rows.row_state(3).widths)
    store = _core.FullTable(table.layout)
    keys, tables = np.arange(4, dtype=np.uint64), np.zeros(4, np.uint32)
    batch = table.batch(keys, tables)
    store.find(batch)
    store.insert_missing(batch, table.layout)
    before = table.values(batch.lines).copy()
    wanted = before.copy()
    # 1e-30: its square is 0 in float32
    grads = np.array([[0.0, 0, 0], [1e-30, -1e-30, -0.0], [0, 1, -2], [math.nan, 0, 0]], np.float32)
    naive.update(wanted, np.zeros(4, np.uint32), grads[batch.keys.astype(int)], rows.rule, rows.hyper(1), 1)
    table.update(batch, grads, rows.rule, rows.hyper(1), 1)
    values = table.values(batch.lines)
    np.testing.assert_array_equal(values, wanted)
    order = np.argsort(batch.keys)
    values, before = values[order][:, :3], before[order][:, :3]
    decay = np.float32(1 - 0.1 * options.get("weight_decay", 0.0))
    np.testing.assert_array_equal(values[:2], before[:2] * decay)
    np.testing.assert_allclose(values[2], before[2] * decay - [0, 0.1, -0.1], rtol=1e-5)
    assert np.isnan(values[3]).tolist() == [True, False, False]


class LazyRow:
    """One row in double precision, as the documentation words it."""

    def __init__(self, w: np.ndarray, options: dict) -> None:
        self.w, self.o, self.touched = w.astype(float), options, False
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)

    def momentum(self, g: np.ndarray, step: int) -> None:
        g = g + self.o["weight_decay"] * self.w
        self.m = self.o["momentum"] * self.m + (1 - self.o["dampening"]) * g if self.touched else g
        self.w = self.w - self.o["lr"] * self.m

    def adamw(self, g: np.ndarray, step: int) -> None:
        beta1, beta2 = self.o["betas"]
        self.w = self.w * (1 - self.o["lr"] * self.o["weight_decay"])
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        hat = self.m / (1 - beta1**step), self.v / (1 - beta2**step)
        self.w = self.w - self.o["lr"] * hat[0] / (np.sqrt(hat[1]) + self.o["eps"])


@pytest.mark.parametrize(
    ("kind", "formula", "options"),
    [
        (torch.optim.SGD, "momentum", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
        (torch.optim.AdamW, "adamw", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.2}),
    ],
)
def test_a_row_and_its_state_move_only_with_its_batches(
    kind: type[torch.optim.Optimizer], formula: str, options: dict
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
    rows = rows_of(optimizer)
    table = Table([3], rows.initial)
    store = _core.FullTable(table.layout)
    zeros = np.zeros(12, np.uint32)
    lazy = [LazyRow(row[:3], options) for row in table.initial(zeros, np.arange(12, dtype=np.uint64))]
    rng = np.random.default_rng(0)
    for step in range(1, 16):
        keys = rng.integers(0, 12, 4).astype(np.uint64)
        grads = rng.standard_normal((4, 3), np.float32)
        batch = table.batch(keys, zeros[:4])
        store.find(batch)
        store.insert_missing(batch, table.layout)
        table.update(batch, grads, rows.rule, rows.hyper(step), step)
        for key in set(keys.tolist()):
            getattr(lazy[key], formula)(grads[keys == key].astype(float).sum(0), step)
            lazy[key].touched = True
    batch = table.batch(np.arange(12), zeros)
    store.find(batch)
    _core.initialise_missing(batch, table.layout)
    values = table.values(batch.lines)
    for row, key in zip(values, batch.keys.tolist(), strict=True):
        np.testing.assert_allclose(row[:3], lazy[key].w, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(row[3:6], lazy[key].m, rtol=1e-5, atol=1e-5)


def test_epsilon_comes_after_the_bias_correction() -> None:
    """Where gradients are tiny this decides the step: SparseAdam adds it before."""
    options = {"lr": 0.1, "eps": 1e-3}
    parameter = torch.nn.Parameter(torch.zeros(1, 1))
    parameter.grad = torch.full((1, 1), 1e-4)
    optimizer = torch.optim.Adam([parameter], **options)
    values = np.zeros((1, 3), np.float32)
    rows = rows_of(optimizer)
    naive.update(values, np.zeros(1, np.uint32), parameter.grad.numpy(), rows.rule, rows.hyper(1))
    optimizer.step()
    assert values[0, 0] == pytest.approx(parameter.item(), rel=1e-6)
    assert values[0, 0] == pytest.approx(-0.1 * 1e-4 / (1e-4 + 1e-3), rel=1e-5)


def test_settings_are_read_at_each_step_even_after_load_state_dict() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = rows_of(optimizer)
    assert rows.hyper(1)[0] == 0.1
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert rows.hyper(2)[0] == 0.5
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert rows.hyper(3)[0] == 0.25


def test_each_group_has_its_own_settings() -> None:
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.Adagrad([{"params": [one]}, {"params": [two], "lr": 7.0}], lr=0.1)
    assert [row_optimizer(optimizer, group).hyper(1)[0] for group in optimizer.param_groups] == [0.1, 7.0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, CatchUpAdam])
def test_maximize_is_true_or_false_as_torch_reads_it(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = rows_of(optimizer)
    for value, expected in ((None, False), (2, True)):
        optimizer.param_groups[0]["maximize"] = value
        numbers = rows.hyper(1)
        optimizer.param_groups[0]["maximize"] = expected
        assert numbers == rows.hyper(1)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = CatchUpAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(OptimizerError):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "eps": 0.0})
    assert len(optimizer.param_groups) == 1


def test_momentum_that_appears_later_is_refused_because_rows_have_no_buffer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = rows_of(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(OptimizerError, match="sgd_momentum"):
        rows.hyper(1)


class OwnSGD(torch.optim.SGD):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (
            torch.optim.Adadelta,
            {},
            r"Adadelta cannot.*torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW.*torch.optim.SGD",
        ),
        (torch.optim.SparseAdam, {}, "SparseAdam"),
        (OwnSGD, {}, "OwnSGD"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.SGD, {"differentiable": True}, "differentiable=True"),
        (torch.optim.RMSprop, {"centered": True}, "RMSprop: centered=True is not supported"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum=0.9; RMSprop trains rows without momentum"),
    ],
)
def test_what_rows_cannot_follow_is_refused_by_name(kind: type, options: dict, named: str) -> None:
    with pytest.raises(OptimizerError, match=named):
        rows_of(kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options))


class OwnAdam(torch.optim.Adam):
    pass


KINDS = [torch.optim.Adafactor, torch.optim.Adadelta, torch.optim.SparseAdam, torch.optim.Muon, OwnSGD, OwnAdam]


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_that_a_refusal_names_can_be_imported_by_that_name(kind: type) -> None:
    with pytest.raises(OptimizerError) as caught:
        rows_of(kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1))
    named = re.findall(r"\w+(?:\.\w+)+", str(caught.value))
    found = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in named]
    assert found[0] is kind
    assert set(found[1:]) == {rule.optimizer for rule in all_rules()}
    if kind.__module__.startswith("torch"):
        assert named[0] == f"torch.optim.{kind.__name__}"


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_options_that_choose_an_implementation_are_accepted(option: str) -> None:
    rows = rows_of(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], **{option: True}))
    assert (rows.rule, rows.states, rows.initial) == ("adam", ("exp_avg", "exp_avg_sq"), [0.0, 0.0])


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (torch.optim.SGD, "lr", math.nan),
        (torch.optim.Adam, "lr", -1.0),
        (torch.optim.Adam, "eps", -1.0),
        (torch.optim.Adam, "betas", (1.0, 0.9)),
        (torch.optim.Adam, "betas", (0.9,)),
        (CatchUpAdam, "betas", (0.9, 1.0)),
        (torch.optim.Adagrad, "weight_decay", math.inf),
        (torch.optim.SGD, "clip_grad_norm", 1.0),
        (torch.optim.Adagrad, "max_norm", 1.0),
        (CatchUpAdam, "max_gradient", 1.0),
        (torch.optim.Adam, "momentum", 0.9),
        (torch.optim.RMSprop, "momentum", 0.9),
        (torch.optim.RMSprop, "alpha", 1.0),
        (torch.optim.SGD, "max_row_norm", 0.0),
    ],
)
def test_a_wrong_setting_of_a_running_optimizer_is_refused_by_name(
    kind: type[torch.optim.Optimizer], name: str, value: object
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = rows_of(optimizer)
    optimizer.param_groups[0][name] = value
    with pytest.raises(OptimizerError, match=f"{name}="):
        rows.hyper(3)
