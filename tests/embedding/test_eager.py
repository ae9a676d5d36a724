"""Embeddings train in a plain PyTorch loop as in a graph, bit for bit, and as `nn.Embedding` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.embeddings import contents, make
from support.graphs import dense_copy, embedding, graph_of, id_batches, mlp, train
from support.optimizers import OPTIMIZERS
from support.stores import STORES, options
from tierbed import EagerOptimizer, MultiTableEmbedding
from tierbed.engine.optim import CatchUpAdam, RowWiseAdagrad

KINDS = {**OPTIMIZERS, "clipped": (torch.optim.Adagrad, {"lr": 0.1})}
JAGGED = torch.tensor([0, 3, 3, 4, 8, 10])


class Ads(nn.Module):
    """Every kind of lookup: of each table, the same ids again, pooled and jagged with weights that are computed."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = rows
        self.score = nn.Parameter(torch.linspace(-1, 1, 10))

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.flatten()[:10]
        each = self.rows(ids)
        bags = self.rows(flat, torch.arange(5) % 3, JAGGED, "mean", torch.sigmoid(self.score))
        again = self.rows(ids)
        pooled = self.rows(ids.T, pooling="sum", table_ids=1)
        loss = (each * again).float().sum(1).square().sum() + bags.float().sin().sum()
        loss = loss + (pooled.float() - 1).square().mean()
        loss = loss * 0.1
        loss.backward()
        return loss


def batches(steps: int = 5) -> Tensor:
    return torch.randint(-1, 90, (steps, 12, 3), generator=torch.Generator().manual_seed(4))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, settings = KINDS[name]
    group: dict[str, Any] = {"params": list(model.parameters())}
    if name == "clipped":
        group |= {"clip_grad_value": 0.05, "clip_grad_row_norm": 0.07}
    return kind([group], **settings)  # type: ignore[arg-type]


def in_a_graph(model: Ads, optimizer: torch.optim.Optimizer, steps: Tensor) -> list[Tensor]:
    graph = graph_of(lambda self, ids: self.model(ids), optimizer, model=model)
    return [graph(ids) for ids in steps]


def in_a_loop(model: Ads, optimizer: torch.optim.Optimizer, steps: Tensor) -> list[Tensor]:
    ours = EagerOptimizer(optimizer, model)
    losses = []
    for ids in steps:
        losses.append(model(ids).detach())
        ours.step()
        ours.zero_grad()
    return losses


Way = Callable[[Ads, torch.optim.Optimizer, Tensor], list[Tensor]]


def run(way: Way, store_options: Any, optimizer: str, **more: Any) -> tuple[bytes, list[float], list[float], Any]:
    with make(store_options, padding_idx=-1, **more) as rows:
        model = Ads(rows)
        kept = optimizer_of(optimizer, model)
        losses = way(model, kept, batches())
        state = kept.state_dict()["state"]
        counts = rows.metrics()["table"]
        return contents(rows).tobytes(), model.score.tolist(), [float(loss) for loss in losses], (state, counts["step"])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.rotated("store")
def test_rows_equal_those_of_the_graph_to_the_bit(optimizer: str, store: str, tmp_path: Path) -> None:
    expected = run(in_a_graph, options("device"), optimizer)
    found = run(in_a_loop, options(store, tmp_path), optimizer)
    assert found[:3] == expected[:3]
    torch.testing.assert_close(found[3], expected[3], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs_equal_those_of_the_graph_to_the_bit(dtype: torch.dtype) -> None:
    found, expected = (run(way, options("device"), "adam", output_dtype=dtype) for way in (in_a_loop, in_a_graph))
    assert found[:3] == expected[:3]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "plain", "sparse", "settings"),
    [
        (torch.optim.SGD, torch.optim.SGD, False, {"lr": 0.5}),
        (torch.optim.SGD, torch.optim.SGD, True, {"lr": 0.5}),
        (torch.optim.Adagrad, torch.optim.Adagrad, False, {"lr": 0.1}),
        (torch.optim.Adagrad, torch.optim.Adagrad, True, {"lr": 0.1}),
        (RowWiseAdagrad, RowWiseAdagrad, False, {"lr": 0.1}),
        (CatchUpAdam, torch.optim.Adam, False, {"lr": 0.01}),
    ],
)
def test_rows_equal_a_plain_embedding(kind: Any, plain: Any, sparse: bool, settings: dict[str, float]) -> None:
    rows, net = embedding(), mlp(3 * 4)
    dense, other = dense_copy(rows), copy.deepcopy(net)
    dense.sparse = sparse
    model = nn.ModuleList([rows, net])
    ours = EagerOptimizer(kind(model.parameters(), **settings), model)
    theirs = plain([*dense.parameters(), *other.parameters()], **settings)
    for ids in id_batches(8, 3):
        expected, found = train(dense, other, ids), train(rows, net, ids)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(rows.get(range(50)), dense.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_rows_that_every_batch_holds_equal_a_plain_embedding(optimizer: str) -> None:
    rows = embedding()
    dense = dense_copy(rows)
    kind, settings = OPTIMIZERS[optimizer]
    ours = EagerOptimizer(kind(rows.parameters(), **settings), rows)  # type: ignore[arg-type]
    theirs = kind(dense.parameters(), **settings)  # type: ignore[arg-type]
    for step, ids in enumerate(id_batches(30)):
        for layer in (rows, dense):
            out = layer(torch.cat([ids, torch.arange(50)]))
            (out * torch.linspace(-1, step, out.numel()).view_as(out)).sum().backward()
        for either in (theirs, ours):
            either.step()
            either.zero_grad()
    torch.testing.assert_close(rows.get(range(50)), dense.weight.detach(), rtol=1e-5, atol=1e-6)


def test_weighted_bags_equal_a_plain_embedding() -> None:
    rows = embedding()
    dense = dense_copy(rows)
    scores = [torch.linspace(-1, 1, 10).requires_grad_() for _ in range(2)]
    ours = EagerOptimizer(torch.optim.SGD([*rows.parameters(), scores[0]], lr=0.1), rows)
    theirs = torch.optim.SGD([*dense.parameters(), scores[1]], lr=0.1)
    for ids in id_batches(10):
        bags = F.embedding_bag(
            ids, dense.weight, JAGGED, mode="sum", per_sample_weights=scores[1].exp(), include_last_offset=True
        )
        bags.sin().sum().backward()
        rows(ids, offsets=JAGGED, pooling="sum", weights=scores[0].exp()).sin().sum().backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(scores[0], scores[1])
    torch.testing.assert_close(rows.get(range(50)), dense.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_loop_and_a_graph_take_turns() -> None:
    def run(ways: list[Way]) -> bytes:
        with make(options("cached_host"), padding_idx=-1) as rows:
            model = Ads(rows)
            kept = [optimizer_of("adam", model) for _ in range(2)]
            kept[1].param_groups[0]["lr"] = 0.5
            for step, ids in enumerate(batches()):
                ways[step % len(ways)](model, kept[step % 2], ids[None])
            return contents(rows).tobytes()

    assert run([in_a_graph, in_a_loop]) == run([in_a_loop])
