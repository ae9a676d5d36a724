"""Announced batches change when work is done, never a row: hits, skipped and wrong hints, errors, closing, streams."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from support.cuda_emulation.ordering import OrderedDevice
from support.cuda_tables import on_one_device, on_processors, tables_on
from support.embeddings import attach, contents, make, train
from support.examples import examples
from support.forked import in_process
from support.stores import STORES, options
from tierbed import CapacityError, EagerOptimizer, InputError, MultiTableEmbedding, OptimizerError, StoreError
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.prefetch import MAX_QUEUE, Prefetcher

STEPS = 12
BATCHES = [torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
MANY_SETS_MB = 0.1
three_stores = pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])


def hint(embedding: MultiTableEmbedding, ids: Tensor) -> None:
    embedding.prefetch(ids, torch.zeros_like(ids))


def hits(embedding: MultiTableEmbedding) -> int:
    return int(embedding.metrics()["table"]["prefetch_hits"])


def on(place: torch.device) -> list[Tensor]:
    return [ids.to(place) for ids in BATCHES]


@pytest.fixture(scope="module")
def plain() -> bytes:
    with make(options("device"), "adagrad") as embedding:
        for ids in BATCHES:
            train(embedding, ids)
        return contents(embedding).tobytes()


@on_processors
@pytest.mark.parametrize("budget_mb", [0.01, MANY_SETS_MB])
@pytest.mark.parametrize("ahead", [1, 4, 40])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.pairs
@pytest.mark.rotated("store")
def test_rows_are_those_of_the_plain_run(
    tmp_path: Path, place: torch.device, plain: bytes, store: str, ahead: int, budget_mb: float
) -> None:
    with make(options(store, tmp_path, budget_mb), "adagrad").to(place) as embedding:
        batches = on(place)
        for ids in batches[:ahead]:
            hint(embedding, ids)
        for i, ids in enumerate(batches):
            train(embedding, ids)
            for later in batches[i + ahead : i + ahead + 1]:
                hint(embedding, later)
            embedding(batches[-1], torch.zeros_like(ids))  # reads while rows are fetched
        assert hits(embedding) == STEPS
        assert contents(embedding).tobytes() == plain


@on_processors
@pytest.mark.parametrize("store", STORES)
@examples(0.1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.rotated("store")
def test_hints_that_are_wrong_late_or_skipped_change_no_row(
    tmp_path_factory: pytest.TempPathFactory, place: torch.device, plain: bytes, store: str, data: st.DataObject
) -> None:
    with make(options(store, tmp_path_factory.mktemp("wrong")), "adagrad").to(place) as embedding:
        batches, saved = on(place), False
        for i, ids in enumerate(batches):
            for hinted in data.draw(st.lists(st.integers(-2, 4), max_size=3)):
                hint(embedding, batches[(i + hinted) % STEPS])
            action = data.draw(st.sampled_from(["none", "read", "put", "delete", "release", "scan", "save"]))
            if action == "read":
                embedding(batches[-1], torch.zeros_like(ids))
            elif action == "put":
                embedding.put([1000], torch.ones(1, 5), 0)
            elif action == "delete":
                embedding.delete([1000], 0)
            elif action == "release":
                embedding.pin([Lookup(ids, torch.zeros_like(ids))])
                embedding.unpin_rows()
            elif action == "scan":
                contents(embedding)
            elif action == "save" and embedding.store_options.persistent_path:
                embedding.save_snapshot(f"step-{i}", kind="incremental" if saved else "full")
                saved = True
            train(embedding, ids)
        rows = contents(embedding)
        assert rows[rows["key"] != 1000].tobytes() == plain


@on_processors
@three_stores
@pytest.mark.rotated("store")
def test_tensors_may_be_filled_anew_after_the_hint(
    tmp_path: Path, place: torch.device, plain: bytes, store: str
) -> None:
    with make(options(store, tmp_path), "adagrad").to(place) as embedding:
        buffer, tables = (torch.zeros_like(BATCHES[0], device=place) for _ in range(2))
        for ids in BATCHES:
            embedding.prefetch(buffer.copy_(ids), tables)
        for ids in BATCHES:
            train(embedding, buffer.copy_(ids), tables)
        assert hits(embedding) == STEPS
        assert contents(embedding).tobytes() == plain


def test_a_hint_is_checked_at_once_and_steps_go_on() -> None:
    bad = torch.full_like(BATCHES[0], 99)
    with make(options("cached_host")) as embedding:
        with pytest.raises(OptimizerError, match="add_optimizer"):
            hint(embedding, BATCHES[0])
        attach(embedding, "adagrad")
        with pytest.raises(InputError, match="dtype"):
            embedding.prefetch(torch.ones(3))
        with pytest.raises(InputError, match="table id 99"):
            embedding.prefetch(BATCHES[0], bad)
        with pytest.raises(InputError, match="followed by"):
            embedding.prefetch(BATCHES[0], 0, torch.tensor([0, 9, 3, 64]), "sum")
        hint(embedding, BATCHES[1])
        with pytest.raises(InputError, match="table id 99"):
            embedding.pin([Lookup(BATCHES[0], bad)])
        train(embedding, BATCHES[1])
        assert hits(embedding) == 1


def step_and_wait(embedding: MultiTableEmbedding, ids: Tensor, tables: Tensor | int = 0) -> None:
    """What a step on a device does wrong may be found after it."""
    train(embedding, ids, tables)
    embedding.metrics()


@on_one_device
@three_stores
def test_a_mistake_in_a_batch_ahead_is_that_of_its_step(tmp_path: Path, place: torch.device, store: str) -> None:
    with make(options(store, tmp_path), "adagrad").to(place) as embedding:
        batches = on(place)
        bad = torch.full_like(batches[0], 99)
        hint(embedding, batches[0])
        embedding.table_handle().table.announce([Lookup(batches[1], bad)])  # the embedding checks what is on the CPU
        hint(embedding, batches[2])
        train(embedding, batches[0])
        before = contents(embedding).tobytes()
        with pytest.raises(InputError, match="table_ids"):
            step_and_wait(embedding, batches[1], bad)
        assert contents(embedding).tobytes() == before
        train(embedding, batches[2])
        with make(options("device"), "adagrad", name="plain").to(place) as expected:
            for ids in (batches[0], batches[2]):
                train(expected, ids)
            assert contents(embedding).tobytes() == contents(expected).tobytes()


@on_one_device
@three_stores
def test_ids_that_change_unseen_after_the_hint_are_told(tmp_path: Path, place: torch.device, store: str) -> None:
    with make(options(store, tmp_path), "adagrad").to(place) as embedding:
        first, ids = (batch.to(place, copy=True) for batch in BATCHES[:2])
        tables = torch.zeros_like(ids)
        embedding.prefetch(first, tables)
        embedding.prefetch(ids, tables)
        train(embedding, first, tables)
        before = contents(embedding).tobytes()
        ids.data[3] += 1
        with pytest.raises(InputError, match=r"ids of embedding 'rows'.*ahead=0"):
            step_and_wait(embedding, ids, tables)
        assert contents(embedding).tobytes() == before
        train(embedding, ids, tables)
        assert contents(embedding).tobytes() != before


@on_processors
@pytest.mark.parametrize("store", ["device", "host", "cached_host"])
@pytest.mark.rotated("store")
def test_hints_take_no_room_of_a_capacity(place: torch.device, store: str) -> None:
    with make(options(store, capacity=10), "adagrad").to(place) as embedding:
        ids = [torch.arange(at, at + 5, device=place) for at in range(0, 100, 5)]
        for wrong in ids[2:]:
            hint(embedding, wrong)
        for wanted in ids[:2]:
            train(embedding, wanted)
        assert embedding.metrics()["table"]["rows"] == 10
        hint(embedding, ids[3])
        hint(embedding, ids[0])
        with pytest.raises(CapacityError, match="capacity"):
            step_and_wait(embedding, ids[3])
        train(embedding, ids[0])
        assert embedding.metrics()["table"]["rows"] == 10
        assert embedding.delete(ids[1].cpu(), 0) == 5
        train(embedding, ids[3])
        assert embedding.metrics()["table"]["rows"] == 10


def test_hints_that_no_step_wants_are_dropped_and_do_not_pile_up() -> None:
    with make(options("cached_host"), "adagrad") as embedding:
        hint(embedding, torch.full((8,), 10_000))
        for _ in range(MAX_QUEUE + 5):
            train(embedding, BATCHES[0])
        assert embedding.metrics()["table"]["prefetch_misses"] == MAX_QUEUE + 1  # then no hint is left to look at
        for _ in range(MAX_QUEUE + 5):
            hint(embedding, BATCHES[0])
        assert embedding.metrics()["table"]["prefetch_dropped"] == 5
        train(embedding, BATCHES[0])
        assert hits(embedding) == 1


@on_processors
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("store")
def test_closing_with_hints_under_way_ends_the_thread(tmp_path: Path, place: torch.device, store: str) -> None:
    before = set(threading.enumerate())  # of other tests
    embedding = make(options(store, tmp_path), "adagrad").to(place)
    for ids in on(place):
        hint(embedding, ids)
    assert [thread for thread in threading.enumerate() if thread not in before]
    embedding.close()
    assert not [thread for thread in threading.enumerate() if thread not in before]


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
        assert hits(embedding) == 1


def test_ctrl_c_while_a_close_waits_for_the_thread_leaves_a_table_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    main, begun = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt_the_close(prefetcher: Prefetcher, coming: object) -> None:
        begun.set()
        with prefetcher._condition:  # the close releases the lock, and joins
            prefetcher._condition.wait_for(lambda: prefetcher._thread is None)
        signal.pthread_kill(main, signal.SIGINT)  # held back until the thread has ended

    with make(options("cached_host"), "adagrad") as embedding:
        with monkeypatch.context() as patched:
            patched.setattr(Prefetcher, "_prepare", interrupt_the_close)
            hint(embedding, BATCHES[0])
            begun.wait()
            with pytest.raises(KeyboardInterrupt):
                embedding.close()
        hint(embedding, BATCHES[0])
        train(embedding, BATCHES[0])
        assert hits(embedding) == 1


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

        def closed() -> bool:
            hint(embedding, BATCHES[0])
            train(embedding, BATCHES[0])
            done = hits(embedding) == 1
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
        assert hits(embedding) == 2
        return [without_thread, with_thread]


def test_a_child_has_a_thread_of_its_own_or_may_not_use_the_table() -> None:
    assert in_process(_fork_beside_hints) == [0, 0]


def accumulate(embedding: MultiTableEmbedding, batches: list[Tensor], ahead: int, together: int) -> int:
    """Train by steps that take the gradients of `together` batches, announced one by one. Returns the hits."""
    optimizer = EagerOptimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1), embedding)
    before = hits(embedding) if embedding.is_open else 0
    for i, ids in enumerate(batches):
        for later in batches[:ahead] if i == 0 else batches[i + ahead - 1 : i + ahead]:
            hint(embedding, later)
        embedding(ids, torch.zeros_like(ids)).square().sum().backward()
        if (i + 1) % together == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return hits(embedding) - before


@pytest.mark.parametrize("ahead", [2, 5, 40])
def test_hints_of_accumulated_batches_belong_to_one_step(tmp_path: Path, ahead: int) -> None:
    batches = BATCHES * 2  # 24
    with make(options("device")) as plain, make(options("cached_ssd", tmp_path)) as embedding:
        for together, least in [(2, 9), (3, 6), (1, 18), (4, 4)]:  # of 12, 8, 24 and 6 steps
            accumulate(plain, batches, 0, together)
            assert accumulate(embedding, batches, ahead, together) >= least
        assert contents(embedding).tobytes() == contents(plain).tobytes()


@pytest.mark.parametrize(("ahead", "wrong"), [(1, MAX_QUEUE + 50), (3, 40), (60, MAX_QUEUE + 50)])
def test_hints_are_used_again_after_many_wrong_ones(ahead: int, wrong: int) -> None:
    with make(options("cached_host"), "adagrad") as embedding:
        for i in range(wrong):  # each step was announced as another one
            hint(embedding, torch.full((8,), 10_000 + i))
            train(embedding, BATCHES[0][:8])
        for i, ids in enumerate(BATCHES * 10):
            hint(embedding, (BATCHES * 16)[i + ahead])
            train(embedding, ids)
        before = hits(embedding)
        assert before >= len(BATCHES) * 10 - ahead - 2
        embedding.forget_announced()
        for i in range(wrong):  # batches that are evaluated alone
            hint(embedding, torch.full((8,), 10_000 + i))
        embedding.forget_announced()
        hint(embedding, BATCHES[0])
        train(embedding, BATCHES[0])
        assert hits(embedding) == before + 1


@pytest.mark.rotated("store")
@three_stores
@pytest.mark.parametrize(("budget_mb", "reads"), [(0.01, True), (MANY_SETS_MB, True), (MANY_SETS_MB, False)])
def test_streams_wait_for_each_other_where_they_use_the_same_memory(
    tmp_path: Path, plain: bytes, store: str, budget_mb: float, reads: bool
) -> None:
    device = OrderedDevice(seed=1)
    capacity = {} if store == "ssd" else {"capacity": 1000}  # a table that grows gives memory from thread to thread
    with (
        tables_on(device) as place,
        device.watch(),
        make(options(store, tmp_path, budget_mb, **capacity), "adagrad").to(place) as embedding,
    ):
        device.opened(embedding.table_handle().table.processor._device_layout._memory)
        for ids in BATCHES:
            hint(embedding, ids)
        for ids in BATCHES:
            train(embedding, ids)
            if reads:
                embedding(BATCHES[-1], torch.zeros_like(ids))
            else:
                time.sleep(0.05)  # the rows of the next step are fetched, most likely
        assert hits(embedding) == STEPS
        assert contents(embedding).tobytes() == plain
    assert not device.races
    assert not device.unkept()
