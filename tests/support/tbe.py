"""Table-batched embeddings of some tables, and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierbed.jagged import ComputeDevice, EmbeddingLocation, TableBatchedEmbeddingBags

TABLES = [(40, 8), (7, 4), (23, 8)]  # rows and dim
MAP = [0, 0, 1, 1, 2]  # features of a table side by side: FBGEMM updates a row twice, or fails, where they are not


class Batch(NamedTuple):
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None


def ours(
    tables: Sequence[tuple[int, int]], feature_table_map: Sequence[int], **options: Any
) -> TableBatchedEmbeddingBags:
    specs = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in tables]
    return TableBatchedEmbeddingBags(specs, feature_table_map, **options)


def fill(tbe: TableBatchedEmbeddingBags, tables: Sequence[Tensor]) -> None:
    for i, rows in enumerate(tables):
        tbe.embedding_of(i).put(torch.arange(len(rows)), rows, tbe.tables[i].name)


def batch(
    tables: Sequence[tuple[int, int]],
    feature_table_map: Sequence[int],
    sizes: Sequence[int],
    longest: int = 4,
    weighted: bool = False,
) -> Batch:
    """Bags of 0 to `longest` ids drawn by torch's generator. sizes: how many bags each feature has."""
    lengths = [torch.randint(0, longest + 1, (size,)) for size in sizes]
    counts = [int(of_feature.sum()) for of_feature in lengths]
    ids = [torch.randint(0, tables[t][0], (n,)) for t, n in zip(feature_table_map, counts, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return Batch(torch.cat(ids), offsets, torch.rand(sum(counts)) + 0.5 if weighted else None)
