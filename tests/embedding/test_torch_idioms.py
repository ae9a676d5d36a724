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
from support.refusals import check_refusal
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


def step(model: nn.Module, optimizer: Any, ids: Tensor = IDS, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        (model(ids) - 1).square().sum().backward()
        optimizer.step()


def trained(count: int = 1) -> tuple[Model, tb.EagerOptimizer]:
    model = Model()
    optimizer = eager(model)
    step(model, optimizer, count=count)
    return model, optimizer


def weight_of(model: Model) -> Tensor:
    return model.items.weight.detach()


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.pow(2).sum().backward(),
        lambda p: nn.init.normal_(p),
        lambda p: p.data.copy_(torch.zeros(10, 4)),
        lambda p: p.data.mul_(0.9),
    ],
)
def test_a_parameter_has_the_name_of_torchs_and_is_no_silent_stand_in(use) -> None:
    model = Model()
    names = [name for name, _ in Model(nn.Embedding).named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert set(names) <= set(model.state_dict())
    with pytest.raises(
        (tb.InputError, tb.GraphError), match=r"initializer= \(of Embedding\)|the weight of an Embedding"
    ):
        use(dict(model.named_parameters())["items.weight"])


@pytest.mark.parametrize("kind", ["groups", "freeze", "clip"])
def test_groups_and_clips_by_name_reach_the_rows(kind) -> None:
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
    torch.testing.assert_close(weight_of(models[1]), weight_of(models[0]), rtol=1e-6, atol=1e-6)


def test_a_partial_load_brings_the_rows_of_a_dense_weight() -> None:
    old, (model, _), again = Model(nn.Embedding), trained(), Model()
    state = model.state_dict()
    state.update({key: value for key, value in old.state_dict().items() if key in state})
    model.load_state_dict(state)
    again.load_state_dict(model.state_dict())
    for found in (model, again):
        assert torch.equal(found.items.weight, old.items.weight)


@pytest.mark.parametrize("dim", [1, 4])
def test_rows_load_without_the_extra_state_that_a_filter_of_a_state_dropped(dim) -> None:
    first, second = tb.Embedding(None, dim), tb.Embedding(None, dim)
    first.put(IDS, torch.rand(10, dim))
    state = {key: value for key, value in first.state_dict().items() if key != "_extra_state"}
    second.load_state_dict(state, strict=False)
    assert torch.equal(second(IDS), first(IDS))


def test_states_of_an_embedding_and_of_a_multi_table_embedding_load_into_each_other() -> None:
    table = tb.make_table_options(tb.make_normal_initializer(0.0, 1.0), ids=10)
    store = tb.make_host_mem_store_options()
    one, many = tb.Embedding(10, 4), tb.MultiTableEmbedding("many", 4, torch.float32, torch.int64, [table], store)
    for first, second in ((one, many), (many, one)):
        first.load_dense({0: torch.rand(10, 4)})
        second.load_state_dict(first.state_dict())
        assert torch.equal(second(IDS), first(IDS))


def test_a_dense_load_begins_the_optimizer_anew_as_a_new_model_would(caplog) -> None:
    weights, moved = torch.zeros(10, 4), []
    for kind in ("new", "load_dense", "load_state_dict"):
        model = Model()
        model.out.requires_grad_(False)
        nn.init.ones_(model.out.weight)
        optimizer = eager(model)
        step(model, optimizer, count=0 if kind == "new" else 20)
        caplog.clear()
        if kind == "load_state_dict":
            model.load_state_dict({**model.out.state_dict(prefix="out."), "items.weight": weights})
        else:
            model.items.load_dense(weights)
        assert ("drops the optimizer state of 20 steps" in caplog.text) == (kind != "new")
        step(model, optimizer)
        moved.append(weight_of(model).abs().max())
    assert moved == pytest.approx([0.01] * 3)


NEW_OPTIMIZER = "keeps the optimizer state of its 3 steps, but the new optimizer has no state"


@pytest.mark.parametrize("how", ["second", "loaded", "resumed", "resumed inside", "dense", "first"])
def test_a_new_optimizer_says_that_rows_keep_their_state(how, caplog) -> None:
    model, optimizer = trained(3)
    new = model if how == "second" else Model()
    if how in ("loaded", "resumed", "resumed inside"):
        new.load_state_dict(model.state_dict())
    elif how == "dense":
        new.load_state_dict(tb.to_dense_state_dict(model))
    later = eager(new)
    if how == "resumed inside":
        later.optimizer.load_state_dict(optimizer.state_dict())
        later = tb.EagerOptimizer(later.optimizer, new)
    if how == "resumed":
        later.load_state_dict(optimizer.state_dict())
    step(new, later, count=2)
    assert caplog.text.count(NEW_OPTIMIZER) == (how in ("second", "loaded"))
    if how == "dense":  # begins as torch's new optimizer
        plain = Model(nn.Embedding)
        plain.load_state_dict(tb.to_dense_state_dict(model))
        step(plain, torch.optim.Adam(plain.parameters(), lr=0.01), count=2)
        torch.testing.assert_close(weight_of(new), weight_of(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "is_warned"), [(CatchUpAdam, True), (torch.optim.Adagrad, True), (torch.optim.SGD, False)]
)
def test_zero_grads_that_are_kept_say_that_tables_stay(kind, is_warned, caplog) -> None:
    optimizer = eager(Model(), kind=kind)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
    assert caplog.text.count("set_to_none=False") == is_warned


@pytest.mark.parametrize("name", ["weight_decay", "eps", "betas", "lr"])
def test_a_setting_that_changes_under_waiting_rows_says_so(name, caplog) -> None:
    model = Model()
    optimizer = eager(model, weight_decay=0.1)
    for at in range(3):
        optimizer.param_groups[0][name] = (0.8, 0.9) if name == "betas" else 0.01 * (at + 1)
        step(model, optimizer)
    assert caplog.text.count(f"{name} of CatchUpAdam changed. Steps that a row has missed") == (name != "lr")


ROWS_STAY = "load_state_dict() received the rows that state_dict() has just returned, so the rows do not change"


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
def test_a_partial_load_by_shape_says_that_rows_stay(used, change, is_warned, caplog) -> None:
    old, model = Model(nn.Embedding).state_dict(), trained()[0] if used else Model()
    own = model.state_dict()
    own.update(change(own, old))
    model.load_state_dict(own)
    assert caplog.text.count(ROWS_STAY) == is_warned


READS = {
    "norm": torch.no_grad()(lambda p: p.norm()),
    "data": lambda p: p.data.norm(),
    "detach": lambda p: p.detach().square().sum(),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "item": lambda p: p.item(),
    "finite": lambda p: torch.isfinite(p).all(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_the_parameter_says_once_that_it_finds_no_row(read, monkeypatch, caplog) -> None:
    monkeypatch.setattr(shadow, "_warned_operations", set())
    model = Model()
    for _ in range(3):
        read(next(model.parameters()))
    assert caplog.text.count("reads a placeholder, not the rows") == len(shadow._warned_operations) > 0


CHECKS = {
    "isnan": lambda p, before: torch.isnan(p).any(),
    "isinf": lambda p, before: p.data.isinf().any(),
    "equal": lambda p, before: torch.equal(p, before),
    "==": lambda p, before: (p == before).all(),
    "a torch model's": lambda p, before: nn.Embedding(10, 4).weight.data.copy_(p.data),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_of_the_parameter_does_not_answer_for_the_rows(check) -> None:
    model = Model()
    parameter = next(model.parameters())
    before = parameter.detach().clone()
    with pytest.raises(tb.GraphError, match=r"'unnamed-\d+'.*result would ignore the rows; read emb.weight"):
        check(parameter, before)


def test_training_and_comparing_states_read_no_parameter(monkeypatch) -> None:
    monkeypatch.setattr(shadow, "_warned_operations", set())
    model, optimizer = trained()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    state, again = copy.deepcopy(model.state_dict()), model.state_dict()
    assert all(torch.equal(again[key], state[key]) and state[key].isfinite().all() for key in state)
    optimizer.load_state_dict(optimizer.state_dict())
    print(model, *model.parameters(), optimizer, [torch.zeros_like(p) for p in model.parameters()])
    assert not shadow._warned_operations


class Initialised(tb.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Loaded(tb.Embedding):
    def reset_parameters(self) -> None:
        self.load_dense(torch.ones(self.num_embeddings, self.embedding_dim))


class Extended(tb.Embedding):
    def reset_parameters(self) -> None:
        super().reset_parameters()


def test_the_constructor_calls_a_reset_parameters_of_a_subclass(tmp_path) -> None:
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


def set_after(module: Any, name: str, value: Any) -> None:
    setattr(module, name, type(value)(0))
    setattr(module, name, value)


def two_models() -> None:
    models = trained(0)[0], trained(0)[0]
    eager(nn.ModuleList(models))


def with_gradient(use: Callable[[Model], Any]) -> Callable[[Model, Any], Any]:
    def call(model: Model, optimizer: Any) -> None:
        model(IDS).sum().backward()
        use(model)

    return call


AVERAGE = "average what tierbed.to_dense_state_dict(model) returns"
NOT_SET = "of an EagerOptimizer cannot be set: rows would not use the new value"
MESSAGES = [
    (lambda m, o: two_models(), "named 'items'", "make both again", "to_dense_state_dict"),
    (lambda m, o: m.items.load_dense(np.zeros((10, 4), "f")), "got ndarray", "torch.from_numpy"),
    (lambda m, o: m.items.load_dense({0: np.zeros((10, 4), "f")}), "got ndarray", "torch.from_numpy"),
    (lambda m, o: m.items(IDS + 1), "make_table_options(bad_ids='drop')"),
    (with_gradient(lambda m: m.items.shadow.grad.data), ".data of the gradient"),
    (with_gradient(lambda m: m.zero_grad(set_to_none=False)), "zero_grad(set_to_none=False) of the gradient"),
    (
        with_gradient(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True)),
        "a clip with foreach=True of the gradient",
    ),
    (
        with_gradient(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, norm_type=1)),
        "if norm_type is not 2",
    ),
    (lambda m, o: 0.9 * m.items.shadow, AVERAGE),
    (lambda m, o: 0.9 * m.state_dict()["items.rows.embedding"], AVERAGE),
    (lambda m, o: CatchUpAdamW(m.parameters(), amsgrad=True), "CatchUpAdamW: amsgrad=True is not supported"),
    (lambda m, o: setattr(o, "state", copy.copy(o.state)), f"state {NOT_SET}"),
    (lambda m, o: setattr(o, "param_groups", copy.copy(o.param_groups)), f"param_groups {NOT_SET}"),
    (lambda m, o: set_after(m.items, "max_norm", 0.1), "max_norm=0.1"),
    (lambda m, o: set_after(m.items, "scale_grad_by_freq", True), "scale_grad_by_freq=True"),
    (lambda m, o: set_after(tb.EmbeddingBag(10, 4), "max_norm", 0.1), "max_norm=0.1"),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_an_error_names_what_was_written_and_a_remedy_that_works(message) -> None:
    call, *named = message
    model = Model()
    optimizer = eager(model, amsgrad=False, foreach=True)
    check_refusal((lambda: call(model, optimizer), tb.TierbedError, *named))


def test_a_state_without_the_rows_of_a_table_in_memory_says_so() -> None:
    (model, _), new = trained(), Model()
    new.load_state_dict({key: value for key, value in model.state_dict().items() if "rows." not in key})
    with pytest.raises(tb.SnapshotError, match=r"has no rows\.\* entries: load a state with all of its keys"):
        new(IDS)


def test_rows_go_on_under_another_class_of_optimizer_by_the_remedy_of_its_error() -> None:
    model, _ = trained()
    with pytest.raises(tb.OptimizerError, match=r"reset_parameters\(\).*model\.load_state_dict\(rows\)"):
        eager(model, kind=torch.optim.SGD)
    rows = tb.to_dense_state_dict(model)
    model.items.reset_parameters()
    optimizer = eager(model, kind=torch.optim.SGD)
    model.load_state_dict(rows)
    assert torch.equal(model.items.weight, rows["items.weight"])
    step(model, optimizer)
