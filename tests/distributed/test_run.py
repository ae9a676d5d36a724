"""Steps of ranks that fail, and runs whose loaders end unevenly, raise, or give ids ahead."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.live_rows import remarks_of
from support.live_rows import step as step_alone
from support.ranked import BACKWARD, BETWEEN, IDS, LATE, LOSS, NOWHERE, Ranked, assert_equal, batch, state
from support.ranks import assert_alike, fails, on_ranks, outcome, run_kept, run_ranks
from tierbed import (
    ClosedError,
    GroupError,
    InputError,
    StoreError,
    TierbedError,
    World,
    make_cached_host_mem_store_options,
    make_host_mem_store_options,
)
from tierbed.distributed.sharded_table import ShardedBatch, ShardedTable
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.table.table import PinnedBatch
from tierbed.graph.run import step_cache
from tierbed.graph.trace import values

COUNTS = [8, 3, 4]  # batches of each rank, of which one has more to spare than a run looks ahead
AHEAD = pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 2])


def loader(rank: int, count: int) -> list[tuple[Tensor, ...]]:
    return [batch(rank, step) for step in range(count)]


def came_to(call: Callable[[], Any]) -> Any:
    """The loss of a step, or what it raises."""
    try:
        return call().item()
    except TierbedError as error:
        return str(error)


def uneven(world: World, how: str, ahead: int, every: int) -> dict[str, Any]:
    graph, said = Ranked(world), remarks_of()
    graph.accumulate_grads(every)
    run = graph.run(loader(world.rank, COUNTS[world.rank]), ahead=ahead, uneven=how)
    losses = [loss.item() for loss in run]
    assert next(run, None) is None
    return {"losses": losses, "left": len(run.left), "said": said, "state": state(graph)}


def accumulated(counts: list[list[int]]) -> tuple[dict[int, list[float]], dict[str, Tensor]]:
    """One process: for each step the ranks that have a batch, whose parts are a mean. Losses by rank, and the state."""
    graph = Ranked(None)
    losses: dict[int, list[float]] = {}
    for step, ranks in enumerate(counts):
        graph.accumulate_grads(len(ranks), mean=True)
        for rank in ranks:
            losses.setdefault(rank, []).append(graph(*batch(rank, step)).item())
    return losses, state(graph)


@AHEAD
@pytest.mark.parametrize("how", ["stop", "join"])
def test_all_ranks_stop_with_the_shortest_loader_or_join_those_that_have_a_batch(how: str, ahead: int) -> None:
    losses, expected = accumulated([[0, 1, 2]] * 3 + ([[0, 2]] + [[0]] * 4) * (how == "join"))
    for rank, found in enumerate(run_kept(3, uneven, how, ahead, 1)):
        assert found["losses"] == losses[rank]
        assert_equal(found["state"], expected)
        assert found["left"] == (min(COUNTS[rank] - 3, ahead + 1) if how == "stop" else 0)
        said = [text for text in found["said"] if "rank 1 has no more batches" in text]
        assert how == "join" or f"this rank drew {found['left']} more" in said[0]


def test_ranks_that_accumulate_join_as_well() -> None:
    one, two = run_kept(2, uneven, "join", 2, 2)
    assert_equal(one["state"], two["state"])
    assert [len(found["losses"]) for found in (one, two)] == COUNTS[:2]


class Loader:
    """Batches of a rank; before the second of rank 1, an exception that the next call goes past."""

    def __init__(self, batches: Sequence[tuple[Tensor, ...]], raises: bool) -> None:
        self.batches, self.step, self.raises = batches, 0, raises

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        if self.step == 1 and self.raises:
            self.raises = False
            raise OSError("no such file")
        if self.step == len(self.batches):
            raise StopIteration
        self.step += 1
        return self.batches[self.step - 1]


def past_errors(world: World, ahead: int) -> tuple[list[Any], dict[str, Tensor]]:
    """What each turn of a run came to, of which the loader raises at one and a step at another, and the state."""
    graph, seen, rank = Ranked(world), list[Any](), world.rank
    last = batch(rank, 3, LOSS if rank == 1 else NOWHERE)
    run = graph.run(Loader([*loader(rank, 3), last], raises=rank == 1), ahead=ahead)
    while True:
        try:
            seen.append(came_to(partial(next, run)))
        except StopIteration:
            return seen, state(graph)


@AHEAD
def test_what_one_loader_or_step_raises_is_raised_on_all_and_the_run_goes_on(ahead: int) -> None:
    losses, expected = accumulated([[0, 1]] * 3)
    for rank, (seen, found) in enumerate(run_kept(2, past_errors, ahead)):
        first, *others = losses[rank]
        assert seen == [first, "rank 1: OSError: no such file", *others, f"rank 1: ValueError: failed at {LOSS}"]
        assert_equal(found, expected)


FULL: list[None] = []  # while there is an item, this rank's disk is full


@torch.library.custom_op("tierbed_tests::fills", mutates_args=())
def fills(x: Tensor) -> Tensor:
    if FULL:
        FULL.pop()
        raise StoreError("no space left")
    return x.clone()


@fills.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Filling(Ranked):
    temp = 1.0

    def build(self, users: Tensor, items: Tensor, y: Tensor, at: Tensor) -> Tensor:
        return super().build(users, items, fills(y), at)

    def loss(self, loss: Tensor) -> Tensor:
        return loss * self.temp


def filling(world: World, how: str) -> tuple[list[Any], dict[str, Tensor]]:
    """The disk of rank 1 is full at the third step, and at the next try."""
    graph = Filling(world)
    run = graph.run(loader(world.rank, COUNTS[world.rank]), ahead=2, uneven=how)
    seen = [next(run).item() for _ in range(2)]
    FULL.extend([None, None] if world.rank == 1 else [])
    seen += [came_to(partial(next, run)) for _ in range(2)]
    return seen + [loss.item() for loss in run], state(graph)


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.slow), "join"])
def test_a_full_disk_of_one_rank_costs_no_rank_a_batch(how: str) -> None:
    losses, expected = accumulated([[0, 1]] * 3 + [[0]] * 5 * (how == "join"))
    for rank, (seen, found) in enumerate(run_ranks(2, filling, how)):
        said = "rank 1: no space left"
        assert seen == [*losses[rank][:2], said, said, *losses[rank][2:]]
        assert_equal(found, expected)


@on_ranks(2)
def test_a_value_that_one_rank_changes_is_traced_or_refused_on_all(world: World) -> None:
    """More often than it may."""
    values.MAX_CHANGES = 2  # this process ends with the test
    graph, said = Filling(world), []
    for step in range(6):
        graph.temp = 1.0 + step * world.rank
        said.append(came_to(partial(graph, *batch(world.rank, step))))
    graph.temp = 1.0
    graph(*batch(world.rank, 6))
    assert_alike(world, state(graph))
    told, *others = [one for one in said if isinstance(one, str)]
    assert len(others) == 2
    assert told.startswith("rank 1: ")
    assert "temp changed to 4.0" in told


@AHEAD
@on_ranks(2, run_kept)
def test_a_run_goes_on_after_a_rank_was_elsewhere(world: World, ahead: int) -> None:
    """Rank 1 looks rows up in the middle of a run, which rank 0 goes on with."""
    graph = Ranked(world)
    run = graph.run(loader(world.rank, 6), ahead=ahead)
    next(run)
    calls = (lambda: next(run), lambda: graph.items.get(range(3)).sum() if world.rank else next(run))
    (said,) = [one for one in map(came_to, calls) if isinstance(one, str)]
    assert "; rank 1: embedding 'items', lookup at step 2; " in said
    assert len(list(run)) == 4 - bool(ahead)  # the batch of the step that was refused on rank 0
    assert_alike(world, state(graph))


@AHEAD
@on_ranks(2, run_kept)
def test_an_embedding_that_one_rank_closes_in_a_run_is_told_at_the_next_step_of_all(world: World, ahead: int) -> None:
    graph, losses = Ranked(world), list[Tensor]()

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for step in range(8):
            if step == 5 and world.rank == 1:
                graph.users.close()
            yield batch(world.rank, step)

    for call in (lambda: losses.extend(graph.run(batches(), ahead=ahead)), lambda: graph.users.get(range(3))):
        assert outcome(call).startswith("ClosedError: rank 1: embedding 'users' was closed")
    assert graph.items.size()
    assert len(losses) == 5 - ahead


@on_ranks(2, run_kept)
def test_announcements_that_no_step_can_take_are_let_go(world: World) -> None:
    """Rank 1 does not know what it announces."""
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    table: Any = graph.users.table_handle().table
    for step in range(1, 4):
        table.announce(None if world.rank else [Lookup(batch(0, step)[0], None)], is_collective=True)
    graph(*batch(world.rank, 0))
    assert not table.id_prefetcher._steps


@on_ranks(2, run_kept)
def test_runs_of_different_arguments_and_a_rank_that_never_had_a_batch_are_refused(world: World) -> None:
    said = outcome(lambda: list(Ranked(world).run(loader(world.rank, 2), ahead=world.rank)))
    assert "run of Ranked: ranks differ, rank 0: ahead=0; rank 1: ahead=1" in said
    said = outcome(lambda: list(Ranked(world).run(loader(world.rank, 2 - 2 * world.rank), ahead=1, uneven="join")))
    assert "rank 1: this rank's loader gave no batch" in said


class Evaluated(Ranked):
    """Reads alone where it is evaluated."""

    def build(self, users: Tensor, items: Tensor, y: Tensor, at: Tensor) -> Tensor:
        if self.training:
            return super().build(users, items, y, at)
        return self.users(users).sum()


def evaluates_between(world: World) -> tuple[list[float], dict[str, Tensor]]:
    """A step, an evaluation, and a run in which a rank without a batch joins training steps."""
    graph = Evaluated(world)
    graph(*batch(world.rank, 0))
    graph.eval()
    graph(*batch(world.rank, 0))
    graph.train()
    later = (batch(world.rank, 1 + step) for step in range(2 - 2 * world.rank))
    return [loss.item() for loss in graph.run(later, uneven="join")], state(graph)


def test_a_rank_joins_training_steps_after_an_evaluation() -> None:
    all_losses, expected = accumulated([[0, 1], [0], [0]])
    for rank, (losses, found) in enumerate(run_kept(2, evaluates_between)):
        assert losses == all_losses[rank][1:]
        assert_equal(found, expected)


def test_one_process_takes_the_argument_as_well() -> None:
    graph = Ranked(None)
    assert len(list(graph.run(loader(0, 2), uneven="join"))) == 2
    with pytest.raises(InputError, match="uneven='both': give one of 'stop', 'join'"):
        graph.run([], uneven="both")


def announced(world: World, ahead: int, every: int) -> tuple[dict[str, int], dict[str, Tensor]]:
    graph = Ranked(world, store=partial(make_cached_host_mem_store_options, 1))
    graph.accumulate_grads(every)
    assert len(list(graph.run(loader(world.rank, 8), ahead=ahead))) == 8
    found = state(graph)
    return {e.name: e.metrics()["table"]["prefetch_hits"] for e in (graph.users, graph.items)}, found


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_of_a_run_find_what_ranks_ask_of_their_rows_announced(every: int) -> None:
    plain = run_kept(2, announced, 0, every)
    for (hits, found), (_, expected) in zip(run_kept(2, announced, 4, every), plain, strict=True):
        assert_equal(found, expected)
        assert hits["users"] >= 8 // every - 1
        assert hits["items"] == 0  # an op that is not torch's makes their ids


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
    losses, expected = accumulated([[0, 1]] * 3)
    failing = [(5, at) for place in PLACES for at in ([place, NOWHERE], [NOWHERE, place])] + [(5, [BACKWARD, IDS])]
    texts = [f"rank {rank}: ValueError: failed at {place}" for place in PLACES for rank in range(2)]
    texts.append(f"rank 1: ValueError: failed at {IDS}")
    steps = [*failing, (0, fine), *failing, (1, fine), (2, fine)]
    for rank, (reports, mine, found) in enumerate(run_kept(2, trained, steps)):
        assert reports == texts * 2
        assert mine == losses[rank]
        assert_equal(found, expected)


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


@on_ranks(2, run_kept)
def test_a_build_that_raises_on_one_rank_is_told_to_those_that_are_in_their_step(world: World) -> None:
    graph, reports = Wrong(world), []
    for step in range(4):
        users, items, y, at = batch(world.rank, step)
        given = {1: at.expand(2), 2: None}.get(step, at) if world.rank == 1 else at
        reports.append(outcome(partial(graph, users, items, y, given)))
    assert reports[0] == reports[3] == "fine"
    assert reports[1] == "GroupError: rank 1: ValueError: two numbers"
    assert reports[2].startswith("GroupError: rank 1: AttributeError: 'NoneType'")


@on_ranks(2, run_kept)
def test_graphs_that_differ_are_refused_on_all_ranks(world: World) -> None:
    graphs = Ranked(world), Ranked(world)
    if world.rank == 1:
        graphs[0].middle = torch.zeros(1)
        graphs[1].before.bias.requires_grad_(False)
    said = [outcome(partial(graph, *batch(world.rank, 0))) for graph in graphs]
    tensors = "GraphError: parameters of Ranked: ranks differ, rank 0: 5 tensors, middle float32 []; rank 1: 5 "
    gradients = "GroupError: embedding 'users', step 1: ranks differ, rank 0: graph: parameter 1=before_bias float32"
    assert said[0].startswith(tensors)
    assert said[1].startswith(gradients)


@on_ranks(2)
def test_a_step_of_many_sizes_that_fails_on_one_rank_is_raised_on_all_and_not_run_again(world: World) -> None:
    step_cache.MAX_STATIC_SHAPES = 1  # this process ends with the test
    graph, reports, losses, many = Ranked(world), [], [], False
    for step, size in enumerate([5, 6, 7, 7]):
        at = LOSS if step == 2 and world.rank == 1 else NOWHERE
        try:
            losses.append(graph(*batch(world.rank, step, at, size=size)).item())
        except TierbedError as error:
            reports.append(str(error))
        many = many or any(step.guard is not None for step in graph._Graph__steps.list_steps())
    assert reports == [f"rank 1: ValueError: failed at {LOSS}"]
    assert len(losses) == 3
    assert many  # else no step served dynamic shapes, and the test shows nothing
    assert_alike(world, state(graph))


@on_ranks(2, run_kept)
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
def test_rows_that_a_rank_left_amid_the_updates_are_refused(world: World, tmp_path: Path) -> None:
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
        assert "load snapshots" in said or "load a snapshot" in said
    for embedding in both:
        assert embedding.prune_snapshots(1) == []
        embedding.close()
    found = state(Ranked(world, store=partial(make_host_mem_store_options, persistent_path=tmp_path)))
    assert all(torch.equal(found[name], before[name]) for name in ("users", "items"))


@pytest.mark.parametrize(
    ("after", "ahead"), [("gather", 0), pytest.param("send", 0, marks=pytest.mark.slow), ("send", 3)]
)
@on_ranks(2)
def test_an_embedding_that_one_rank_closes_amid_a_step_is_an_error_on_all(world: World, after: str, ahead: int) -> None:
    """ahead: how many steps more than the other this embedding has made."""
    graph, reports = Ranked(world), list[str]()
    graph(*batch(world.rank, 0))
    for number in range(ahead):
        step_alone(graph.users, 2 * number)
    plain = getattr(ShardedBatch, after)

    def closes(batch_: ShardedBatch, *arguments: Any) -> Any:
        found = plain(batch_, *arguments)
        if world.rank == 1 and not reports and batch_.local_batch.spec.name == "users":
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
