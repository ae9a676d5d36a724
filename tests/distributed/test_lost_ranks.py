"""A rank that is killed, frozen or elsewhere is named on every other one, which wait no more, and costs no snapshot."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from support.live_rows import opened, own_rows, step
from support.lost import Heard, all_name, calls, end_after, heard, until_told
from support.ranked import Ranked, batch
from support.ranks import on_ranks, run_kept, run_ranks, started, survivors
from support.two_hosts import run_on_hosts
from tierbed import GroupError, World, list_snapshots
from tierbed.engine.signals import defer_signals

KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
HOW = {KILL: "its process ended", STOP: "it was silent for 3 seconds"}


def gather(world: World) -> None:
    while True:
        world.gather(torch.arange(1000 * (world.rank + 1)))


def lose(world: World, lost: int, number: int, exchanges: int, is_sent: bool) -> Heard:
    """Rank `lost` gets the signal at an exchange. All are in the same collectives until then."""
    if world.rank == lost:
        end_after(world, exchanges, number, is_sent)
    return heard(world, lambda: gather(world))


@pytest.mark.parametrize(("exchanges", "is_sent"), [(1, False), (2, True), (3, True), (8, False)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.rotated("ranks")
def test_a_killed_rank_is_named_at_once(ranks: int, exchanges: int, is_sent: bool) -> None:
    lost = exchanges % ranks
    with started(ranks, lose, lost, KILL, exchanges, is_sent) as group:
        found = survivors(group, lost)
    all_name(found.values(), lost, HOW[KILL])
    assert all(one.said.startswith("gather: ") for one in found.values())
    assert all(one.seconds < 60 for one in found.values())  # where nothing notices it, the timeout


def test_a_frozen_rank_is_named_after_the_timeout() -> None:
    timeout, cells = 1.5, [(2, 1, 3, True), (3, 0, 2, True), (3, 2, 1, False)]
    with contextlib.ExitStack() as opened_groups:
        groups = [started(ranks, lose, lost, STOP, *where, timeout=timeout) for ranks, lost, *where in cells]
        for (_, lost, *_), group in zip(cells, [*map(opened_groups.enter_context, groups)], strict=True):
            found = survivors(group, lost).values()
            all_name(found, lost, HOW[STOP])
            assert all(one.seconds < timeout + 5 and one.after < timeout for one in found)


def compute(world: World, number: int) -> Heard:
    """Rank 1 is lost, and rank 2 comes to no call until the others know."""
    if world.rank == 1:
        os.kill(os.getpid(), number)
    if world.rank == 2:
        until_told(world)
    return heard(world, lambda: gather(world))


@pytest.mark.parametrize("number", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_a_rank_that_computes_is_not_named(number: int) -> None:
    with started(3, compute, number, timeout=60 if number == KILL else 1.5) as group:
        found = survivors(group, 1)
    said = f"rank 1 did not answer ({HOW[number]})"
    assert found[0][:2] == (f"gather: {said}", (1,))
    assert found[2][:2] == (f"gather: rank 0 ended the group: {said}", (1,))


def evaluate(world: World) -> Heard:
    if world.rank:
        until_told(world)
    return heard(world, lambda: gather(world))


def test_a_call_of_rank_0_alone_ends_by_timeout() -> None:
    first, *others = run_ranks(3, evaluate, timeout=1)
    said = "ranks 1, 2 did not answer (it runs, but has not reached this call)"
    assert first[:2] == (f"gather: {said}", (1, 2))
    assert first.seconds < 1 + 5
    for one in others:
        assert one[:2] == (f"gather: rank 0 ended the group: {said}", (1, 2))


def close_and_live(world: World) -> Heard | None:
    """Rank 1 closes its world during an exchange, and lives on until the others have reported what they received."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
    under_way = world.start_all_to_all("numbers", torch.full((world.size,), world.rank))
    if world.rank == 1:
        world.close()
        store.wait(["heard by 0", "heard by 2"])
        return None
    assert under_way.wait().tolist() == [0, 1, 2]
    found = heard(world, lambda: gather(world))
    store.set(f"heard by {world.rank}", "")
    return found


def test_a_rank_that_closed_its_world_and_lives_is_named_at_once() -> None:
    first, _, third = run_ranks(3, close_and_live)
    all_name((first, third), 1, "it closed its world")
    assert max(first.seconds, third.seconds) < 60  # where nothing notices it, the timeout


def close_in_time(world: World) -> Heard | None:
    """Rank 1 closes its world after it began the call to which rank 2 does not come."""
    if world.rank == 2:
        until_told(world)
        return heard(world, lambda: gather(world))
    under_way = world.start_all_to_all("numbers", torch.zeros(world.size))
    return heard(world, under_way.wait) if world.rank == 0 else None


