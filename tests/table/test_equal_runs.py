"""One training run, a graph with an MLP, has the same bits on every stack, whatever is cached, by any threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.embeddings import DIM, contents, make
from support.graphs import graph_of
from support.optimizers import OPTIMIZERS
from support.stores import ONE_SET_MB, options
from tierbed import Graph

Types = tuple[torch.dtype, torch.dtype]

STEPS, BATCH, FIELDS = 8, 24, 3
FLOAT32: Types = torch.float32, torch.float32
TYPES = [FLOAT32, (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


def id_batches() -> Tensor:
    """[STEPS, BATCH, FIELDS]: a few hot ids and a tail, so that caches hit, evict and overflow."""
    generator = torch.Generator().manual_seed(11)
    return (torch.rand(STEPS, BATCH, FIELDS, generator=generator) ** 4 * 300).to(torch.int64)


def run(store_options: Any, optimizer: str, ahead: int = 0, types: Types = FLOAT32) -> tuple[list[bytes], bytes]:
    """The loss of each step, and all that the table holds in the end. So many steps `ahead` are announced.

    types: of rows and of their state.
    """
    torch.manual_seed(3)
    dtype, state_dtype = types
    name = f"{store_options.store}-{optimizer}"
    embedding = make(store_options, name=name, dtype=dtype, state_dtype=state_dtype)
    net = nn.Sequential(nn.Flatten(), nn.Linear(FIELDS * DIM, 16), nn.ReLU(), nn.Linear(16, 1))
    kind, settings = OPTIMIZERS[optimizer]
    optimizers = [kind(embedding.parameters(), **settings), torch.optim.Adam(net.parameters(), lr=0.01)]  # type: ignore[arg-type]

    def build(graph: Graph, ids: Tensor) -> Tensor:
        loss = (graph.net(graph.rows(ids)) - 1).square().mean()
        loss.backward()
        return loss

    graph = graph_of(build, *optimizers, rows=embedding, net=net)
    batches, losses = id_batches(), []
    with embedding:
        for ids in batches[:ahead]:
            embedding.prefetch(ids)
        for step, ids in enumerate(batches):
            losses.append(graph(ids).numpy().tobytes())
            for coming in batches[step + ahead : step + ahead + 1] if ahead else ():
                embedding.prefetch(coming)
        assert embedding.metrics()["table"]["prefetch_hits"] == (STEPS if ahead else 0)
        return losses, contents(embedding).tobytes()


@pytest.fixture(scope="module")
def expected() -> Callable[..., tuple[list[bytes], bytes]]:
    known: dict[Any, Any] = {}

    def in_memory(optimizer: str, types: Types = FLOAT32) -> tuple[list[bytes], bytes]:
        if (optimizer, types) not in known:
            known[optimizer, types] = run(options("device"), optimizer, types=types)
        return known[optimizer, types]

    return in_memory


@pytest.mark.rotated("types")
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(("store", "optimizer"), [("cached_host", "adam"), ("ssd_host", "rowwise")])
def test_losses_rows_and_state_do_not_depend_on_the_store(
    tmp_path: Path, store: str, optimizer: str, types: Types, expected: Any
) -> None:
    assert run(options(store, tmp_path), optimizer, ahead=2, types=types) == expected(optimizer, types)


# every pair of values meets
@pytest.mark.rotated("types")
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(
    ("store", "sets", "policy", "threads", "ahead"),
    [
        ("cached_host", 1, "lru", 1, 1),
        ("cached_host", 3, "lfu", 2, 4),
        ("cached_host", 1000, "lru", 16, 0),
        ("ssd", 1, "lfu", 16, 4),
        ("ssd", 3, "lru", 1, 0),
        ("ssd", 1000, "lfu", 2, 1),
        ("ssd_host", 1, "lru", 2, 0),
        ("ssd_host", 3, "lfu", 16, 1),
        ("ssd_host", 1000, "lfu", 1, 4),
    ],
)
@pytest.mark.all_stores
def test_losses_rows_and_state_do_not_depend_on_the_cache_on_threads_and_on_hints(
    tmp_path: Path,
    store: str,
    sets: int,
    policy: str,
    threads: int,
    ahead: int,
    types: Types,
    expected: Any,
    native_threads: Callable[[int], None],
) -> None:
    native_threads(threads)
    how = options(store, tmp_path, sets * ONE_SET_MB, cache_policy=policy)
    assert run(how, "adam", ahead, types) == expected("adam", types)
