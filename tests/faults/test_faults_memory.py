"""Memory that runs out, for real: calls raise, no call hangs, and no row is wrong afterwards."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.background_saves import until
from support.embeddings import contents, make, train
from support.forked import in_own_process
from support.images import table_of
from support.stores import options
from tierbed import MultiTableEmbedding, StoreError
from tierbed.engine.threads import Thread, wait_for

MB = 1 << 20
ROWS = 20_000  # a step
SLOW_CASES = [(0, 1), (0, 2), (8, 1), (24, 1), (24, 2)]


def limit(more: int) -> None:
    """Let this process allocate that many more bytes."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))


def unlimit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def fails(action: Callable[..., Any], *arguments: Any) -> bool:
    try:
        action(*arguments)
    except (MemoryError, StoreError, RuntimeError):
        return True
    return False


def step(embedding: MultiTableEmbedding, number: int) -> None:
    train(embedding, torch.arange(ROWS * (number - 1), ROWS * number))


@cache
def rows_after(steps: int) -> bytes:
    with make(options("device"), "sgd", "plain", tables=1) as plain:
        for number in range(1, steps + 1):
            step(plain, number)
        return contents(plain).tobytes()


def is_right(embedding: MultiTableEmbedding) -> None:
    """It holds the rows of a table that took as many steps."""
    assert contents(embedding).tobytes() == rows_after(int(embedding.metrics()["table"]["step"]))


@pytest.mark.parametrize(
    ("more", "threads"), [(8, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
@in_own_process
def test_no_call_waits_for_ever_once_memory_ran_out(tmp_path: Path, more: int, threads: int) -> None:
    torch.set_num_threads(threads)
    embedding = make(options("ssd", tmp_path, overflow_mb=192), "sgd", tables=1)  # rows of 97 steps are more
    for number in (1, 2):
        step(embedding, number)
    embedding.save_snapshot("first")
    limit(more * MB)
    failed = any(fails(step, embedding, number) for number in range(3, 100))
    assert sum(fails(embedding.save_snapshot, name) for name in "abc") or failed
    unlimit()
    fails(embedding.close)
    embedding.close()
    with make(options("ssd", tmp_path), "sgd", tables=1) as again:  # in this process, too
        assert again.metrics()["table"]["step"] >= 2
        is_right(again)
        for name in "abc":
            if (tmp_path / "rows" / "snapshots" / name).exists():
                again.load_snapshot(name)
                is_right(again)
        again.load_snapshot("first")
        step(again, 3)
        again.save_snapshot("last")
        is_right(again)


@in_own_process
def test_a_start_ends_where_the_new_thread_died_of_it() -> None:
    """Blocks of memory are taken until not even a small one is left, then given back one by one."""
    ran: list[int] = []
    blocks: list[Any] = []
    limit(64 * MB)
    size = 8 * MB
    while size >= 4096:
        try:
            blocks.append(bytearray(size))
        except MemoryError:
            size //= 2
    refused = 0
    while blocks:
        thread = Thread(target=lambda: ran.append(1), daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            refused += 1
        else:
            thread.join()
        del blocks[-3:]
    unlimit()
    assert refused
    thread = Thread(target=lambda: ran.append(2))
    thread.start()
    thread.join()
    assert ran[-1] == 2
    assert not [thread for thread in threading.enumerate() if isinstance(thread, Thread)]


@pytest.mark.parametrize("wait", [True, False])
@in_own_process
def test_neither_a_wait_with_the_lock_nor_a_step_waits_for_a_save_whose_thread_died(wait: bool) -> None:
    """The thread of a save dies in its start, as `_run` is called: what traces it raises."""

    embedding = make(options("device"), "sgd", tables=1)
    step(embedding, 1)
    table, saved = table_of(embedding), []

    def dies(*_: Any) -> None:
        if wait:
            until(lambda: table.observers.last_save is not None and table.observers.last_save._hurry_event.is_set())
        raise MemoryError

    threading.excepthook = lambda _: None
    threading.settrace(dies)
    save = table.observers.save_in_background("snapshot 'one'", saved.extend, max_bytes=1)
    threading.settrace(None)  # type: ignore[arg-type]
    for number in () if wait else (2, 3):  # the first saves more before-images than allowed
        step(embedding, number)
    with table.lock, pytest.raises(MemoryError, match="'one'"):
        save.wait()
    assert not saved
    is_right(embedding)
    table.observers.open_image().close()


def test_a_wait_ends_with_the_thread_that_it_is_for() -> None:
    changed = threading.Condition()
    thread = Thread(target=lambda: None)
    thread.start()
    with changed:
        assert not wait_for(changed, lambda: False, thread)
        assert wait_for(changed, lambda: not thread.is_alive(), thread)