def test_a_rank_that_began_the_call_before_it_closed_is_not_named() -> None:
    first, _, third = run_ranks(3, close_in_time, timeout=0.5)
    assert first[:2] == ("numbers: rank 2 did not answer (it runs, but has not reached this call)", (2,))
    assert third.ranks == (2,)


def interrupt(world: World, number: int) -> Heard:
    """Rank 0 gets SIGTERM while it waits for rank 1."""
    world.gather(torch.zeros(2))
    if world.rank == 1:
        until_told(world)
        return heard(world, lambda: gather(world))
    came = []

    def signal_rank(*_: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def end(before: int) -> None:
        while calls(world) == before:
            sleep(0.001)
        os.kill(os.getpid(), number)

    def call() -> None:
        with pytest.raises(KeyboardInterrupt) as reports:
            world.gather(torch.zeros(2))
        assert came == [number]
        assert isinstance(reports.value.__context__, GroupError)
        raise reports.value.__context__

    if world.rank == 0:
        signal.signal(number, signal_rank)
        threading.Thread(target=end, args=[calls(world)]).start()
        return heard(world, call)
    return heard(world, lambda: gather(world))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_rank(number: signal.Signals) -> None:
    first, *others = run_ranks(3, interrupt, int(number))
    assert first[:2] == (f"gather: interrupted by {number.name} in a wait for others", ())
    for one in others:
        said = f"rank 0 ended the group: rank 0 did not answer (interrupted by {number.name} in a wait for others)"
        assert one[:2] == (f"gather: {said}", (0,))


def lost_with_work_under_way(world: World, lost: int, number: int) -> float:
    """Rank `lost` gets the signal while exchanges are under way that nothing waits for."""
    if world.rank == lost:
        os.kill(os.getpid(), number)
    with contextlib.suppress(GroupError):  # the loss may be noticed before all are started
        for _ in range(5):
            world.start_all_to_all("numbers", torch.zeros(world.size))
    return heard(world, lambda: gather(world)).after


@pytest.mark.parametrize("number", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_the_end_of_a_process_waits_for_no_rank(number: int) -> None:
    timeout = 60 if number == KILL else 1.5
    with started(3, lost_with_work_under_way, 0, number, timeout=timeout, whole=True) as group:
        began = monotonic()
        assert max(survivors(group, 0).values()) < 5
        assert monotonic() - began < 60  # which the group's threads would go on waiting


@on_ranks(2)
def test_a_call_that_all_answer_is_whole_before_ctrl_c_and_a_forked_child_of_a_rank_is_refused(world: World) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    totals = []

    def call() -> None:
        with defer_signals():
            os.kill(os.getpid(), signal.SIGINT)
            totals.append(world.sum(torch.tensor(world.rank)))

    with pytest.raises(KeyboardInterrupt):
        call()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            world.gather(torch.zeros(2))
        except GroupError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        assert pipe.read().startswith("a forked process uses a world")
    assert totals[0] + world.sum(torch.tensor(1)) == 1 + 2


OF_STEP = 14  # of a step of `Ranked`, and one more


@on_ranks(2, run_kept)
def test_the_exchanges_of_a_step_are_these(world: World) -> None:
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    before = calls(world)
    graph(*batch(world.rank, 1))
    assert calls(world) - before == OF_STEP - 1


def train(world: World, lost: int, number: int, exchanges: int) -> Heard:
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    if world.rank == lost:
        end_after(world, exchanges, number, is_sent=exchanges % 2 == 0)
    return heard_of_steps(world, graph)


def heard_of_steps(world: World, graph: Ranked) -> Heard:
    steps = (batch(world.rank, step) for step in count(1))

    def run() -> None:
        while True:
            graph(*next(steps))

    def close() -> None:
        graph.users.close()
        graph.items.close()

    return heard(world, run, close)


def check_step(found: dict[int, Heard], lost: int, how: str) -> None:
    all_name(found.values(), lost, how)
    assert all(re.search(r"step \d+", one.said) for one in found.values())


@pytest.mark.parametrize(
    "exchanges", [pytest.param(n, marks=() if n == 12 else pytest.mark.slow) for n in range(1, OF_STEP + 1)]
)
def test_a_rank_that_is_killed_in_a_step(exchanges: int) -> None:
    ranks = 2 + exchanges % 2
    lost = exchanges // 2 % ranks
    with started(ranks, train, lost, int(signal.SIGKILL), exchanges, whole=exchanges == 12) as group:
        check_step(survivors(group, lost), lost, "its process ended")


@pytest.mark.slow
def test_a_rank_that_is_frozen_in_a_step() -> None:
    timeout = 2
    with contextlib.ExitStack() as groups:
        every = [
            (lost, groups.enter_context(started(2, train, lost, int(signal.SIGSTOP), exchanges, timeout=timeout)))
            for lost, exchanges in ((0, 1), (1, 4), (0, 6))
        ]
        for lost, group in every:
            found = survivors(group, lost)
            check_step(found, lost, "it was silent for 3 seconds")
            assert all(one.seconds < timeout + 5 + timeout for one in found.values())


def train_on_hosts(world: World, ready: int) -> Heard:
    assert world.num_ranks_on_host == world.size // 2
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    os.write(ready, b".")
    return heard_of_steps(world, graph)


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 1])
def test_the_ranks_behind_a_link_that_is_cut_are_named(end: int) -> None:
    found = run_on_hosts(train_on_hosts, 4, end, 2)
    for rank, one in enumerate(found):
        assert one.ranks == ((2, 3) if rank < 2 else (0, 1))
        assert f"ranks {one.ranks[0]}, {one.ranks[1]} did not answer (it was silent for 3 seconds)" in one.said
        assert re.search(r"step \d+", one.said)


