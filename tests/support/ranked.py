"""A small graph of two embeddings whose rows ranks share, its batches, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tierbed import Graph, MultiTableEmbedding, World, make_host_mem_store_options

ROWS = 50
NOWHERE, IDS, BETWEEN, LOSS, BACKWARD, LATE = range(6)  # places of the step where it can be made to fail


@torch.library.custom_op("tierbed_tests::fails", mutates_args=())
def fails(x: Tensor, at: Tensor, place: int) -> Tensor:
    """`x`; raises ValueError where `at` says this place."""
    if at.item() == place:
        raise ValueError(f"failed at {place}")
    return x.clone()


@fails.register_fake
def _(x: Tensor, at: Tensor, place: int) -> Tensor:
    return torch.empty_like(x)


fails.register_autograd(lambda ctx, grad: (grad, None, None))


class _Backward(torch.autograd.Function):
    """The identity, whose backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, place: int) -> Tensor:
        ctx.save_for_backward(at)
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return fails(grads[0], *ctx.saved_tensors, ctx.place), None, None


class Ranked(Graph):
    """Two embeddings, a linear layer before one of them, and one after both. Parameters begin as this rank draws them.

    Every second step halves the learning rate. world: None for one process, which has to begin as rank 0.
    """

    def __init__(
        self,
        world: World | None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        store: Callable[..., Any] = make_host_mem_store_options,
    ) -> None:
        super().__init__()
        torch.manual_seed(7 if world is None else 7 + world.rank)
        self.users = MultiTableEmbedding("users", 4, torch.float32, torch.int64, None, store(), world=world)
        self.items = MultiTableEmbedding("items", 8, torch.float32, torch.int64, None, store(), seed=3, world=world)
        self.before = nn.Linear(4, 4)
        self.after = nn.Linear(12, 1)
        self.register_buffer("middle", torch.rand(()))
        self.optimizer = optimizer(self.parameters())
        halving = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.add_optimizer(self.optimizer, halving)

    def build(self, users: Tensor, items: Tensor, y: Tensor, at: Tensor) -> Tensor:
        of_users = self.before(_Backward.apply(self.users(users), at, LATE))
        of_items = self.items(fails(items, at, IDS), None, torch.arange(0, items.shape[0] + 1, 3), "sum")
        both = fails(torch.cat([of_users, of_items], 1), at, BETWEEN)
        loss = (self.after(_Backward.apply(both, at, BACKWARD)).squeeze(1) + self.middle - y).square().mean()
        loss = fails(loss, at, LOSS)
        self.loss(loss).backward()
        return loss

    def loss(self, loss: Tensor) -> Tensor:
        """What backward() begins with."""
        return loss


def batch(rank: int, step: int, at: int = NOWHERE, size: int = 16) -> tuple[Tensor, ...]:
    """The part of a rank in the batch of a step, which fails at a place."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    users, items = (torch.randint(ROWS, (size * n,), generator=generator) for n in (1, 3))
    return users, items, torch.rand(size, generator=generator), torch.tensor(at)


def state(graph: Ranked) -> dict[str, Tensor]:
    """Dense parameters, buffers and all rows. Collective."""
    named = [*graph.named_parameters(), *graph.named_buffers()]
    found = {name: value.detach().clone() for name, value in named if "shadow" not in name}
    ids = torch.arange(ROWS)
    return found | {"users": graph.users.get(ids), "items": graph.items.get(ids)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
