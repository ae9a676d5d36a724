"""TorchRec's own containers as arguments and results of a graph: one step for all totals, ids known ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from support.embeddings import make
from support.graphs import compiled_steps, graph_of
from support.stores import options
from tierbed import MultiTableEmbedding

KEYS, BATCH = ["a", "b", "c"], 5


def pooled(rows: MultiTableEmbedding, values: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return rows(values, None, offsets, pooling="sum", weights=weights)


def keyed(total: int, weighted: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(total)
    place = torch.randint(0, len(KEYS) * BATCH, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if weighted else None
    lengths = torch.bincount(place, minlength=len(KEYS) * BATCH)
    values = torch.randint(0, 50, (total,), generator=generator)
    return KeyedJaggedTensor(list(KEYS), values, weights, lengths=lengths)


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_keyed_jagged_tensor_of_any_total_runs_in_one_step(weighted: bool, tmp_path: Path, caplog: Any) -> None:
    def build(graph: Any, features: KeyedJaggedTensor, scale: KeyedTensor, *more: JaggedTensor) -> tuple[Any, ...]:
        bags = pooled(graph.rows, features.values(), features.lengths(), features.weights_or_none())
        found = bags.view(len(KEYS), BATCH, -1).transpose(0, 1).reshape(BATCH, -1) * scale.values()
        found.square().sum().backward()
        return KeyedTensor(features.keys(), [bags.shape[1]] * len(KEYS), found), features, *more

    totals = [0, 40, 300]
    with make(options("ssd", tmp_path), tables=1) as rows, make(options("device"), tables=1) as other:
        dim = rows.spec.dim
        scale = KeyedTensor(list(KEYS), [dim] * len(KEYS), torch.full((BATCH, dim * len(KEYS)), 0.5))
        graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
        plain = graph_of(
            lambda graph, *flat: build(graph, KeyedJaggedTensor(KEYS, *flat), scale)[0].values(),
            torch.optim.SGD(other.parameters(), lr=0.1),
            rows=other,
        )
        apart = [JaggedTensor(torch.arange(total), lengths=torch.tensor([total])) for total in totals]
        given = [(keyed(total, weighted), scale, one) for total, one in zip(totals, apart, strict=True)]
        results = list(graph.run(given, ahead=2))
        assert rows.metrics()["table"]["prefetch_hits"] == len(totals)
        for total, (found, returned, one) in zip(totals, results, strict=True):
            features = keyed(total, weighted)
            wanted = plain(features.values(), features.weights_or_none(), features.lengths())
            assert torch.equal(found.values(), wanted)
            assert found.keys() == returned.keys() == KEYS
            assert torch.equal(returned.values(), features.values())
            assert (one.values().tolist(), one.lengths().tolist()) == ([*range(total)], [total])
    assert compiled_steps(graph) == 1
    assert compiled_steps(plain) == len(totals)
    assert "args__values: int64 [s" in str(graph)
    assert not [record for record in caplog.records if record.name == "tierbed"]
