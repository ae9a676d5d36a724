"""Rows that are no embedding of tierbed's stand in a graph: it asks for what `EmbeddingBase` says, and for no class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.checkpoints import rating
from support.embeddings import make
from support.stores import options
from tierbed import Graph, GraphError
from tierbed.embedding.autograd import lookup_op as ops
from tierbed.engine.ops.embedding_base import EmbeddingBase
from tierbed.engine.options.lookup import Lookup


class Frozen(EmbeddingBase):
    """The rows of a tensor [n, dim], which never change."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        spec = make(options("device", None), tables=1)
        self.values, self.spec, self.store_options = values, spec.spec, spec.store_options
        self.output_dtype, self.embedding_id = torch.float32, ops.register(self)
        self.shadow = nn.Parameter(torch.zeros(1), requires_grad=False)

    @property
    def name(self) -> str:
        return "frozen"

    @property
    def dim(self) -> int:
        return int(self.values.shape[1])

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = ops.lookup(self.shadow, ids, None, None, None, None, None, self.embedding_id)
        return rows

    def read(self, lookup: Lookup, weights: Tensor | None = None, is_training: bool = False) -> Tensor:
        return self.values[lookup.ids]


class Scoring(Graph):
    """A layer over frozen rows, trained."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.rows = Frozen(values)
        self.layer = nn.Linear(self.rows.dim, 1)
        self.add_optimizer(torch.optim.SGD(self.layer.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.layer(self.rows(ids)).square().mean()
        loss.backward()
        return loss


def test_a_graph_trains_over_rows_of_another_kind_as_plain_torch() -> None:
    torch.manual_seed(0)
    values, ids = torch.randn(10, 4), torch.tensor([[1, 2], [1, 9]])
    graph = Scoring(values)
    plain = nn.Linear(4, 1)
    plain.load_state_dict(graph.layer.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        expected = plain(values[ids]).square().mean()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(graph(ids), expected.detach())
    torch.testing.assert_close(graph.layer.weight, plain.weight)
    assert "rows" in str(graph)


@pytest.mark.parametrize("call", ["save", "check_save", "load"])
def test_a_checkpoint_that_would_lack_rows_is_refused(tmp_path: Path, call: str) -> None:
    path = tmp_path / "checkpoint"
    if call == "load":
        rating("host", None).save(path)
    with pytest.raises(GraphError, match="rows is a Frozen, and a checkpoint cannot hold its rows"):
        getattr(Scoring(torch.zeros(3, 4)), call)(path)
    assert path.exists() == (call == "load")
