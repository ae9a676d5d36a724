"""Steps of small batches through `Graph` against eager loops, and what the engine's own Python executes in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from graph_bytecodes import COUNTED_ON, executed
from graph_steps import Batch, EagerStep, GraphStep, Model, Step, check, cycle, keyed, make_batches, seconds_of
from graph_stopwatch import Stopwatch, is_op, timed_calls, timed_natives, timed_ops
from tier_report import Figure, listed
from tier_stores import Mismatch

SECTION = "overhead"
# 3 % over what a step with Adam executes
MOST_CALLS, MOST_BYTECODES = 280, 3320
MODEL = Model(rows=10_000, tables=3, batch=64, hidden=(64,))


@dataclass(frozen=True)
class Sizes:
    """turn: steps that one takes before the others do; batches: different ones, used in turn."""

    model: Model = MODEL
    batches: int = 32
    turn: int = 50
    rounds: int = 40


QUICK = Sizes(Model(rows=200, tables=2, batch=8, hidden=(4,)), batches=2, turn=3, rounds=2)


def measure(folder: Path, sizes: Sizes) -> list[Figure]:
    """SGD against dense gradients, Adam against SparseAdam."""
    batches = make_batches(sizes.model, sizes.batches)
    return [
        *_against("nn.Embedding and SGD", folder, sizes, "sgd", batches, 0.8),
        *_against("nn.Embedding(sparse=True) and SparseAdam", folder, sizes, "adam", batches, 0.5),
    ]


def _against(peer: str, folder: Path, sizes: Sizes, optimizer: str, batches: list[Batch], bar: float) -> list[Figure]:
    model = replace(sizes.model, optimizer=optimizer)
    graph = GraphStep(model, folder)
    ours, theirs = cycle(graph, keyed(batches)), cycle(EagerStep(model, graph), batches)
    check(peer, ours, theirs)
    taken = _turns([ours, theirs], sizes)
    ratio = median(one / other for one, other in taken)
    us = [1e6 * median(seconds) for seconds in zip(*taken, strict=True)]
    notes = listed([("graph", f"{us[0]:.0f} us"), ("eager", f"{us[1]:.0f} us")])
    return [
        Figure(SECTION, f"a step, of eager {peer}", ratio, bar=bar, at_most=True, notes=notes),
        *_own_counts(ours, sizes, optimizer),
        _own_time(graph, ours, sizes, optimizer),
    ]


def _turns(steps: Sequence[Step], sizes: Sizes) -> list[list[float]]:
    """For each round, the median seconds of each."""
    return [
        [median(seconds_of(step, turn * sizes.turn + number) for number in range(sizes.turn)) for step in steps]
        for turn in range(sizes.rounds)
    ]


def _own_counts(step: Step, sizes: Sizes, optimizer: str) -> list[Figure]:
    """Steps of all batches execute the same, so the count is that of each."""
    counts = [executed(step, number) for number in range(min(sizes.batches, 4))]
    if any(count != counts[0] for count in counts):
        raise Mismatch(f"{optimizer}: steps of one kind execute different Python: {counts}")
    bytecodes = MOST_BYTECODES if sys.version_info[:2] == COUNTED_ON else None
    return [
        Figure(SECTION, f"calls of the engine's Python in a step, {optimizer}", counts[0].calls, "", MOST_CALLS, True),
        Figure(SECTION, f"bytecodes of the same, {optimizer}", counts[0].bytecodes, "", bytecodes, True),
    ]


def _own_time(graph: GraphStep, step: Step, sizes: Sizes, optimizer: str) -> Figure:
    """What is neither torch's ops, nor the native core, nor `optimizer.step()`, which is torch's.

    Of steps without a stopwatch, less what the stopwatches show in the steps of the next turn.
    """
    rounds: list[tuple[float, float, float]] = []
    for turn in range(sizes.rounds):
        numbers = range(turn * sizes.turn, (turn + 1) * sizes.turn)
        whole = median(seconds_of(step, number) for number in numbers)
        ops, rest = Stopwatch(), Stopwatch()
        with timed_ops(ops, graph, is_op), timed_natives(rest), timed_calls(rest, graph.optimizer, "step"):
            inside = [(step(number), ops.lap(), rest.lap())[1:] for number in numbers]
        rounds.append((whole, *(median(part) for part in zip(*inside, strict=True))))
    parts = [1e6 * median(part) for part in zip(*rounds, strict=True)]
    own = 1e6 * median(whole - in_ops - in_rest for whole, in_ops, in_rest in rounds)
    notes = f"of {parts[0]:.0f} us; torch's ops {parts[1]:.0f}, native core and optimizer.step() {parts[2]:.0f}"
    return Figure(SECTION, f"time of the same, {optimizer}", own, "us", notes=notes)
