"""FBGEMM's table-batched embedding on the CPU, as an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen


def theirs(tables: Sequence[tuple[int, int]], feature_table_map: Sequence[int], **options: Any) -> Any:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation as Location
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice as Device

    specs = [(rows, dim, Location.HOST, Device.CPU) for rows, dim in tables]
    return SplitTableBatchedEmbeddingBagsCodegen(specs, list(feature_table_map), **options)