OF_ACTION = {"save": 12, "load": 13, "close": 0}  # of two ranks


def begun(world: World, folder: Path, store: str = "host") -> Any:
    """An embedding that is trained, saved, and trained on."""
    embedding = opened(world, folder, store)
    for number in range(3):
        step(embedding, number)
    embedding.save_snapshot("a")
    step(embedding, 3)
    return embedding


def act(embedding: Any, action: str) -> None:
    if action == "save":
        embedding.save_snapshot("b")
    elif action == "load":
        embedding.load_snapshot("a")
    else:
        embedding.close()


@on_ranks(2, run_kept)
def test_the_exchanges_of_an_action_are_these(world: World, tmp_path: Path) -> None:
    embedding = begun(world, tmp_path)
    for action, exchanges in OF_ACTION.items():
        before = calls(world)
        act(embedding, action)
        assert calls(world) - before == exchanges


def lose_in(world: World, folder: Path, store: str, action: str, lost: int, number: int, at: int) -> Heard:
    embedding = begun(world, folder, store)
    if world.rank == lost:
        end_after(world, at, number, is_sent=at % 2 == 0)
    return heard(world, lambda: (act(embedding, action), world.sum(torch.tensor(1))), embedding.close)


def saved(world: World, folder: Path, store: str) -> dict[str, bytes]:
    """The rows of this rank in every snapshot, each loaded; then the group goes on."""
    with opened(world, folder, store) as embedding:
        found = {}
        for listed in list_snapshots(folder / "rows" / "snapshots").snapshots:
            embedding.load_snapshot(listed.name)
            found[listed.name] = own_rows(embedding)
        step(embedding, 4)
        embedding.save_snapshot("next")
    return found


def whole(world: World, folder: Path) -> dict[str, bytes]:
    with begun(world, folder) as embedding:
        later = own_rows(embedding)
        embedding.load_snapshot("a")
        return {"a": own_rows(embedding), "b": later}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """By rank, the rows of the snapshots where none is lost; they are the same on every store."""
    return run_kept(2, whole, tmp_path_factory.mktemp("whole"))


def check_saved(folder: Path, store: str, rows: list[dict[str, bytes]]) -> None:
    """The earlier snapshot exists, a later one is whole or not there, and training goes on."""
    for found, expected in zip(run_kept(2, saved, folder, store), rows, strict=True):
        assert found.items() <= expected.items()
        assert "a" in found


@pytest.mark.parametrize("store", ["host", pytest.param("ssd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("action", "at"),
    [
        pytest.param(action, at, marks=() if action != "load" and at == max(count, 1) else pytest.mark.slow)
        for action, count in OF_ACTION.items()
        for at in range(1, max(count, 1) + 1)
    ],
)
def test_a_rank_that_is_killed_costs_no_snapshot(
    tmp_path: Path, rows: list[dict[str, bytes]], store: str, action: str, at: int
) -> None:
    lost = at // 2 % 2
    with started(2, lose_in, tmp_path, store, action, lost, int(signal.SIGKILL), at) as group:
        all_name(survivors(group, lost).values(), lost, "its process ended")
    check_saved(tmp_path, store, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "at"), [("save", 5), ("save", 12), ("load", 6), ("close", 1)])
def test_a_rank_that_is_frozen_costs_no_snapshot(
    tmp_path: Path, rows: list[dict[str, bytes]], action: str, at: int
) -> None:
    lost = at % 2
    with started(2, lose_in, tmp_path, "host", action, lost, int(signal.SIGSTOP), at, timeout=2) as group:
        all_name(survivors(group, lost).values(), lost, "it was silent for 3 seconds")
        group[lost][0].kill()  # the block's end does not wait until the frozen rank has lost its locks
    check_saved(tmp_path, "host", rows)
