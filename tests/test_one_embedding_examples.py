"""Scripts written for OneEmbedding's documentation train as they are, but for the names of packages.

Arguments, their names, order and sizes are those of its examples; torch's names stand for OneFlow's, and an ordinary
MLP for FusedMLP, and the CPU for cuda. Dense PyTorch tables say what the losses and rows have to be.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierbed.engine as one_embedding
from tierbed.engine import optim
from tierbed.graph import Graph

SIZES = [39884407, 39043, 17289]
SCALES = np.sqrt(1 / np.array(SIZES))
IDS = np.random.default_rng(0).integers(0, 1000, (100, 3), dtype=np.int64)


def fused_mlp(in_features: int, hidden_features: list[int], out_features: int) -> nn.Sequential:
    """`FusedMLP(..., skip_final_activation=True)`."""
    widths = [in_features, *hidden_features]
    hidden = [layer for pair in zip(widths, hidden_features, strict=False) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], out_features))


def ssd_options(path: Path, **others: Any) -> Any:
    return one_embedding.make_cached_ssd_store_options(persistent_path=str(path), **others)


def guided(path: Path) -> nn.Module:
    """The guide's own steps: tables, the storage of the tables, the embedding."""
    tables = [
        one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.1, high=0.1)),
        one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.05, high=0.05)),
        one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.15, high=0.15)),
    ]
    store_options = ssd_options(path, cache_budget_mb=8142, capacity=40000000, size_factor=1, physical_block_size=4096)
    return one_embedding.MultiTableEmbedding(
        name="my_embedding",
        embedding_dim=128,
        dtype=torch.float,
        key_type=torch.int64,
        tables=tables,
        store_options=store_options,
    )


def multi_table(path: Path) -> nn.Module:
    """The example of `MultiTableEmbedding`."""
    tables = [
        one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-scale, high=scale))
        for scale in SCALES
    ]
    return one_embedding.MultiTableEmbedding(
        name="my_embedding",
        embedding_dim=128,
        dtype=torch.float,
        key_type=torch.int64,
        tables=tables,
        store_options=ssd_options(path, cache_budget_mb=8192, capacity=sum(SIZES)),
    )


def multi_column(path: Path) -> nn.Module:
    """The example of `MultiTableMultiColumnEmbedding`."""
    tables = [
        one_embedding.make_table_options(
            [
                one_embedding.make_column_options(one_embedding.make_uniform_initializer(low=-scale, high=scale)),
                one_embedding.make_column_options(one_embedding.make_normal_initializer(mean=0, std=scale)),
            ]
        )
        for scale in SCALES
    ]
    return one_embedding.MultiTableMultiColumnEmbedding(
        name="my_embedding",
        embedding_dim=[10, 1],
        dtype=torch.float,
        key_type=torch.int64,
        tables=tables,
        store_options=ssd_options(path, cache_budget_mb=8192, capacity=sum(SIZES)),
    )


class TrainGraph(Graph):
    def __init__(self, embedding: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.embedding_lookup = embedding
        self.mlp = mlp
        self.add_optimizer(torch.optim.SGD(self.embedding_lookup.parameters(), lr=0.1, momentum=0.0))
        self.add_optimizer(torch.optim.SGD(self.mlp.parameters(), lr=0.1, momentum=0.0))

    def build(self, ids: Tensor) -> Tensor:
        embedding = self.embedding_lookup(ids)
        loss = self.mlp(torch.reshape(embedding, (-1, self.mlp[0].in_features)))
        loss = loss.sum()
        loss.backward()
        return loss


def eager_steps(tables: nn.ParameterList, mlp: nn.Module, count: int) -> Iterator[float]:
    """The same steps with dense tables of 1000 rows."""
    optimizer = torch.optim.SGD([*tables, *mlp.parameters()], lr=0.1)
    for _ in range(count):
        rows = torch.stack([table[column] for table, column in zip(tables, torch.tensor(IDS).T, strict=True)], 1)
        loss = mlp(rows.flatten(1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.parametrize("example", [guided, multi_table, multi_column])
def test_a_documented_example_trains_as_dense_tables_do(example: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    embedding = example(tmp_path)
    mlp = fused_mlp(in_features=3 * embedding.dim, hidden_features=[512, 256, 128], out_features=1)
    keys = torch.arange(1000)
    tables = nn.ParameterList(embedding.get(keys, table) for table in range(3))
    plain = fused_mlp(in_features=3 * embedding.dim, hidden_features=[512, 256, 128], out_features=1)
    plain.load_state_dict(mlp.state_dict())
    graph = TrainGraph(embedding, mlp)
    ids_tensor = torch.tensor(IDS, requires_grad=False)
    losses = [graph(ids_tensor).item() for _ in range(2)]
    assert losses == pytest.approx(list(eager_steps(tables, plain, 2)), rel=1e-4)
    assert losses[1] < losses[0]
    assert embedding.size() == len({(table, key) for row in IDS.tolist() for table, key in enumerate(row)})
    for table, expected in enumerate(tables):
        torch.testing.assert_close(embedding.get(keys, table), expected.detach(), rtol=0, atol=1e-5)

    trained = embedding(ids_tensor)
    embedding.save_snapshot("two_steps")
    graph(ids_tensor)
    assert not torch.equal(embedding(ids_tensor), trained)
    embedding.load_snapshot("two_steps")
    assert torch.equal(embedding(ids_tensor), trained)
    embedding.close()
    with example(tmp_path) as again:
        assert torch.equal(again(ids_tensor), trained)


def test_columns_begin_as_their_own_initializers_say(tmp_path: Path) -> None:
    with multi_column(tmp_path) as embedding:
        for table, scale in enumerate(SCALES):
            wide, narrow = embedding.get(torch.arange(1000), table).split([10, 1], dim=1)
            assert 0.99 * scale < wide.abs().max() <= scale
            assert narrow.std().item() == pytest.approx(scale, rel=0.1)
            assert narrow.abs().max() > 2 * scale


def test_ftrl_has_the_documented_arguments_and_steps_after_backward() -> None:
    given = {name: p.default for name, p in inspect.signature(optim.Ftrl).parameters.items() if name != "params"}
    documented = {
        "lr": 1e-3,
        "weight_decay": 0.0,
        "lr_power": -0.5,
        "initial_accumulator_value": 0.1,
        "lambda1": 0.0,
        "lambda2": 0.0,
        "beta": 0.0,
    }
    assert given | documented == given
    assert list(given)[: len(documented)] == list(documented)
    net = nn.Linear(1, 1, bias=False)
    ftrl = optim.Ftrl(net.parameters(), lr=1e-3)
    for _ in range(3):
        before = net.weight.item()
        loss = net(torch.ones(1, 1)).sum()
        loss.backward()
        ftrl.step()
        ftrl.zero_grad()
        assert net.weight.item() < before
