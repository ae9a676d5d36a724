"""A setting of an optimizer is ignored, misread, or refused without its name and value."""

from __future__ import annotations

import copy
import importlib
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from support.refusals import check_refusal
from support.rows import Table
from tierbed.engine import _core
from tierbed.engine.errors import OptimizerError
from tierbed.engine.optim import CatchUpAdam
from tierbed.engine.optim.row_optimizer import RowOptimizer, row_optimizer
from tierbed.engine.optim.rule import load_rules

pytestmark = pytest.mark.optimizer


def rows_of(optimizer: torch.optim.Optimizer) -> RowOptimizer:
    return row_optimizer(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=4),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    ],
)
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
        rows.compute_hyperparams(step)


NO_EPS = [(torch.optim.Adagrad, {}), (torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.5})]


@pytest.mark.parametrize(("kind", "options"), NO_EPS, ids=["adagrad", "adam", "adamw"])
def test_without_eps_a_gradient_of_zero_makes_no_nan(kind: type, options: dict[str, Any]) -> None:
    rows = rows_of(kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, eps=0.0, **options))
    table = Table([3], rows.initial_values, state_widths=rows.make_row_state(3).widths)
    store = _core.FullTable(table.layout)
    batch = table.batch(np.arange(4, dtype=np.uint64), np.zeros(4, np.uint32))
    store.look_up_rows(batch)
    store.insert_missing(batch, table.layout)
    before = table.values(batch.lines)[:, :3].copy()
    # 1e-30: its square is 0 in float32
    grads = np.array([[0.0, 0, 0], [1e-30, -1e-30, -0.0], [0, 1, -2], [math.nan, 0, 0]], np.float32)
    table.update(batch, grads, rows.rule, rows.compute_hyperparams(1), 1)
    order = np.argsort(batch.keys)
    values, before = table.values(batch.lines)[order][:, :3], before[order]
    decay = np.float32(1 - 0.1 * options.get("weight_decay", 0.0))
    np.testing.assert_array_equal(values[:2], before[:2] * decay)
    np.testing.assert_allclose(values[2], before[2] * decay - [0, 0.1, -0.1], rtol=1e-5)
    assert np.isnan(values[3]).tolist() == [True, False, False]


def test_settings_of_a_group_are_read_at_each_step_even_after_load_state_dict() -> None:
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 7.0}], lr=0.1)
    rows = rows_of(optimizer)
    assert row_optimizer(optimizer, optimizer.param_groups[1]).compute_hyperparams(1)[0] == 7.0
    assert rows.compute_hyperparams(1)[0] == 0.1
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert rows.compute_hyperparams(2)[0] == 0.5
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert rows.compute_hyperparams(3)[0] == 0.25


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, CatchUpAdam])
def test_maximize_is_true_or_false_as_torch_reads_it(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = rows_of(optimizer)
    for value, expected in ((None, False), (2, True)):
        optimizer.param_groups[0]["maximize"] = value
        numbers = rows.compute_hyperparams(1)
        optimizer.param_groups[0]["maximize"] = expected
        assert numbers == rows.compute_hyperparams(1)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = CatchUpAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(OptimizerError):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "eps": 0.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=", "True"),
        (torch.optim.SGD, {"differentiable": True}, "differentiable=", "True"),
        (torch.optim.RMSprop, {"centered": True}, "centered=", "True"),
    ],
)
def test_what_rows_cannot_follow_is_refused_by_name(refusal: Any) -> None:
    kind, options, *named = refusal
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options)
    check_refusal((lambda: rows_of(optimizer), OptimizerError, *named))


class OwnSGD(torch.optim.SGD):
    """A subclass, which may compute anything."""


KINDS = [torch.optim.Adafactor, torch.optim.Adadelta, torch.optim.SparseAdam, torch.optim.Muon, OwnSGD]


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_that_a_refusal_names_can_be_imported_by_that_name(kind: type) -> None:
    with pytest.raises(OptimizerError) as caught:
        rows_of(kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1))
    named = re.findall(r"\w+(?:\.\w+)+", str(caught.value))
    found = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in named]
    assert found[0] is kind
    assert set(found[1:]) == {rule.optimizer for rule in load_rules()}
    if kind.__module__.startswith("torch"):
        assert named[0] == f"torch.optim.{kind.__name__}"


def test_options_that_choose_an_implementation_are_accepted() -> None:
    for option in ("foreach", "fused", "capturable"):
        rows = rows_of(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], **{option: True}))
        assert (rows.rule, rows.states, rows.initial_values) == ("adam", ("exp_avg", "exp_avg_sq"), [0.0, 0.0])


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
        (torch.optim.Adam, "momentum", 0.9),
        (torch.optim.SGD, "momentum", 0.9),  # rows have no buffer
        (torch.optim.RMSprop, "momentum", 0.9),
        (torch.optim.RMSprop, "alpha", 1.0),
        (torch.optim.SGD, "max_row_norm", 0.0),
    ],
)
def test_a_wrong_setting_of_a_running_optimizer_is_refused(kind: Any, name: str, value: object) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = rows_of(optimizer)
    optimizer.param_groups[0][name] = value
    with pytest.raises(OptimizerError, match=f"{name}="):
        rows.compute_hyperparams(3)
