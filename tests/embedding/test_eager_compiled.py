"""A plain loop over a model under torch.compile trains as without it, at every size, whatever gradients are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from support.graphs import DIM, embedding
from tierbed import EagerOptimizer

SIZES = (64, 64, 40, 2)
Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, bags: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.net, self.bags = embedding(), nn.Linear(DIM, 1), bags

    def look_up(self, ids: Tensor) -> Tensor:
        return self.rows(ids.view(-1, 2), pooling="sum") if self.bags else self.rows(ids)

    def dense(self, rows: Tensor) -> Tensor:
        return self.net(rows).square().mean()

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.look_up(ids))


def losses(model: Model, loss: Loss, *, clears: bool, autocast: bool) -> list[float]:
    optimizer = EagerOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model)
    found = []
    for step, size in enumerate(SIZES):
        ids = torch.randint(0, 50, (size,), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            now = loss(ids)
        if clears:
            optimizer.zero_grad()
        now.backward()
        optimizer.step()
        found.append(now.item())
    return found


@pytest.mark.parametrize(
    ("dynamic", "inside", "autocast", "bags", "clears"),
    [
        pytest.param(None, True, False, False, False, marks=pytest.mark.slow),
        (None, True, False, True, True),
        pytest.param(True, True, True, True, False, marks=pytest.mark.slow),
        pytest.param(None, False, True, False, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which Dynamo reads
def test_losses_are_those_of_eager(dynamic, inside, autocast, bags, clears) -> None:
    model = Model(bags)
    expected = losses(model, model, clears=clears, autocast=autocast)
    model = Model(bags)
    compiled = torch.compile(model if inside else model.dense, backend="aot_eager", dynamic=dynamic)
    loss = compiled if inside else lambda ids: compiled(model.look_up(ids))
    torch.testing.assert_close(losses(model, loss, clears=clears, autocast=autocast), expected, rtol=0, atol=1e-6)


def test_a_compiled_backward_that_ends_before_the_rows_adds_nothing() -> None:
    model = Model(bags=False)
    optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = torch.compile(model, backend="aot_eager")
    torch.autograd.grad(loss(torch.arange(6)), [model.net.weight])
    assert model.rows.shadow.grad is None
    loss(torch.arange(6)).backward()
    optimizer.step()
    assert model.rows.size() == 6
