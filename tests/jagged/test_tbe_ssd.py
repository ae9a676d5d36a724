"""A table-batched embedding on SSD refuses a number of sets, or keeps fewer rows in its cache than asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.tbe import batch
from tierbed.engine.errors import OptionError
from tierbed.jagged import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SSDTableBatchedEmbeddingBags,
    TableBatchedEmbeddingBags,
)

OPTIMIZERS = [OptimType.EXACT_ROWWISE_ADAGRAD, OptimType.EXACT_ADAGRAD, OptimType.LAMB, OptimType.NONE]


@pytest.mark.parametrize("dims", [[128], [4, 16], [4, 8, 12, 16, 20]], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_sets_is_a_cache(dims: list[int], optimizer: OptimType, tmp_path: Path) -> None:
    tables, features = [(90, dim) for dim in dims], list(range(len(dims)))
    for sets in (1, 3, 9):
        with SSDTableBatchedEmbeddingBags(tables, None, sets, str(tmp_path / str(sets)), optimizer=optimizer) as tbe:
            assert tbe.embedding_specs == tables
            made = batch(tables, features, [8] * len(dims))
            output = tbe(made.indices, made.offsets)
            if optimizer is not OptimType.NONE:
                output.sum().backward()
            capacities = [embedding.metrics()["device"]["capacity"] for embedding in tbe.each()]
            assert min(capacities) >= 64
            assert sum(capacities) > sets * 32 - 64 * len(dims)  # each is a whole number of sets


def test_rows_of_few_sets_are_those_of_rows_in_memory(tmp_path: Path) -> None:
    tables, features, numbers = [(300, 4), (300, 16)], [0, 1], {"learning_rate": 0.1, "eps": 1e-3}
    specs = [(*spec, EmbeddingLocation.HOST, ComputeDevice.CPU) for spec in tables]
    ours = SSDTableBatchedEmbeddingBags(tables, features, 1, str(tmp_path), **numbers)
    memory = TableBatchedEmbeddingBags(specs, features, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, **numbers)
    memory.load_dense([rows.clone() for rows in ours.split_embedding_weights()])
    torch.manual_seed(0)
    for _ in range(5):
        made = batch(tables, features, [60, 60])
        for tbe in (ours, memory):
            tbe(made.indices, made.offsets).square().sum().backward()
    for one, other in zip(ours.split_embedding_weights(), memory.split_embedding_weights(), strict=True):
        assert torch.equal(one, other)
    ours.close()
    memory.close()


@pytest.mark.parametrize(
    ("specs", "sets", "message"),
    [
        ([(10, 4)], 0, "cache_sets=0: give a whole number > 0"),
        ([(10, 4)], "4", "cache_sets='4': give a whole number"),
        ([(10, 4)], 1.5, "cache_sets=1.5"),
        ([], 1, r"embedding_specs=\[\]: give a list of \(rows, dim\)"),
        (None, 1, "embedding_specs=None"),
        ([(10, "4")], 1, "embedding_specs="),
        ([(10, 4, 0, 0)], 1, "embedding_specs="),
        ([10], 1, "embedding_specs="),
    ],
)
def test_sets_and_tables_that_are_none_are_refused(specs: Any, sets: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        SSDTableBatchedEmbeddingBags(specs, None, sets, str(tmp_path))
