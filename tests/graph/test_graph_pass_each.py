"""Each pass on its own: a small FX graph before, and what it is after."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.graphs import embedding
from tierbed.engine.options.lookup import Lookup
from tierbed.graph.passes import rewrite
from tierbed.graph.passes.lookups import extract_id_graph, share_rows
from tierbed.graph.passes.step_epilogue import StepEpilogue

aten = torch.ops.aten
ROWS = embedding()
OTHERS = {"others": embedding(), "padded": embedding(padding_idx=0), "tables": embedding(tables=2)}


@torch.library.custom_op("tierbed_test::sample", mutates_args=())
def sample(ids: torch.Tensor) -> torch.Tensor:
    """Of a user, who knows what it does."""
    return ids.clone()


@sample.register_fake
def _(ids: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ids)


class Sketch:
    """A step under construction: nodes with fake values, of arguments of 4 ids and a weight of 4."""

    def __init__(self) -> None:
        self.mode, self.graph = FakeTensorMode(), fx.Graph()
        self.module = fx.GraphModule(nn.Module(), self.graph)
        self.ids = self.placeholder("ids", torch.zeros(4, dtype=torch.int64))
        self.weight = self.placeholder("weight", torch.zeros(4))
        self.module.rows = ROWS
        self.rows = self.graph.get_attr("rows")

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = (self.graph.call_method if isinstance(target, str) else self.graph.call_function)(target, args)
        if isinstance(target, torch._ops.OpOverload):
            with self.mode:
                node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def train(self, ids: fx.Node, name: str | None = None) -> fx.Node:
        """Prefetch, gather, update of `ROWS`, or of one of `OTHERS`; the batch."""
        rows = self.rows
        if name is not None:
            setattr(self.module, name, OTHERS[name])
            rows = self.graph.get_attr(name)
        batch = self.call("pin", rows, [Lookup(ids)])
        rows = self.call("gather", batch, 0)
        rows.meta["val"] = self.mode.from_tensor(torch.zeros(4, ROWS.dim))
        self.call("update", batch, [self.call(aten.mul.Tensor, rows, 2.0)])
        return batch

    def end(self) -> fx.GraphModule:
        self.graph.output([])
        self.graph.lint()
        return self.module


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op in ("call_function", "call_method")]


def test_cut_lookups_leaves_out_draws_and_writes_to_arguments() -> None:
    for spoil in (
        lambda sketch: sketch.call(aten.randint.default, 9, [4]),
        lambda sketch: sketch.call(aten.add_.Tensor, sketch.ids, 1),
        lambda sketch: sketch.call(torch.ops.tierbed_test.sample.default, sketch.ids),
        lambda sketch: sketch.call(operator.getitem, sketch.call("read", sketch.rows, Lookup(sketch.ids)), 0),
    ):
        sketch = Sketch()
        sketch.train(spoil(sketch))
        assert extract_id_graph(sketch.end()) is None


def test_cut_lookups_keeps_what_makes_ids_that_change_later_and_nothing_else() -> None:
    for accumulated in (1, 2):
        sketch = Sketch()
        shifted = sketch.call(aten.add.Tensor, sketch.ids, 1)
        sketch.call(aten.mul.Tensor, sketch.weight, 3.0)
        sketch.call(aten.remainder_.Scalar, shifted, 10)  # a write that the ids depend on
        sketch.train(shifted)
        sketch.call(aten.remainder_.Scalar, shifted, 2)  # one that they do not
        module, end = sketch.end(), StepEpilogue()
        end.accumulate_steps = accumulated
        end.max_norm = 1.0
        rewrite.merge_updates(module, end)
        before = str(module.graph)
        cut = extract_id_graph(module)
        assert cut is not None
        assert [aten.add.Tensor, aten.remainder_.Scalar] == targets(cut.graph)[:2]
        assert aten.mul.Tensor not in targets(cut.graph)
        assert str(module.graph) == before
        given = torch.tensor([1, 8, 9, 10])
        ((rows, lookups),) = cut(given, torch.zeros(4))
        assert rows is ROWS
        assert Lookup(*lookups[0]).ids.tolist() == [2, 9, 0, 1]
        assert given.tolist() == [1, 8, 9, 10]


def draw(sketch: Sketch) -> fx.Node:
    return sketch.call(aten.randint.default, 9, [4])


def users(sketch: Sketch) -> fx.Node:
    return sketch.call(torch.ops.tierbed_test.sample.default, sketch.ids)


def given(sketch: Sketch) -> fx.Node:
    return sketch.ids


def shifted(sketch: Sketch) -> fx.Node:
    return sketch.call(aten.add.Tensor, sketch.ids, 1)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize(
    ("make", "name", "shared"),
    [
        (given, "others", True),
        (shifted, "others", True),
        (draw, "others", False),
        (users, "others", False),
        (given, "padded", False),
        (given, "tables", False),
    ],
)
def test_ids_that_are_the_same_are_shared_and_no_others(
    make: Callable[[Sketch], fx.Node], name: str, shared: bool, changed: bool
) -> None:
    sketch = Sketch()
    first = sketch.train(make(sketch))
    if changed:
        sketch.call(aten.mul_.Tensor, sketch.ids, 2)
    second = sketch.train(make(sketch), name)
    share_rows(sketch.end())
    assert (second.args[1:] == (first.args[1], first)) == (shared and not changed)
    assert len(second.args) == 2 + (shared and not changed)
