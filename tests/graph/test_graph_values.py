"""A Python value that `build` reads and that changes between calls: the step follows it, or the call raises."""

from __future__ import annotations

import argparse
import copy
import enum
import functools
import logging
import math
import random
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.graphs import dense_copy, embedding, training
from tierbed import Graph, GraphError
from tierbed.jagged import JaggedTensor

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]])


class Mode(enum.Enum):
    PLAIN = 1
    SQUARED = 2


class Half(float):
    """A subclass of float."""


@dataclass
class Inner:
    scale: float = 2.0


@dataclass
class Config:
    temp: float = 1.5
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Frozen:
    temp: float = 1.5


class Slots:
    __slots__ = ("temp",)

    def __init__(self) -> None:
        self.temp = 1.5


class Scaler:
    """A helper with methods, a property and a call."""

    power = 2

    def __init__(self) -> None:
        self._factor = 1.5

    @property
    def factor(self) -> float:
        return self._factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __call__(self, x: Tensor) -> Tensor:
        return x**self.power + HIDDEN


class Doubler(Scaler):
    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x) * 2


class Dots(dict[str, Any]):
    """A dict whose items are attributes too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Behind:
    """An object that keeps its values behind `__getattr__`."""

    def __init__(self) -> None:
        vars(self)["values"] = {"temp": 1.5}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value


class Guarded:
    """An object with a `__getattribute__` of its own."""

    def __init__(self) -> None:
        self.temp = 1.5

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Sealed(type):
    """The class of a class that takes no attributes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{name} cannot be set")


class OfSealed(metaclass=Sealed):
    def __init__(self) -> None:
        self.temp = 1.5


class Namespace:
    """A class of settings, which nobody makes an object of."""

    temp: ClassVar[float] = 1.5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = 1.5, nn.Module()
        self.inner.bias = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.inner.bias + (TEMP - 1.5)


TEMP = 1.5
HIDDEN = 0.5
SETTINGS: dict[str, Any] = {"temp": 1.5, "deep": {"list": [1.0, 2.0]}}
CONFIG = Config()
MASK = torch.ones(3)
LOSS, DROPOUT, CHAIN = nn.SmoothL1Loss(), nn.Dropout(1.0), nn.Sequential(nn.LeakyReLU(0.1))
settings = types.ModuleType("settings_of_user")
settings.temp = 1.5  # type: ignore[attr-defined]
sys.modules["settings_of_user"] = settings


def helper(x: Tensor, by: float = 1.5, *, plus: float = 0.5) -> Tensor:
    return x * by + plus


def outer(x: Tensor) -> Tensor:
    return (lambda y: y * TEMP)(x)


def activation(x: Tensor) -> Tensor:
    return x.tanh()


@torch.fx.wrap
def wrapped_by_fx(x: Tensor) -> Tensor:
    return x * TEMP


@torch.no_grad()
def decorated_by_torch(x: Tensor) -> Tensor:
    return x * TEMP


Kind = tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]


class Box(Graph):
    """A graph with all kinds of values, whose build is a function of the graph and x."""

    level = 1.5

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.temp: Any = 1.5
        self.text, self.mode, self.betas = "plain", Mode.PLAIN, (0.9, 0.99)
        self.config, self.frozen, self.slots, self.scaler = Config(), Frozen(), Slots(), Doubler()
        self.options: dict[str, Any] = {"temp": 1.5, "deep": {"list": [1.0, 2.0]}, "configs": [Config()]}
        self.ordered = OrderedDict(zero=0.0)
        self.args = argparse.Namespace(temp=1.5)
        self.dtype, self.number, self.plain = torch.float32, np.float32(1.5), [nn.Dropout(0.0)]
        self.activation: Any = torch.relu
        self.partial = functools.partial(helper, by=1.5)
        self.masks, self.allowed = [torch.ones(3)], {1}
        self.dots, self.behind, self.guarded, self.sealed = Dots(temp=1.5), Behind(), Guarded(), OfSealed()
        self.by_mode = {Mode.PLAIN: 1.5}
        self.many = [1.0] * 1000
        self.endless: list[Any] = [1.5]
        self.endless.append(self.endless)
        self.tables = types.SimpleNamespace(all=[[[1.5] * 60] * 60] * 60, me=[])
        self.tables.me.append(self.tables)
        self.method: Any = Scaler().scaled
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.5)
        self.layer, self.leaky = Layer(), nn.LeakyReLU(0.01)
        self.layers = nn.Sequential(nn.LeakyReLU(0.1), nn.LayerNorm(3))

    def build(self, x: Tensor) -> Tensor:
        print("build runs")
        return self.function(self, x)

    @property
    def doubled(self) -> float:
        return float(self.temp) * 2


