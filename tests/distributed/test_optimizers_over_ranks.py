"""An optimizer that one rank cannot take is refused on all ranks, whose rows stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.embeddings import attach, make, train
from support.live_rows import own_rows
from support.ranks import run_ranks
from support.stores import options
from tierbed import OptimizerError, StoreError, World, make_host_mem_store_options
from tierbed.engine import _core


def with_an_empty_share(world: World) -> tuple[int, bytes]:
    embedding = make(make_host_mem_store_options(), "adagrad", world=world)
    keys = torch.arange(20)
    owners = _core.owners(torch.zeros(20, dtype=torch.int32).numpy().view("u4"), keys.numpy().view("u8"), 2)
    of_first = keys[torch.from_numpy(owners.astype("i8")) == 0]
    train(embedding, of_first)
    with pytest.raises(OptimizerError, match=r"rank 0: .* has rows of optimizer adagrad"):
        attach(embedding, "adam")
    train(embedding, of_first)
    return embedding.size(), own_rows(embedding)


def test_a_rank_without_rows_keeps_the_optimizer_that_another_rank_has_to_keep() -> None:
    (size, first), (_, second) = run_ranks(2, with_an_empty_share)
    assert size > 0
    assert first
    assert not second


def with_a_damaged_share(world: World, folder: Path) -> tuple[Tensor, Tensor]:
    embedding = make(options("ssd", folder), tables=1, world=world)
    keys = torch.arange(20)
    embedding.put(keys, torch.rand(20, 5))
    rows = embedding.get(keys)
    current = next((folder / "rows" / "ranks" / "1-of-2").rglob("CURRENT"))
    good = current.read_bytes()
    world.sum(torch.ones(1))  # both have read it
    if world.rank == 1:
        current.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="rank 1: "):
        attach(embedding, "adagrad")
    with pytest.raises(StoreError, match="closed"):
        embedding.size()
    if world.rank == 1:
        current.write_bytes(good)
    world.sum(torch.ones(1))
    return rows, make(options("ssd", folder), tables=1, world=world).get(keys)


def test_a_rank_that_loses_its_rows_to_an_optimizer_closes_those_of_all(tmp_path: Path) -> None:
    for before, after in run_ranks(2, with_a_damaged_share, tmp_path):
        assert torch.equal(before, after)
