"""Embeddings whose tables have names, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.embeddings import DIM, attach, rows_by_key
from support.stores import options
from tierbed import MultiTableEmbedding, make_normal_initializer, make_table_options


def opened(path: Path | None, *names: str | None, store: str = "host", **more: Any) -> MultiTableEmbedding:
    normal = make_normal_initializer(0.0, 0.1)
    tables = [make_table_options(normal, name) for name in names]
    embedding = MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, options(store, path), **more)
    attach(embedding, "adagrad")
    return embedding


def filled(path: Path | None, *names: str | None, store: str = "host") -> MultiTableEmbedding:
    """Row 7 of each table holds the table's number + 1."""
    embedding = opened(path, *names, store=store)
    for table in range(len(names)):
        embedding.put([7], torch.full((1, DIM), table + 1.0), table)
    return embedding


def firsts(embedding: MultiTableEmbedding) -> dict[int, float]:
    """The first number of row 7 of each table that has it."""
    return {table: row[0] for (table, key), row in rows_by_key(embedding).items() if key == 7}
