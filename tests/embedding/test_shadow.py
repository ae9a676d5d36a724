"""The parameter that stands for rows: training tools use it as any other, and what needs the rows in it raises."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import get_total_norm, parameters_to_vector, prune, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


PENALTIES: dict[str, Callable[[Any, Model], Any]] = {
    "square": lambda p, m: sum((q**2).sum() for q in m.parameters()),
    "norm": lambda p, m: sum(q.norm() for q in m.parameters()),
    "torch.norm": lambda p, m: torch.norm(p, 1),
    "vector_norm": lambda p, m: torch.linalg.vector_norm(p),
    "foreach": lambda p, m: torch._foreach_norm(list(m.parameters())),
    "abs": lambda p, m: p.abs().sum(),
    "mse_loss": lambda p, m: nn.functional.mse_loss(p, torch.zeros(1, 1)),
    "vector": lambda p, m: parameters_to_vector(m.parameters()),
    "scaled": lambda p, m: 2 * p,
    "added": lambda p, m: torch.zeros(1, 1) + p,
    "matmul": lambda p, m: torch.ones(3, 1) @ p,
    "weight tying": lambda p, m: nn.functional.linear(torch.ones(3, 1), p),
    "view": lambda p, m: p.T.exp(),
    "item": lambda p, m: sum(row.sum() for row in p[0]),
    "stack": lambda p, m: torch.stack([p, p]),
    "aten": lambda p, m: torch.ops.aten.mul.Tensor(p, p),
    "double": lambda p, m: p.double().square(),
    "clone": lambda p, m: p.clone().sum(),
    "compiled": lambda p, m: torch.compile(lambda: p.pow(2).sum(), backend="eager")(),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_arithmetic_that_autograd_records_raises(penalty: Callable[[Any, Model], Any]) -> None:
    model = Model()
    with pytest.raises(GraphError, match=r"parameter of embedding 'rows.*lookup returns.*weight_decay"):
        penalty(model.rows.shadow, model)


INITS = ["normal_", "uniform_", "zeros_", "ones_", "xavier_uniform_", "kaiming_normal_", "orthogonal_", "eye_"]
WRITES: dict[str, Callable[[Any, Model], Any]] = {
    **{name: (lambda p, m, name=name: getattr(nn.init, name)(p)) for name in INITS},
    "constant_": lambda p, m: nn.init.constant_(p, 1.0),
    "data.mul_": lambda p, m: p.data.mul_(3),
    "data.copy_": lambda p, m: p.data.copy_(torch.ones(1, 1)),
    "data[0] =": lambda p, m: p.data.__setitem__(0, 1),
    "data +=": lambda p, m: p.data.__iadd__(1),
    "data[0].fill_": lambda p, m: p.data[0].fill_(1),
    "data.view.fill_": lambda p, m: p.data.view(-1).fill_(1),
    "data.set_": lambda p, m: p.data.set_(torch.ones(1, 1)),
    "data =": lambda p, m: setattr(p, "data", torch.ones(1, 1)),
    "detach.fill_": lambda p, m: p.detach().fill_(1),
    "fill_": lambda p, m: torch.fill_(p.data, 1),
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
def test_a_write_raises_and_names_what_writes_rows(write: Callable[[Any, Model], Any]) -> None:
    model = Model()
    with pytest.raises(InputError, match=r"embedding 'rows.*default_initializer=.*load_dense"):
        write(model.rows.shadow, model)
    assert not model.rows.shadow.detach().numpy().any()
    with pytest.raises(ValueError, match="read-only"):
        model.rows.shadow.detach().numpy()[:] = 1


def test_other_ways_to_change_the_parameter_raise() -> None:
    with pytest.raises(TierbedError, match="rows"):
        register_parametrization(Model().rows, "shadow", nn.ReLU())
    with pytest.raises(InputError, match=r"share_memory_.*world="):
        Model().share_memory()


@torch.no_grad()
def _average(p: Any, m: Model, update: Callable[[Any, Any], Any]) -> None:
    averages = {name: q.detach().clone() for name, q in m.named_parameters()}
    for name, q in m.named_parameters():
        averages[name] = update(averages[name], q)


@torch.no_grad()
def _average_of_state(m: Model, update: Callable[[Any, Any], Any]) -> None:
    averages = copy.deepcopy(m.state_dict())
    step_of_rows = m.state_dict()
    for name in ("rows.rows.embedding", "rows.rows.state"):
        averages[name] = update(averages[name], step_of_rows[name])


def _copy_to(m: Model, update: Callable[[Any, Any], Any]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(Model().parameters(), m.parameters(), strict=True):
            update(mine, theirs)


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "mul_ add_": lambda a, q: a.mul_(0.9).add_(q, alpha=0.1),
    "lerp_": lambda a, q: a.lerp_(q, 0.1),
    "lerp": lambda a, q: torch.lerp(a, q, 0.1),
    "in two": lambda a, q: 0.9 * a + 0.1 * q.data,
    "difference": lambda a, q: a + 0.1 * (q - a),
    "-=": lambda a, q: a.__isub__(0.1 * (a - q)),
    "foreach": lambda a, q: torch._foreach_lerp_([a], [q], 0.1),
    "plain": lambda a, q: torch.zeros(q.shape).add_(q, alpha=0.1),
    "swa_utils": lambda a, q: get_ema_multi_avg_fn()([a], [q], torch.tensor(1)),
}
AVERAGES: dict[str, Callable[[Model], Any]] = {
    "AveragedModel": lambda m: AveragedModel(m),
    "deepcopy": lambda m: torch._foreach_lerp_(copy.deepcopy(list(m.parameters())), list(m.parameters()), 0.1),
    "clone": lambda m: [q.clone().detach().sub_(q) for q in m.parameters()],
    "hard": lambda m: _copy_to(m, lambda mine, theirs: mine.copy_(theirs)),
    "hard data": lambda m: _copy_to(m, lambda mine, theirs: mine.data.copy_(theirs.data)),
    "soft": lambda m: _copy_to(m, lambda mine, theirs: mine.data.mul_(0.9).add_(0.1 * theirs.data)),
    **{name: (lambda m, update=update: _average(None, m, update)) for name, update in UPDATES.items()},
    **{f"state {name}": (lambda m, update=update: _average_of_state(m, update)) for name, update in UPDATES.items()},
}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
def test_averages_of_weights_and_copies_between_models_raise(average: Callable[[Model], Any]) -> None:
    model = Model()
    model.rows.put(torch.arange(3), torch.ones(3, DIM))
    with pytest.raises((TierbedError, RuntimeError), match="row"):
        average(model)


STATE_WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda t: t.zero_(),
    "[0] =": lambda t: t.__setitem__(0, 1),
    "*=": lambda t: t.__imul__(2),
    "init": lambda t: nn.init.normal_(t),
    "view": lambda t: t.view(-1).zero_(),
    "row": lambda t: t[0].zero_(),
    "data": lambda t: t.data.zero_(),
    "detach": lambda t: t.detach().zero_(),
    "transposed": lambda t: t.T.zero_(),
    "out=": lambda t: torch.zeros(3, DIM, out=t),
}


@pytest.mark.parametrize("write", STATE_WRITES.values(), ids=STATE_WRITES)
def test_a_write_into_the_rows_of_a_state_raises(write: Callable[[Any], Any]) -> None:
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
def test_a_gradient_that_is_of_no_lookup_raises_by_the_step(looks_up: bool, sets: bool) -> None:
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


def _saved(model: Model, **options: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, **options)
    return state


def _moved_anew(model: Model) -> bool:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return type(model.to("cpu").rows.shadow) is Shadow
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def _backward(model: Model) -> Model:
    model(IDS).backward()
    return model


GOES_ON: dict[str, Callable[[Any, Model], Any]] = {
    "count": lambda p, m: sum(q.numel() for q in m.parameters()) == DIM + 2,
    "describe": lambda p, m: (p.shape, p.dtype, p.device.type, p.is_leaf) == ((1, 1), torch.float32, "cpu", True),
    "print": lambda p, m: "Shadow" in repr(p) and "Shadow" in f"{p}",
    "norm": lambda p, m: torch.no_grad()(lambda: sum(q.norm() + q.data.norm(1) for q in m.parameters()) > 0)(),
    "squares": lambda p, m: torch.no_grad()(lambda: sum((q**2 + q * q).sum() for q in m.parameters()) > 0)(),
    "total norm": lambda p, m: get_total_norm(list(m.parameters())) > 0,
    "vector": lambda p, m: torch.no_grad()(lambda: parameters_to_vector(m.parameters()).norm() > 0)(),
    "histogram": lambda p, m: p.detach().cpu().numpy().shape == (1, 1) and torch.histc(p.data).sum() == 1,
    "clone": lambda p, m: [q.clone().shape == q.shape for q in m.parameters()] == [True] * 3,
    "same": lambda p, m: [torch.equal(q, q) for q in m.parameters()] == [True] * 3,
    "finite": lambda p, m: bool(torch.isfinite(p.detach()).all()),
    "requires_grad_": lambda p, m: m.requires_grad_(False).requires_grad_() and p.requires_grad,
    "requires_grad =": lambda p, m: [setattr(p, "requires_grad", flag) for flag in (False, True)],
    "zero_grad": lambda p, m: _backward(m).zero_grad() or p.grad is None,
    "edge": lambda p, m: get_gradient_edge(p).node,
    "move": lambda p, m: type(m.to("cpu").float().train().rows.shadow) is type(p),
    "move to new parameters": lambda p, m: _moved_anew(m),
    "deepcopy of a state": lambda p, m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "clone of a state": lambda p, m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
    "its own state": lambda p, m: m.load_state_dict(m.state_dict(), assign=True) and m.rows.shadow is p,
    "file": lambda p, m: m.load_state_dict(_saved(m)) and type(_saved(m)["rows.shadow"]) is Tensor,
    "keep_vars": lambda p, m: pickle.loads(pickle.dumps(m.state_dict(keep_vars=True)))["rows.shadow"].requires_grad,
    "functional_call": lambda p, m: torch.func.functional_call(m, dict(m.named_parameters()), (IDS,)),
    "checkpoint": lambda p, m: torch.utils.checkpoint.checkpoint(m, IDS, use_reentrant=False).backward(),
    "compile": lambda p, m: torch.compile(m, backend="aot_eager", fullgraph=True)(IDS).backward(),
}  # fmt: skip


@pytest.mark.parametrize("use", GOES_ON.values(), ids=GOES_ON)
def test_tools_use_it_as_any_parameter_and_training_goes_on(use: Callable[[Any, Model], Any]) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    step(model, optimizer)
    assert use(model.rows.shadow, model) is not False
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = model.rows.get(IDS)
    step(model, optimizer)
    assert not torch.equal(model.rows.get(IDS), before)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_optimizers_leave_it_as_it_is(kind: str) -> None:
    model = Model()
    optimizer = optimizer_of(model, getattr(torch.optim, kind))
    for _ in range(3):
        step(model, optimizer)
    assert model.rows.shadow.item() == 0


def test_a_module_on_meta_gets_it_on_its_device() -> None:
    model = Model().to("meta")
    assert model.rows.device.type == "meta"
    model.to_empty(device="cpu")
    with pytest.raises(InputError, match="fill_"):
        model.rows.shadow.data.fill_(1)
    step(model, optimizer_of(model))


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_distributed_checkpoints_load_it(tmp_path: Any) -> None:
    model = Model()
    model.rows.put(torch.arange(3), torch.ones(3, DIM))
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = Model().state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other = Model()
    other.load_state_dict({name: value for name, value in state.items() if not name.startswith("rows.")}, strict=False)
    model.load_state_dict(state)


IN_A_GRAPH: dict[str, Callable[[Any, nn.Module], Any]] = {
    name: {**PENALTIES, **WRITES}[name] for name in ("square", "norm", "normal_", "data.mul_", "detach.fill_")
}


@pytest.mark.parametrize("use", IN_A_GRAPH.values(), ids=IN_A_GRAPH)
def test_a_graph_refuses_it_as_well(use: Callable[[Any, nn.Module], Any]) -> None:
    def build(graph: Any, ids: Tensor) -> Tensor:
        used = use(graph.rows.shadow, graph)
        loss = graph.rows(ids).sum() + (used if isinstance(used, Tensor) else 0)
        loss.sum().backward()
        return loss

    rows = embedding()
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    with pytest.raises(GraphError, match=r"parameter of embedding 'rows.*default_initializer=.*load_dense"):
        graph(IDS)


@pytest.mark.parametrize("way", ["inherited", "own", "graph"])
def test_a_forked_child_does_not_train_a_copy_of_its_parent_s_rows_unnoticed(way: str) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    step(model, optimizer)

    def build(self: Any, ids: Tensor) -> Any:
        self.rows(ids).sum().backward()

    rows = embedding()
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
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
            said = "no EagerOptimizer trains the embedding" if way == "inherited" else "train in one process"
            code = 0 if said in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer)