def with_cell(value: float = 1.5) -> Kind:
    def change(_: Any) -> None:
        nonlocal value
        value = 3.0

    return lambda _, x: x * value, change


def setter(path: str, value: Any) -> Callable[[Any], None]:
    """Sets `g.<path>`, or a global of that name."""

    def change(g: Any) -> None:
        exec(f"{path} = value", globals(), {"g": g, "value": value})

    return change


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: globals().__setitem__(name, value)


def local_import(_: Any, x: Tensor) -> Tensor:
    import settings_of_user as mine  # type: ignore[import-not-found]

    return x * mine.temp


KINDS: dict[str, Kind] = {
    "float": (lambda g, x: x * g.temp, setter("g.temp", 3.0)),
    "float to int": (lambda g, x: x.long() * g.temp, setter("g.temp", 2)),
    "float to bool": (lambda g, x: x.bool() * g.temp, setter("g.temp", True)),
    "float to None": (lambda g, x: x if g.temp is None else x * g.temp, setter("g.temp", None)),
    "float to tensor": (lambda g, x: x * g.temp, setter("g.temp", torch.tensor(3.0))),
    "float to nan": (lambda g, x: x * g.temp, setter("g.temp", math.nan)),
    "0.0 to -0.0": (lambda g, x: 1 / torch.full_like(x, g.ordered["zero"]), setter("g.ordered['zero']", -0.0)),
    "subclass of float": (lambda g, x: x * g.temp, setter("g.temp", Half(0.5))),
    "numpy scalar": (lambda g, x: x * float(g.number), setter("g.number", np.float32(2.5))),
    "str": (lambda g, x: x if g.text == "plain" else x * 2, setter("g.text", "".join(["s", "quared"]))),
    "enum": (lambda g, x: x if g.mode is Mode.PLAIN else x * x, setter("g.mode", Mode.SQUARED)),
    "dtype": (lambda g, x: x.to(g.dtype), setter("g.dtype", torch.float64)),
    "tuple": (lambda g, x: x * g.betas[0], setter("g.betas", (0.5, 0.99))),
    "dataclass": (lambda g, x: x * g.config.temp, setter("g.config.temp", 3.0)),
    "dataclass of a dataclass": (lambda g, x: x * g.config.inner.scale, setter("g.config.inner.scale", 3.0)),
    "frozen dataclass": (lambda g, x: x * g.frozen.temp, setter("g.frozen", replace(Frozen(), temp=3.0))),
    "slots": (lambda g, x: x * g.slots.temp, setter("g.slots.temp", 3.0)),
    "property": (lambda g, x: x * g.doubled, setter("g.temp", 3.0)),
    "property of a helper": (lambda g, x: g.scaler.scaled(x), setter("g.scaler._factor", 3.0)),
    "class of a helper": (lambda g, x: g.scaler.scaled(x), setter("g.scaler", Scaler())),
    "class attribute of a helper": (lambda g, x: g.scaler(x), setter("Scaler.power", 3)),
    "global of a helper's call": (lambda g, x: g.scaler(x), set_global("HIDDEN", 2.0)),
    "class attribute": (lambda g, x: x * g.level, setter("Box.level", 3.0)),
    "class attribute, shadowed": (lambda g, x: x * g.level, setter("g.level", 3.0)),
    "class attribute by type": (lambda g, x: x * type(g).level, setter("Box.level", 3.0)),
    "dict": (lambda g, x: x * g.options["temp"], setter("g.options['temp']", 3.0)),
    "dict, with a new key": (lambda g, x: x * g.ordered.get("b", 2.0), setter("g.ordered['b']", 3.0)),
    "list in a dict": (lambda g, x: x * g.options["deep"]["list"][1], setter("g.options['deep']['list'][1]", 3.0)),
    "global that a module reads": (lambda g, x: g.layer(x), set_global("TEMP", 3.0)),
    "number of items": (lambda g, x: x * len(g.many), lambda g: g.many.append(1.0)),  # above 256: no object is kept
    "longer list": (lambda g, x: x * sum(g.options["deep"]["list"]), lambda g: g.options["deep"]["list"].append(3.0)),
    "dataclass in a list": (
        lambda g, x: next(x * one.temp for one in g.options["configs"]),
        setter("g.options['configs'][0].temp", 3.0),
    ),
    "argparse": (lambda g, x: x * g.args.temp, setter("g.args.temp", 3.0)),
    "getattr": (lambda g, x: x * getattr(g, "te" + "mp"), setter("g.temp", 3.0)),
    "behind __getattr__": (lambda g, x: x * g.behind.temp, setter("g.behind.temp", 3.0)),
    "own __getattribute__": (lambda g, x: x * g.guarded.temp, setter("g.guarded.temp", 3.0)),
    "class that takes no attributes": (lambda g, x: x * g.sealed.temp, setter("g.sealed.temp", 3.0)),
    "dict by enum": (lambda g, x: x * g.by_mode[Mode.PLAIN], setter("g.by_mode[Mode.PLAIN]", 3.0)),
    "list that holds itself": (lambda g, x: x * g.endless[0] * len(g.endless), lambda g: g.endless.append(1)),
    "huge tables": (lambda g, x: x * g.tables.all[0][0][0] * g.temp, setter("g.temp", 3.0)),
    "vars": (lambda g, x: x * vars(g.config)["temp"], setter("g.config.temp", 3.0)),
    "new attribute": (lambda g, x: x * getattr(g.config, "other", 2.0), setter("g.config.other", 3.0)),
    "hasattr": (lambda g, x: x if hasattr(g.config, "other") else x * 2, setter("g.config.other", 3.0)),
    "removed key": (lambda g, x: x * g.dots.get("temp", 2.0), lambda g: g.dots.pop("temp")),
    "set": (lambda g, x: x * 2 if 3 in g.allowed else x, lambda g: g.allowed.add(3)),
    "method of another object": (lambda g, x: g.method(x), setter("g.method.__self__._factor", 3.0)),
    "learning rate": (
        lambda g, x: x * g.optimizer.param_groups[0]["lr"],
        setter("g.optimizer.param_groups[0]['lr']", 3.0),
    ),
    "tensor in a list": (lambda g, x: x * g.masks[0], setter("g.masks[0]", torch.tensor([1.0, 0.0, 0.0]))),
    "global tensor": (lambda g, x: x * MASK, set_global("MASK", torch.tensor([1.0, 0.0, 0.0]))),
    "function": (lambda g, x: g.activation(x), setter("g.activation", torch.tanh)),
    "partial": (lambda g, x: g.partial(x), setter("g.partial", functools.partial(helper, by=3.0))),
    "keywords of a partial": (lambda g, x: g.partial(x), setter("g.partial.keywords['by']", 3.0)),
    "default argument": (lambda g, x: helper(x), setter("helper.__defaults__", (3.0,))),
    "default keyword": (lambda g, x: helper(x), setter("helper.__kwdefaults__", {"plus": 3.0})),
    "global": (lambda g, x: x * TEMP, set_global("TEMP", 3.0)),
    "global of a nested function": (lambda g, x: outer(x), set_global("TEMP", 3.0)),
    "global of a function of fx": (lambda g, x: wrapped_by_fx(x), set_global("TEMP", 3.0)),
    "global of a decorated function": (lambda g, x: decorated_by_torch(x), set_global("TEMP", 3.0)),
    "global dict": (lambda g, x: x * SETTINGS["deep"]["list"][0], setter("SETTINGS['deep']['list'][0]", 3.0)),
    "global function": (lambda g, x: activation(x), set_global("activation", torch.relu)),
    "class of settings": (lambda g, x: x * Namespace.temp, setter("Namespace.temp", 3.0)),
    "module of settings": (lambda g, x: x * settings.temp, setter("settings.temp", 3.0)),
    "import in build": (local_import, setter("settings.temp", 3.0)),
    "closure": with_cell(),
    "module": (lambda g, x: g.layer(x), setter("g.layer.gain", 3.0)),
    "leaky relu": (lambda g, x: g.leaky(x), setter("g.leaky.negative_slope", 0.5)),
    "layer norm in a sequence": (lambda g, x: g.layers(x), setter("g.layers[1].eps", 1.0)),
    "global module": (lambda g, x: LOSS(x, x + 1), setter("LOSS.reduction", "sum")),
    "flag of a global module": (lambda g, x: DROPOUT(x), lambda g: DROPOUT.eval()),
    "child of a global module": (lambda g, x: CHAIN(x), setter("CHAIN[0].negative_slope", 0.5)),
    "hook of a global module": (lambda g, x: CHAIN(x), lambda g: CHAIN.register_forward_hook(lambda *a: a[2] * 3)),
    "module in a list": (lambda g, x: g.plain[0](x) + g.plain[0].p, setter("g.plain[0].p", 1.0)),
    "hook": (lambda g, x: g.leaky(x), lambda g: g.leaky.register_forward_hook(lambda *a: a[2] * 3)),
    "module, replaced": (lambda g, x: g.leaky(x), setter("g.leaky", nn.LeakyReLU(0.5))),
}


