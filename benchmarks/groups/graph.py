"""Compares the static graph with eager loops, and a pipelined step with its dense work and its fetch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from graph_bytecodes import COUNTED_ON, count_executed
from models import EagerStep, GraphStep, Model, Step, cycle, hash_batches, make_batches
from report import Figure, join_pairs
from timing import Turn, format_times, measure_turn, time_in_turns, use_one_thread
from torch import Tensor
from workload import Mismatch, check_losses, check_same, figure, workload

MAX_CALLS, MAX_BYTECODES = 280, 3320  # 3 % above a step with Adam
SMALL_STEP = Model(rows=10_000, tables=3, batch=64, hidden=(64,))
LARGE_STEP = Model(rows=20_000, tables=26, batch=4096, hidden=(512, 256), optimizer="adagrad")
TINY = {"rows": 200, "tables": 2, "batch": 16, "hidden": (8, 4)}
AHEAD = 8


def check_eager(what: str, model: Model, graph: GraphStep, batches: list[tuple[Tensor, ...]]) -> EagerStep:
    """Return an eager loop with the graph's rows. Raises Mismatch unless their first losses agree to 1e-5."""
    eager = EagerStep(model, graph)
    first = [batches[number % len(batches)] for number in range(10)]
    losses = [eager(*eager.prepare(batch)) for batch in first]
    check_losses(what, [graph(*batch) for batch in hash_batches(first)], losses, 1e-5)
    return eager


@workload({**TINY, "batches": 2, "repeats": 3, "hidden": (4,), "turn": 3}, passive=False, **asdict(SMALL_STEP))
def overhead(folder: Path, batches: int = 32, turn: int = 50, repeats: int = 40, **fields: Any) -> Iterator[Figure]:
    """A step with a small batch, relative to an eager step, and the amount of Python the engine executes in it."""
    for optimizer, peer, bar in (
        ("sgd", "nn.Embedding and SGD", 0.8),
        ("adam", "nn.Embedding(sparse=True) and SparseAdam", 0.5),
    ):
        model = replace(Model(**fields), optimizer=optimizer)
        inputs = make_batches(model, batches)
        graph = GraphStep(model, folder)
        eager = check_eager(peer, model, graph, inputs)
        ours, eager_step = cycle(graph, hash_batches(inputs)), cycle(eager, [eager.prepare(batch) for batch in inputs])

        def steps(step: Step, number: int) -> None:
            for each in range(number * turn, (number + 1) * turn):
                step(each)

        times = time_in_turns({"graph": partial(steps, ours), "eager": partial(steps, eager_step)}, repeats, 1)
        notes = join_pairs((name, f"{1e3 * times.ms(name) / turn:.0f} us") for name in times)
        yield figure(
            f"time of a step, graph / eager {peer}", times.ratio("graph", "eager"), bar=bar, at_most=True, notes=notes
        )
        counts = [count_executed(ours, number) for number in range(min(batches, 4))]
        if any(count != counts[0] for count in counts):
            raise Mismatch(f"{optimizer}: equal steps execute different Python: {counts}")
        most = MAX_BYTECODES if sys.version_info[:2] == COUNTED_ON else None
        yield figure(f"calls in the engine's Python, {optimizer}", counts[0].calls, bar=MAX_CALLS, at_most=True)
        yield figure(f"bytecodes in the engine's Python, {optimizer}", counts[0].bytecodes, bar=most, at_most=True)


@workload({**TINY, "warm_up": 4, "turn": 4, "repeats": 2}, **asdict(LARGE_STEP))
def pipeline(
    folder: Path,
    narrow: Sequence[int] = (64,),
    cached: float = 0.75,
    warm_up: int = 60,
    turn: int = 20,
    repeats: int = 4,
    **fields: Any,
) -> Iterator[Figure]:
    """A step of graph.run on cached_ssd, relative to the plain loop's dense work or fetch, whichever is longer.

    torch uses one thread. `narrow`: widths of a second MLP, whose work is shorter than the fetch.
    """
    model = Model(**fields)
    with use_one_thread():
        for hidden, bar in ((model.hidden, 1.15), (tuple(narrow), None)):
            path = folder / str(len(hidden))
            yield from _pipeline(replace(model, hidden=hidden), path, cached, (warm_up, turn, repeats), bar)


def _pipeline(
    model: Model, folder: Path, cached: float, steps: tuple[int, int, int], bar: float | None
) -> Iterator[Figure]:
    warm_up, count, repeats = steps
    graph = GraphStep(model, folder, "cached_ssd", int(cached * model.rows * model.tables))
    memory = GraphStep(model, folder)
    turns: list[tuple[Turn, Turn]] = []
    with graph.embedding, memory.embedding:
        for batch in hash_batches(make_batches(model, warm_up)):
            check_same("losses of the warm-up", graph(*batch), memory(*batch))
        for first in range(warm_up, warm_up + 2 * count * repeats, 2 * count):
            batches = hash_batches(make_batches(model, 2 * count, first))
            # without the first step of each: its rows cannot have been prefetched
            plain = measure_turn(graph.embedding, (graph(*batch) for batch in batches[:count]), 1)
            run = measure_turn(graph.embedding, graph.run(batches[count:], ahead=AHEAD), 1)
            check_losses("cached_ssd", plain.results + run.results, [memory(*batch) for batch in batches])
            turns.append((plain, run))
    what = f"longer of dense work and fetch, MLP {'-'.join(map(str, (*model.hidden, 1)))}"
    longer = [max(plain.dense, plain.parts["pin"]) for plain, _ in turns]
    for number, name in ((1, "graph.run"), (0, "the plain loop")):
        sides = [pair[number] for pair in turns]
        ratio = median(side.seconds / seconds for side, seconds in zip(sides, longer, strict=True))
        hits = f"{median(side.hit_rate for side in sides):.1%}"
        notes = join_pairs([("a step", format_times(sides, count - 1)), ("hit rate", hits)])
        yield figure(f"time of a step, {name} / {what}", ratio, bar=bar if number else None, at_most=True, notes=notes)
