"""The parameter that stands for rows: training tools use it as any other, and what needs the rows in it raises."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import get_total_norm, parameters_to_vector, prune, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support.embeddings import reloaded
from support.graphs import DIM, embedding, graph_of
from tierbed import EagerOptimizer, GraphError, InputError, OptimizerError, TierbedError
from tierbed.embedding.autograd.shadow import Shadow

IDS = torch.tensor([3, 4, 3])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.net = embedding(), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.net(self.rows(ids)).sum()
        return result


def optimizer_of(model: Model, kind: Any = torch.optim.SGD) -> EagerOptimizer:
    return EagerOptimizer(kind(model.parameters(), lr=0.1), model)


def step(model: nn.Module, optimizer: EagerOptimizer) -> None:
    optimizer.zero_grad()
    model(IDS).backward()
    optimizer.step()


PENALTIES = {
    "square": lambda p, m: sum((q**2).sum() for q in m.parameters()),
    "norm": lambda p, m: sum(q.norm() for q in m.parameters()),
    "vector_norm": lambda p, m: torch.linalg.vector_norm(p),
    "foreach": lambda p, m: torch._foreach_norm(list(m.parameters())),
    "mse_loss": lambda p, m: nn.functional.mse_loss(p, torch.zeros(1, 1)),
    "vector": lambda p, m: parameters_to_vector(m.parameters()),
    "added": lambda p, m: torch.zeros(1, 1) + p,
    "weight tying": lambda p, m: nn.functional.linear(torch.ones(3, 1), p),
    "view": lambda p, m: p.T.exp(),
    "item": lambda p, m: sum(row.sum() for row in p[0]),
    "aten": lambda p, m: torch.ops.aten.mul.Tensor(p, p),
    "compiled": lambda p, m: torch.compile(lambda: p.pow(2).sum(), backend="eager")(),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_arithmetic_that_autograd_records_raises(penalty) -> None:
    model = Model()
    with pytest.raises(GraphError, match=r"parameter of embedding 'rows.*weight_decay.*a lookup's result"):
        penalty(model.rows.shadow, model)


WRITES = {
    "normal_": lambda p, m: nn.init.normal_(p),
    "xavier_uniform_": lambda p, m: nn.init.xavier_uniform_(p),
    "orthogonal_": lambda p, m: nn.init.orthogonal_(p),
    "data.mul_": lambda p, m: p.data.mul_(3),
    "data[0] =": lambda p, m: p.data.__setitem__(0, 1),
    "data +=": lambda p, m: p.data.__iadd__(1),
    "data.set_": lambda p, m: p.data.set_(torch.ones(1, 1)),
    "data =": lambda p, m: setattr(p, "data", torch.ones(1, 1)),
    "detach.fill_": lambda p, m: p.detach().fill_(1),
    "aten": lambda p, m: torch.ops.aten.mul_.Tensor(p.data, 2),
    "out=": lambda p, m: torch.ones(1, 1, out=p.data),
    "foreach": lambda p, m: torch._foreach_mul_([p.data], 2),
    "vector": lambda p, m: vector_to_parameters(torch.ones(100), m.parameters()),
    "state": lambda p, m: m.state_dict()["rows.shadow"].fill_(1),
    "apply": lambda p, m: m.apply(lambda module: [q.data.normal_() for q in module.parameters(recurse=False)]),
    "moved": lambda p, m: m._apply(lambda tensor: tensor.fill_(2)),
    "weight =": lambda p, m: setattr(m.rows, "weight", nn.Parameter(torch.ones(10, DIM))),
    "shadow =": lambda p, m: setattr(m.rows, "shadow", nn.Parameter(torch.ones(10, DIM))),
    "register_parameter": lambda p, m: m.rows.register_parameter("weight", nn.Parameter(torch.ones(10, DIM))),
    "prune": lambda p, m: prune.random_unstructured(m.rows, "shadow", amount=1),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_raises_and_names_what_writes_rows(write) -> None:
    model = Model()
    with pytest.raises(InputError, match=r"embedding 'rows.*default_initializer=.*load_dense"):
        write(model.rows.shadow, model)
    assert not model.rows.shadow.detach().numpy().any()
    with pytest.raises(ValueError, match="read-only"):
        model.rows.shadow.detach().numpy()[:] = 1


def test_a_module_on_meta_gets_it_on_its_device() -> None:
    model = Model().to("meta")
    assert model.rows.device.type == "meta"
    model.to_empty(device="cpu")
    with pytest.raises(InputError, match="fill_"):
        model.rows.shadow.data.fill_(1)
    step(model, optimizer_of(model))


@torch.no_grad()
def averaged(tensors: dict[str, Tensor], update: Callable[[Any, Any], Any]) -> None:
    for tensor in tensors.values():
        update(copy.deepcopy(tensor.detach()), tensor)


UPDATES = {
    "mul_ add_": lambda a, q: a.mul_(0.9).add_(q, alpha=0.1),
    "lerp": lambda a, q: torch.lerp(a, q, 0.1),
    "in two": lambda a, q: 0.9 * a + 0.1 * q.data,
    "foreach": lambda a, q: torch._foreach_lerp_([a], [q], 0.1),
    "plain": lambda a, q: torch.zeros(q.shape).add_(q, alpha=0.1),
    "swa_utils": lambda a, q: get_ema_multi_avg_fn()([a], [q], torch.tensor(1)),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_averages_of_weights_and_copies_between_models_raise(update) -> None:
    model, other = Model(), Model()
    model.rows.put(torch.arange(3), torch.ones(3, DIM))
    state = model.state_dict()
    for average in (
        lambda: AveragedModel(model),
        lambda: averaged(dict(model.named_parameters()), update),
        lambda: averaged({name: state[name] for name in ("rows.rows.embedding", "rows.rows.state")}, update),
        lambda: torch.no_grad()(other.rows.shadow.copy_)(model.rows.shadow),
        lambda: other.rows.shadow.data.copy_(model.rows.shadow.data),
        lambda: register_parametrization(model.rows, "shadow", nn.ReLU()),
        model.share_memory,
    ):
        with pytest.raises((TierbedError, RuntimeError), match="row"):
            average()


STATE_WRITES = {
    "[0] =": lambda t: t.__setitem__(0, 1),
    "*=": lambda t: t.__imul__(2),
    "view": lambda t: t.view(-1).zero_(),
    "data": lambda t: t.data.zero_(),
    "detach": lambda t: t.detach().zero_(),
    "out=": lambda t: torch.zeros(3, DIM, out=t),
}


@pytest.mark.parametrize("write", STATE_WRITES.values(), ids=STATE_WRITES)
def test_a_write_into_the_rows_of_a_state_raises(write) -> None:
    model = Model()
    model.rows.put(torch.arange(3), torch.ones(3, DIM))
    state = model.state_dict()["rows.rows.embedding"]
    with pytest.raises(InputError, match="a copy, so no row"):
        write(state)
    assert (state == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        state.numpy()[:] = 0
    plain = torch.empty(3, DIM).copy_(state)
    assert (plain.mul_(2) == state.clone().mul_(2)).all()


class _Constant(torch.autograd.Function):
    """Gives its argument a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ones(1, 1)


