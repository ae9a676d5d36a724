"""Work ahead and behind: order, errors, and that no thread is left."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from time import sleep

import pytest

from tierbed.snapshots.files.pipeline import TaskThread, read_ahead, run_syncs


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not set(threading.enumerate()) - before


def numbers(count: int, closed: list[int], fail: bool = False) -> Generator[int, None, None]:
    try:
        yield from range(count)
        if fail:
            raise OSError("as planned")
    finally:
        closed.append(1)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
@pytest.mark.parametrize("wanted", [0, 1, 100])
def test_items_come_in_order_and_the_source_is_closed(count: int, wanted: int) -> None:
    closed: list[int] = []
    with read_ahead(numbers(count, closed)) as items:
        assert [item for item, _ in zip(items, range(wanted), strict=False)] == list(range(min(count, wanted)))
    with read_ahead(numbers(5, closed, fail=True)) as items:
        assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(OSError, match="as planned"):
            next(items)
    with pytest.raises(KeyError), read_ahead(numbers(50, closed)) as items:
        raise KeyError(next(items))
    assert closed == [1] * 3


def fail() -> None:
    raise OSError("as planned")


def test_tasks_are_done_in_order_and_none_after_one_that_failed() -> None:
    def run(*tasks: Callable[[], None], error: type[Exception] | None = None) -> None:
        with TaskThread("tierbed-behind") as behind:
            for task in tasks:
                behind.submit(task)
            if error is not None:
                raise error

    done: list[int] = []
    tasks = [partial(done.append, number) for number in range(100)]
    with pytest.raises(OSError, match="as planned"):
        run(*tasks[:3], fail, *tasks[3:])
    assert done == [0, 1, 2]
    run(*tasks)
    assert done == [0, 1, 2, *range(100)]
    with pytest.raises(KeyError):
        run(*tasks, error=KeyError)


@pytest.mark.parametrize("slow", [False, True])
def test_all_tasks_are_done_whether_they_are_slow_or_not(slow: bool) -> None:
    done: list[int] = []

    def task(number: int) -> None:
        sleep(0.004 * slow)
        done.append(number)

    run_syncs([])
    run_syncs([partial(task, number) for number in range(20)])
    assert sorted(done) == [*range(20)]

    with pytest.raises(OSError, match="as planned"):
        run_syncs([partial(task, 1), fail, partial(task, 2)])


def test_a_block_that_was_cut_off_leaves_no_thread() -> None:
    behind = TaskThread("tierbed-behind")
    behind.submit(lambda: None)
    thread = next(each for each in threading.enumerate() if each.name == "tierbed-behind")
    del behind  # as Ctrl-C does between its lines
    thread.join()


def test_a_block_that_failed_is_held_by_nobody() -> None:
    def fail() -> weakref.ref[TaskThread]:
        try:
            with TaskThread("tierbed-behind") as behind:
                there = weakref.ref(behind)
                raise KeyError
        except KeyError:
            return there

    there = fail()
    gc.collect()
    assert there() is None


def test_at_the_end_of_the_interpreter_the_caller_does_it() -> None:
    script = """
import atexit
from tierbed.snapshots.files.pipeline import TaskThread, read_ahead

def last():
    done = []
    with read_ahead(number for number in range(4)) as items, TaskThread("tierbed-behind") as behind:
        for item in items:
            behind.submit(lambda item=item: done.append(item))
    print(done)

atexit.register(last)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr


def test_no_thread_is_begun_that_would_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)  # as where Ctrl-C put a close off until after atexit
    by: list[threading.Thread] = []
    with TaskThread("tierbed-behind") as behind:
        behind.submit(lambda: by.append(threading.current_thread()))
    assert by == [threading.current_thread()]