CHANGED: list[tuple[Any, str]] = [
    *((sys.modules[__name__], name) for name in ("TEMP", "HIDDEN", "MASK", "activation", "DROPOUT", "CHAIN", "LOSS")),
    *((sys.modules[__name__], "SETTINGS"), (sys.modules[__name__], "CONFIG"), (settings, "temp")),
    *((Box, "level"), (Scaler, "power"), (Namespace, "temp"), (helper, "__defaults__"), (helper, "__kwdefaults__")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_value_is_seen_once(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for owner, name in CHANGED:
        monkeypatch.setattr(owner, name, copy.deepcopy(getattr(owner, name)))
    build, change = KINDS[kind]
    graph = Box(build)
    assert graph(X).equal(graph.build(X))
    capsys.readouterr()
    before = graph(X)
    assert graph(X).equal(before)
    assert capsys.readouterr().out == ""
    change(graph)
    after = graph(X)
    torch.testing.assert_close(after, graph.build(X), rtol=0, atol=0, equal_nan=True, check_dtype=True)
    assert after.dtype != before.dtype or not torch.equal(after, before)
    assert len(graph.why_recompiled()) == 1
    capsys.readouterr()
    graph(X)
    assert capsys.readouterr().out == ""


def test_values_that_alternate_are_compiled_once_each() -> None:
    graph = Box(lambda g, x: x * g.temp)
    for _ in range(4):
        for temp in (1.0, 1, True, math.nan, float("nan"), 0.0, -0.0):
            graph.temp = temp
            torch.testing.assert_close(graph(X), graph.build(X), rtol=0, atol=0, equal_nan=True)
    assert len(graph.why_recompiled()) == 5
    assert graph.why_recompiled()[0] == "step 1: value temp: 1, was 1.0"


def test_a_value_with_more_than_eight_changes_is_refused_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    graph = Box(lambda g, x: x * g.layer.gain)
    with caplog.at_level(logging.INFO, "tierbed"):
        for step in range(9):
            graph.layer.gain = 1 / (step + 1)
            assert graph(X).equal(graph.build(X))
    assert caplog.messages[0] == "Box compiled step 1: value layer.gain: 0.5, was 1.0"
    assert len(caplog.messages) == 8
    graph.layer.gain = 0.05
    for _ in range(2):
        with pytest.raises(GraphError, match=r"layer\.gain changed to 0\.05 from 0\.11.*as a tensor.*buffer"):
            graph(X)
    graph.layer.gain = 1 / 4
    assert graph(X).equal(graph.build(X))
    del graph.layer.gain
    graph.layer.register_buffer("gain", torch.tensor(0.05))
    for step in range(10):
        graph.layer.gain.fill_(1 / (step + 1))
        assert graph(X).equal(graph.build(X))


UNUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "only the caller's": lambda g, x: x * 2,
    "printed": lambda g, x: (print(f"step {g.calls} of {g.calls} %s" % g.calls), x * 2)[1],
    "logged": lambda g, x: (logging.getLogger("mine").warning("step %s", g.calls), x * 2)[1],
    "of a name": lambda g, x: (setattr(g, "title", f"run {g.calls}"), x * 2)[1],
}


@pytest.mark.parametrize("kind", [int, float, str])
@pytest.mark.parametrize("use", UNUSED)
@pytest.mark.rotated("kind")
def test_a_value_that_reaches_no_operation_costs_no_steps(use: str, kind: Callable[[int], Any]) -> None:
    graph = Box(UNUSED[use])
    graph.title = ""
    for step in range(30):
        graph.calls = kind(step)
        assert graph(X).equal(X * 2)
    assert graph.why_recompiled() == []
    assert graph.calls == kind(29)


def test_a_counter_that_build_writes_is_not_guarded() -> None:
    def build(g: Any, x: Tensor) -> Tensor:
        g.calls += 1
        g.options["calls"] = g.options.get("calls", 0) + 1
        g.layer.gain = 0.5 * g.temp
        return g.layer(x)

    graph = Box(build)
    graph.calls = 0
    for _ in range(20):
        assert graph(X).equal(X * 0.75 + 0.25)
    assert graph.calls == 1  # of the trace
    graph.temp = 3.0
    for _ in range(3):
        assert graph(X).equal(X * 1.5 + 0.25)
    assert len(graph.why_recompiled()) == 1


BRANCHES: dict[str, Callable[[Any], bool]] = {
    "comparison": lambda g: g.epoch >= 3,
    "quotient": lambda g: bool(g.epoch // 3),
    "index": lambda g: [False, False, False, True][g.epoch],
    "quotient as index": lambda g: [False, True][g.epoch // 3],
    "function of math": lambda g: math.sqrt(g.epoch) > 1.5,
    "hash": lambda g: g.epoch in {3},
    "range": lambda g: len(range(g.epoch)) > 2,
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_value_that_takes_a_branch_late_is_still_guarded(branch: str) -> None:
    graph = Box(lambda g, x: x * 2 if BRANCHES[branch](g) else x)
    graph.epoch = 0
    for epoch in range(4):
        graph.epoch = epoch
        assert graph(X).equal(graph.build(X))
    assert len(graph.why_recompiled()) == 1


drawn = random.random
DRAWS: dict[str, Callable[[Any], float]] = {
    "random": lambda g: random.random(),
    "choice": lambda g: random.choice([1, 2, 3]),
    "numpy": lambda g: np.random.rand(),
    "Random": lambda g: g.rng.gauss(0, 1),
    "RandomState": lambda g: g.state.normal(),
    "Generator": lambda g: g.generator.random(),
    "imported": lambda g: drawn(),
    "in a helper": lambda g: helper_that_draws(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_drawing_outside_of_torch_is_refused_not_frozen(draw: str) -> None:
    graph = Box(lambda g, x: x * DRAWS[draw](g) if g.temp else x)
    graph.rng, graph.state, graph.generator = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)
    with pytest.raises(GraphError, match=r"draws random numbers from .*as a tensor"):
        graph(X)
    graph.temp = None
    assert graph(X).equal(X)


def helper_that_draws() -> float:
    return float(np.random.normal())


def test_a_trace_leaves_no_class_changed() -> None:
    def fail(g: Any, x: Tensor) -> Tensor:
        assert "__getattribute__" in vars(Box)
        raise ValueError(f"after {g.config.temp}, {g.layer(x)}")

    with pytest.raises(ValueError, match=r"after 1\.5"):
        Box(fail)(X)
    for cls in (Box, Layer, nn.Module, nn.LeakyReLU, Config, Slots):
        assert "__getattribute__" not in vars(cls)


def test_dropout_and_a_temperature_train_as_in_eager_torch() -> None:
    def loss_of(graph: Any, ids: Tensor) -> Tensor:
        return graph.net(graph.rows(ids)).square().mean() * graph.temp

    rows, net, ids = embedding(), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 1)), torch.arange(32)
    graph = training(loss_of, rows=rows, net=net)
    for p, momentum, temp in ((0.9, 0.1, 1.0), (0.0, 0.5, 2.0), (0.5, 0.1, 1.0), (0.9, 0.1, 1.0)):
        net[1].p, net[0].momentum, graph.temp = p, momentum, temp
        eager = SimpleNamespace(net=copy.deepcopy(net), temp=temp, rows=dense_copy(rows))
        state = torch.get_rng_state()
        loss = graph(ids)
        torch.set_rng_state(state)
        expected = loss_of(eager, ids)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        weight = eager.rows.weight
        torch.testing.assert_close(rows.get(ids), (weight.detach() - 0.1 * weight.grad)[ids])
        torch.testing.assert_close(net[0].running_mean, eager.net[0].running_mean)
    assert len(graph.why_recompiled()) == 2


def counting(graph: Any, features: JaggedTensor) -> Tensor:
    """A loss of rows of a container of ids, and a counter of the caller's that is printed."""
    print(f"step {graph.calls}")
    return graph.rows(features.values()).square().sum()


def test_a_printed_counter_costs_no_step_where_rows_train_and_sizes_differ() -> None:
    graph = training(counting, rows=embedding())
    for step in range(8):
        graph.calls, ids = step, torch.arange(step % 5 + 1)
        expected = graph.rows.get(ids).square().sum()
        torch.testing.assert_close(graph(JaggedTensor(ids, lengths=torch.tensor([len(ids)]))), expected)
    assert graph.why_recompiled() == []


def test_a_run_uses_the_values_of_each_step_though_it_draws_ahead() -> None:
    graph = Reading()
    run = graph.run([X] * 6, ahead=4)
    for step in range(6):
        graph.temp = float(step % 2 + 1)
        assert next(run).equal(X * graph.temp)
    assert graph.why_recompiled() == ["step 1: value temp: 2.0, was 1.0"]


class Reading(Graph):
    temp = 1.0

    def build(self, x: Tensor) -> Tensor:
        return x * self.temp


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch, of its own class
def test_a_copy_of_a_graph_has_values_of_its_own() -> None:
    graph = Reading()
    graph(X)
    other = copy.deepcopy(graph)
    for one, temp in ((other, 2.0), (graph, 3.0), (other, 4.0)):
        one.temp = temp
        assert graph(X).equal(X * graph.temp)
        assert other(X).equal(X * other.temp)


def test_values_that_another_thread_writes_are_those_of_the_step() -> None:
    graph, stop = Reading(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            graph.temp = 3.0 - graph.temp

    graph.temp = 1.0
    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert {graph(X)[0, 0].item() for _ in range(100)} <= {1.0, 2.0}
    finally:
        stop.set()
        thread.join()
    for temp in (1.0, 2.0):
        graph.temp = temp
        assert graph(X).equal(X * temp)
