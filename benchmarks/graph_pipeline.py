"""`Graph.run` over an SSD: rows of coming steps are brought up on one core while the dense model has the other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from graph_steps import GraphStep, Model, keyed, make_batches
from graph_stopwatch import Stopwatch, is_op, timed_calls, timed_ops
from tier_report import Figure, listed
from tier_stores import Mismatch, top_tier, wait_until_idle
from torch import Tensor

from tierbed.engine.table.table import OpenTable, PinnedBatch

SECTION = "pipeline"
AHEAD = 8
MODEL = Model(rows=20_000, tables=26, batch=4096, hidden=(512, 256), optimizer="adagrad")


@dataclass(frozen=True)
class Sizes:
    """narrow: widths of a second MLP, whose work is shorter than the fetch; cached: share of the rows.

    turn: steps that one kind of run takes before the other does.
    """

    model: Model = MODEL
    narrow: tuple[int, ...] = (64,)
    cached: float = 0.75
    warm_up: int = 60
    turn: int = 20
    rounds: int = 4


QUICK = Sizes(
    Model(rows=400, tables=2, batch=32, hidden=(8, 4), optimizer="adagrad"),
    narrow=(4,),
    cached=0.6,
    warm_up=4,
    turn=4,
    rounds=2,
)


@dataclass(frozen=True)
class Turn:
    """Mean seconds of a step but the first, which waits for rows beside nothing; and of it within parts.

    dense: torch's ops and `optimizer.step()`; fetch: pinning the batch; rows: gather and update.
    """

    step: float
    dense: float
    fetch: float
    rows: float
    hit_rate: float
    losses: list[Tensor]


def measure(folder: Path, sizes: Sizes) -> list[Figure]:
    """With one thread of torch. Every other turn runs plainly."""
    with _one_thread():
        return [
            figure
            for hidden, bar in ((sizes.model.hidden, 1.15), (sizes.narrow, None))
            for figure in _measure(folder / str(len(hidden)), sizes, replace(sizes.model, hidden=hidden), bar)
        ]


def _measure(folder: Path, sizes: Sizes, model: Model, bar: float | None) -> list[Figure]:
    graph = GraphStep(model, folder, "cached_ssd", int(sizes.cached * model.rows * model.tables))
    memory = GraphStep(model, folder)
    turns: list[tuple[Turn, Turn]] = []
    with graph.embedding, memory.embedding:
        for batch in keyed(make_batches(model, sizes.warm_up)):
            _check("warm-up", [graph(*batch)], [memory(*batch)])
        for first in range(sizes.warm_up, sizes.warm_up + 2 * sizes.turn * sizes.rounds, 2 * sizes.turn):
            batches = keyed(make_batches(model, 2 * sizes.turn, first))
            plain = _turn(graph, (graph(*batch) for batch in batches[: sizes.turn]))
            run = _turn(graph, graph.run(batches[sizes.turn :], ahead=AHEAD))
            _check("a turn", plain.losses + run.losses, [memory(*batch) for batch in batches])
            turns.append((plain, run))
    return _figures(model, turns, bar)


def _turn(graph: GraphStep, steps: Iterable[Tensor]) -> Turn:
    watches = {"dense": Stopwatch(), "fetch": Stopwatch(), "rows": Stopwatch()}
    losses: list[Tensor] = []
    wait_until_idle()
    before, ends = top_tier(graph.embedding), iter(steps)
    with (
        timed_ops(watches["dense"], graph, is_op),
        timed_calls(watches["dense"], graph.optimizer, "step"),
        timed_calls(watches["fetch"], OpenTable, "pin"),
        timed_calls(watches["rows"], PinnedBatch, "gather"),
        timed_calls(watches["rows"], OpenTable, "update"),
    ):
        losses.append(next(ends))
        for watch in watches.values():
            watch.lap()
        begin = time.perf_counter()
        losses += ends
        seconds = time.perf_counter() - begin
    after = top_tier(graph.embedding)
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    parts = {part: watch.lap() / (len(losses) - 1) for part, watch in watches.items()}
    return Turn(seconds / (len(losses) - 1), **parts, hit_rate=hits / (hits + misses), losses=losses)


def _check(what: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not torch.equal(one, other):
            raise Mismatch(f"{what}: loss of step {step} is {float(one)} on cached_ssd, {float(other)} on device_mem")


def _figures(model: Model, turns: list[tuple[Turn, Turn]], bar: float | None) -> list[Figure]:
    what = f"MLP {'-'.join(map(str, (*model.hidden, 1)))}, of the longer of dense work and fetch"
    plain, run = zip(*turns, strict=True)
    longer = [max(turn.dense, turn.fetch) for turn in plain]
    return [
        Figure(
            SECTION,
            f"a step of graph.run, {what}",
            median(turn.step / seconds for turn, seconds in zip(run, longer, strict=True)),
            bar=bar,
            at_most=True,
            notes=_split(run),
        ),
        Figure(
            SECTION,
            f"a step of the plain loop, {what}",
            median(turn.step / seconds for turn, seconds in zip(plain, longer, strict=True)),
            notes=_split(plain),
        ),
    ]


def _split(turns: Sequence[Turn]) -> str:
    step, dense, fetch, rows = (
        1e3 * median(getattr(turn, part) for turn in turns) for part in ("step", "dense", "fetch", "rows")
    )
    return listed(
        [
            ("step", f"{step:.1f} ms"),
            ("dense", f"{dense:.1f}"),
            ("pin", f"{fetch:.1f}"),
            ("gather and update", f"{rows:.1f}"),
            ("hit rate", f"{median(turn.hit_rate for turn in turns):.1%}"),
        ]
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
