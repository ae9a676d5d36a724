"""Offsets of no bag, [0], look up nothing: a result of no rows, whatever asks, and a step that moves none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support import naive
from support.embeddings import DIM, make
from support.graphs import embedding, graph_of
from support.stores import STORES, options
from tierbed import EagerOptimizer, GraphError, InputError, MultiTableEmbedding

NONE, ZERO = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def weights_of(weighted: bool) -> Tensor | None:
    return torch.empty(0, requires_grad=True) if weighted else None


def in_a_loop(rows: MultiTableEmbedding, arguments: tuple[Any, ...]) -> Tensor:
    optimizer = EagerOptimizer(torch.optim.SGD(rows.parameters(), lr=0.1), rows)
    rows.prefetch(*arguments[:4])
    out = rows(*arguments)
    out.sum().backward()
    optimizer.step()
    return out


def in_a_graph(rows: MultiTableEmbedding, arguments: tuple[Any, ...]) -> Tensor:
    ids, tables, offsets, pooling, weights = arguments

    def build(graph: Any, *parts: Tensor) -> Tensor:
        given = None if weights is None else parts[2] * 1
        out = graph.rows(parts[0], tables, parts[1], pooling, given)
        (out.sum() + graph.rows(parts[0], 0).sum()).backward()
        return out

    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    graph.clip_grad_norm(1.0)
    tensors = (ids, offsets, *([] if weights is None else [weights.detach()]))
    (out,) = graph.run([tensors])
    return out


@pytest.mark.parametrize("use", [in_a_loop, in_a_graph, lambda rows, arguments: rows(*arguments)])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("use")
def test_no_bag_gives_no_row(tmp_path: Path, store: str, use: Callable[..., Tensor]) -> None:
    with make(options(store, tmp_path)) as rows:
        for tables, pooling, weighted in (
            (NONE, "sum", False),
            (NONE, "mean", True),
            (0, "sum", True),
            (0, "mean", False),
        ):
            out = use(rows, (NONE, tables, ZERO, pooling, weights_of(weighted)))
            assert out.shape == (0, DIM)
        assert rows.size() == 0


@pytest.mark.parametrize("mean", [False, True])
def test_the_specification_has_no_bag_either(mean: bool) -> None:
    rows, none = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    offsets, grads = np.zeros(1, np.int64), np.zeros((0, 4), np.float32)
    assert naive.pool(rows, none, offsets, mean).shape == (0, 4)
    assert naive.pool_grad(grads, none, offsets, mean).shape == (0, 4)
    assert naive.weights_grad(rows, none, offsets, grads, mean).shape == (0,)


def test_ids_without_a_bag_are_refused() -> None:
    rows = embedding()
    with pytest.raises(InputError, match=r"they run from 0 to 0; .* the last the number of ids, 2"):
        rows(torch.tensor([1, 2]), offsets=ZERO, pooling="sum")


def test_a_mean_over_no_bags_names_its_line_and_a_division_of_builds_own_keeps_its_type() -> None:
    rows, net = embedding(), nn.Linear(4, 1)

    def build(graph: Any, ids: Tensor, offsets: Tensor, own: bool) -> Tensor:
        out = graph.net(graph.rows(ids, offsets=offsets, pooling="sum"))
        loss = out.sum() * (1 / len(out)) if own else F.mse_loss(out, torch.ones_like(out))
        loss.backward()
        return loss

    graph = graph_of(build, torch.optim.SGD([*rows.parameters(), *net.parameters()], lr=0.1), rows=rows, net=net)
    with pytest.raises(GraphError, match=r"no_bags\.py.*in build: `loss\.backward\(\)` makes torch divide by"):
        graph(NONE, ZERO, False)
    with pytest.raises(ZeroDivisionError):
        graph(NONE, ZERO, True)
    graph(torch.tensor([1]), torch.tensor([0, 1]), False)
    assert rows.size() == 1
