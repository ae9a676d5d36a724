"""Each pass on its own: a small FX graph before, and what it is after."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.graphs import embedding
from tierbed.engine.options.lookup import Lookup
from tierbed.graph.passes import rewrite
from tierbed.graph.passes.lookups import extract_id_graph, share_rows
from tierbed.graph.passes.step_epilogue import StepEpilogue, accumulate, apply_gradients, dense_step, schedule

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


def dense(sketch: Sketch) -> None:
    sketch.module.sgd = torch.optim.SGD([torch.zeros(4, requires_grad=True)], lr=0.1)
    sketch.call(dense_step, sketch.graph.create_node("get_attr", "sgd"), [sketch.weight], [sketch.weight])


def test_end_together_takes_every_update_and_dense_step_into_one_node() -> None:
    sketch = Sketch()
    batch = sketch.train(sketch.ids)
    dense(sketch)
    module, end = sketch.end(), StepEpilogue()
    end.max_norm = 1.0
    last = rewrite.merge_updates(module, end)
    assert targets(module.graph) == ["pin", "gather", aten.mul.Tensor, apply_gradients]
    arguments: Any = last.args
    epilogue, rows, dense_grads = arguments
    assert epilogue.target == "step_end"
    assert [(part.batch, part.weights) for part in rows] == [(batch, [None])]
    assert dense_grads[0].params == [sketch.weight]
    module.graph.lint()


def test_end_together_lets_accumulated_lookups_read() -> None:
    sketch = Sketch()
    sketch.train(sketch.ids)
    dense(sketch)
    module, end = sketch.end(), StepEpilogue()
    end.accumulate_steps = 2
    last = rewrite.merge_updates(module, end)
    assert targets(module.graph) == ["read", aten.mul.Tensor, accumulate]
    arguments: Any = last.args
    assert arguments[1][0][:2] == (sketch.rows, [Lookup(sketch.ids)])
    module.graph.lint()


def test_schedules_come_last_and_hear_whether_there_was_a_step() -> None:
    sketch = Sketch()
    dense(sketch)
    module = sketch.end()
    steps = {"steplr": torch.optim.lr_scheduler.StepLR(module.sgd, 1)}
    rewrite.add_schedules(module, steps, None)
    assert targets(module.graph) == [dense_step, schedule]
    ended = module.graph.find_nodes(op="call_function", target=dense_step)[0]
    rewrite.add_schedules(module, steps, ended)
    assert [node.args[1:] for node in module.graph.find_nodes(op="call_function", target=schedule)] == [(), (ended,)]


def test_cut_lookups_keeps_what_makes_ids_and_nothing_else() -> None:
    sketch = Sketch()
    shifted = sketch.call(aten.add.Tensor, sketch.ids, 1)
    sketch.call(aten.mul.Tensor, sketch.weight, 3.0)
    sketch.call(aten.remainder_.Scalar, shifted, 10)  # a write that the ids depend on
    sketch.train(shifted)
    module = sketch.end()
    before = str(module.graph)
    cut = extract_id_graph(module)
    assert cut is not None
    assert targets(cut.graph) == [aten.add.Tensor, aten.remainder_.Scalar]
    assert str(module.graph) == before
    given = torch.tensor([1, 8, 9, 10])
    ((rows, lookups),) = cut(given, torch.zeros(4))
    assert rows is ROWS
    assert Lookup(*lookups[0]).ids.tolist() == [2, 9, 0, 1]
    assert given.tolist() == [1, 8, 9, 10]


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


def test_cut_lookups_of_an_accumulated_step_and_ids_that_change_later() -> None:
    sketch = Sketch()
    shifted = sketch.call(aten.add.Tensor, sketch.ids, 1)
    sketch.train(shifted)
    sketch.call(aten.remainder_.Scalar, shifted, 2)
    module, end = sketch.end(), StepEpilogue()
    end.accumulate_steps = 2
    kept = rewrite.merge_updates(module, end).args[1][0][1][0].ids  # type: ignore[index,union-attr]
    assert kept.target is aten.clone.default
    cut = extract_id_graph(module)
    assert cut is not None
    ((rows, lookups),) = cut(torch.tensor([1, 8]), torch.zeros(4))
    assert rows is ROWS
    assert Lookup(*lookups[0]).ids.tolist() == [2, 9]


def test_drop_dead_keeps_the_end_of_a_step_and_its_schedule() -> None:
    sketch = Sketch()
    sketch.train(sketch.ids)
    unread = sketch.call(aten.mul.Tensor, sketch.weight, 3.0)
    module, end = sketch.end(), StepEpilogue()
    end.clip_value = 1.0
    rewrite.merge_updates(module, end)
    rewrite.drop_dead(module.graph)
    assert unread not in module.graph.nodes
    assert targets(module.graph)[-1] is apply_gradients


def test_a_prefetch_of_the_same_ids_takes_the_earlier_batch() -> None:
    sketch = Sketch()
    first = sketch.train(sketch.call(aten.remainder.Scalar, sketch.ids, 10))
    second = sketch.train(sketch.call(aten.remainder.Scalar, sketch.ids, 10), "others")  # as another function makes it
    other = sketch.train(sketch.call(aten.remainder.Scalar, sketch.ids, 9), "padded")
    module = sketch.end()
    share_rows(module)
    rewrite.drop_dead(module.graph)
    module.graph.lint()
    assert second.args == (second.args[0], first.args[1], first)
    assert [len(node.args) for node in (first, other)] == [2, 2]
    step_of_rows = ["pin", "gather", "update", aten.mul.Tensor]
    made = aten.remainder.Scalar
    assert Counter(targets(module.graph)) == Counter([made, *step_of_rows, *step_of_rows, made, *step_of_rows])


def test_what_may_differ_is_not_shared() -> None:
    def draw(sketch: Sketch) -> fx.Node:
        return sketch.call(aten.randint.default, 9, [4])

    def users(sketch: Sketch) -> fx.Node:
        return sketch.call(torch.ops.tierbed_test.sample.default, sketch.ids)

    for make in (draw, users):
        sketch = Sketch()
        sketch.train(make(sketch))
        second = sketch.train(make(sketch), "others")
        share_rows(sketch.end())
        assert len(second.args) == 2
    for name in ("padded", "tables"):
        sketch = Sketch()
        sketch.train(sketch.ids)
        second = sketch.train(sketch.ids, name)
        share_rows(sketch.end())
        assert len(second.args) == 2


def test_ids_that_the_step_writes_to_are_not_shared() -> None:
    for direct in (True, False):
        sketch = Sketch()
        made = (lambda s: s.ids) if direct else lambda s: s.call(aten.add.Tensor, s.ids, 1)
        sketch.train(made(sketch))
        sketch.call(aten.mul_.Tensor, sketch.ids, 2)
        second = sketch.train(made(sketch), "others")
        share_rows(sketch.end())
        assert len(second.args) == 2