@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("sets", [False, True])
def test_a_gradient_that_is_of_no_lookup_raises_by_the_step(looks_up, sets) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    before = model.rows.get(IDS)
    with pytest.raises(OptimizerError, match=r"'rows.* gradient that no lookup made"):  # noqa: PT012
        if sets:
            model.rows.shadow.grad = torch.ones(1, 1)
        loss = model(IDS) if looks_up else torch.zeros((), requires_grad=True)
        (loss + 0 if sets else loss + _Constant.apply(model.rows.shadow)).backward()
        optimizer.step()
    assert torch.equal(model.rows.get(IDS), before)
    step(model, optimizer)
    assert not torch.equal(model.rows.get(IDS), before)


GOES_ON = {
    "count": lambda p, m: sum(q.numel() for q in m.parameters()) == DIM + 2,
    "describe": lambda p, m: (p.shape, p.dtype, p.device.type, p.is_leaf) == ((1, 1), torch.float32, "cpu", True),
    "print": lambda p, m: "Shadow" in repr(p) and "Shadow" in f"{p}",
    "norm": lambda p, m: torch.no_grad()(lambda: sum(q.norm() + q.data.norm(1) for q in m.parameters()) > 0)(),
    "total norm": lambda p, m: get_total_norm(list(m.parameters())) > 0,
    "vector": lambda p, m: torch.no_grad()(lambda: parameters_to_vector(m.parameters()).norm() > 0)(),
    "histogram": lambda p, m: p.detach().cpu().numpy().shape == (1, 1) and torch.histc(p.data).sum() == 1,
    "clone": lambda p, m: [q.clone().shape == q.shape for q in m.parameters()] == [True] * 3,
    "requires_grad": lambda p, m: m.requires_grad_(False).requires_grad_() and p.requires_grad,
    "zero_grad": lambda p, m: [m(IDS).backward(), m.zero_grad()] and p.grad is None,
    "edge": lambda p, m: get_gradient_edge(p).node,
    "move": lambda p, m: type(m.to("cpu").float().train().rows.shadow) is type(p),
    "move to new parameters": lambda p, m: moved_anew(m),
    "deepcopy of a state": lambda p, m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "its own state": lambda p, m: m.load_state_dict(m.state_dict(), assign=True) and m.rows.shadow is p,
    "file": lambda p, m: m.load_state_dict(reloaded(m.state_dict())) and m.rows.shadow is p,
    "keep_vars": lambda p, m: pickle.loads(pickle.dumps(m.state_dict(keep_vars=True)))["rows.shadow"].requires_grad,
    "functional_call": lambda p, m: torch.func.functional_call(m, dict(m.named_parameters()), (IDS,)),
    "checkpoint": lambda p, m: torch.utils.checkpoint.checkpoint(m, IDS, use_reentrant=False).backward(),
    "compile": lambda p, m: torch.compile(m, backend="aot_eager", fullgraph=True)(IDS).backward(),
}  # fmt: skip


