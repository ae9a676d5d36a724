"""A step of a run that raises: its batch trains once, later, or is in `failed`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.embeddings import contents, make
from support.forked import in_process
from support.graph_runs import IDS, LABELS, STEPS, Rating, rating
from support.stores import options
from tierbed import ClosedError, Graph, StoreError
from tierbed.graph.run import loop


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


def test_ctrl_c_in_the_loader_loses_no_batch() -> None:
    drawn = iter(zip(IDS, LABELS, strict=True))
    calls = 0

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            nonlocal calls
            calls += 1
            if calls == 7:
                raise KeyboardInterrupt
            return next(drawn)

    graph, plain = rating("cached_host"), rating("cached_host")
    torch.manual_seed(2)
    expected = [plain(*batch) for batch in zip(IDS, LABELS, strict=True)]
    torch.manual_seed(2)
    run = graph.run(Loader(), ahead=3)
    losses = [next(run) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):  # the seventh is drawn before the fourth step
        next(run)
    losses += run
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert contents(graph.rows).tobytes() == contents(plain.rows).tobytes()


@contextlib.contextmanager
def ctrl_c_at(line: int) -> Iterator[None]:
    """Ctrl-C before that line, counted from the first, of those that run of graph/run/loop.py in the block."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != loop.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_ctrl_c_at_each_line_of_a_call_loses_no_batch() -> None:
    graph, plain = rating("cached_host"), rating("cached_host")
    batches = list(zip(IDS[:2], LABELS[:2], strict=True))
    torch.manual_seed(2)
    lines = 0
    for line in count():
        run = graph.run(batches, ahead=2)
        next(run)
        try:
            with ctrl_c_at(line):
                next(run)
            lines = line
        except KeyboardInterrupt:
            for _ in run:
                pass
        assert graph.rows.metrics()["table"]["step"] == 2 * (line + 1)
        if lines:
            break
    assert lines > 20
    torch.manual_seed(2)
    for batch in batches * (lines + 1):
        plain(*batch)
    assert contents(graph.rows).tobytes() == contents(plain.rows).tobytes()


def interrupted_runs(path: Path) -> bool:
    """A run is interrupted many times, wherever it is, and gone on with."""

    class Two(Graph):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.users, self.items = (make(options("cached_host"), None, name, tables=1) for name in ("users", "items"))
            self.layer = nn.Linear(2 * self.users.spec.dim, 1)
            self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

        def build(self, ids: Tensor) -> Tensor:
            rows = torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], 1)
            loss = self.layer(rows).square().mean()
            loss.backward()
            return loss

    batches = [IDS[i % STEPS] for i in range(100)]
    plain, graph = Two(), Two()
    for ids in batches:
        plain(ids)
    run, interrupts, done = graph.run(batches, ahead=8), 0, False
    ready, stop, random = threading.Event(), threading.Event(), np.random.default_rng(1)

    def interrupt() -> None:
        while not stop.is_set():
            ready.wait(0.3)  # not forever: Python swallows what is raised in a callback of a weak reference
            ready.clear()
            stop.wait(random.uniform(0.0, 0.01))
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):  # one that was pending
        while not done:
            try:
                ready.set()
                for _ in run:
                    pass
                done = True
            except KeyboardInterrupt:
                interrupts += 1
    with contextlib.suppress(KeyboardInterrupt):
        stop.set()
        thread.join()
        time.sleep(0.05)
    thread.join()
    same = all(
        contents(ours).tobytes() == contents(theirs).tobytes()
        for ours, theirs in ((graph.users, plain.users), (graph.items, plain.items))
    )
    return done and interrupts > 5 and same and torch.equal(graph.layer.weight, plain.layer.weight)


def test_ctrl_c_anywhere_makes_no_half_step_and_loses_no_batch(tmp_path: Path) -> None:
    assert in_process(interrupted_runs, tmp_path)
