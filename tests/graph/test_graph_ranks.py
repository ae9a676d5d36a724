"""A graph refuses modules that share training among ranks: its steps talk to none, and ranks would drift apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from support.graphs import graph_of
from tierbed import Graph
from tierbed.engine.errors import GraphError

SHARED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "DistributedDataParallel": (DistributedDataParallel, "net is a DistributedDataParallel"),
    "inside": (lambda net: nn.Sequential(DistributedDataParallel(net)), r"net\.0 is a DistributedDataParallel"),
    "FSDP": (
        lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        "net is a FullySharded.*",
    ),
    "fully_shard": (lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (1,))), "net is a FSDPLinear"),
    "replicate": (replicate, "net is a DDPLinear"),
    "tensors": (
        lambda net: parallelize_module(net, init_device_mesh("cpu", (1,)), ColwiseParallel()),
        r"net\.(weight|bias) is a DTensor",
    ),
}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*FSDP")


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(net: nn.Module) -> Graph:
    return graph_of(
        lambda graph, x: graph.net(x).square().sum().backward(), torch.optim.SGD(net.parameters(), lr=0.1), net=net
    )


@pytest.mark.parametrize("kind", SHARED)
def test_a_module_of_several_ranks_is_refused_by_name_not_trained_alone(kind: str) -> None:
    share, message = SHARED[kind]
    with pytest.raises(GraphError, match=f"{message}: .*give the graph the module without it"):
        trained(share(nn.Linear(3, 1)))(torch.ones(2, 3))


def test_a_module_or_graph_that_is_shared_after_the_first_step_is_refused() -> None:
    graph = trained(nn.Linear(3, 1))
    graph(torch.ones(2, 3))
    graph.net = DistributedDataParallel(graph.net)
    with pytest.raises(GraphError, match="net is a DistributedDataParallel"):
        graph(torch.ones(2, 3))
    graph.net = graph.net.module
    around = DistributedDataParallel(graph)
    with pytest.raises(GraphError, match=r"Built is in a DistributedDataParallel: .*train in one process"):
        around(torch.ones(2, 3))
    graph(torch.ones(2, 3))
