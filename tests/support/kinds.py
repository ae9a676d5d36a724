"""Embeddings whose snapshots of each kind are saved, in every store and type of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.embeddings import DIM, make, train
from support.small_snapshots import keys_of_few_files
from support.stores import options
from tierbed import MultiTableEmbedding

TYPES = [  # of rows and of their state
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]
KEYS = torch.stack([keys_of_few_files(200, table) for table in range(3)])


def kinds_of(store: str) -> list[str]:
    return ["full", "incremental"] + ["checkpoint"] * store.startswith("ssd")


def open_at(
    path: Path,
    store: str,
    optimizer: str | None = "adam",
    types: tuple[torch.dtype, torch.dtype] = TYPES[0],
    **more: Any,
) -> MultiTableEmbedding:
    return make(options(store, path, **more), optimizer, dtype=types[0], state_dtype=types[1])


def grow(embedding: MultiTableEmbedding, seed: int, steps: int = 3) -> None:
    """Some rows are new, some change, some go."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        tables = random.integers(0, 3, 40)
        train(embedding, KEYS[tables, random.integers(0, 200, 40)], tables)
    embedding.delete(KEYS[1, random.integers(0, 200, 10)], 1)
    embedding.put([500 + seed], torch.full((1, DIM), float(seed)), 2)
