"""What the tests of graphs share: small models, their batches, and the same step for a graph and for eager torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tierbed
from tierbed import Graph, MultiTableEmbedding

DIM = 4
FEW = 2  # sizes of arguments that have a step of their own under `few_steps_of_their_own`
names = itertools.count()


class Train(Graph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))


def batches(count: int, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(rows, 6, generator=draw), torch.randn(rows, 1, generator=draw)) for _ in range(count)]


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def embedding(tables: int = 1, capacity: int = 1000, **options: Any) -> MultiTableEmbedding:
    initializers = [tierbed.make_uniform_initializer(-0.1, 0.1)] * tables
    store = tierbed.make_device_mem_store_options(capacity=capacity)
    name, options = f"rows{next(names)}", {"seed": 0, **options}
    return MultiTableEmbedding(name, DIM, torch.float32, torch.int64, initializers, store, **options)


def dense_copy(rows: MultiTableEmbedding, count: int = 50) -> nn.Embedding:
    return nn.Embedding.from_pretrained(rows.get(torch.arange(count)), freeze=False)


def id_batches(*shape: int, steps: int = 10) -> Tensor:
    return torch.randint(0, 50, (steps, *shape), generator=torch.Generator().manual_seed(3))


class Rating(Graph):
    """One embedding, looked up once or twice, and an MLP."""

    def __init__(self, rows: nn.Module, mlp: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__()
        self.rows, self.mlp = rows, mlp
        for optimizer in optimizers:
            self.add_optimizer(optimizer)

    def build(self, *ids: Tensor) -> Tensor:
        return train(self.rows, self.mlp, *ids)


def train(rows: nn.Module, mlp: nn.Module, *ids: Tensor) -> Tensor:
    loss = mlp(torch.cat([rows(i).flatten(1) for i in ids], 1)).square().mean()
    loss.backward()
    return loss


def graph_of(build: Callable[..., Any], *optimizers: torch.optim.Optimizer, **modules: nn.Module) -> Graph:
    """A graph with these modules as attributes, whose build is `build(graph, ...)`."""

    class Built(Graph):
        def __init__(self) -> None:
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)
            for optimizer in optimizers:
                self.add_optimizer(optimizer)

        def build(self, *args: Any) -> Any:
            return build(self, *args)

    return Built()


def training(loss_of: Callable[..., Tensor], lr: float = 0.1, **modules: nn.Module) -> Any:
    """A graph that trains these modules by SGD on the loss that `loss_of(graph, ...)` gives."""

    def build(graph: Any, *args: Any) -> Tensor:
        loss = loss_of(graph, *args)
        loss.backward()
        return loss

    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    return graph_of(build, torch.optim.SGD(parameters, lr=lr), **modules)


def compiled_steps(graph: Graph) -> int:
    return str(graph).count("# compiled step")
