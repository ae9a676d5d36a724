"""Sizes that keep changing: one step for many of them, and the results of a step for each."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.embeddings import contents, make
from support.graphs import FEW, Train, assert_same_state, batches, compiled_steps, eager_step, graph_of, mlp, training
from support.stores import options
from tierbed import Graph, MultiTableEmbedding
from tierbed.graph.run.step_cache import MAX_DYNAMIC_TRIES, MAX_STATIC_SHAPES


class Bags(Graph):
    """Jagged bags in two lookups, dropout, and a loss over as many bags as there are."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows, self.mlp = rows, nn.Sequential(nn.Linear(2 * rows.spec.dim, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.add_optimizer(torch.optim.Adagrad([*rows.parameters(), *self.mlp.parameters()], lr=0.1))

    def build(self, ids: Tensor, offsets: Tensor, users: Tensor) -> Tensor:
        bags = self.rows(ids, 0, offsets, pooling="mean")
        loss = F.mse_loss(self.mlp(torch.cat([bags, self.rows(users, 1)], 1)).squeeze(1), users / 100)
        loss.backward()
        return loss


def bags(bag_count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * bag_count + length)
    ends = torch.sort(torch.randint(0, length + 1, (bag_count - 1,), generator=generator)).values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends, torch.tensor([length])])
    return (
        torch.randint(0, 200, (length,), generator=generator),
        offsets,
        torch.randint(0, 100, (bag_count,), generator=generator),
    )


def test_one_step_for_many_sizes_has_the_bits_of_one_for_each() -> None:
    sizes, found = [(5, 12), (9, 30), (30, 80)], []
    for own in (1, MAX_STATIC_SHAPES):
        with pytest.MonkeyPatch.context() as patched, make(options("cached_host"), None, tables=2) as rows:
            patched.setattr("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", own)
            graph = Bags(rows)
            torch.manual_seed(5)
            losses = torch.stack(list(graph.run([bags(*size) for size in sizes], ahead=8)))
            found.append((losses, contents(rows).tobytes(), rows.metrics()["table"]["prefetch_hits"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_a_step_for_many_sizes_trains_as_eager_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", FEW)
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    graph = Train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    theirs = torch.optim.Adam(other.parameters(), lr=0.01)

    def train(sizes: Iterable[int]) -> None:
        for rows in sizes:
            for x, y in batches(1, rows=rows):
                torch.testing.assert_close(graph(x, y), eager_step(other, theirs, x, y), rtol=1e-5, atol=1e-6)
        assert_same_state(model, other)

    train(range(2, FEW + 2))
    with pytest.raises(RuntimeError):  # which does not end the sharing
        graph(torch.zeros(5, 7), torch.zeros(5, 1))
    train(range(10, 30))
    assert compiled_steps(graph) == FEW + 1
    train([1])
    assert compiled_steps(graph) == FEW + 2  # sizes 0 and 1 have steps of their own
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"Train was compiled for {FEW} sizes of its arguments" in warning
    x, y = torch.randn(6, 40).t(), torch.zeros(40, 1)  # another layout does not take a step for contiguous ones
    torch.testing.assert_close(graph(x, y), eager_step(other, theirs, x, y), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("few_steps_of_their_own")
def test_a_build_that_takes_a_size_for_a_number_keeps_a_step_for_each_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traced: list[int] = []

    def loss(graph: Any, x: Tensor) -> Tensor:
        traced.append(len(x))
        return graph.layer(x).sum() / int(x.shape[0])

    layer = nn.Linear(6, 1)
    graph = training(loss, layer=layer)
    for rows in range(2, FEW + 6):
        x = torch.randn(rows, 6)
        expected = layer(x).mean().detach()
        torch.testing.assert_close(graph(x), expected)
    assert compiled_steps(graph) == FEW + 4
    assert len(traced) == FEW + 4 + MAX_DYNAMIC_TRIES  # of dynamic-shape steps
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert f"Built was compiled for more than {FEW} sizes of its arguments and is compiled again" in warning
    assert "pad inputs to few sizes" in warning


STATIC = "tierbed.graph.run.step_cache.MAX_STATIC_SHAPES"


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


def test_sizes_read_after_an_in_place_view_are_those_of_this_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(graph: Any, x: Tensor) -> list[Tensor]:
        found = [loss(graph, x) for loss in BUILDS]
        torch.stack(found).sum().backward()
        return found

    monkeypatch.setattr(STATIC, 1)
    torch.manual_seed(1)
    layer = nn.Linear(3, 4)
    eager = SimpleNamespace(layer=copy.deepcopy(layer))
    graph = graph_of(build, torch.optim.SGD(layer.parameters(), lr=0.001), layer=layer)
    optimizer = torch.optim.SGD(eager.layer.parameters(), lr=0.001)
    for rows in (7, 9, 12, 5):
        x = torch.randn(rows, 3)
        optimizer.zero_grad()
        expected = [loss.detach() for loss in build(eager, x)]
        optimizer.step()
        for name, ours, theirs in zip(BUILDS, graph(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n.__name__}: {m}")
    torch.testing.assert_close(layer.state_dict(), eager.layer.state_dict(), rtol=1e-5, atol=1e-5)
    assert compiled_steps(graph) == 2


def test_arguments_and_buffers_that_build_reshapes_are_reshaped_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(graph: Any, x: Tensor) -> Tensor:
        return graph.layer(x.unsqueeze_(0)).sum() + x.shape[1] + graph.norm.running_mean.unsqueeze_(0).sum()

    monkeypatch.setattr(STATIC, 1)
    layer, norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
    graph = training(loss, lr=0.0, layer=layer, norm=norm)
    for rows in range(7, 10):
        x = torch.randn(rows, 3)
        expected = layer(x).sum() + rows
        norm.running_mean = torch.zeros(4)
        torch.testing.assert_close(graph(x), expected.detach())
        assert x.shape == (1, rows, 3)
        assert norm.running_mean.shape == (1, 4)
