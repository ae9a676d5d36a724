"""The golden store of an embedding that trains alone, in tests/golden/stores/alone."""

from __future__ import annotations

from pathlib import Path

import torch

from support.embeddings import make, train
from support.stores import options
from tierbed import MultiTableEmbedding


def embedding_in(path: Path) -> MultiTableEmbedding:
    return make(options("host", path), "adagrad", tables=1)


def step(embedding: MultiTableEmbedding, number: int) -> None:
    train(embedding, [1, 2 + number], grad=torch.ones(2, 5))


def write_store(path: Path) -> MultiTableEmbedding:
    """Saves of steps 1 and 2, the second one incremental, of a clean store that was opened again; then step 3."""
    with embedding_in(path) as embedding:
        step(embedding, 1)
        embedding.save_snapshot("one")
    embedding = embedding_in(path)
    step(embedding, 2)
    embedding.save_snapshot("two", "incremental")
    step(embedding, 3)
    return embedding
