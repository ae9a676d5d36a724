"""An EagerOptimizer refuses modules that share training among ranks: rows talk to none, and ranks would drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.embeddings import make
from support.stores import options
from tierbed import EagerOptimizer
from tierbed.engine.errors import OptimizerError

IDS = torch.tensor([1, 2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = make(options("host", None), tables=1)
        self.mlp = nn.Linear(self.rows.dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.rows(ids, 0)).sum()
        return out


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_rows_in_a_distributed_data_parallel_are_refused_not_trained_apart() -> None:
    model = Model()
    around = DistributedDataParallel(model)
    with pytest.raises(OptimizerError, match=r"the module is a DistributedDataParallel: .*train in one process"):
        EagerOptimizer(torch.optim.Adagrad(around.parameters()), around)
    model.mlp = DistributedDataParallel(model.mlp)  # type: ignore[assignment]
    with pytest.raises(OptimizerError, match="mlp is a DistributedDataParallel"):
        EagerOptimizer(torch.optim.Adagrad(model.parameters()), model)


def test_a_lookup_for_training_in_a_distributed_data_parallel_is_refused() -> None:
    model = Model()
    optimizer = EagerOptimizer(torch.optim.Adagrad(model.parameters()), model)
    around = DistributedDataParallel(model)
    with pytest.raises(OptimizerError, match=r"embedding 'rows' is in a DistributedDataParallel: "):
        around(IDS)
    with torch.no_grad():
        around(IDS)
    model(IDS).backward()
    optimizer.step()
    assert model.rows.size() == 2
