"""What a graph and a lookup cannot take is refused with a remedy, and the remedy works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from support.graphs import embedding, graph_of, training
from support.refusals import check_refusal
from tierbed import Graph, MultiTableEmbedding
from tierbed.engine.errors import GraphError, InputError
from tierbed.engine.ops.embedding_base import TRACED_ATTRIBUTE

VALUES, OFFSETS = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 5])
LAYOUTS = [torch.jagged, torch.strided]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def nested(layout: torch.layout, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.nested.nested_tensor([part.to(dtype) for part in VALUES.split([2, 3])], layout=layout)


def trained(rows_of: Any, rows: MultiTableEmbedding) -> Graph:
    return training(lambda graph, *args: rows_of(graph.rows, *args).sum(), rows=rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nested_ids_of_a_lookup_are_refused_with_a_remedy(layout: torch.layout) -> None:
    rows, ids = embedding(), nested(layout)
    for name, call in (
        ("ids", lambda: rows(ids)),
        ("ids", lambda: rows.get(ids)),
        ("ids", lambda: rows(ids, pooling="sum")),
        ("ids", lambda: rows.put(ids, np.ones((5, 4)))),
        ("table_ids", lambda: rows(VALUES, ids)),
        ("weights", lambda: rows(VALUES, None, OFFSETS, "sum", nested(layout, torch.float32))),
    ):
        remedy = "layout=torch.jagged", f"{name}.values()", "offsets=ids.offsets()"
        check_refusal((call, InputError, f"{name} of ", "nested", "contiguous()", *remedy))  # type: ignore[arg-type]
    check_refusal((lambda: rows(VALUES, None, ids, "sum"), InputError, "offsets of", "nested"))


def test_the_remedy_for_nested_ids_pools_and_trains_their_bags_whatever_their_holes() -> None:
    rows = embedding()
    wanted = torch.stack([rows.get(part).sum(0) for part in VALUES.split([2, 3])])
    with_holes = torch.nested.nested_tensor_from_jagged(
        torch.tensor([3, 1, 9, 9, 4, 1, 5, 9]), torch.tensor([0, 4, 8]), torch.tensor([2, 3])
    )
    for ids in (nested(torch.jagged), with_holes):
        ids = ids.contiguous()
        torch.testing.assert_close(rows(ids.values(), offsets=ids.offsets(), pooling="sum"), wanted)
    before = rows.get(VALUES)
    graph = trained(lambda rows, values, offsets: rows(values, offsets=offsets, pooling="sum"), rows)
    graph(ids.values(), ids.offsets())
    torch.testing.assert_close(rows.get(VALUES), before - 0.1 * torch.tensor([1, 2, 1, 2, 1.0])[:, None])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_nested_tensor_in_a_batch_is_refused_with_a_remedy(layout: torch.layout) -> None:
    rows, ids = embedding(), nested(layout)
    remedy = "layout=torch.jagged", "tierbed.jagged.JaggedTensor.from_nested", "KeyedJaggedTensor.from_nested"
    graph = trained(lambda rows, batch: rows(batch["x"] if isinstance(batch, dict) else batch), rows)
    for call, name in (
        (lambda: graph(ids), "argument args is a nested"),
        (lambda: graph({"x": ids}), "argument args['x'] is a nested"),
        (lambda: list(graph.run([ids, ids])), "is a nested"),
    ):
        check_refusal((call, GraphError, name, *remedy))  # type: ignore[arg-type]


@dataclass
class Batch:
    ids: Tensor
    name: str = "train"
    scale: int = 2


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.parts = first, second


def test_an_object_of_a_class_is_refused_until_it_is_registered_as_the_error_says() -> None:
    rows, batch = embedding(), Batch(VALUES)
    graph = trained(lambda rows, batch: rows(batch.ids) * batch.scale, rows)
    echo = graph_of(lambda graph, x: Batch(x + 1))
    for call, name in (
        (lambda: graph(batch), "argument args is a Batch"),
        (lambda: list(graph.run([batch])), "argument args is a Batch"),
        (lambda: echo(VALUES), "build returns a Batch"),
    ):
        check_refusal((call, GraphError, name, "register_dataclass(Batch)"))  # type: ignore[arg-type]
    torch.export.register_dataclass(Batch)
    assert len(list(graph.run([batch, Batch(VALUES, scale=3)]))) == 2
    assert torch.equal(echo(VALUES).ids, VALUES + 1)
    wrong = Batch(VALUES, {1, 2}), Batch(VALUES.numpy())  # type: ignore[arg-type]
    check_refusal((lambda: graph(wrong[0]), GraphError, "argument args.name is a set"))
    check_refusal((lambda: graph(wrong[1]), GraphError, "args.ids is a NumPy array", "torch.from_numpy(args.ids)"))


def test_a_class_that_was_registered_without_names_is_taken() -> None:
    pytree.register_pytree_node(Pair, lambda p: (list(p.parts), None), lambda parts, _: Pair(*parts))
    rows = embedding()
    graph = trained(lambda rows, pair: rows(pair.parts[0]) * pair.parts[1], rows)
    graph(Pair(VALUES, 2))
    with pytest.raises(GraphError, match="argument args is a set"):
        graph(Pair(VALUES, {1}))


def test_an_argument_may_have_the_name_by_which_a_step_calls_an_op() -> None:
    class Named(Graph):
        def build(self, ids: Tensor, aten_mul_Tensor_op: Tensor, pin: Tensor) -> None:
            (self.rows(ids) * aten_mul_Tensor_op * pin).sum().backward()

    graph, ids = Named(), torch.arange(3)
    graph.rows = rows = embedding()
    graph.add_optimizer(torch.optim.SGD(rows.parameters(), lr=1.0))
    before = rows.get(ids)
    graph(ids, torch.tensor(2.0), torch.tensor(3.0))
    torch.testing.assert_close(rows.get(ids), before - 6)


def test_accumulated_gradients_are_taken_while_another_thread_traces_the_embedding() -> None:
    rows = embedding()
    graph = trained(lambda rows, ids: rows(ids), rows)
    graph.accumulate_grads(2)
    graph(torch.arange(3))
    shadow = rows.shadow
    with FakeTensorMode() as tracing:
        traced = nn.Parameter(tracing.from_tensor(shadow))
    setattr(traced, TRACED_ATTRIBUTE, (0, shadow))  # as a trace by another thread has it
    pin = rows.pin

    def pinned(*arguments: Any, **named: Any) -> Any:
        rows._parameters["shadow"] = shadow
        return pin(*arguments, **named)

    def gradients(*arguments: Any) -> None:
        rows._parameters["shadow"] = traced
        tracing.in_kernel_invocation = True  # as at the instant at which its ops compute shapes
        keep(*arguments)

    keep = graph._Graph__epilogue.add_gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "pin", pinned)
        patch.setattr(graph._Graph__epilogue, "add_gradients", gradients)
        graph(torch.arange(3))
    assert rows.metrics()["table"]["step"] == 1
