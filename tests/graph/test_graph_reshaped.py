"""Tensors whose shape changes in place: a graph has the numbers of eager torch, in steps for one size and for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.graphs import compiled_steps, graph_of

OWN = 1


@pytest.fixture(autouse=True)
def one_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", OWN)


def stacked(graph: Any, x: Tensor) -> Tensor:
    w = graph.layer(x)
    y = torch.stack([w, w, w]).transpose_(0, 1)
    return w.pow(2).sum() / y.shape[0] + y.std() * y.size(1)


def unsqueezed(graph: Any, x: Tensor) -> Tensor:
    y = graph.layer(x).tanh()
    z = y.clone().unsqueeze_(0)
    return (z.expand(2, *z.shape[1:]) * y).mean() * z.shape[1] / z.numel()


def squeezed(graph: Any, x: Tensor) -> Tensor:
    y = graph.layer(x).unsqueeze(0).clone().squeeze_(0)
    return y.sum() / y.shape[0] + y.new_ones(y.size(0)).sum()


def swapped(graph: Any, x: Tensor) -> Tensor:
    y = (graph.layer(x) * 2).t_()
    z = torch.cat([y, y], 1).swapaxes_(0, 1)
    return (z.pow(2).sum() + z.shape[0]) / y.shape[1]


def strided(graph: Any, x: Tensor) -> Tensor:
    y = graph.layer(x)
    z = torch.zeros(y.shape[0] * 4).as_strided_((y.shape[0], 2), (4, 1))
    return y.sum() + z.shape[0] * y.mean() + z.sum()


def resized(graph: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.zeros(3, x.shape[0]).resize_(x.shape[0], 2)
    return graph.layer(x).sum() / z.shape[0]


def set_to_stack(graph: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.zeros(2).set_(torch.stack([x, x, x]))
    return graph.layer(x).sum() / z.shape[1]


def of_a_detached(graph: Any, x: Tensor) -> Tensor:
    y = graph.layer(x)
    y.detach().unsqueeze_(0)
    return (y.sum(0) * torch.arange(4)).pow(2).sum() / y.shape[0]


def of_a_parameter(graph: Any, x: Tensor) -> Tensor:
    w = graph.layer.weight.detach().t_()
    v = graph.layer.weight.detach().t().t().t_()
    return graph.layer(x).pow(2).mean() + (w[0] * torch.arange(4)).sum() + (v[0] * torch.arange(4)).sum()


BUILDS = [stacked, unsqueezed, squeezed, swapped, strided, resized, set_to_stack, of_a_detached, of_a_parameter]


def test_sizes_read_after_an_in_place_view_are_those_of_this_call() -> None:
    def build(graph: Any, x: Tensor) -> list[Tensor]:
        found = [loss(graph, x) for loss in BUILDS]
        torch.stack(found).sum().backward()
        return found

    torch.manual_seed(1)
    layer, other = nn.Linear(3, 4), nn.Linear(3, 4)
    other.load_state_dict(layer.state_dict())
    graph = graph_of(build, torch.optim.SGD(layer.parameters(), lr=0.001), layer=layer)
    eager = graph_of(build, layer=other)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.001)
    for rows in (7, 9, 12, 5):
        x = torch.randn(rows, 3)
        optimizer.zero_grad()
        expected = [loss.detach() for loss in eager.build(x)]
        optimizer.step()
        for name, ours, theirs in zip(BUILDS, graph(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n.__name__}: {m}")
    torch.testing.assert_close(layer.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-5)
    assert compiled_steps(graph) == OWN + 1


def test_arguments_and_buffers_that_build_reshapes_are_reshaped_as_in_eager() -> None:
    def build(graph: Any, x: Tensor) -> Tensor:
        loss: Tensor = graph.layer(x.unsqueeze_(0)).sum() + x.shape[1] + graph.norm.running_mean.unsqueeze_(0).sum()
        loss.backward()
        return loss

    layer, norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
    graph = graph_of(build, torch.optim.SGD(layer.parameters(), lr=0.0), layer=layer, norm=norm)
    for rows in range(2, OWN + 4):
        x = torch.randn(rows, 3)
        expected = layer(x).sum() + rows
        norm.running_mean = torch.zeros(4)
        torch.testing.assert_close(graph(x), expected.detach())
        assert x.shape == (1, rows, 3)
        assert norm.running_mean.shape == (1, 4)
