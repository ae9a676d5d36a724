"""A table at its capacity, one row over and half over: an error or the policy, the same on every stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.stores import STORES, options
from tierbed import CapacityError, MultiTableEmbedding

CAPACITY = 192
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "lru": {"eviction": "lru"},
    "lfu": {"eviction": "lfu"},
    "distance_lfu": {"eviction": "distance_lfu"},
    "ttl": {"eviction": "ttl", "ttl_steps": 2},
}


def at_capacity(store: str, path: Path, policy: str) -> MultiTableEmbedding:
    return make(options(store, path / store, capacity=CAPACITY, **POLICIES[policy]), "adam", tables=1)


def fill(embedding: MultiTableEmbedding) -> None:
    """Exactly full, rows of several ages and counts."""
    for step in range(4):
        train(embedding, torch.arange(step * CAPACITY // 4, CAPACITY))
    assert embedding.size() == len(contents(embedding)) == CAPACITY


def goes_over(embedding: MultiTableEmbedding, policy: str) -> list[bytes]:
    """What it holds after each of three more batches: a new row, half a capacity of them, and more than fits."""
    states = []
    for count, first in ((1, 1000), (CAPACITY // 2, 2000), (CAPACITY + 1, 3000)):
        before = contents(embedding).tobytes()
        try:
            train(embedding, torch.arange(first, first + count))
        except CapacityError:
            assert policy == "none" or count > CAPACITY or policy == "ttl"
            assert contents(embedding).tobytes() == before
        else:
            assert policy != "none"
            assert count <= CAPACITY
            rows = contents(embedding)
            assert set(range(first, first + count)) <= set(rows["key"].tolist())
        states.append(contents(embedding).tobytes())
        assert len(contents(embedding)) == embedding.size() <= CAPACITY
    return states


@pytest.mark.parametrize("policy", POLICIES)
def test_full_one_over_and_half_over_end_in_the_same_rows_on_every_stack(tmp_path: Path, policy: str) -> None:
    expected: list[bytes] = []
    for store in STORES:
        with at_capacity(store, tmp_path, policy) as embedding:
            fill(embedding)
            states = goes_over(embedding, policy)
            # existing rows still train, and the store closes and opens unchanged
            keys = torch.from_numpy(contents(embedding)["key"].astype("int64"))
            train(embedding, keys)
            states.append(contents(embedding).tobytes())
        with at_capacity(store, tmp_path, policy) as again:
            assert contents(again).tobytes() == states[-1]
            states += goes_over(again, policy)
        expected = expected or states
        assert states == expected, store
    assert (len(set(expected)) > 2) == (policy != "none")
