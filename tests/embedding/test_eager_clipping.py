"""`clip_grad_norm_` of an EagerOptimizer clips rows and dense parameters by one norm, as a graph and torch do."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.embeddings import DIM, make
from support.graphs import dense_copy, embedding, graph_of, id_batches
from support.stores import options
from tierbed import EagerOptimizer, GraphError, InputError, MultiTableEmbedding, OptimizerError

IDS = torch.tensor([3, 4, 3])


def summed(**options: Any) -> tuple[MultiTableEmbedding, EagerOptimizer]:
    """An embedding and its optimizer."""
    rows = embedding(**options)
    return rows, EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=1.0), rows)


def twins(**settings: Any) -> tuple[nn.ModuleList, nn.ModuleList, EagerOptimizer, torch.optim.Optimizer]:
    """Rows and a linear layer, their likeness in torch, and the optimizers of both."""
    rows, net = embedding(), nn.Linear(4, 1)
    ours, theirs = nn.ModuleList([rows, net]), nn.ModuleList([dense_copy(rows), copy.deepcopy(net)])
    optimizer = EagerOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1, **settings), ours)
    return ours, theirs, optimizer, torch.optim.SGD(theirs.parameters(), lr=0.1)


def same(ours: nn.ModuleList, theirs: nn.ModuleList) -> None:
    torch.testing.assert_close(ours[0].get(range(50)), theirs[0].weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1].weight, theirs[1].weight, rtol=1e-5, atol=1e-6)


def model(store_options: Any, name: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    users, items = (make(store_options, name=f"{name}-{part}", tables=1) for part in ("users", "items"))
    return nn.ModuleDict({"one": users, "two": items, "net": nn.Linear(DIM, 1)})


def loss_of(model: Any, ids: Tensor) -> Tensor:
    rows = model["one"](ids) + model["two"](ids.view(-1, 2), pooling="sum").repeat(2, 1)
    return model["net"](rows).square().sum()


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
@pytest.mark.rotated("store")
def test_rows_and_parameters_have_the_bits_of_a_graph_that_clips(tmp_path, store, max_norm) -> None:
    ours, theirs = (model(options(store, tmp_path / name), name) for name in ("eager", "graph"))
    optimizer = EagerOptimizer(torch.optim.Adagrad(ours.parameters(), lr=0.1), ours)
    inner = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    graph = graph_of(lambda graph, ids: loss_of(graph.model, ids).backward(), inner, model=theirs)
    graph.clip_grad_norm(max_norm)
    for ids in id_batches(12, steps=3):
        graph(ids)
        loss_of(ours, ids).backward()
        norm = optimizer.clip_grad_norm_(ours.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm < 1)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(ours["net"].weight, theirs["net"].weight)
    for name in ("one", "two"):
        assert torch.equal(ours[name].get(range(50)), theirs[name].get(range(50)))
        ours[name].close()
        theirs[name].close()


def loss(model: nn.ModuleList) -> Tensor:
    return (model[1](model[0](IDS)) - 5).square().sum()


@pytest.mark.parametrize("which", ["all", "rows", "net", "one tensor"])
@pytest.mark.parametrize("by", ["optimizer", "torch"])
def test_gradients_are_scaled_as_by_torch_once_and_again_and_those_that_come_later_are_not(by, which) -> None:
    ours, theirs, optimizer, plain = twins()

    def chosen(model: nn.ModuleList) -> Any:
        parts = {"all": model, "rows": model[0], "net": model[1], "one tensor": model[0]}
        parameters = parts[which].parameters()
        return next(parameters) if which == "one tensor" else parameters

    for max_norms in ((1.0,), (1e9,), (3.0, 2.0)):
        for scale in (1.0, -2.0):
            (loss(ours) * scale).backward()
            (loss(theirs) * scale).backward()
            for max_norm in max_norms:
                clip = nn.utils.clip_grad_norm_ if by == "torch" else optimizer.clip_grad_norm_
                found = clip(chosen(ours), max_norm)
                expected = nn.utils.clip_grad_norm_(chosen(theirs), max_norm)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for _ in range(2):  # gradients stay, and so does their scale
            optimizer.step()
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_are_rounded_no_further_where_more_come_after_a_clip(dtype) -> None:
    rows, optimizer = summed(output_dtype=dtype)
    before = rows.get([4, 7])
    rows(IDS).sum().backward()
    optimizer.clip_grad_norm_(rows.parameters(), 1.0)
    rows(IDS[:0]).sum().backward()
    rows(torch.tensor([7])).sum().backward()
    torch.testing.assert_close(optimizer.clip_grad_norm_(rows.parameters(), math.inf), torch.tensor(5**0.5))
    optimizer.step()
    expected = torch.tensor([[20**-0.5], [1.0]]).expand(2, 4)
    torch.testing.assert_close(before - rows.get([4, 7]), expected, rtol=1e-5, atol=0)


def test_a_norm_of_nothing_is_zero_and_one_that_is_not_finite_reaches_the_rows_as_in_torch() -> None:
    rows, optimizer = summed()
    assert optimizer.clip_grad_norm_(rows.parameters(), 1.0) == 0
    rows(IDS[:0]).sum().backward()
    assert optimizer.clip_grad_norm_(rows.parameters(), 1.0) == 0
    (rows(IDS).sum() * math.nan).backward()
    assert optimizer.clip_grad_norm_(rows.parameters(), 1.0).isnan()
    optimizer.step()
    assert rows.get(3).isnan().all()


@pytest.mark.parametrize("scale", [1.0, math.inf])
def test_an_infinite_limit_measures_and_scales_nothing_and_a_tensor_is_a_limit(scale) -> None:
    rows, optimizer = summed()
    before = rows.get(4)
    (rows(IDS) * scale).sum().backward()
    norm = optimizer.clip_grad_norm_(rows.parameters(), math.inf)
    torch.testing.assert_close(norm, torch.tensor(scale * 20**0.5))
    assert optimizer.clip_grad_norm_(rows.parameters(), torch.tensor(math.inf)) == norm
    if scale == 1.0:
        torch.testing.assert_close(optimizer.clip_grad_norm_(rows.parameters(), torch.tensor(20**0.5 / 2)), norm)
        scale = 0.5
    optimizer.step()
    torch.testing.assert_close(rows.get(4), before - scale)


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    (rows, optimizer), (other, another) = summed(), summed()
    (rows(IDS) + other(IDS)).sum().backward()
    for wrong in (0, -1.0, math.nan, "1", None):
        with pytest.raises(OptimizerError, match=rf"max_norm={wrong!r}: give a number from .*, or inf") as raised:
            optimizer.clip_grad_norm_(rows.parameters(), wrong)  # type: ignore[arg-type]
        assert "or None" not in str(raised.value)
    with pytest.raises(OptimizerError, match=rf"another EagerOptimizer trains embedding {other.name!r}"):
        optimizer.clip_grad_norm_([*rows.parameters(), *other.parameters()], 0.1)
    before = rows.get(4)
    optimizer.step()
    torch.testing.assert_close(before - rows.get(4), torch.ones(4))
    optimizer.zero_grad()
    grad = torch.ones(3, 4)
    rows(IDS).backward(grad)
    grad.mul_(2)
    with pytest.raises(InputError, match="changed in place"):
        optimizer.clip_grad_norm_(rows.parameters(), 1.0)
    del another


@pytest.mark.parametrize(
    "steps", [("value",), ("value", "value"), ("norm", "value"), ("scaler",), ("scaler", "norm", "value")]
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.rotated("fused")
def test_torchs_clips_and_its_scaler_do_to_rows_what_they_do_to_a_dense_table(steps, fused) -> None:
    ours, theirs, *optimizers = twins(fused=fused)
    scale = 2.0**100 if fused else 64.0  # whose squares float32 does not hold
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale, enabled="scaler" in steps) for _ in optimizers]
    scales = []
    for factor in (1.0, 3.0, math.inf, 0.5):
        for model, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            rows_of_it = model[0](IDS)
            overflow = (rows_of_it * factor).sum() if factor == math.inf and "scaler" in steps else 0.0  # of rows alone
            scaler.scale(loss(model) + overflow).backward()
            if len(steps) > 1:
                scaler.unscale_(optimizer)
            for limit, step in zip((0.5, 0.2, 0.1), steps, strict=False):
                if step == "value":
                    nn.utils.clip_grad_value_(model.parameters(), limit)
                elif step == "norm":
                    nn.utils.clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales[::2] == scales[1::2]
    assert (scale / 2 in scales) == ("scaler" in steps)
    same(ours, theirs)


def test_what_comes_after_a_clip_by_value_is_refused() -> None:
    rows, optimizer = summed()
    before = rows.get(4)
    rows(IDS).sum().backward()
    nn.utils.clip_grad_value_(rows.parameters(), 0.5)
    for use in (
        lambda: nn.utils.clip_grad_norm_(rows.parameters(), 1.0),
        lambda: optimizer.clip_grad_norm_(rows.parameters(), 1.0),
        lambda: rows(IDS).sum().backward(),
    ):
        with pytest.raises(GraphError, match=r"after clip_grad_value_ .* clip by value last, just before step"):
            use()
    optimizer.step()
    torch.testing.assert_close(rows.get(4), before - 0.5)
    optimizer.zero_grad()
    rows(IDS).sum().backward()
    optimizer.step()
    torch.testing.assert_close(rows.get(4), before - 1.5)
