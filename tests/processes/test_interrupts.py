"""Signal handlers wait until what they must not split is whole, and come then, whatever was set before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from support.embeddings import make
from support.stores import options
from tierbed import EagerOptimizer
from tierbed.engine.signals import defer_signals


@pytest.fixture(autouse=True)
def handled() -> Iterator[list[int]]:
    """What `signal.signal(number, lambda *_: ...)` of a test may fill; handlers are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield []
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_block_without_handlers_leaves_later_ones_protected(handled: list[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with defer_signals():
        pass
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    with defer_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not handled
    assert handled == [signal.SIGTERM]


def test_all_deferred_signals_are_handled_and_handlers_are_back(handled: list[int]) -> None:
    def handle(number: int, frame: object) -> None:
        handled.append(number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    with defer_signals(), defer_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert not handled
    assert handled == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is handle


def test_a_step_of_an_eager_optimizer_is_made_whole() -> None:
    def come(number: int, frame: object) -> None:
        raise InterruptedError

    dense = torch.nn.Parameter(torch.ones(3))
    with make(options("device")) as embedding:
        sgd = torch.optim.SGD([*embedding.parameters(), dense], lr=0.1)
        sgd.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        optimizer = EagerOptimizer(sgd, embedding)
        (embedding(torch.tensor([[1, 2, 3]])).sum() + dense.sum()).backward()
        signal.signal(signal.SIGTERM, come)
        with pytest.raises(InterruptedError):
            optimizer.step()
        assert embedding.metrics()["table"]["step"] == 1
        assert torch.equal(dense, torch.full((3,), 0.9))
        assert embedding.shadow.grad is not None  # until `zero_grad`, as that of the dense parameter
