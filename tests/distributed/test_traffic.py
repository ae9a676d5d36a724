"""What ranks count of their exchange is what `plan` says of a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from tierbed import MultiTableEmbedding, World, make_constant_initializer, make_host_mem_store_options
from tierbed.engine.options.lookup import Lookup
from tierbed.planning.plan import plan

RANKS, DIM = 3, 6


def batches(tables: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, 90, (12, tables), generator=draw) for _ in range(4)]


def counted(world: World, tables: int, wire: torch.dtype) -> dict[str, Any]:
    world.grads = wire
    start, store = [make_constant_initializer(0.0)] * tables, make_host_mem_store_options()
    embedding = MultiTableEmbedding("e", DIM, torch.float32, torch.int64, start, store, world=world)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding.attach(optimizer, optimizer.param_groups[0])
    for batch in batches(tables):
        ids = batch.chunk(world.size)[world.rank]
        pinned = embedding.pin([Lookup(ids, torch.arange(tables).expand(ids.shape))])
        pinned.update([torch.ones(*ids.shape, DIM)])
    return embedding.metrics()["ranks"]


@pytest.mark.parametrize(("tables", "wire"), [(1, torch.float32), (3, torch.bfloat16)], ids=str)
def test_a_run_counts_what_the_plan_says(tables: int, wire: torch.dtype) -> None:
    expected = plan([batch.numpy() for batch in batches(tables)], DIM, 0, tables=tables, world_size=RANKS).ranks
    assert expected is not None
    for rank, found in enumerate(run_ranks(RANKS, counted, tables, wire)):
        ids, sent = expected.ids, expected.bytes(torch.float32, wire)
        assert found == {
            "ids_sent": ids[rank].sum() - ids[rank, rank],
            "ids_received": ids[:, rank].sum() - ids[rank, rank],
            "rows_sent": ids[:, rank].sum() - ids[rank, rank],
            "rows_received": ids[rank].sum() - ids[rank, rank],
            "bytes_sent": sent[rank].sum(),
            "bytes_received": sent[:, rank].sum(),
        }
