"""The passes remove what nothing needs, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.graphs import embedding, graph_of
from tierbed import Graph
from tierbed.engine.options.lookup import Lookup
from tierbed.graph.passes import rewrite
from tierbed.graph.passes.lookups import extract_id_graph, share_rows
from tierbed.graph.passes.step_epilogue import StepEpilogue


def two_losses(graph: Any, x: Tensor) -> Tensor:
    out = graph.net(x)
    loss: Tensor = out.sum()
    loss.backward(retain_graph=True)
    out.square().sum().backward()
    return loss


def compiled(graph: Graph) -> str:
    return str(graph).partition("# compiled step 0")[2]


def test_an_evaluation_step_holds_no_backward_though_it_accumulates_in_place() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    graph = graph_of(two_losses, torch.optim.SGD(net.parameters(), lr=0.1), net=net)
    words = ("threshold_backward", "add_.Tensor", "square", "dense_step")
    graph(torch.ones(2, 3))
    assert all(word in compiled(graph) for word in words[:2])
    graph.eval()(torch.ones(2, 3))
    code = str(graph).partition("# compiled step 1")[2]
    assert "addmm" in code
    assert not any(word in code for word in words)


def test_a_linear_layer_is_transposed_once_a_direction() -> None:
    net = nn.Linear(3, 1)
    graph = graph_of(lambda graph, x: graph.net(x).sum().backward(), torch.optim.SGD(net.parameters()), net=net)
    graph(torch.ones(2, 3))
    assert compiled(graph).count("aten.t.default") == 2


def test_writes_that_outlive_a_call_stay() -> None:
    seen, total = torch.zeros(2), torch.zeros(())

    def build(graph: Any, x: Tensor) -> Tensor:
        graph.calls.add_(1)
        seen.view(2, 1)[1, 0].copy_(x.sum())
        torch.add(total, x.sum(), out=total)
        scratch = torch.zeros(2)
        scratch[0] = 7
        x[0].zero_()
        return x.sum()

    graph, x = graph_of(build), torch.ones(3)
    graph.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    assert graph(x) == 2
    assert graph(x) == 2
    assert (graph.calls.item(), seen.tolist(), total.item(), x.tolist()) == (2, [0, 2], 5, [0, 1, 1])
    assert "zeros" not in compiled(graph)


def test_a_random_draw_that_nobody_reads_still_moves_the_stream() -> None:
    graph = graph_of(lambda graph: [torch.rand(2), torch.rand(2)][1])
    torch.manual_seed(1)
    ours = graph()
    torch.manual_seed(1)
    torch.rand(2)
    assert torch.equal(ours, torch.rand(2))


def test_ids_of_a_closure_or_attribute_train_like_an_argument() -> None:
    ids, rows = torch.tensor([1, 2]), embedding()

    def build(graph: Any) -> Tensor:
        loss = graph.rows(ids).sum() + graph.rows(graph.more).sum()
        loss.backward()
        return loss

    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=1.0), rows=rows)
    graph.more = torch.tensor([2])
    before = rows.get(ids)
    graph()
    torch.testing.assert_close(rows.get(ids), before - torch.tensor([[1.0], [2.0]]))


def test_a_sparse_argument_is_read() -> None:
    graph = graph_of(lambda graph, x: x.to_dense() * 2)
    assert torch.equal(graph(torch.eye(2).to_sparse()), torch.eye(2) * 2)
    assert torch.equal(graph(torch.eye(2)[:1].to_sparse()), torch.eye(2)[:1] * 2)


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
