"""What a CUDA graph cannot hold is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.captured import Model, Pair, batches
from support.cuda_tables import on_one_device
from support.embeddings import make
from support.refusals import check_refusal
from support.stores import options
from tierbed import Graph, GraphError, OptionError
from tierbed.engine.ops.cuda.device import Device


@on_one_device
def test_a_step_that_waits_for_the_device_is_refused_with_its_cause(place: torch.device) -> None:
    class Masked(Model):
        def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.rows(ids, tables)
            loss = (rows.sum((1, 2)) - y).square()
            scale = torch.ones_like(y)
            scale[y > 0.5] = scale[:1] * 2
            (loss * scale).mean().backward()
            return loss.detach().sum(), rows

    pair = Pair(place, lambda _: Masked("adam"))
    with pytest.raises(GraphError, match=r"cuda_graph: aten.index_put.*waits for the device.*torch.where"):
        pair.graphs[1](*(tensor.to(place) for tensor in batches(1)[0]))
    pair.graphs[0].rows.table_handle()  # as the refused step did
    pair.check()  # it left nothing
    pair.graphs[1].cuda_graph(False)
    pair.steps(batches(3, seed=1))


@torch.library.custom_op("tierbed_tests::read", mutates_args=())
def read(given: Tensor) -> Tensor:
    return given * (2 if given.sum().item() > 0 else 1)


read.register_fake(torch.empty_like)
read.register_autograd(lambda context, grad: grad)


@on_one_device
def test_an_op_that_reads_a_value_is_told_by_the_fourth_call_and_tried_once(
    place: torch.device, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reading(Model):
        def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.rows(ids, tables)
            loss = (read(rows).sum((1, 2)) - y).square().mean()
            loss.backward()
            return loss, rows

    tries = []
    capture = device.capture
    monkeypatch.setattr(device, "capture", lambda launches: tries.append(launches) or capture(launches))
    pair = Pair(place, lambda _: Reading("adam"))
    pair.steps(batches(3))
    said = r"cuda_graph: the step could not be captured: .*(captur|permitted).*reads"
    for _ in range(2):
        with pytest.raises(GraphError, match=said):
            pair.graphs[1](*(tensor.to(place) for tensor in batches(1)[0]))
        pair.check()  # the step left nothing
    assert len(tries) == 1
    pair.graphs[1].cuda_graph(False)
    pair.steps(batches(2, seed=1))


class Small(Graph):
    def __init__(self, where: Any, build: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.rows = make(where, tables=1)
        self.add_optimizer(torch.optim.SGD(self.rows.parameters(), lr=0.1))
        self.cuda_graph()
        self.inside = build

    def build(self, ids: Tensor, y: Tensor) -> Any:
        loss = self.rows(ids, 0).sum()
        loss.backward()
        return loss, None if self.inside is None else self.inside(ids, y)


@on_one_device
@pytest.mark.parametrize(
    ("store", "more"),
    [("device", {}), ("host", {"capacity": 50}), ("cached_host", {"capacity": 50})],
    ids=["growing", "host", "cached"],
)
def test_stores_that_wait_for_the_device_are_refused(place: torch.device, store: str, more: dict[str, Any]) -> None:
    graph = Small(options(store, **more)).to(place)
    ids, y = torch.arange(3, device=place), torch.ones(1, device=place)
    with pytest.raises(OptionError, match=r"cuda_graph: embedding 'rows' has store='\w+', capacity=\w+, .*or call cud"):
        graph(ids, y)
    assert graph.rows.metrics()["table"]["step"] == 0
    graph.cuda_graph(False)
    graph(ids, y)


def test_tables_on_the_cpu_are_refused() -> None:
    with pytest.raises(GraphError, match=r"cuda_graph: embedding 'rows' is on cpu.*call \.cuda\(\) on the graph"):
        Small(options("device", capacity=50))(torch.arange(3), torch.ones(1))


@on_one_device
def test_arguments_of_another_device_or_changed_in_place_are_refused(place: torch.device) -> None:
    ids, away = torch.arange(3, device=place), torch.ones(1, device="meta" if place.type == "cpu" else "cpu")

    def refused(inside: Callable[..., Any], y: Tensor, *named: str) -> None:
        graph = Small(options("device", capacity=50), inside).to(place)
        check_refusal((lambda: graph(ids, y), GraphError, "cuda_graph", *named))

    refused(lambda _, y: y * 2, away, f"argument y is on {away.device.type}", f"make it on {place}")
    refused(lambda _, y: y * 2, torch.ones(6, device=place)[::2], "argument y is a slice", "y.contiguous")
    refused(lambda _, y: y.add_(1), torch.ones(1, device=place), "argument y in place", "change a clone")


@pytest.mark.parametrize(
    ("method", "given", "undo"),
    [
        ("clip_grad_norm", (1.0,), (None,)),
        ("accumulate_grads", (2,), (1,)),
        ("set_grad_scaler", (torch.amp.GradScaler("cpu"),), (None,)),
        ("compile_dense", (), None),
    ],
)
def test_what_asks_the_device_for_numbers_is_refused(method: str, given: Any, undo: Any) -> None:
    graph = Small(options("device", capacity=50))
    ask = getattr(graph, method)
    check_refusal((lambda: ask(*given), OptionError, f"cuda_graph and {method}", "or leave out"))
    graph.cuda_graph(False)
    ask(*given)
    check_refusal((graph.cuda_graph, OptionError, f"cuda_graph and {method}"))
    check_refusal((lambda: graph.cuda_graph(1), OptionError, "enabled=1"))  # type: ignore[arg-type]
    if undo is not None:
        ask(*undo)
        graph.cuda_graph()
