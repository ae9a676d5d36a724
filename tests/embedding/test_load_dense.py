"""Rows and states of a dense table: a checkpoint of `nn.Embedding` goes on here as it would have gone on there."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import graph_of
from support.refusals import check_refusal
from support.stores import options
from tierbed import EagerOptimizer, MultiTableEmbedding, make_constant_initializer, make_table_options, optim
from tierbed.engine.errors import InputError, OptimizerError

ROWS, DIM, STEPS = 30, 4, 4
OPTIMIZERS = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def made(names: tuple[str | None, ...] = ("a", "b"), store: Any = None) -> MultiTableEmbedding:
    tables = [make_table_options(make_constant_initializer(0.5), name, ROWS) for name in names]
    return MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, store or options("device"))


def batch(seed: int) -> Tensor:
    """Every id, so that a dense optimizer, which moves all rows, and a lazy one agree."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))


def train(rows: Any, optimizer: Any, first: int) -> list[Tensor]:
    losses = []
    for seed in range(first, first + STEPS):
        optimizer.zero_grad()
        loss = (rows(batch(seed)) * torch.arange(1.0, 1 + DIM)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.rotated("store")
def test_a_checkpoint_of_torch_goes_on_with_its_states(name, store, tmp_path) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(ROWS, DIM)
    theirs = OPTIMIZERS[name](dense.parameters())
    train(dense, theirs, 0)
    [state] = copy.deepcopy(theirs.state_dict()["state"]).values()
    weights, step = dense.weight.detach().clone(), int(state.pop("step", STEPS))
    with made(("a",), options(store, tmp_path)) as rows:
        optimizer = EagerOptimizer(OPTIMIZERS[name](rows.parameters()), rows)
        known = rows.table_handle().open_table.state.names
        rows.load_dense({"a": weights}, {"a": dict(zip(known, state.values(), strict=True))}, step)
        losses = train(dense, theirs, STEPS)
        torch.testing.assert_close(train(rows, optimizer, STEPS), losses, rtol=1e-5, atol=1e-6)
        assert rows.metrics()["table"]["step"] == 2 * STEPS
    with made(("a",), options(store, tmp_path)) as again:  # and with new state without it
        optimizer = EagerOptimizer(OPTIMIZERS[name](again.parameters()), again)
        again.load_dense({0: weights})
        with pytest.raises(AssertionError):
            torch.testing.assert_close(train(again, optimizer, STEPS), losses, rtol=1e-5, atol=1e-6)


def test_other_tables_keep_their_rows_and_states() -> None:
    with made() as rows:
        graph = graph_of(lambda graph, ids: graph.rows(ids, 1).sum().backward(), rows=rows)
        graph.add_optimizer(torch.optim.Adagrad(rows.parameters(), lr=0.1))
        graph(batch(0))
        before, weights = rows.get(batch(0), "b"), torch.rand(ROWS, DIM)
        rows.load_dense({"a": weights})
        assert torch.equal(rows.get(torch.arange(ROWS), "a"), weights)
        assert torch.equal(rows.get(batch(0), "b"), before)
        graph(batch(0))
        moved = before - rows.get(batch(0), "b")
        torch.testing.assert_close(moved, torch.full_like(moved, 0.1 / 2**0.5))  # the second step of Adagrad


WEIGHTS, SUMS = torch.rand(ROWS, DIM), torch.rand(ROWS, DIM)
A, OF_SUM = {"a": WEIGHTS}, "'sum' is torch."
MISFITS = [
    (({"c": WEIGHTS},), "embedding 'rows' has no table 'c'", "0 to 1, or by name 'a', 'b'"),
    (({"a": WEIGHTS[1:]},), "weights of table a: 29 rows", "30"),
    (({"a": WEIGHTS[:, 1:]},), "weights of table a: got torch.float32 [30, 3]", "[rows, 4]"),
    (({"a": WEIGHTS.long()},), "weights of table a: got torch.int64"),
    (({**A, 0: WEIGHTS},), "weights: table a is given twice"),
    ((WEIGHTS,), "weights of embedding 'rows': got Tensor", "a dict by table"),
    ((A, {"a": {"sum": SUMS, "step": torch.tensor(1.5)}}), "step=tensor(1.5000): "),
    ((A, {"b": {"sum": SUMS}}), "states of table b", "weights"),
    ((A, {"a": {"exp_avg": SUMS}}), "'exp_avg' is no state of adagrad, which has sum"),
    ((A, {"a": {}}), "there is no 'sum'"),
    ((A, {"a": {"sum": SUMS[:, 0]}}), "'sum' is [30]", "[30, 4]"),
    ((A, {"a": {"sum": SUMS.double().index_fill(0, torch.tensor([3]), -1e39)}}), OF_SUM, "within float32's range"),
    *(((A, {"a": {"sum": SUMS.to(kind)}}), OF_SUM) for kind in (torch.int32, torch.bool, torch.cfloat)),
    *(((A, None, step), f"step={step!r}: give a whole number") for step in (-1, 1.5, "3", True)),
]


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    with made() as rows:
        with pytest.raises(OptimizerError, match="has no optimizer with state"):
            rows.load_dense(A, {"a": {"sum": SUMS}})
        kept = EagerOptimizer(torch.optim.Adagrad(rows.parameters()), rows)
        for given, *named in MISFITS:
            check_refusal((partial(rows.load_dense, *given), InputError, *named))
        assert rows.size() == 0
        rows.put([1], WEIGHTS[:1], "b")
        with pytest.raises(InputError, match="step=3 of embedding 'rows': the rows of the other tables are kept"):
            rows.load_dense(A, step=3)
        assert rows.size() == 1
        with pytest.raises(OptimizerError, match=r"'sum' \[30, 4\] is state for rows of embedding 'rows'.*load_dense"):
            kept.load_state_dict({"state": {0: {"sum": SUMS}}, "param_groups": kept.state_dict()["param_groups"]})
        for sums in (SUMS.double(), SUMS.index_fill(0, torch.tensor([3]), torch.inf)):
            rows.load_dense(A, {"a": {"sum": sums}})
    tables, store = [make_table_options(make_constant_initializer(0.5), "a", 3)], options("device")
    with MultiTableEmbedding("narrow", DIM, torch.float16, torch.int64, tables, store, padding_idx=1) as narrow:
        with pytest.raises(InputError, match=r"overflows .*float16"):
            narrow.load_dense({"a": torch.full((3, DIM), 1e6)})
        with pytest.raises(InputError, match="weights of table a: row 1 belongs to padding_idx"):
            narrow.load_dense({"a": torch.ones(3, DIM)})
        assert narrow.size() == 0


def test_an_optimizer_in_backward_is_known_before_the_first_lookup() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own import
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
    state = {"step": torch.tensor(4.0), "exp_avg": SUMS, "exp_avg_sq": SUMS}
    with made(("a",)) as rows:
        _apply_optimizer_in_backward(torch.optim.Adam, rows.parameters(), {"lr": 0.1})
        rows.load_dense(A, {"a": state})
        assert rows.table_handle().open_table.step == 4


@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.Adagrad, lr_decay=0.1), optim.LAMB])
def test_states_without_the_step_that_their_rule_counts_are_refused(kind, caplog) -> None:
    with made(("a",)) as rows:
        kept = EagerOptimizer(kind(rows.parameters()), rows)
        table = rows.table_handle().open_table
        kinds = zip(table.state.names, table.state.widths, strict=True)
        state = {state: torch.rand(ROWS, width) for state, width in kinds}
        with pytest.raises(InputError, match=r"states of embedding 'rows' have no 'step' or 'iter', .* give step="):
            rows.load_dense(A, {"a": state})
        assert rows.size() == 0
        for given, step, found in (
            ({}, 0, 0),
            ({}, 5, 5),
            ({"step": torch.tensor(6.0)}, None, 6),
            ({"iter": torch.tensor([7])}, None, 7),
            ({"step": 3}, 8, 8),
        ):
            rows.load_dense(A, {"a": {**state, **given}}, step)
            assert rows.metrics()["table"]["step"] == found
        assert "the count goes on from" not in caplog.text
        rows.load_dense(A, {"a": state})  # to rows that have a number
        assert rows.metrics()["table"]["step"] == 8
        assert "counting continues from step 8; give step= to continue from another step" in caplog.text
        rows.load_dense(A)
        del kept
