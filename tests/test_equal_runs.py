"""One training run, a graph with an MLP, has the same bits on every stack, whatever is cached and by how many threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embeddings import DIM, ONE_SET_MB, OPTIMIZERS, STORES, contents, make, options
from graphs import graph_of
from torch import Tensor, nn

from tierbed.graph import Graph

STEPS, BATCH, FIELDS = 8, 24, 3
CACHED = ["cached_host", "ssd", "ssd_host"]


def id_batches() -> Tensor:
    """[STEPS, BATCH, FIELDS]: a few hot ids and a tail, so that caches hit, evict and overflow."""
    generator = torch.Generator().manual_seed(11)
    return (torch.rand(STEPS, BATCH, FIELDS, generator=generator) ** 4 * 300).to(torch.int64)


def run(store_options: Any, optimizer: str) -> tuple[list[bytes], bytes]:
    """The loss of each step, and all that the table holds in the end."""
    torch.manual_seed(3)
    embedding = make(store_options, name=f"{store_options.store}-{optimizer}")
    net = nn.Sequential(nn.Flatten(), nn.Linear(FIELDS * DIM, 16), nn.ReLU(), nn.Linear(16, 1))
    kind, settings = OPTIMIZERS[optimizer]
    optimizers = [kind(embedding.parameters(), **settings), torch.optim.Adam(net.parameters(), lr=0.01)]  # type: ignore[arg-type]

    def build(graph: Graph, ids: Tensor) -> Tensor:
        loss = (graph.net(graph.rows(ids)) - 1).square().mean()
        loss.backward()
        return loss

    graph = graph_of(build, *optimizers, rows=embedding, net=net)
    with embedding:
        losses = [graph(ids).numpy().tobytes() for ids in id_batches()]
        return losses, contents(embedding).tobytes()


@pytest.fixture(scope="module")
def expected() -> Callable[[str], tuple[list[bytes], bytes]]:
    known: dict[str, Any] = {}

    def in_memory(optimizer: str) -> tuple[list[bytes], bytes]:
        if optimizer not in known:
            known[optimizer] = run(options("device"), optimizer)
        return known[optimizer]

    return in_memory


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("store", STORES[1:])
def test_losses_rows_and_state_do_not_depend_on_the_store(
    tmp_path: Path, store: str, optimizer: str, expected: Any
) -> None:
    assert run(options(store, tmp_path), optimizer) == expected(optimizer)


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("sets", [3, 1000])
@pytest.mark.parametrize("store", CACHED)
def test_losses_rows_and_state_do_not_depend_on_the_cache_and_on_threads(
    tmp_path: Path, store: str, sets: int, threads: int, expected: Any, native_threads: Callable[[int], None]
) -> None:
    native_threads(threads)
    assert run(options(store, tmp_path, sets * ONE_SET_MB), "adam") == expected("adam")
