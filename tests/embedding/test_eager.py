"""Embeddings train in a plain PyTorch loop as in a graph, bit for bit, and as `nn.Embedding` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.embeddings import contents, make
from support.graphs import graph_of
from support.optimizers import OPTIMIZERS, few_optimizers
from support.stores import STORES, options
from tierbed import EagerOptimizer, MultiTableEmbedding

JAGGED = torch.tensor([0, 3, 3, 4, 8, 10])


class Ads(nn.Module):
    """Every kind of lookup: of each table, the same ids again, pooled and jagged with weights that are computed."""

    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows = rows
        self.score = nn.Parameter(torch.linspace(-1, 1, 10))

    def forward(self, ids: Tensor) -> Tensor:
        each, again = self.rows(ids), self.rows(ids)
        bags = self.rows(ids.flatten()[:10], torch.arange(5) % 3, JAGGED, "mean", torch.sigmoid(self.score))
        pooled = self.rows(ids.T, pooling="sum", table_ids=1)
        loss = (each * again).float().sum(1).square().sum() + bags.float().sin().sum()
        loss = (loss + (pooled.float() - 1).square().mean()) * 0.1
        loss.backward()
        return loss


def batches(steps: int = 3) -> Tensor:
    return torch.randint(-1, 90, (steps, 12, 3), generator=torch.Generator().manual_seed(4))


def optimizer_of(name: str, model: nn.Module, **group: float) -> torch.optim.Optimizer:
    kind, settings = OPTIMIZERS[name]
    return kind([{"params": list(model.parameters()), **group}], **settings)  # type: ignore[arg-type]


Way = Callable[[Ads, torch.optim.Optimizer, Tensor], list[Tensor]]


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


def run(
    way: Way, store_options: Any, optimizer: str, group: dict[str, float], **more: Any
) -> tuple[bytes, list[float], list[float], Any]:
    with make(store_options, padding_idx=-1, **more) as rows:
        model = Ads(rows)
        kept = optimizer_of(optimizer, model, **group)
        losses = way(model, kept, batches())
        state = kept.state_dict()["state"]
        counts = rows.metrics()["table"]
        return contents(rows).tobytes(), model.score.tolist(), [float(loss) for loss in losses], (state, counts["step"])


def check(optimizer: str, store_options: Any, group: dict[str, float], **more: Any) -> None:
    expected = run(in_a_graph, options("device"), optimizer, group, **more)
    found = run(in_a_loop, store_options, optimizer, group, **more)
    assert found[:3] == expected[:3]
    torch.testing.assert_close(found[3], expected[3], rtol=0, atol=0)


@pytest.mark.parametrize("store", STORES)
@few_optimizers
@pytest.mark.rotated("store")
def test_rows_equal_those_of_the_graph_to_the_bit(optimizer, store, tmp_path) -> None:
    check(optimizer, options(store, tmp_path), {})


def test_clipped_rows_and_half_outputs_equal_those_of_the_graph_to_the_bit() -> None:
    check("adagrad", options("device"), {"clip_grad_value": 0.05, "clip_grad_row_norm": 0.07})
    for dtype in (torch.float16, torch.bfloat16):
        check("adagrad", options("device"), {}, output_dtype=dtype)


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
