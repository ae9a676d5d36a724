"""Time a step of the embedding alone against its peers and against the memory floor, and gate the ratios.

    python benchmarks/kernels.py [--workload NAME ...] [--repeats N] [--threads N] [--json FILE] [--parts]

Contenders take turns, so that what else the machine does hits all of them; figures are medians. A workload has figures
only where all contenders computed the same outputs and rows. Exits with 1 if a bar is missed. `--parts` shows in place
of that where the time of tierbed's own step goes. See README.md here.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from contenders import PEERS, Contender, Tierbed
from floor import Floor
from kernel_parts import print_parts
from report import Result, Time, is_intel, machine, print_results
from workloads import BATCHES, NEAR, WORKLOADS, Workload, make_batches

THREADS = 2
CHECKED_STEPS = 3
# outputs and rows are about 0.1; three steps of Adagrad or Adam move a row by at most 3 * LR
TOLERANCE = 2e-6


class Mismatch(Exception):
    """Two contenders computed different outputs or rows."""


def check(contenders: list[Contender]) -> None:
    """Raises Mismatch unless all give the same outputs in some steps, and hold the same rows after each."""
    for index in range(CHECKED_STEPS):
        for what in ("step", "rows"):
            values = [(each.name, getattr(each, what)(index).clone()) for each in contenders]
            for (first, a), (second, b) in pairwise(values):
                error = float((a - b).abs().max())
                if not error <= TOLERANCE:
                    raise Mismatch(f"{what} of batch {index}: {first} and {second} differ by {error:.3g}")


def interleaved(contenders: list[Contender], repeats: int) -> list[Time]:
    """Times of the contenders' steps; the first round over the batches only warms up."""
    times: list[list[float]] = [[] for _ in contenders]
    gc.disable()
    for turn in range(BATCHES + repeats):
        for each, taken in zip(contenders, times, strict=True):
            begin = time.perf_counter()
            out = each.step(turn % BATCHES)
            taken.append(1e3 * (time.perf_counter() - begin))
            del out  # not before the clock stops: freeing the output is no part of a step
    gc.enable()
    return [Time(median(taken[BATCHES:]), min(taken[BATCHES:])) for taken in times]


def measure(work: Workload, repeats: int) -> Result:
    gc.collect()  # gigabytes of the workload before
    batches = make_batches(work)
    ours, floor = Tierbed(work, batches), Floor(work, batches)
    if work.peer == "near":
        check([ours, floor])
        peer: Contender = Tierbed(NEAR, make_batches(NEAR), name="near")
    else:
        peer = PEERS[work.peer](work, batches)
        check([ours, peer, floor])
    ours_time, peer_time, floor_time = interleaved([ours, peer, floor], repeats)
    bar = work.peer_bar(is_intel())
    return Result(work.name, peer.name, bar, ours_time, peer_time, floor_time, work.floor_bar, floor.settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=[work.name for work in WORKLOADS], help="default: all")
    parser.add_argument("--repeats", type=int, default=50, help="timed steps of each contender (default: 50)")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"default: {THREADS}")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--parts", action="store_true", help="cycles an id of each part of a step, without peers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = machine("tierbed", "torch", "fbgemm-gpu-cpu", "numpy")
    chosen = [work for work in WORKLOADS if arguments.workload is None or work.name in arguments.workload]
    if arguments.parts:
        print_parts(chosen, arguments.repeats)
        return 0
    results, failed = [], False
    for work in chosen:
        try:
            results.append(measure(work, arguments.repeats))
        except Mismatch as error:
            print(f"{work.name}: no figure, {error}", file=sys.stderr)
            failed = True
    print_results(results, about)
    if arguments.json is not None:
        figures = {"machine": about, "workloads": [result.as_dict() for result in results]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(failed or not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
