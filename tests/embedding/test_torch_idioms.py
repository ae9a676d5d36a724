"""What programs of torch do with the parameters and optimizers of an nn.Embedding has torch's result, or says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed as tb
from tierbed.optim import CatchUpAdam, CatchUpAdamW

IDS = torch.arange(10)


class Model(nn.Module):
    def __init__(self, embedding: Any = tb.Embedding) -> None:
        super().__init__()
        self.items = embedding(10, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.items(ids))


def eager(model: nn.Module, lr: float = 0.01, kind: Any = CatchUpAdam, **settings: Any) -> tb.EagerOptimizer:
    return tb.EagerOptimizer(kind(model.parameters(), lr=lr, **settings), model)


def step(model: nn.Module, optimizer: Any, ids: Tensor = IDS) -> None:
    optimizer.zero_grad()
    (model(ids) - 1).square().sum().backward()
    optimizer.step()


def test_a_tables_parameter_has_the_name_of_torchs() -> None:
    names = [name for name, _ in Model(nn.Embedding).named_parameters()]
    assert [name for name, _ in Model().named_parameters()] == names
    assert set(names) <= set(Model().state_dict())


@pytest.mark.parametrize(
    "chosen",
    [lambda name: "weight" in name, lambda name: name.endswith("weight"), lambda name: name == "items.weight"],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.pow(2).sum().backward(),
        lambda p: nn.init.normal_(p),
        lambda p: p.data.copy_(torch.zeros(10, 4)),
        lambda p: p.data.mul_(0.9),
    ],
)
def test_a_parameter_that_is_chosen_by_name_is_no_silent_stand_in(
    use: Callable[[Any], object], chosen: Callable[[str], bool]
) -> None:
    model = Model()
    (parameter, *_) = [parameter for name, parameter in model.named_parameters() if chosen(name)]
    with pytest.raises((tb.InputError, tb.GraphError), match=r"initializer= \(of Embedding\)|penalise emb.weight"):
        use(parameter)


@pytest.mark.parametrize("kind", ["groups", "freeze", "clip"])
def test_groups_and_clips_by_name_reach_the_rows(kind: str) -> None:
    models = Model(nn.Embedding), Model()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
        ]
        own, other = (torch.optim.AdamW, torch.optim.Adam) if model is models[0] else (CatchUpAdamW, CatchUpAdam)
        optimizer = own(groups, lr=0.1) if kind == "groups" else other(model.parameters(), lr=0.1)
        if kind == "freeze":
            named["items.weight"].requires_grad_(False)
        optimizer = optimizer if model is models[0] else tb.EagerOptimizer(optimizer, model)
        for ids in (IDS, IDS[:5], IDS):
            optimizer.zero_grad()
            (model(ids) - 1).square().sum().backward()
            if kind == "clip":
                nn.utils.clip_grad_norm_([p for n, p in named.items() if "weight" in n], 0.5)
            optimizer.step()
    torch.testing.assert_close(models[1].items.weight.detach(), models[0].items.weight.detach(), rtol=1e-6, atol=1e-6)


def test_a_partial_load_brings_the_rows_of_a_dense_weight() -> None:
    old, model = Model(nn.Embedding), Model()
    step(model, eager(model))
    state = model.state_dict()
    state.update({key: value for key, value in old.state_dict().items() if key in state})
    model.load_state_dict(state)
    assert torch.equal(model.items.weight, old.items.weight)
    again = Model()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.items.weight, old.items.weight)


@pytest.mark.parametrize("dim", [1, 4])
def test_rows_load_without_the_extra_state_that_a_filter_of_a_state_dropped(dim: int) -> None:
    first, second = tb.Embedding(None, dim), tb.Embedding(None, dim)
    first.put(IDS.unique(), torch.rand(len(IDS.unique()), dim))
    state = {key: value for key, value in first.state_dict().items() if key != "_extra_state"}
    second.load_state_dict(state, strict=False)
    assert torch.equal(second(IDS), first(IDS))


def test_states_of_an_embedding_and_of_a_multi_table_embedding_load_into_each_other() -> None:
    table = tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=10)
    with tb.MultiTableEmbedding(
        "many", 4, torch.float32, torch.int64, [table], tb.make_host_mem_store_options()
    ) as many:
        one = tb.Embedding(10, 4)
        for first, second in ((one, many), (many, one)):
            first.load_dense({0: torch.rand(10, 4)})
            second.load_state_dict(first.state_dict())
            assert torch.equal(second(IDS), first(IDS))


@pytest.mark.parametrize("part", [lambda w: w[1:], lambda w: w.T, lambda w: w.detach(), lambda w: w.data, lambda w: w])
@pytest.mark.parametrize("use", [lambda w: w + 1, lambda w: torch.cat([w, w]), lambda w: w.detach().numpy()])
def test_a_part_of_a_weight_is_not_taken_for_the_present_one(part: Any, use: Any) -> None:
    model = Model()
    older = part(model.items.weight)
    use(older)
    step(model, eager(model))
    with pytest.raises(tb.InputError, match="was read before a training step"):
        use(older)


def test_a_dense_load_begins_the_optimizer_anew_as_a_new_model_would(caplog: pytest.LogCaptureFixture) -> None:
    weights, moved = torch.zeros(10, 4), []
    for kind in ("new", "load_dense", "load_state_dict"):
        model = Model()
        model.out.requires_grad_(False)
        nn.init.ones_(model.out.weight)
        optimizer = eager(model)
        for _ in range(0 if kind == "new" else 50):
            step(model, optimizer)
        caplog.clear()
        if kind == "load_state_dict":
            model.load_state_dict({**model.out.state_dict(prefix="out."), "items.weight": weights})
        else:
            model.items.load_dense(weights)
        assert ("drops optimizer state, that of 50 steps" in caplog.text) == (kind != "new")
        step(model, optimizer)
        moved.append(model.items.weight.detach().abs().max())
    assert moved == pytest.approx([0.01] * 3)


def test_put_changes_rows_and_keeps_their_optimizer_state() -> None:
    models = Model(), Model()
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [eager(model) for model in models]
    for at in range(4):
        if at == 2:
            models[0].items.put(IDS, models[0].items.weight.detach())
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    assert torch.equal(models[0].items.weight, models[1].items.weight)


NEW_OPTIMIZER = "keeps the optimizer state of its 3 steps under a new optimizer"


@pytest.mark.parametrize("how", ["second", "loaded", "resumed", "resumed inside", "dense", "first"])
def test_a_new_optimizer_says_that_rows_keep_their_state(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = eager(model)
    for _ in range(3):
        step(model, optimizer)
    state, new = model.state_dict(), Model()
    if how in ("loaded", "resumed", "resumed inside"):
        new.load_state_dict(state)
    elif how in ("dense", "first"):
        new.load_state_dict(tb.to_dense_state_dict(model))
    else:
        new = model
    if how == "first":
        new = Model()
    later = eager(new)
    if how == "resumed inside":
        later.optimizer.load_state_dict(optimizer.state_dict())
        later = tb.EagerOptimizer(later.optimizer, new)
    if how == "resumed":
        later.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        step(new, later)
    assert caplog.text.count(NEW_OPTIMIZER) == (how in ("second", "loaded"))
    if how == "dense":  # begins as torch's new optimizer
        plain = Model(nn.Embedding)
        plain.load_state_dict(tb.to_dense_state_dict(model))
        adam = torch.optim.Adam(plain.parameters(), lr=0.01)
        for _ in range(2):
            step(plain, adam)
        torch.testing.assert_close(new.items.weight.detach(), plain.items.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "is_warned"), [(CatchUpAdam, True), (torch.optim.Adagrad, True), (torch.optim.SGD, False)]
)
def test_zero_grads_that_are_kept_say_that_tables_stay(
    kind: Any, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    optimizer = eager(model, kind=kind)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
    assert caplog.text.count("set_to_none=False") == is_warned


@pytest.mark.parametrize("name", ["weight_decay", "eps", "betas", "lr"])
def test_a_setting_that_changes_under_waiting_rows_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = eager(model, weight_decay=0.1)
    for at in range(3):
        optimizer.param_groups[0][name] = (0.8, 0.9) if name == "betas" else 0.01 * (at + 1)
        step(model, optimizer)
    assert caplog.text.count(f"{name} of CatchUpAdam changed: steps that a row has missed") == (name != "lr")
