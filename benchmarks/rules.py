"""Time a step of rows under each optimizer against the same step under Adam, and gate the ratios that have bars.

    python benchmarks/rules.py [--repeats N] [--json FILE] [--quick]

Contenders take turns over the same batches, 26 tables of 38,462 rows with dim 64, 4096 uniform ids of each; figures are
ratios of medians. There are figures only where the rows of each optimizer are, after three steps, those of its dense
step over the same gradients.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from contenders import RowsOf
from report import machine
from tier_report import Figure, report
from tier_stores import Mismatch
from workloads import BATCHES, BETAS, EPS, LR, Workload, make_batches

from tierbed.engine.optim import LAMB, CatchUpAdam, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS}
OPTIMIZERS: dict[str, tuple[Make, float | None]] = {  # and the most that its step may take of Adam's time
    "Adam": (lambda p: torch.optim.Adam(p, **ADAM), None),
    "PartialRowWiseAdam": (lambda p: PartialRowWiseAdam(p, **ADAM), 1.0),
    "LAMB": (lambda p: LAMB(p, **ADAM), 1.4),
    "PartialRowWiseLAMB": (lambda p: PartialRowWiseLAMB(p, **ADAM), None),
    "LarsSGD": (lambda p: LarsSGD(p, LR), None),
    "CatchUpAdam": (lambda p: CatchUpAdam(p, **ADAM), None),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, LR, eps=EPS), None),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, LR, eps=EPS), None),
    "RowWiseAdagrad": (lambda p: RowWiseAdagrad(p, LR, EPS), None),
    "SGD": (lambda p: torch.optim.SGD(p, LR), None),
}
CHECKED_STEPS, CHECKED_ROWS, TOLERANCE = 3, 4096, 2e-6


def check(name: str, make: Make, rows: RowsOf) -> None:
    """Raises Mismatch unless steps of rows that are in one batch alone are the dense optimizer's."""
    batch = rows.batches[0]
    ids = batch.rows[:CHECKED_ROWS, 0, 0]
    unique, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    summed = torch.zeros(len(unique), batch.grad.shape[2]).index_add_(0, inverse, batch.grad[:CHECKED_ROWS, 0])
    dense = torch.nn.Parameter(rows.of(unique))
    optimizer = make([dense])
    for _ in range(CHECKED_STEPS):
        rows.step(0)
        dense.grad = summed.clone()
        optimizer.step()
    alone = counts == 1  # sums of one gradient are exact
    apart = float((rows.of(unique) - dense.detach())[alone].abs().max())
    if not apart <= TOLERANCE:
        raise Mismatch(f"{name}: rows are {apart:.3g} from those of its dense step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40, help="timed steps of each optimizer (default: 40)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--quick", action="store_true", help="small tables: whether it runs, not how fast")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    size = (3, 500, 64, 64) if arguments.quick else (26, 38_462, 64, 4096)
    work = Workload("rules", *size, 1, None, "adam", "", 0)
    batches = make_batches(work)
    contenders = {name: RowsOf(work, batches, make) for name, (make, _) in OPTIMIZERS.items()}
    for name, rows in contenders.items():
        check(name, OPTIMIZERS[name][0], rows)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    for turn in range(BATCHES + arguments.repeats):
        for name, rows in contenders.items():
            begin = perf_counter()
            out = rows.step(turn % BATCHES)
            times[name].append(1e3 * (perf_counter() - begin))
            del out
    took = {name: median(taken[BATCHES:]) for name, taken in times.items()}
    figures = [
        Figure("rules", name, took[name] / took["Adam"], "x", bar, True, f"ms {took[name]:.2f}")
        for name, (_, bar) in OPTIMIZERS.items()
    ]
    return int(not report(figures, machine("tierbed", "torch", "numpy"), arguments.json) and not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
