"""Rows and states of a dense table: a checkpoint of `nn.Embedding` goes on here as it would have gone on there."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import graph_of
from tierbed import (
    EagerOptimizer,
    InputError,
    MultiTableEmbedding,
    OptimizerError,
    make_cached_ssd_store_options,
    make_constant_initializer,
    make_device_mem_store_options,
    make_host_mem_store_options,
    make_table_options,
    optim,
)

ROWS, DIM, STEPS = 30, 4, 4
OPTIMIZERS: dict[str, Any] = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
STORES: dict[str, Any] = {
    "device_mem": lambda path: make_device_mem_store_options(),
    "host_mem": lambda path: make_host_mem_store_options(persistent_path=path),
    "cached_ssd": lambda path: make_cached_ssd_store_options(0.01, path),
}


def made(store: Any, ids: int | None = ROWS, names: tuple[str | None, ...] = ("a", "b")) -> MultiTableEmbedding:
    tables = [make_table_options(make_constant_initializer(0.5), name, ids) for name in names]
    return MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, store)


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


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_torch_goes_on_with_its_states(name: str, store: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(ROWS, DIM)
    theirs = OPTIMIZERS[name](dense.parameters())
    train(dense, theirs, 0)
    [state] = copy.deepcopy(theirs.state_dict()["state"]).values()
    weights, step = dense.weight.detach().clone(), int(state.pop("step", STEPS))
    with made(STORES[store](tmp_path), names=("a",)) as rows:
        optimizer = EagerOptimizer(OPTIMIZERS[name](rows.parameters()), rows)
        known = rows.table_handle().local_table.state.names
        rows.load_dense({"a": weights}, {"a": dict(zip(known, state.values(), strict=True))}, step)
        losses = train(dense, theirs, STEPS)
        torch.testing.assert_close(train(rows, optimizer, STEPS), losses, rtol=1e-5, atol=1e-6)
        assert rows.metrics()["table"]["step"] == 2 * STEPS
    with made(STORES[store](tmp_path), names=("a",)) as again:  # and with new state without it
        optimizer = EagerOptimizer(OPTIMIZERS[name](again.parameters()), again)
        again.load_dense({0: weights})
        with pytest.raises(AssertionError):
            torch.testing.assert_close(train(again, optimizer, STEPS), losses, rtol=1e-5, atol=1e-6)


def test_other_tables_keep_their_rows_and_states() -> None:
    with made(make_device_mem_store_options()) as rows:
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


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    weights, sums = torch.rand(ROWS, DIM), torch.rand(ROWS, DIM)
    cases: list[tuple[Any, Any, str]] = [
        ({"c": weights}, None, "weights: table 'c' of embedding 'rows'; give one of 0 to 1, or by name 'a', 'b'"),
        ({"a": weights[1:]}, None, "weights of table a: 29 rows, and the table has 30"),
        (
            {"a": weights[:, 1:]},
            None,
            r"weights of table a: got torch.float32 \[30, 3\]; give torch.float32, .* \[rows, 4\]",
        ),
        ({"a": weights.long()}, None, "weights of table a: got torch.int64"),
        ({"a": weights.double()}, None, "weights of table a: got torch.float64"),
        (
            {"a": weights},
            {"a": {"sum": sums, "step": torch.tensor(1.5)}},
            r"step=tensor\(1.5000\): give a whole number",
        ),
        ({"a": weights}, {"b": {"sum": sums}}, "states of table b: give its weights as well"),
        ({"a": weights}, {"a": {"exp_avg": sums}}, "'exp_avg' is no state of adagrad, which has sum"),
        ({"a": weights}, {"a": {}}, "there is no 'sum'; give all of sum, or none"),
        ({"a": weights}, {"a": {"sum": sums[:, 0]}}, r"'sum' is \[30\]; give a tensor \[30, 4\]"),
        ({"a": weights, 0: weights}, None, "weights: table a is given twice"),
        (weights, None, "weights of embedding 'rows': got Tensor; give a dict by table"),
    ]
    with made(make_device_mem_store_options()) as rows:
        with pytest.raises(OptimizerError, match="has no optimizer with state"):
            rows.load_dense({"a": weights}, {"a": {"sum": sums}})
        kept = EagerOptimizer(torch.optim.Adagrad(rows.parameters()), rows)
        for given, states, message in cases:
            with pytest.raises(InputError, match=message):
                rows.load_dense(given, states)
        for step in (-1, 1.5, "3", True):
            with pytest.raises(InputError, match=f"step={step!r}: give a whole number"):
                rows.load_dense({"a": weights}, step=step)  # type: ignore[arg-type]
        assert rows.size() == 0
        rows.put([1], weights[:1], "b")
        with pytest.raises(InputError, match="step=3 of embedding 'rows': other tables keep"):
            rows.load_dense({"a": weights}, step=3)
        assert rows.size() == 1
        with pytest.raises(OptimizerError, match=r"'sum' \[30, 4\] is of the rows of embedding 'rows'.*load_dense"):
            kept.load_state_dict({"state": {0: {"sum": sums}}, "param_groups": kept.state_dict()["param_groups"]})
    tables = [make_table_options(make_constant_initializer(0.5), "a", 3)]
    store = make_device_mem_store_options()
    with MultiTableEmbedding("narrow", DIM, torch.float16, torch.int64, tables, store, padding_idx=1) as narrow:
        with pytest.raises(InputError, match=r"overflows .*float16"):
            narrow.load_dense({"a": torch.full((3, DIM), 1e6)})
        with pytest.raises(InputError, match="weights of table a: row 1 is that of padding_idx"):
            narrow.load_dense({"a": torch.ones(3, DIM)})
        assert narrow.size() == 0


def test_an_optimizer_in_backward_is_known_before_the_first_lookup() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own import
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
    state = {"step": torch.tensor(4.0), "exp_avg": torch.rand(ROWS, DIM), "exp_avg_sq": torch.rand(ROWS, DIM)}
    with made(make_device_mem_store_options(), names=("a",)) as rows:
        _apply_optimizer_in_backward(torch.optim.Adam, rows.parameters(), {"lr": 0.1})
        rows.load_dense({"a": torch.rand(ROWS, DIM)}, {"a": state})
        assert rows.table_handle().local_table.step == 4


COUNT_STEPS = {
    "adam": lambda p: torch.optim.Adam(p),
    "adagrad with decay": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "lamb": lambda p: optim.LAMB(p),
    "partial": lambda p: optim.PartialRowWiseAdam(p),
}


@pytest.mark.parametrize("name", COUNT_STEPS)
def test_states_without_the_step_that_their_rule_counts_are_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with made(make_device_mem_store_options(), names=("a",)) as rows:
        kept = EagerOptimizer(COUNT_STEPS[name](rows.parameters()), rows)
        weights, table = {"a": torch.rand(ROWS, DIM)}, rows.table_handle().local_table
        kinds = zip(table.state.names, table.state.widths, strict=True)
        state = {state: torch.rand(ROWS, width) for state, width in kinds}
        with pytest.raises(InputError, match=r"states of embedding 'rows' have no 'step' or 'iter', .* give step="):
            rows.load_dense(weights, {"a": state})
        assert rows.size() == 0
        for given, step, found in (
            ({}, 0, 0),
            ({}, 5, 5),
            ({"step": torch.tensor(6.0)}, None, 6),
            ({"iter": torch.tensor([7])}, None, 7),
            ({"step": 3}, 8, 8),
        ):
            rows.load_dense(weights, {"a": {**state, **given}}, step)
            assert rows.table_handle().local_table.step == found
        assert "it goes on from" not in caplog.text
        rows.load_dense(weights, {"a": state})  # to rows that have a number
        assert rows.table_handle().local_table.step == 8
        assert "it goes on from 8; give step= for another number" in caplog.text
        rows.load_dense(weights)
        del kept


def test_states_that_float32_does_not_hold_are_refused() -> None:
    with made(make_device_mem_store_options(), names=("a",)) as rows:
        kept = EagerOptimizer(torch.optim.Adagrad(rows.parameters()), rows)
        weights, state = torch.rand(ROWS, DIM), torch.rand(ROWS, DIM, dtype=torch.float64)
        for wrong in (state.index_fill(0, torch.tensor([3]), -1e39), state.int(), state.bool(), state.to(torch.cfloat)):
            with pytest.raises(InputError, match=r"'sum' is torch\.[a-z0-9]+, or beyond float32; give fl"):
                rows.load_dense({"a": weights}, {"a": {"sum": wrong}})
        rows.load_dense({"a": weights}, {"a": {"sum": state}})
        rows.load_dense({"a": weights}, {"a": {"sum": state.index_fill(0, torch.tensor([3]), torch.inf)}})
        del kept
