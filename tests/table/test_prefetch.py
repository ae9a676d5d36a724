"""Announced batches change when work is done, never a row: hits, skipped and wrong hints, errors, closing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.embeddings import attach, contents, make, train
from support.examples import examples
from support.forked import in_process
from support.stores import STORES, options
from tierbed import EagerOptimizer, InputError, MultiTableEmbedding, OptimizerError, StoreError
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.prefetch import QUEUE, Prefetcher

STEPS = 12
BATCHES = [torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


def hint(embedding: MultiTableEmbedding, ids: torch.Tensor) -> None:
    embedding.prefetch(ids, torch.zeros_like(ids))


@pytest.fixture(scope="module")
def plain() -> NDArray[np.void]:
    with make(options("device"), "adagrad") as embedding:
        for ids in BATCHES:
            train(embedding, ids)
        return contents(embedding)


@pytest.mark.parametrize("ahead", [1, 3, 40])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("ahead")
def test_rows_are_those_of_the_plain_run(tmp_path: Path, plain: NDArray[np.void], store: str, ahead: int) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        for ids in BATCHES[:ahead]:
            hint(embedding, ids)
        for i, ids in enumerate(BATCHES):
            train(embedding, ids)
            for later in BATCHES[i + ahead : i + ahead + 1]:
                hint(embedding, later)
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain.tobytes()


@pytest.mark.parametrize("store", STORES)
@examples(0.3)
@given(data=st.data())
def test_hints_that_are_wrong_late_or_skipped_change_no_row(
    tmp_path_factory: pytest.TempPathFactory, plain: NDArray[np.void], store: str, data: st.DataObject
) -> None:
    with make(options(store, tmp_path_factory.mktemp("wrong")), "adagrad") as embedding:
        for i, ids in enumerate(BATCHES):
            for hinted in data.draw(st.lists(st.integers(-2, 4), max_size=3)):
                hint(embedding, BATCHES[(i + hinted) % STEPS])
            action = data.draw(st.sampled_from(["none", "read", "put", "release", "scan"]))
            if action == "read":
                embedding(BATCHES[-1], torch.zeros_like(BATCHES[-1]))
            elif action == "put":
                embedding.put([1000], torch.ones(1, 5), 0)
            elif action == "release":
                embedding.pin([Lookup(ids, torch.zeros_like(ids))])
                embedding.release()
            elif action == "scan":
                contents(embedding)
            train(embedding, ids)
        rows = contents(embedding)
        assert rows[rows["key"] != 1000].tobytes() == plain.tobytes()


def test_tensors_may_be_filled_anew_after_the_hint(plain: NDArray[np.void]) -> None:
    buffer = torch.empty_like(BATCHES[0])
    with make(options("cached_host"), "adagrad") as embedding:
        for ids in BATCHES:
            hint(embedding, buffer.copy_(ids))
        for ids in BATCHES:
            train(embedding, ids)
        assert embedding.metrics()["table"]["prefetch_hits"] == STEPS
        assert contents(embedding).tobytes() == plain.tobytes()


def test_a_bad_table_id_is_raised_at_once_and_steps_go_on() -> None:
    bad = torch.full_like(BATCHES[0], 99)
    with make(options("cached_host"), "adagrad") as embedding:
        with pytest.raises(InputError, match="table id 99"):
            embedding.prefetch(BATCHES[0], bad)
        with pytest.raises(InputError, match="followed by"):
            embedding.prefetch(BATCHES[0], 0, torch.tensor([0, 9, 3, 64]), "sum")
        hint(embedding, BATCHES[1])
        with pytest.raises(InputError, match="table id 99"):
            embedding.pin([Lookup(BATCHES[0], bad)])
        train(embedding, BATCHES[1])
        assert embedding.metrics()["table"]["prefetch_hits"] == 1


def test_a_hint_is_checked_at_once() -> None:
    with make(options("device")) as embedding:
        with pytest.raises(OptimizerError, match="add_optimizer"):
            hint(embedding, BATCHES[0])
        attach(embedding, "adagrad")
        with pytest.raises(InputError, match="dtype"):
            embedding.prefetch(torch.ones(3))


def test_hints_that_no_step_wants_are_dropped() -> None:
    with make(options("cached_host"), "adagrad") as embedding:
        hint(embedding, torch.full((8,), 10_000))
        for _ in range(QUEUE + 5):
            train(embedding, BATCHES[0])
        assert embedding.metrics()["table"]["prefetch_misses"] == QUEUE + 1  # then no hint is left to look at


@pytest.mark.parametrize("store", STORES)
def test_closing_with_hints_under_way_ends_the_thread(tmp_path: Path, store: str) -> None:
    before = set(threading.enumerate())  # of other tests
    embedding = make(options(store, tmp_path), "adagrad")
    for ids in BATCHES:
        hint(embedding, ids)
    assert [thread for thread in threading.enumerate() if thread not in before]
    embedding.close()
    assert not [thread for thread in threading.enumerate() if thread not in before]


def test_hints_that_nobody_takes_do_not_pile_up() -> None:
    with make(options("cached_host"), "adagrad") as embedding:
        for _ in range(QUEUE + 5):
            hint(embedding, BATCHES[0])
        assert embedding.metrics()["table"]["prefetch_dropped"] == 5
        train(embedding, BATCHES[0])
        assert embedding.metrics()["table"]["prefetch_hits"] == 1


def test_a_hint_whose_thread_does_not_start_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make(options("cached_host"), "adagrad") as embedding:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="start new thread"):
                hint(embedding, BATCHES[0])
        train(embedding, BATCHES[0])
        hint(embedding, BATCHES[1])
        train(embedding, BATCHES[1])
        assert embedding.metrics()["table"]["prefetch_hits"] == 1


def test_ctrl_c_while_a_close_waits_for_the_thread_leaves_a_table_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    main, begun = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt_the_close(prefetcher: Prefetcher, coming: object) -> None:
        begun.set()
        with prefetcher._changed:  # the close releases the lock, and joins
            prefetcher._changed.wait_for(lambda: prefetcher._thread is None)
        signal.pthread_kill(main, signal.SIGINT)  # held back until the thread has ended

    embedding = make(options("cached_host"), "adagrad")
    with monkeypatch.context() as patched:
        patched.setattr(Prefetcher, "_prepare", interrupt_the_close)
        hint(embedding, BATCHES[0])
        begun.wait()
        with pytest.raises(KeyboardInterrupt):
            embedding.close()
    hint(embedding, BATCHES[0])
    train(embedding, BATCHES[0])
    assert embedding.metrics()["table"]["prefetch_hits"] == 1
    embedding.close()


def _exit_code_of_a_child(task: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        passed = False
        try:
            passed = task()
        finally:
            os._exit(0 if passed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork_beside_hints() -> list[int]:
    with make(options("cached_host"), "adagrad") as embedding:

        def hinted() -> bool:
            hint(embedding, BATCHES[0])
            train(embedding, BATCHES[0])
            return embedding.metrics()["table"]["prefetch_hits"] == 1

        def closed() -> bool:
            done = hinted()
            embedding.close()
            return done and threading.active_count() == 1

        def refused() -> bool:
            with pytest.raises(StoreError, match="which holds its folder or its threads"):
                hint(embedding, BATCHES[2])
            return True

        without_thread = _exit_code_of_a_child(closed)
        hint(embedding, BATCHES[0])
        hint(embedding, BATCHES[1])
        with_thread = _exit_code_of_a_child(refused)
        train(embedding, BATCHES[0])
        train(embedding, BATCHES[1])
        assert embedding.metrics()["table"]["prefetch_hits"] == 2
        return [without_thread, with_thread]


def test_a_child_has_a_thread_of_its_own_or_may_not_use_the_table() -> None:
    assert in_process(_fork_beside_hints) == [0, 0]


def accumulate(embedding: MultiTableEmbedding, batches: list[torch.Tensor], ahead: int, together: int) -> int:
    """Train by steps that take the gradients of `together` batches, announced one by one. Returns the hits."""
    optimizer = EagerOptimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1), embedding)
    before = embedding.metrics()["table"]["prefetch_hits"] if embedding.is_open else 0
    for i, ids in enumerate(batches):
        for later in batches[:ahead] if i == 0 else batches[i + ahead - 1 : i + ahead]:
            hint(embedding, later)
        embedding(ids, torch.zeros_like(ids)).square().sum().backward()
        if (i + 1) % together == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return int(embedding.metrics()["table"]["prefetch_hits"]) - before


@pytest.mark.parametrize("ahead", [2, 5, 40])
def test_hints_of_accumulated_batches_belong_to_one_step(tmp_path: Path, ahead: int) -> None:
    batches = BATCHES * 4  # 48
    with make(options("device")) as plain, make(options("cached_ssd", tmp_path)) as embedding:
        for together, least in [(2, 20), (3, 12), (1, 40), (4, 8)]:  # of 24, 16, 48 and 12 steps
            accumulate(plain, batches, 0, together)
            assert accumulate(embedding, batches, ahead, together) >= least
        assert contents(embedding).tobytes() == contents(plain).tobytes()


@pytest.mark.parametrize("wrong", [40, QUEUE + 50])
@pytest.mark.parametrize("ahead", [1, 3, 60])
def test_hints_are_used_again_after_many_wrong_ones(ahead: int, wrong: int) -> None:
    with make(options("cached_host"), "adagrad") as embedding:
        for i in range(wrong):  # each step was announced as another one
            hint(embedding, torch.full((8,), 10_000 + i))
            train(embedding, BATCHES[0])
        for i, ids in enumerate(BATCHES * 10):
            hint(embedding, (BATCHES * 16)[i + ahead])
            train(embedding, ids)
        hits = embedding.metrics()["table"]["prefetch_hits"]
        assert hits >= len(BATCHES) * 10 - ahead - 2
        embedding.forget_announced()
        for i in range(wrong):  # batches that are evaluated alone
            hint(embedding, torch.full((8,), 10_000 + i))
        embedding.forget_announced()
        hint(embedding, BATCHES[0])
        train(embedding, BATCHES[0])
        assert embedding.metrics()["table"]["prefetch_hits"] == hits + 1
