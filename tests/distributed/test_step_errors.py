"""What a step raises on one rank is raised on all in that step; nothing has moved, and the next step is right."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.live_rows import step as step_alone
from support.ranked import BACKWARD, BETWEEN, IDS, LATE, LOSS, NOWHERE, Ranked, assert_equal, batch, state
from support.ranks import fails, on_ranks, outcome, run_ranks
from tierbed import ClosedError, GroupError, TierbedError, World, make_host_mem_store_options
from tierbed.distributed.sharded_table import ShardedBatch, ShardedTable
from tierbed.engine.table.table import PinnedBatch
from tierbed.graph.run import step_cache

PLACES = [IDS, BETWEEN, LOSS, BACKWARD, LATE]


def trained(world: World, steps: list[Any]) -> tuple[list[str], list[float], dict[str, Tensor]]:
    """What steps raise, the losses of the others, and the state. A step: its batch, and where each rank fails."""
    graph, reports, losses = Ranked(world), [], []
    for step, failing in steps:
        try:
            losses.append(graph(*batch(world.rank, step, failing[world.rank])).item())
        except GroupError as error:
            reports.append(str(error))
    return reports, losses, state(graph)


def test_failures_at_any_places_are_one_error_on_all_and_cost_nothing() -> None:
    fine = [NOWHERE] * 2
    plain = run_ranks(2, trained, [(0, fine), (1, fine), (2, fine)])
    failing = [(5, at) for place in PLACES for at in ([place, NOWHERE], [NOWHERE, place])] + [(5, [BACKWARD, IDS])]
    texts = [f"rank {rank}: ValueError: failed at {place}" for place in PLACES for rank in range(2)]
    texts.append(f"rank 1: ValueError: failed at {IDS}")
    steps = [*failing, (0, fine), *failing, (1, fine), (2, fine)]
    for (reports, losses, found), expected in zip(run_ranks(2, trained, steps), plain, strict=True):
        assert reports == texts * 2
        assert losses == expected[1]
        assert_equal(found, expected[2])


def sockets_after(world: World, failing: list[int], most: int = 1000) -> int:
    """How many sockets this process has when its world is closed right after steps, which fail at these places.

    most: how many there may be, for which it waits, since Gloo closes some of them in a thread of its own.
    """
    graph = Ranked(world)
    for place in failing:
        with pytest.raises(GroupError) if place != NOWHERE else contextlib.nullcontext():
            graph(*batch(world.rank, 5, place if world.rank == 1 else NOWHERE))
    world.close()
    give_up = time.monotonic() + 30
    while (count := sockets()) > most and time.monotonic() < give_up:
        time.sleep(0.01)
    dist.barrier()  # the end of a rank closes sockets of the others
    return count


def sockets() -> int:
    places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(place).startswith("socket:") for place in places if os.path.lexists(place))


def test_a_world_of_failed_steps_closes_all_its_connections() -> None:
    most = min(run_ranks(2, sockets_after, [NOWHERE]))
    assert max(run_ranks(2, sockets_after, [*PLACES, NOWHERE, *PLACES], most)) <= most


class Wrong(Ranked):
    """Its `build` is right where `at` has one number, as `Ranked` has it; one rank may give two."""

    def build(self, users: Tensor, items: Tensor, y: Tensor, at: Tensor) -> Tensor:
        if at.dim():
            raise ValueError("two numbers")
        return super().build(users, items, y, at)


@on_ranks(2)
def test_a_build_that_raises_on_one_rank_is_told_to_those_that_are_in_their_step(world: World) -> None:
    graph, reports = Wrong(world), []
    for step in range(4):
        users, items, y, at = batch(world.rank, step)
        given = {1: at.expand(2), 2: None}.get(step, at) if world.rank == 1 else at
        reports.append(outcome(partial(graph, users, items, y, given)))
    assert reports[0] == reports[3] == "fine"
    assert reports[1] == "GroupError: rank 1: ValueError: two numbers"
    assert reports[2].startswith("GroupError: rank 1: AttributeError: 'NoneType'")


@on_ranks(2)
def test_graphs_that_differ_are_refused_on_all_ranks(world: World) -> None:
    graphs = Ranked(world), Ranked(world)
    if world.rank == 1:
        graphs[0].middle = torch.zeros(1)
        graphs[1].before.bias.requires_grad_(False)
    said = [outcome(partial(graph, *batch(world.rank, 0))) for graph in graphs]
    tensors = "GraphError: parameters of Ranked: ranks differ, rank 0: 5 tensors, middle float32 []; rank 1: 5 "
    gradients = (
        "GroupError: embedding 'users', step 1: ranks differ, rank 0: graph: parameter 1=before_bias float32 [4], "
    )
    assert said[0].startswith(tensors)
    assert said[1].startswith(gradients)


def of_many_sizes(world: World) -> tuple[list[str], list[float], bool, dict[str, Tensor]]:
    step_cache.MAX_STATIC_SHAPES = 2  # this process ends with the test
    graph, reports, losses, many = Ranked(world), [], [], False
    for step, size in enumerate([5, 6, 7, 8, 8]):
        at = LOSS if step == 3 and world.rank == 1 else NOWHERE
        try:
            losses.append(graph(*batch(world.rank, step, at, size=size)).item())
        except TierbedError as error:
            reports.append(str(error))
        many = many or any(step.guard is not None for step in graph._Graph__steps.all())
    return reports, losses, many, state(graph)


def test_a_step_of_many_sizes_that_fails_on_one_rank_is_raised_on_all_and_not_run_again() -> None:
    both = run_ranks(2, of_many_sizes)
    for reports, losses, many, found in both:
        assert reports == [f"rank 1: ValueError: failed at {LOSS}"]
        assert len(losses) == 4
        assert many  # else no step served dynamic shapes, and the test shows nothing
        assert_equal(found, both[0][3])


@on_ranks(2)
def test_a_rank_that_fails_amid_the_updates_refuses_further_steps_until_a_checkpoint_is_loaded(world: World) -> None:
    graph, reports, stumbles = Ranked(world), [], False

    def hook(*_: object) -> None:
        if stumbles:
            raise ArithmeticError("stumbled")

    graph.optimizer.register_step_pre_hook(hook)
    for step in range(4):
        stumbles = step == 1 and world.rank == 1
        reports.append(outcome(partial(graph, *batch(world.rank, step))))
        if step == 0:
            saved = copy.deepcopy(graph.get_extra_state())
        elif step == 2:
            graph.set_extra_state(saved)
    assert reports[:2] == ["fine", "ArithmeticError: stumbled" if world.rank == 1 else "fine"]
    assert "rank 1: a step of Ranked raised ArithmeticError('stumbled') during its updates, and other" in reports[2]
    assert reports[3] == "fine"


@on_ranks(2)
def test_rows_that_a_rank_left_behind_amid_the_updates_are_refused_and_never_marked(
    world: World, tmp_path: Path
) -> None:
    """Rank 1 fails in the first of two updates, which rank 0 makes both."""
    graph = Ranked(world, store=partial(make_host_mem_store_options, persistent_path=tmp_path))
    both = (graph.users, graph.items)
    graph(*batch(world.rank, 0))
    for embedding in both:
        embedding.save_snapshot("first")
    before, update = state(graph), PinnedBatch.update

    def full(*_: Any) -> None:
        PinnedBatch.update = update  # type: ignore[method-assign]
        raise OSError("disk full")

    if world.rank == 1:
        PinnedBatch.update = full  # type: ignore[assignment,method-assign]  # this process ends with the test
    ids, calls = torch.arange(4), list[Any]()
    assert outcome(lambda: graph(*batch(world.rank, 1))) == ("OSError: disk full" if world.rank == 1 else "fine")
    for embedding in both:
        calls += [
            partial(embedding, ids),
            partial(embedding.get, ids),
            partial(embedding.put, ids, torch.zeros(4, embedding.dim)),
            partial(embedding.prefetch, ids),
            partial(embedding.save_snapshot, "torn"),
        ]
    for number, call in enumerate(calls):
        said, what = outcome(call), ", step 2 raised OSError" if number % 5 < 4 else " failed in the middle"
        assert said.startswith(f"StoreError: rank 1: embedding '{('users', 'items')[number // 5]}'{what}")
        assert "disk full" in said
        assert "; load a snapshot" in said
    for embedding in both:
        assert embedding.prune_snapshots(1) == []
        embedding.close()
    found = state(Ranked(world, store=partial(make_host_mem_store_options, persistent_path=tmp_path)))
    assert all(torch.equal(found[name], before[name]) for name in ("users", "items"))


@pytest.mark.parametrize(("after", "ahead"), [("gather", 0), ("send", 0), ("send", 3)])
@on_ranks(2)
def test_an_embedding_that_one_rank_closes_amid_a_step_is_an_error_of_that_step_on_all(
    world: World, after: str, ahead: int
) -> None:
    """ahead: how many steps more than the other this embedding has made."""
    graph, reports = Ranked(world), list[str]()
    graph(*batch(world.rank, 0))
    for number in range(ahead):
        step_alone(graph.users, 2 * number)
    plain = getattr(ShardedBatch, after)

    def closes(batch_: ShardedBatch, *arguments: Any) -> Any:
        found = plain(batch_, *arguments)
        if world.rank == 1 and not reports and batch_.local.spec.name == "users":
            graph.users.close()
        return found

    setattr(ShardedBatch, after, closes)  # this process ends with the test
    for number in (1, 2):
        reports.append(outcome(partial(graph, *batch(world.rank, number))))
    assert all("Error: rank 1: embedding 'users'" in said for said in reports)
    assert "was closed" in reports[after == "gather"]


@on_ranks(2)
def test_a_step_that_needs_an_embedding_no_more_which_one_rank_closes_is_made(world: World) -> None:
    graph = Ranked(world)
    graph.users.shadow.requires_grad_(False)  # read alone
    for number in range(3):
        step_alone(graph.users, 2 * number)
    graph(*batch(world.rank, 0))
    read = ShardedTable.read

    def closes(table: ShardedTable, *arguments: Any) -> Tensor:
        found = read(table, *arguments)
        if world.rank == 1:
            graph.users.close()
        return found

    ShardedTable.read = closes  # type: ignore[method-assign]  # this process ends with the test
    graph(*batch(world.rank, 1))
    with pytest.raises(ClosedError, match=r"^rank 1: embedding 'users' was closed"):
        graph(*batch(world.rank, 2))


@on_ranks(2)
def test_a_rank_that_cannot_go_through_its_step_ends_the_group_with_the_reason(world: World) -> None:
    """The others would wait for it."""
    graph = Ranked(world)

    def no_memory(*_: Any) -> None:
        raise MemoryError("no more")

    if world.rank == 1:
        ShardedBatch.send = ShardedBatch.send_nothing = no_memory  # type: ignore[assignment,method-assign]
    reports = [fails(partial(graph, *batch(world.rank, number)), GroupError) for number in range(2)]
    assert "failed with MemoryError('no more') after MemoryError('no more')" in reports[0]
    assert reports[1].startswith("the group of ranks has ended: ")
