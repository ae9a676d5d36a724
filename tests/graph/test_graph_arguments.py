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

from support.graphs import embedding, graph_of
from tierbed import Graph, MultiTableEmbedding
from tierbed.engine.errors import GraphError, InputError
from tierbed.engine.ops.rows_contract import TRACED

VALUES, OFFSETS = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 5])
LAYOUTS = [torch.jagged, torch.strided]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def nested(layout: torch.layout, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.nested.nested_tensor([part.to(dtype) for part in VALUES.split([2, 3])], layout=layout)


def trained(build: Any, rows: MultiTableEmbedding) -> Graph:
    def step(graph: Any, *args: Any) -> Tensor:
        loss: Tensor = build(graph.rows, *args).sum()
        loss.backward()
        return loss

    return graph_of(step, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nested_ids_of_a_lookup_are_refused_with_a_remedy(layout: torch.layout) -> None:
    rows, ids = embedding(), nested(layout)
    remedy = r"contiguous\(\), with layout=torch.jagged, and give {}.values\(\).*offsets=ids.offsets\(\)"
    for use in (rows, rows.get, lambda ids: rows(ids, pooling="sum"), lambda ids: rows.put(ids, np.ones((5, 4)))):
        with pytest.raises(InputError, match=r"ids of .* are a nested tensor.*" + remedy.format("ids")):
            use(ids)  # type: ignore[operator]
    with pytest.raises(InputError, match="table_ids of .*" + remedy.format("table_ids")):
        rows(VALUES, ids)
    with pytest.raises(InputError, match=r"offsets of .*nested"):
        rows(VALUES, None, ids, "sum")
    with pytest.raises(InputError, match="weights of .*" + remedy.format("weights")):
        rows(VALUES, None, OFFSETS, "sum", nested(layout, torch.float32))


def test_the_remedy_for_nested_ids_pools_their_bags_whatever_their_holes() -> None:
    rows = embedding()
    wanted = torch.stack([rows.get(part).sum(0) for part in VALUES.split([2, 3])])
    with_holes = torch.nested.nested_tensor_from_jagged(
        torch.tensor([3, 1, 9, 9, 4, 1, 5, 9]), torch.tensor([0, 4, 8]), torch.tensor([2, 3])
    )
    for ids in (nested(torch.jagged), with_holes):
        ids = ids.contiguous()
        torch.testing.assert_close(rows(ids.values(), offsets=ids.offsets(), pooling="sum"), wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_nested_tensor_in_a_batch_is_refused_with_a_remedy(layout: torch.layout) -> None:
    rows, ids = embedding(), nested(layout)
    message = (
        r"is a nested.*layout=torch.jagged.*tierbed.jagged.JaggedTensor.from_nested.*KeyedJaggedTensor.from_nested"
    )
    with pytest.raises(GraphError, match="argument args " + message):
        trained(lambda rows, ids: rows(ids), rows)(ids)
    with pytest.raises(GraphError, match=r"argument args\['x'\] " + message):
        trained(lambda rows, batch: rows(batch["x"]), rows)({"x": ids})
    with pytest.raises(GraphError, match=message):
        list(trained(lambda rows, ids: rows(ids), rows).run([ids, ids]))


def test_values_and_offsets_of_a_nested_tensor_train() -> None:
    rows = embedding()
    before = rows.get(VALUES)
    ids = nested(torch.jagged)
    graph = trained(lambda rows, values, offsets: rows(values, offsets=offsets, pooling="sum"), rows)
    graph(ids.values(), ids.offsets())
    torch.testing.assert_close(rows.get(VALUES), before - 0.1 * torch.tensor([1, 2, 1, 2, 1.0])[:, None])


@dataclass
class Batch:
    ids: Tensor
    name: str = "train"
    scale: int = 2


@dataclass
class Counted:
    """Looks at its fields when it is made."""

    ids: Tensor
    scale: float

    def __post_init__(self) -> None:
        assert self.ids.numel() >= 0
        assert self.scale.is_integer()


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.parts = first, second


def test_an_object_of_a_class_is_refused_until_it_is_registered_as_the_error_says() -> None:
    rows = embedding()
    graph = trained(lambda rows, batch: rows(batch.ids) * batch.scale, rows)
    batch = Batch(VALUES)
    message = r"argument args is a Batch.*dataclass and call torch\.export\.register_dataclass\(Batch\)"
    with pytest.raises(GraphError, match=message):
        graph(batch)
    with pytest.raises(GraphError, match=message):
        list(graph.run([batch]))
    echo = graph_of(lambda graph, x: Batch(x + 1))
    with pytest.raises(GraphError, match=r"build returns a Batch.*register_dataclass\(Batch\)"):
        echo(VALUES)
    torch.export.register_dataclass(Batch)
    losses = list(graph.run([batch, Batch(VALUES, scale=3)]))
    assert len(losses) == 2
    assert torch.equal(echo(VALUES).ids, VALUES + 1)
    with pytest.raises(GraphError, match=r"argument args\.name is a set"):
        graph(Batch(VALUES, {1, 2}))  # type: ignore[arg-type]


def test_a_class_that_looks_at_its_fields_is_named_by_them_not_by_places() -> None:
    torch.export.register_dataclass(Counted)
    rows = embedding()
    graph = trained(lambda rows, batch: rows(batch.ids) * batch.scale, rows)
    graph(Counted(VALUES, 2.0))
    assert "args_ids" in str(graph)
    graph(Counted(VALUES, 3.0))
    assert any("args.scale" in reason for reason in graph.why_recompiled())


def test_a_class_that_was_registered_without_names_is_taken() -> None:
    pytree.register_pytree_node(Pair, lambda p: (list(p.parts), None), lambda parts, _: Pair(*parts))
    rows = embedding()
    graph = trained(lambda rows, pair: rows(pair.parts[0]) * pair.parts[1], rows)
    graph(Pair(VALUES, 2))
    with pytest.raises(GraphError, match="argument args is a set"):
        graph(Pair(VALUES, {1}))


def test_numpy_ids_are_refused_with_the_way_to_a_tensor() -> None:
    rows = embedding()
    graph = trained(lambda rows, batch: rows(batch["ids"]), rows)
    with pytest.raises(GraphError, match=r"args\['ids'\] is a NumPy array.*torch\.from_numpy\(args\['ids'\]\)"):
        graph({"ids": VALUES.numpy()})
    graph({"ids": torch.from_numpy(VALUES.numpy())})


def test_a_batch_norm_without_momentum_is_told_to_take_one() -> None:
    def build(graph: Any, x: Tensor) -> Tensor:
        loss: Tensor = graph.net(x).square().sum()
        loss.backward()
        return loss

    def with_momentum(momentum: float | None) -> Graph:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum))
        return graph_of(build, torch.optim.SGD(net.parameters(), lr=0.1), net=net)

    x = torch.randn(4, 3)
    with pytest.raises(GraphError, match=r"graph\.net\(x\).*give the batch norm a momentum, such as 0\.1"):
        with_momentum(None)(x)
    with_momentum(0.1)(x)


def test_an_argument_may_have_the_name_by_which_a_step_calls_an_op() -> None:
    rows = embedding()

    def build(rows: MultiTableEmbedding, ids: Tensor, aten_mul_Tensor_op: Tensor, pin: Tensor) -> Tensor:
        return rows(ids) * aten_mul_Tensor_op * pin

    graph = trained(build, rows)
    ids = torch.arange(3)
    expected = (rows.get(ids) * 6.0).sum()
    assert torch.equal(graph(ids, torch.tensor(2.0), torch.tensor(3.0)), expected)


def test_accumulated_gradients_are_taken_while_another_thread_traces_the_embedding() -> None:
    rows = embedding()
    graph = trained(lambda rows, ids: rows(ids), rows)
    graph.accumulate_grads(2)
    graph(torch.arange(3))
    shadow = rows.shadow
    with FakeTensorMode() as tracing:
        traced = nn.Parameter(tracing.from_tensor(shadow))
    setattr(traced, TRACED, (0, shadow))  # as a trace by another thread has it
    pin = rows.pin

    def pinned(*arguments: Any, **named: Any) -> Any:
        rows._parameters["shadow"] = shadow
        return pin(*arguments, **named)

    def gradients(*arguments: Any) -> None:
        rows._parameters["shadow"] = traced
        tracing.in_kernel_invocation = True  # as at the instant at which its ops compute shapes
        keep(*arguments)

    keep = graph._Graph__epilogue.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "pin", pinned)
        patch.setattr(graph._Graph__epilogue, "add", gradients)
        graph(torch.arange(3))
    assert rows.metrics()["table"]["step"] == 1
