"""A run over a loader has the results of the plain loop, whatever is ahead, on every store."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from support.embeddings import contents, make
from support.forked import in_process
from support.graph_runs import IDS, LABELS, STEPS, Rating, rating
from support.graphs import embedding, graph_of, training
from support.stores import ONE_SET_MB, STORES, options
from tierbed import CapacityError, ClosedError, InputError, MultiTableEmbedding, StoreError
from tierbed.graph.run import loop
from tierbed.graph.run.look_ahead import CHECK_STEPS


def hits(rows: MultiTableEmbedding) -> float:
    return rows.metrics()["table"]["prefetch_hits"]


OF_OTHER_TESTS = set[threading.Thread]()


@pytest.fixture(autouse=True)
def threads_of_other_tests() -> None:
    """Embeddings that other tests left to the garbage collector may have threads still."""
    OF_OTHER_TESTS.clear()
    OF_OTHER_TESTS.update(threading.enumerate())


def threads() -> int:
    return sum(thread.name == "tierbed-prefetch" for thread in {*threading.enumerate()} - OF_OTHER_TESTS)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(IDS.flatten(0, 1), LABELS.flatten()), batch_size=50)  # a smaller last batch


PAIRS = list(zip(IDS, LABELS, strict=True))


@cache
def plain_loop(accumulated: int = 1) -> tuple[Tensor, bytes]:
    """The losses and the rows of a loop of calls."""
    return plainly(loader(), accumulated)


def plainly(batches: Iterable[Any], accumulated: int = 1) -> tuple[Tensor, bytes]:
    graph = rating("device")
    graph.accumulate_grads(accumulated)
    torch.manual_seed(2)
    return torch.stack([graph(*batch) for batch in batches]), contents(graph.rows).tobytes()


def assert_is_plain(graph: Rating, losses: list[Tensor], expected: tuple[Tensor, bytes]) -> None:
    assert torch.equal(torch.stack(losses), expected[0])
    assert contents(graph.rows).tobytes() == expected[1]


@pytest.mark.parametrize("ahead", [0, 1, 8, 31])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("ahead")
def test_results_are_those_of_the_plain_loop(
    tmp_path: Path, store: str, ahead: int, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = rating(store, tmp_path)
    torch.manual_seed(2)
    assert_is_plain(graph, list(graph.run(loader(), ahead=ahead, progress="epoch 1")), plain_loop())
    assert hits(graph.rows) == (len(loader()) if ahead else 0)
    assert threads() == 0
    shown = capsys.readouterr().out
    assert "epoch 1" in shown
    assert f"{len(loader())}/{len(loader())}" in shown
    assert "samples/s" in shown


def test_lookups_of_accumulated_steps_are_brought_up_together(tmp_path: Path) -> None:
    graph = rating("ssd", tmp_path)
    graph.accumulate_grads(3)
    torch.manual_seed(2)
    losses = list(graph.run(loader(), ahead=1))
    assert_is_plain(graph, losses, plain_loop(3))
    assert len(losses) == 8
    assert hits(graph.rows) == 2
    graph(*next(iter(loader())))  # amid accumulated steps, a run announces from the next update on
    assert len(list(graph.run(loader(), ahead=8))) == 8
    figures = graph.rows.metrics()["table"]
    assert (figures["step"], figures["prefetch_hits"]) == (5, 4)


def test_a_loader_that_fills_a_batch_anew_is_told() -> None:
    def filled() -> Iterator[tuple[Tensor, Tensor]]:
        ids, labels = torch.empty_like(IDS[0]), torch.empty_like(LABELS[0])
        for i in range(STEPS):
            yield ids.copy_(IDS[i]), labels.copy_(LABELS[i])

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        ids = torch.empty_like(IDS)
        for i in range(STEPS):
            ids[i] = IDS[i]
            yield ids[i], LABELS[i]

    graph = rating("device")
    run = graph.run(filled(), ahead=3)
    with pytest.raises(InputError, match=r"ahead=3: the loader reuses the tensors of a batch.*ahead=0"):
        next(run)
    assert list(run) == []
    assert graph.rows.metrics()["table"]["step"] == 0
    torch.manual_seed(2)
    assert_is_plain(graph, list(graph.run(filled(), ahead=0)), plainly(PAIRS))
    assert len(list(graph.run(parts(), ahead=4))) == STEPS  # parts of one tensor are not taken for one another


def run_over_workers(path: Path, start: str) -> None:
    """Two epochs of a loader with worker processes, which are forked beside a store that is open and was trained."""
    graph = rating("ssd", path)
    count = 2 if start == "fork" else 1  # each that is spawned imports torch again
    workers = DataLoader(loader().dataset, batch_size=50, num_workers=count, multiprocessing_context=start)
    torch.manual_seed(2)
    losses = [loss for _ in range(2) for loss in graph.run(workers, ahead=8)]
    assert_is_plain(graph, losses, plainly(batch for _ in range(2) for batch in loader()))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_feed_a_run(tmp_path: Path, start: str) -> None:
    in_process(run_over_workers, tmp_path, start)


def test_ids_that_are_computed_are_announced_as_the_step_makes_them() -> None:
    def build(graph: Any, batch: dict[str, Tensor]) -> Tensor:
        users = graph.map[batch["user"].add(3).remainder_(100)]
        loss = torch.cat([graph.rows(users, 0), graph.rows(batch["items"], 1).sum(1)], 1).square().mean()
        loss.backward()
        users.zero_()  # later: they are announced as they were
        return loss

    rows = embedding(tables=2)
    graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
    graph.register_buffer("map", torch.arange(100).flip(0))
    batches = [{"user": torch.arange(i, i + 8), "items": torch.arange(i, i + 16).view(8, 2)} for i in range(6)]
    list(graph.run(batches, ahead=8))
    assert hits(graph.rows) == 6


def test_ids_that_depend_on_rows_draws_or_changed_arguments_are_not_announced() -> None:
    def loss(graph: Any, ids: Tensor, others: Tensor) -> Tensor:
        near = graph.first(ids)
        far = graph.second((near.sum(-1) > 0).long() + torch.randint(0, 9, ids.shape))
        return (near + far + graph.third(others.add_(1))).square().mean()

    rows = {name: embedding() for name in ("first", "second", "third")}
    others = IDS[:6, :, 1].clone()
    batches = list(zip(IDS[:6, :, 0], list(others), strict=True))
    assert len(list(training(loss, **rows).run(batches, ahead=8))) == 6
    assert [hits(one) for one in rows.values()] == [6, 0, 0]
    assert torch.equal(others, IDS[:6, :, 1] + 1)  # once


@pytest.mark.parametrize(("error", "before"), [(OSError, 5), (KeyboardInterrupt, 2)])
def test_an_exception_of_the_loader_comes_after_the_steps_of_its_batches_and_ctrl_c_at_once(
    error: type[BaseException], before: int
) -> None:
    class Loader:
        number = -1

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            self.number += 1
            if self.number == 5:
                raise error("one bad sample")
            if self.number == 8:
                raise StopIteration
            return PAIRS[self.number]

    graph = rating("cached_host")
    torch.manual_seed(2)
    run = graph.run(Loader(), ahead=3)
    losses = [next(run) for _ in range(before)]
    with pytest.raises(error, match="one bad sample"):  # Ctrl-C: the sixth is drawn before the third step
        next(run)
    assert_is_plain(graph, [*losses, *run], plainly([*PAIRS[:5], *PAIRS[6:8]]))  # no batch is lost
    assert list(run) == []
    assert threads() == 0


def test_a_step_that_raises_takes_its_batch_and_no_other() -> None:
    batches = PAIRS[:6]
    batches[2] = (IDS[2].float(), LABELS[2])  # ids of a wrong dtype
    graph = rating("cached_host")
    torch.manual_seed(2)
    run = graph.run(batches, ahead=8)
    losses = [next(run), next(run)]
    with pytest.raises(InputError, match=r"torch\.int64"):
        next(run)
    assert run.failed is batches[2]
    run.skip()  # it is used up already
    assert_is_plain(graph, [*losses, *run], plainly([*PAIRS[:2], *PAIRS[3:6]]))
    assert run.failed is None


def test_a_store_that_is_full_raises_at_its_step() -> None:
    graph = Rating(make(options("device", capacity=100), None, tables=2))
    small = (torch.arange(40).view(20, 2), torch.zeros(20))
    run = graph.run([small, (IDS[0] + 1000, LABELS[0]), (IDS[1] + 2000, LABELS[1]), small], ahead=8)
    next(run)
    for _ in range(2):
        with pytest.raises(CapacityError, match="capacity=100"):
            next(run)
    assert next(run).isfinite()
    assert list(run) == []


def test_leaving_a_loop_forgets_what_was_announced_and_an_evaluation_announces_nothing() -> None:
    graph = rating("cached_host").eval()
    assert len(list(graph.run(loader(), ahead=8))) == len(loader())
    assert graph.rows.metrics()["table"]["rows"] == 0
    assert threads() == 0
    graph.train()
    for _ in graph.run(PAIRS, ahead=8):
        break
    graph(IDS[5], LABELS[5])
    assert threads() == 0
    assert graph.rows.metrics()["table"]["prefetch_misses"] == 0


def test_a_run_that_is_collected_anywhere_disturbs_no_step() -> None:
    graph = rating("cached_host")
    torch.manual_seed(2)
    losses, before = [], gc.get_threshold()
    gc.set_threshold(20)  # collects runs in the middle of steps, in any thread
    try:
        for _ in range(10):
            run: Any = graph.run(PAIRS, ahead=8)
            run.itself = run
            losses += [next(run) for _ in range(4)]
            del run
    finally:
        gc.set_threshold(*before)
    assert_is_plain(graph, losses, plainly(PAIRS[:4] * 10))
    graph.rows.close()


def test_rows_in_memory_are_announced_only_if_a_number_is_given(caplog: pytest.LogCaptureFixture) -> None:
    slower = "ahead=2 makes steps slower, because all rows are in memory; leave it out"
    for store in ("cached_host", "device"):
        graph = rating(store)
        assert len(list(graph.run(PAIRS))) == STEPS
        assert hits(graph.rows) == 0
    assert slower not in caplog.text
    list(graph.run(PAIRS, ahead=2))
    assert slower in caplog.text


def test_rows_on_ssd_are_announced_while_the_cache_misses_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some = STEPS - CHECK_STEPS - 1  # after it checked the miss rate
    missing, holding = (Rating(make(options("ssd", tmp_path / str(mb), mb), None, tables=2)) for mb in (ONE_SET_MB, 1))
    # all rows are new in the first run, and each run begins with the verdict of the one before
    announced = {}
    for graph in (missing, holding):
        torch.manual_seed(2)
        found = [hits(graph.rows) for times in (1, 3, 1) if len(list(graph.run(PAIRS * times))) == times * STEPS]
        announced[graph] = [now - before for before, now in pairwise([0, *found])]
    assert announced[missing] == [some, 3 * STEPS, STEPS]
    assert announced[holding][0::2] == [some, 0]
    assert announced[holding][1] < 3 * STEPS
    assert contents(missing.rows).tobytes() == contents(holding.rows).tobytes()
    slower = "ahead=2 makes steps slower, because caches have 100 % of the rows; leave it out"
    assert slower not in caplog.text
    list(holding.run(PAIRS, ahead=2))
    assert slower in caplog.text


@torch.library.custom_op("tierbed_tests::fail_on_request", mutates_args=())
def fail_on_request(x: Tensor) -> Tensor:
    if FAILURE:
        raise FAILURE.pop()
    return x.clone()


fail_on_request.register_fake(torch.empty_like)


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
    (graph, plain), batches = pair, PAIRS[:7]
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
    assert len(list(run)) == 3 - (not waits or skip)
    assert run.failed is None
    for i, batch in enumerate(batches):
        if i != 4 or late or (waits and not skip):
            plain(*batch)
    assert contents(graph.rows).tobytes() == contents(plain.rows).tobytes()
    assert torch.equal(graph.mlp[1].weight, plain.mlp[1].weight)


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
    graph = rating("cached_host")
    torch.manual_seed(2)
    lines = 0
    for line in count():
        run = graph.run(PAIRS[:2], ahead=2)
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
    assert contents(graph.rows).tobytes() == plainly(PAIRS[:2] * (lines + 1))[1]


def interrupted_runs() -> bool:
    """A run is interrupted many times, wherever it is, and gone on with."""

    def loss(graph: Any, ids: Tensor) -> Tensor:
        return graph.layer(torch.cat([graph.users(ids[:, 0]), graph.items(ids[:, 1])], 1)).square().mean()

    def graph_of_two() -> Any:
        torch.manual_seed(0)
        users, items = (make(options("cached_host"), None, name, tables=1) for name in ("users", "items"))
        return training(loss, users=users, items=items, layer=nn.Linear(2 * users.dim, 1))

    batches = [IDS[i % STEPS] for i in range(100)]
    plain, graph = graph_of_two(), graph_of_two()
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
    pairs = (graph.users, plain.users), (graph.items, plain.items)
    same = all(contents(ours).tobytes() == contents(theirs).tobytes() for ours, theirs in pairs)
    return done and interrupts > 5 and same and torch.equal(graph.layer.weight, plain.layer.weight)


def test_ctrl_c_anywhere_makes_no_half_step_and_loses_no_batch() -> None:
    assert in_process(interrupted_runs)
