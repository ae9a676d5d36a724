"""Runs of ranks whose loaders end unevenly, raise, or give ids ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from support.live_rows import remarks_of
from support.ranked import LOSS, NOWHERE, Ranked, assert_equal, batch, state
from support.ranks import on_ranks, outcome, run_ranks
from tierbed import InputError, StoreError, TierbedError, World, make_cached_host_mem_store_options
from tierbed.engine.options.lookup import Lookup

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
def test_all_ranks_stop_with_the_shortest_loader_and_say_what_is_left(ahead: int) -> None:
    losses, expected = accumulated([[0, 1, 2]] * 3)
    for rank, found in enumerate(run_ranks(3, uneven, "stop", ahead, 1)):
        assert found["losses"] == losses[rank]
        assert_equal(found["state"], expected)
        assert found["left"] == min(COUNTS[rank] - 3, ahead + 1)
        (said,) = [text for text in found["said"] if "rank 1 has no more batches" in text]
        assert f"this rank drew {found['left']} more" in said


@AHEAD
def test_ranks_without_a_batch_join_the_others_whose_mean_is_theirs(ahead: int) -> None:
    losses, expected = accumulated([[0, 1, 2]] * 3 + [[0, 2]] + [[0]] * 4)
    for rank, found in enumerate(run_ranks(3, uneven, "join", ahead, 1)):
        assert found["losses"] == losses[rank]
        assert_equal(found["state"], expected)
        assert found["left"] == 0


def test_ranks_that_accumulate_join_as_well() -> None:
    one, two = run_ranks(2, uneven, "join", 2, 2)
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
    for rank, (seen, found) in enumerate(run_ranks(2, past_errors, ahead)):
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


@pytest.mark.parametrize("how", ["stop", "join"])
def test_a_full_disk_of_one_rank_costs_no_rank_a_batch(how: str) -> None:
    losses, expected = accumulated([[0, 1]] * 3 + [[0]] * 5 * (how == "join"))
    for rank, (seen, found) in enumerate(run_ranks(2, filling, how)):
        said = "rank 1: no space left"
        assert seen == [*losses[rank][:2], said, said, *losses[rank][2:]]
        assert_equal(found, expected)


def with_values(world: World) -> tuple[list[str], dict[str, Tensor]]:
    """Rank 1 alone changes a value that build reads, and more often than it may."""
    graph, said = Filling(world), []
    for step in range(12):
        graph.temp = 1.0 + step * world.rank
        said.append(came_to(partial(graph, *batch(world.rank, step))))
    graph.temp = 1.0
    graph(*batch(world.rank, 12))
    return [one for one in said if isinstance(one, str)], state(graph)


def test_a_value_that_one_rank_changes_is_traced_or_refused_on_all() -> None:
    (one, first), (two, second) = run_ranks(2, with_values)
    assert_equal(first, second)
    assert one == two
    assert len(one) == 3
    assert one[0].startswith("rank 1: ")
    assert "temp changed to 10.0" in one[0]


def astray(world: World, ahead: int) -> tuple[list[Any], int, dict[str, Tensor]]:
    """Rank 1 looks rows up in the middle of a run, which rank 0 goes on with."""
    graph = Ranked(world)
    run = graph.run(loader(world.rank, 6), ahead=ahead)
    next(run)
    calls = (lambda: next(run), lambda: graph.items.get(range(3)).sum() if world.rank else next(run))
    seen = [came_to(call) for call in calls]
    return [one for one in seen if isinstance(one, str)], len(list(run)), state(graph)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_goes_on_after_a_rank_was_elsewhere(ahead: int) -> None:
    one, two = run_ranks(2, astray, ahead)
    assert one[0] == two[0]
    (said,) = one[0]
    assert "; rank 1: embedding 'items', lookup at step 2; " in said
    assert one[1] == two[1] == 4 - bool(ahead)  # the batch of the step that was refused on rank 0
    assert_equal(one[2], two[2])


@AHEAD
@on_ranks(2)
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


@on_ranks(2)
def test_announcements_that_no_step_can_take_are_let_go(world: World) -> None:
    """Rank 1 does not know what it announces."""
    graph = Ranked(world)
    graph(*batch(world.rank, 0))
    table: Any = graph.users.table_handle().table
    for step in range(1, 4):
        table.announce(None if world.rank else [Lookup(batch(0, step)[0], None)], together=True)
    graph(*batch(world.rank, 0))
    assert not table.id_prefetcher._announced


@on_ranks(2)
def test_runs_of_different_arguments_and_a_rank_that_never_had_a_batch_are_refused(world: World) -> None:
    said = outcome(lambda: list(Ranked(world).run(loader(world.rank, 2), ahead=world.rank)))
    assert "run of Ranked: ranks differ, rank 0: ahead=0; rank 1: ahead=1" in said
    said = outcome(lambda: list(Ranked(world).run(loader(world.rank, 2 - 2 * world.rank), ahead=1, uneven="join")))
    assert "rank 1: a loader gave no batch at all" in said


class Evaluated(Ranked):
    """Reads alone where it is evaluated."""

    def build(self, users: Tensor, items: Tensor, y: Tensor, at: Tensor) -> Tensor:
        if self.training:
            return super().build(users, items, y, at)
        return self.users(users).sum()


def evaluates_between(world: World, counts: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """A step, an evaluation, and a run in which a rank without a batch joins training steps."""
    graph = Evaluated(world)
    graph(*batch(world.rank, 0))
    graph.eval()
    graph(*batch(world.rank, 0))
    graph.train()
    later = (batch(world.rank, 1 + step) for step in range(counts[world.rank]))
    return [loss.item() for loss in graph.run(later, uneven="join")], state(graph)


def test_a_rank_joins_training_steps_after_an_evaluation() -> None:
    all_losses, expected = accumulated([[0, 1], [0], [0]])
    for rank, (losses, found) in enumerate(run_ranks(2, evaluates_between, [2, 0])):
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
    plain = run_ranks(2, announced, 0, every)
    for (hits, found), (_, expected) in zip(run_ranks(2, announced, 4, every), plain, strict=True):
        assert_equal(found, expected)
        assert hits["users"] >= 8 // every - 1
        assert hits["items"] == 0  # an op that is not torch's makes their ids
