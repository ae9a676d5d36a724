"""What of a step of large batches is not the matrix products of its dense model."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from graph_steps import EagerStep, GraphStep, Model, check, cycle, keyed, make_batches, seconds_of
from graph_stopwatch import Stopwatch, is_matmul, is_op, timed_calls, timed_natives, timed_ops
from tier_report import Figure, listed

SECTION = "dense_share"
MODEL = Model(rows=38_462, tables=26, batch=4096, hidden=(512, 256), optimizer="adagrad")


@dataclass(frozen=True)
class Sizes:
    model: Model = MODEL
    batches: int = 16
    steps: int = 150


QUICK = Sizes(Model(rows=200, tables=2, batch=16, hidden=(8, 4), optimizer="adagrad"), batches=2, steps=3)


def measure(folder: Path, sizes: Sizes) -> list[Figure]:
    """On device_mem; every part is timed within the same steps."""
    graph = GraphStep(sizes.model, folder)
    batches = make_batches(sizes.model, sizes.batches)
    step = cycle(graph, keyed(batches))
    check(SECTION, step, cycle(EagerStep(sizes.model, graph), batches))
    products, ops, core, optimizer = watches = [Stopwatch() for _ in range(4)]
    samples: list[tuple[float, ...]] = []
    with (
        timed_ops(products, graph, is_matmul),
        timed_ops(ops, graph, is_op),
        timed_natives(core),
        timed_calls(optimizer, graph.optimizer, "step"),
    ):
        faults = _page_faults()
        for number in range(sizes.steps):
            samples.append((seconds_of(step, number), *(watch.lap() for watch in watches)))
    faults = (_page_faults() - faults) / sizes.steps
    ms = [1e3 * median(part) for part in zip(*samples, strict=True)]
    share = 100 * median(1 - in_products / whole for whole, in_products, *_ in samples)
    notes = listed(
        [
            ("step", f"{ms[0]:.1f} ms"),
            ("matrix products", f"{ms[1]:.1f}"),
            ("other ops", f"{ms[2]:.1f}"),
            ("native core", f"{ms[3]:.1f}"),
            ("optimizer.step()", f"{ms[4]:.1f}"),
            ("the engine's Python", f"{ms[0] - sum(ms[1:]):.1f}"),
            ("page faults", f"{faults:,.0f}"),
        ]
    )
    return [Figure(SECTION, "all but matrix products", share, "% of a step", 20, at_most=True, notes=notes)]


def _page_faults() -> float:
    """Minor ones of this process so far: memory that is not reused is cleared page by page."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
