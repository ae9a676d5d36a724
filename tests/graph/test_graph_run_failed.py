"""A step of a run that raises: its batch trains once, later, or is in `failed`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.embeddings import contents, make
from support.graph_runs import IDS, LABELS, Rating
from support.stores import options
from tierbed import ClosedError, StoreError


@torch.library.custom_op("tierbed_tests::fail_on_request", mutates_args=())
def fail_on_request(x: Tensor) -> Tensor:
    if FAILURE:
        raise FAILURE.pop()
    return x.clone()


@fail_on_request.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class LateFailure(torch.optim.SGD):
    """Fails after its step."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        if LATE_FAILURE:
            raise LATE_FAILURE.pop()


FAILURE: list[Exception] = []
LATE_FAILURE: list[Exception] = []
MAY_PASS = {
    "store": (StoreError("no space left"), True),
    "file": (OSError(28, "no space left"), True),
    "memory": (MemoryError(), True),
    "memory of a device": (torch.OutOfMemoryError("the batch is too large"), False),
    "model": (ValueError("a bad batch"), False),
    "closed": (ClosedError("closed"), False),
}


class Failing(Rating):
    def __init__(self) -> None:
        super().__init__(make(options("cached_host"), None, tables=2))
        self.scale = nn.Linear(1, 1)
        self.add_optimizer(LateFailure(self.scale.parameters(), lr=0.1))
        self.mlp[0].eval()

    def build(self, ids: Tensor, labels: Tensor) -> Tensor:
        out = self.scale(self.mlp(self.rows(ids).flatten(1))).squeeze(1)
        loss = F.mse_loss(out, fail_on_request(labels))
        loss.backward()
        return loss


@pytest.fixture(scope="module")
def pair() -> tuple[Failing, Failing]:
    """A graph whose steps fail, and one that takes the steps that it took. All tests go on with them."""
    return Failing(), Failing()


@pytest.mark.parametrize("kind", MAY_PASS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_whose_step_trained_nothing_waits_for_another_try(
    pair: tuple[Failing, Failing], kind: str, late: bool, skip: bool
) -> None:
    error, may_pass = MAY_PASS[kind]
    waits = may_pass and not late
    (graph, plain), batches = pair, list(zip(IDS[:7], LABELS[:7], strict=True))
    run = graph.run(batches, ahead=3)
    for _ in range(4):
        next(run)
    for _ in range(3 if waits else 1):
        (LATE_FAILURE if late else FAILURE).append(error)
        with pytest.raises(type(error)):
            next(run)
        assert run.failed is batches[4]
    if skip:
        run.skip()
    rest = len(batches) - 4 - (not waits or skip)
    assert len(list(run)) == rest
    assert run.failed is None
    for i, batch in enumerate(batches):
        if i != 4 or late or (waits and not skip):
            plain(*batch)
    assert contents(graph.rows).tobytes() == contents(plain.rows).tobytes()
    assert torch.equal(graph.mlp[1].weight, plain.mlp[1].weight)
