"""A table-batched embedding on SSD refuses a number of sets, or keeps fewer rows in its cache than asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.tbe import batch, ours
from tierbed.jagged import OptimType, SSDTableBatchedEmbeddingBags


@pytest.mark.parametrize("dims", [[128], [4, 16], [4, 8, 12, 16, 20]], ids=str)
@pytest.mark.parametrize("optimizer", [OptimType.EXACT_ROWWISE_ADAGRAD, OptimType.LAMB, OptimType.NONE])
@pytest.mark.parametrize("sets", [1, 3, 9])
@pytest.mark.pairs
@pytest.mark.rotated("sets")
def test_any_number_of_sets_is_a_cache(dims: list[int], optimizer: OptimType, sets: int, tmp_path: Path) -> None:
    tables = [(90, dim) for dim in dims]
    with SSDTableBatchedEmbeddingBags(tables, None, sets, str(tmp_path), optimizer=optimizer) as tbe:
        assert tbe.embedding_specs == tables
        made = batch(tables, range(len(dims)), [8] * len(dims))
        output = tbe(made.indices, made.offsets)
        if optimizer is not OptimType.NONE:
            output.sum().backward()
        capacities = [embedding.metrics()["device"]["capacity"] for embedding in tbe.each()]
        assert min(capacities) >= 64
        assert sum(capacities) > sets * 32 - 64 * len(dims)  # each is a whole number of sets


def test_rows_of_few_sets_are_those_of_rows_in_memory(tmp_path: Path) -> None:
    tables, features, numbers = [(300, 4), (300, 16)], [0, 1], {"learning_rate": 0.1, "eps": 1e-3}
    memory = ours(tables, features, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, **numbers)
    with SSDTableBatchedEmbeddingBags(tables, features, 1, str(tmp_path), **numbers) as disk, memory:
        memory.load_dense([rows.clone() for rows in disk.split_embedding_weights()])
        torch.manual_seed(0)
        for _ in range(5):
            made = batch(tables, features, [60, 60])
            for tbe in (disk, memory):
                tbe(made.indices, made.offsets).square().sum().backward()
        for one, other in zip(disk.split_embedding_weights(), memory.split_embedding_weights(), strict=True):
            assert torch.equal(one, other)
