"""What programs of torch do with the parameters and optimizers of an nn.Embedding has torch's result, or says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierbed as tb
from tierbed.embedding.autograd import shadow
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
        assert ("drops the optimizer state of 50 steps" in caplog.text) == (kind != "new")
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


ROWS_STAY = "load_state_dict() got back what state_dict() returned, so its rows stay"


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("change", "is_warned"),
    [
        (lambda own, old: {k: v for k, v in old.items() if k in own and v.shape == own[k].shape}, True),
        (lambda own, old: {k: v for k, v in old.items() if k in own}, False),
        (lambda own, old: copy.deepcopy(own), False),
    ],
    ids=["by shape", "by key", "copied"],
)
def test_a_partial_load_by_shape_says_that_rows_stay(
    used: bool, change: Any, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    old, model = Model(nn.Embedding).state_dict(), Model()
    if used:
        step(model, eager(model))
    own = model.state_dict()
    own.update(change(own, old))
    model.load_state_dict(own)
    assert caplog.text.count(ROWS_STAY) == is_warned


def test_a_state_that_brings_rows_back_loads_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = eager(model)
    step(model, optimizer)
    best, rows = model.state_dict(), model.items.weight.clone()
    step(model, optimizer)
    model.load_state_dict(best, assign=True)
    assert torch.equal(model.items.weight, rows)
    model.load_state_dict(tb.to_dense_state_dict(model), assign=True)
    assert torch.equal(model.items.weight, rows)
    step(model, optimizer)
    assert not torch.equal(model.items.weight, rows)
    assert ROWS_STAY not in caplog.text


READS: dict[str, Callable[[Any], Any]] = {
    "norm": torch.no_grad()(lambda p: p.norm()),
    "largest": torch.no_grad()(lambda p: p.abs().max()),
    "data": lambda p: p.data.norm(),
    "detach": lambda p: p.detach().square().sum(),
    "vector": torch.no_grad()(lambda p: nn.utils.parameters_to_vector([p])),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "item": lambda p: p.item(),
    "histogram": lambda p: torch.histc(p.data),
    "finite": lambda p: torch.isfinite(p).all(),
    "another's": lambda p: torch.equal(p, next(Model().parameters())),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_the_parameter_says_once_that_it_finds_no_row(
    read: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadow, "_warned", set())
    model = Model()
    for _ in range(3):
        read(next(model.parameters()))
    assert caplog.text.count("reads a zero in place of its rows") == len(shadow._warned) > 0


CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "isnan": lambda p, before: torch.isnan(p).any(),
    "isinf": lambda p, before: p.data.isinf().any(),
    "equal": lambda p, before: torch.equal(p, before),
    "allclose": lambda p, before: torch.allclose(p, before),
    "isclose": lambda p, before: p.isclose(before),
    "==": lambda p, before: (p == before).all(),
    "!=": lambda p, before: (before != p).any(),
    "a torch model's": lambda p, before: nn.Embedding(10, 4).weight.data.copy_(p.data),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_of_the_parameter_does_not_answer_for_the_rows(check: Callable[[Any, Any], Any]) -> None:
    model = Model()
    parameter = next(model.parameters())
    before = parameter.detach().clone()
    with pytest.raises(tb.GraphError, match=r"'unnamed-\d+'.*result would not be theirs; read emb.weight"):
        check(parameter, before)


def test_training_and_comparing_states_read_no_parameter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadow, "_warned", set())
    model = Model()
    optimizer = eager(model)
    step(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    state, again = copy.deepcopy(model.state_dict()), model.state_dict()
    assert all(torch.equal(again[key], state[key]) and state[key].isfinite().all() for key in state)
    optimizer.load_state_dict(optimizer.state_dict())
    print(model, *model.parameters(), optimizer, [torch.zeros_like(p) for p in model.parameters()])
    assert not shadow._warned


class Initialised(tb.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Loaded(tb.Embedding):
    def reset_parameters(self) -> None:
        self.load_dense(torch.ones(self.num_embeddings, self.embedding_dim))


class Extended(tb.Embedding):
    def reset_parameters(self) -> None:
        super().reset_parameters()


def test_the_constructor_calls_a_reset_parameters_of_a_subclass(tmp_path: Any) -> None:
    with pytest.raises(tb.InputError, match=r"load_dense\(weight\).*initializer="):
        Initialised(10, 4)
    assert (Loaded(10, 4).weight == 1).all()
    assert (Loaded.from_pretrained(torch.zeros(10, 4)).weight == 0).all()
    store = tb.make_host_mem_store_options(persistent_path=str(tmp_path))
    with Extended(10, 4, store=store, name="rows") as first:
        first.put(IDS, torch.ones(10, 4))
    with Extended(10, 4, store=store, name="rows") as second:
        assert (second.weight == 1).all()
        second.reset_parameters()
        assert not (second.weight == 1).any()


@pytest.mark.parametrize("kind", [tb.Embedding, tb.EmbeddingBag])
@pytest.mark.parametrize(("name", "value"), [("max_norm", 0.1), ("scale_grad_by_freq", True)])
def test_what_the_constructor_refuses_cannot_be_set_later(kind: Any, name: str, value: Any) -> None:
    module = kind(10, 4)
    setattr(module, name, type(value)(0))
    with pytest.raises(tb.OptionError, match=f"{name}={value}: "):
        setattr(module, name, value)


@pytest.mark.parametrize("name", ["state", "param_groups"])
def test_what_rows_do_not_follow_cannot_be_assigned_to_an_optimizer(name: str) -> None:
    optimizer = eager(Model())
    with pytest.raises(tb.OptimizerError, match=f"{name} of an EagerOptimizer cannot be set: no row would follow it"):
        setattr(optimizer, name, copy.copy(getattr(optimizer, name)))


def of_two_models() -> None:
    models = Model(), Model()
    for model in models:
        eager(model)
    eager(nn.ModuleList(models))


def of_gradient(use: Callable[[Any], Any]) -> Callable[[Model, Any], Any]:
    def call(model: Model, optimizer: Any) -> None:
        model(IDS).sum().backward()
        use(model)

    return call


MESSAGES: dict[str, tuple[Callable[[Model, Any], Any], str]] = {
    "two models": (lambda m, o: of_two_models(), r"named 'items'.*make both again.*to_dense_state_dict"),
    "no place": (
        lambda m, o: tb.EagerOptimizer(CatchUpAdam(m.out.parameters()), Model()),
        "does not hold embedding 'items'",
    ),
    "array": (lambda m, o: m.items.load_dense(np.zeros((10, 4), "f")), "got ndarray; give torch.from_numpy"),
    "arrays": (lambda m, o: m.items.load_dense({0: np.zeros((10, 4), "f")}), "got ndarray; .*torch.from_numpy"),
    "id": (lambda m, o: m.items(IDS + 1), r"or with make_table_options\(bad_ids='drop'\)"),
    "data": (of_gradient(lambda m: m.items.shadow.grad.data), r"\.data of the gradient"),
    "zeros": (of_gradient(lambda m: m.zero_grad(set_to_none=False)), r"zero_grad\(set_to_none=False\) of the gradient"),
    "foreach": (
        of_gradient(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True)),
        "a clip with foreach=True of the gradient",
    ),
    "norm_type": (
        of_gradient(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, norm_type=1)),
        "a norm_type other than 2",
    ),
    "average": (lambda m, o: 0.9 * m.items.shadow, r"average what tierbed\.to_dense_state_dict\(model\) returns"),
    "state": (
        lambda m, o: 0.9 * m.state_dict()["items.rows.embedding"],
        r"average what tierbed\.to_dense_state_dict\(model\) returns",
    ),
    "amsgrad": (lambda m, o: CatchUpAdamW(m.parameters(), amsgrad=True), "CatchUpAdamW: amsgrad=True is not supported"),
}


@pytest.mark.parametrize(("call", "remedy"), MESSAGES.values(), ids=MESSAGES)
def test_an_error_names_what_was_written_and_a_remedy_that_works(call: Callable[[Any, Any], Any], remedy: str) -> None:
    model = Model()
    with pytest.raises(tb.TierbedError, match=remedy):
        call(model, eager(model, amsgrad=False, foreach=True))


def test_a_state_without_the_rows_of_a_table_in_memory_says_so() -> None:
    model, new = Model(), Model()
    step(model, eager(model))
    new.load_state_dict({key: value for key, value in model.state_dict().items() if "rows." not in key})
    with pytest.raises(tb.SnapshotError, match=r"has no rows\.\* entries: load a state with all of its keys"):
        new(IDS)


def test_rows_go_on_under_another_class_of_optimizer_by_the_remedy_of_its_error() -> None:
    model = Model()
    step(model, eager(model))
    with pytest.raises(tb.OptimizerError, match=r"reset_parameters\(\).*model\.load_state_dict\(rows\)"):
        eager(model, kind=torch.optim.SGD)
    rows = tb.to_dense_state_dict(model)
    model.items.reset_parameters()
    optimizer = eager(model, kind=torch.optim.SGD)
    model.load_state_dict(rows)
    assert torch.equal(model.items.weight, rows["items.weight"])
    step(model, optimizer)
