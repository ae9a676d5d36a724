"""An example of OneEmbedding's documentation does not run with torch and tierbed, or not as dense tables do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.one_embedding_calls import CALLS, document, examples, run
from tierbed import one_embedding


def columns(made: dict[str, Any]) -> list[int]:
    """The widths that an example gave its embedding."""
    return made["embedding_size_list"] if "embedding_size_list" in made else [made["embedding_size"]]


def again(made: dict[str, Any], name: str, store_options: Any) -> Any:
    """An embedding that begins as an example's does."""
    seed, tables = made["embedding"].spec.seed, made["tables"]
    return one_embedding.Embedding(name, columns(made), torch.float, torch.int64, tables, store_options, seed=seed)


def eager_steps(tables: nn.ParameterList, mlp: nn.Module, ids: Tensor, count: int) -> Iterator[float]:
    """The same steps with dense tables of 1000 rows."""
    optimizer = torch.optim.SGD([*tables, *mlp.parameters()], lr=0.1)
    for _ in range(count):
        rows = torch.stack([table[column] for table, column in zip(tables, ids.T, strict=True)], 1)
        loss = mlp(rows.flatten(1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.skipif(document() is None, reason="TIERBED_SEEDS names no folder with OneEmbedding's documentation")
@pytest.mark.parametrize("name", CALLS)
def test_the_copy_of_an_example_is_the_documents(name: str) -> None:
    assert ast.unparse(ast.parse(CALLS[name])) == ast.unparse(ast.parse(examples()[name]))


def test_the_examples_of_an_ordinary_embedding_and_of_table_options(tmp_path: Path) -> None:
    made = run("embedding", tmp_path)
    assert torch.equal(made["y"], made["embedding"].weight[made["indices"].long()])
    made = run("table_options", tmp_path, scale=0.5)
    assert made["tables"] == [{"initializer": {"type": "uniform", "low": -0.5, "high": 0.5}}] * 2
    assert one_embedding.make_table(made["initializer"]) == made["table1"]


@pytest.mark.parametrize(
    "name", ["guide", *(pytest.param(name, marks=pytest.mark.slow) for name in ("multi_table", "multi_column"))]
)
def test_the_example_of_training_does_what_dense_tables_do(name: str, tmp_path: Path) -> None:
    np.random.seed(0)
    made = run(name, tmp_path)
    embedding = made["embedding"]
    if "loss" in made:
        ids, graph = made["ids_tensor"], made["graph"]
        losses = [made["loss"].item()]
    else:
        ids, graph = torch.randint(1000, (100, 3), generator=torch.Generator().manual_seed(0)), made["TrainGraph"]()
        losses = [graph(ids).item()]
    losses.append(graph(ids).item())

    keys = torch.arange(1000)
    with again(made, "untrained", one_embedding.make_device_mem_store_options()) as untrained:
        tables = nn.ParameterList(untrained.get(keys, table) for table in range(3))
    torch.manual_seed(0)
    mlp = one_embedding.FusedMLP(3 * embedding.dim, [512, 256, 128], 1, skip_final_activation=True)
    assert losses == pytest.approx(list(eager_steps(tables, mlp, ids, 2)), rel=1e-4)
    assert losses[1] < losses[0]
    assert embedding.size() == len({(table, key) for row in ids.tolist() for table, key in enumerate(row)})
    for table, expected in enumerate(tables):
        torch.testing.assert_close(embedding.get(keys, table), expected.detach(), rtol=0, atol=1e-5)

    trained = embedding(ids)
    embedding.save_snapshot("two_steps")
    graph(ids)
    assert not torch.equal(embedding(ids), trained)
    embedding.load_snapshot("two_steps")
    assert torch.equal(embedding(ids), trained)
    embedding.close()
    with again(made, "my_embedding", made["store_options"]) as resumed:
        assert torch.equal(resumed(ids), trained)


def test_columns_begin_as_their_own_initializers_say(tmp_path: Path) -> None:
    made = run("multi_column", tmp_path)
    with made["embedding"], again(made, "untrained", one_embedding.make_device_mem_store_options()) as embedding:
        for table, scale in enumerate(made["scales"]):
            wide, narrow = embedding.get(torch.arange(1000), table).split([10, 1], dim=1)
            assert 0.99 * scale < wide.abs().max() <= scale
            assert narrow.std().item() == pytest.approx(scale, rel=0.1)
            assert narrow.abs().max() > 2 * scale


def test_the_example_of_ftrl(tmp_path: Path) -> None:
    net, seen = nn.Linear(1, 1, bias=False), []
    nn.init.constant_(net.weight, 0.5)

    def compute_loss() -> Tensor:
        seen.append(net.weight.item())
        assert net.weight.grad is None
        return net(torch.ones(1, 1)).sum()

    made = run("ftrl", tmp_path, net=net, epochs=3, compute_loss=compute_loss, one_embedding=one_embedding)
    assert type(made["ftrl"]) is one_embedding.Ftrl
    assert len(seen) == 3
    assert seen[0] > seen[1] > seen[2] > net.weight.item()
