"""The OneEmbedding documentation's training examples, with torch for flow and an ordinary MLP for FusedMLP."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tierbed import engine
from tierbed.engine import MultiTableEmbedding, MultiTableMultiColumnEmbedding
from tierbed.graph import Graph

SCALES = np.sqrt(1 / np.array([39884407, 39043, 17289]))


def check_documented_training(rows: nn.Module, width: int) -> None:
    """The training example of the OneEmbedding documentation, with torch for flow and an ordinary MLP for FusedMLP."""
    num_tables = 3
    dense = nn.Sequential(
        nn.Linear(width * num_tables, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
    )

    class TrainGraph(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.embedding_lookup = rows
            self.mlp = dense
            self.add_optimizer(torch.optim.SGD(self.embedding_lookup.parameters(), lr=0.1, momentum=0.0))
            self.add_optimizer(torch.optim.SGD(self.mlp.parameters(), lr=0.1, momentum=0.0))

        def build(self, ids: Tensor) -> Tensor:
            embedding = self.embedding_lookup(ids)
            loss = self.mlp(torch.reshape(embedding, (-1, num_tables * width)))
            loss = loss.sum()
            loss.backward()
            return loss

    ids = np.random.default_rng(0).integers(0, 1000, (100, num_tables), dtype=np.int64)
    graph = TrainGraph()
    first = graph(torch.tensor(ids, requires_grad=False))
    assert not first.requires_grad
    assert rows.size() == len({(table, key) for row in ids.tolist() for table, key in enumerate(row)})
    assert graph(torch.tensor(ids)) < first


def test_the_documented_multi_table_example_trains() -> None:
    tables = [engine.make_table_options(engine.make_uniform_initializer(low=-s, high=s)) for s in SCALES]
    store_options = engine.make_cached_host_mem_store_options(cache_budget_mb=64, capacity=100_000)
    rows = MultiTableEmbedding(
        name="my_embedding",
        embedding_dim=128,
        dtype=torch.float,
        key_type=torch.int64,
        tables=tables,
        store_options=store_options,
    )
    check_documented_training(rows, 128)


def test_the_documented_multi_column_example_trains() -> None:
    tables = [
        engine.make_table_options(
            [
                engine.make_column_options(engine.make_uniform_initializer(low=-s, high=s)),
                engine.make_column_options(engine.make_normal_initializer(mean=0, std=s)),
            ]
        )
        for s in SCALES
    ]
    rows = MultiTableMultiColumnEmbedding(
        name="my_columns",
        embedding_dim=[10, 1],
        dtype=torch.float,
        key_type=torch.int64,
        tables=tables,
        store_options=engine.make_device_mem_store_options(capacity=100_000),
    )
    check_documented_training(rows, 11)