def moved_anew(model: Model) -> bool:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return type(model.to("cpu").rows.shadow) is Shadow
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


USES = [pytest.param(use, id=name, marks=[pytest.mark.slow] * (name == "compile")) for name, use in GOES_ON.items()]


@pytest.mark.parametrize("use", USES)
def test_tools_use_it_as_any_parameter_and_training_goes_on(use) -> None:
    model = Model()
    optimizer = optimizer_of(model, torch.optim.Adam)
    step(model, optimizer)
    assert use(model.rows.shadow, model) is not False
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = model.rows.get(IDS)
    step(model, optimizer)
    assert not torch.equal(model.rows.get(IDS), before)
    assert model.rows.shadow.item() == 0


@pytest.mark.parametrize("name", ["square", "norm", "normal_", "data.mul_", "detach.fill_"])
def test_a_graph_refuses_it_as_well(name) -> None:
    def build(graph: Any, ids: Tensor) -> Tensor:
        used = {**PENALTIES, **WRITES}[name](graph.rows.shadow, graph)
        loss = graph.rows(ids).sum() + (used if isinstance(used, Tensor) else 0)
        loss.sum().backward()
        return loss

    rows = embedding()
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    with pytest.raises(GraphError, match=r"parameter of embedding 'rows.*default_initializer=.*load_dense"):
        graph(IDS)


@pytest.mark.parametrize("way", ["inherited", "own", "graph"])
def test_a_forked_child_does_not_train_a_copy_of_its_parent_s_rows_unnoticed(way) -> None:
    model, rows = Model(), embedding()
    optimizer, inner = optimizer_of(model), torch.optim.SGD(rows.parameters(), lr=0.1)
    graph = graph_of(lambda graph, ids: graph.rows(ids).sum().backward(), inner, rows=rows)
    step(model, optimizer)
    graph(IDS)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if way == "graph":
                graph(IDS)
            else:
                step(model, optimizer if way == "inherited" else optimizer_of(model))
        except TierbedError as error:
            said = "no EagerOptimizer trains the embedding" if way == "inherited" else "rain in one process"
            code = 0 if said in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer)
