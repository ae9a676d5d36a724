"""Runs contenders of the benchmark of disks, each in a process of its own, and looks at what they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

from tier_stores import Mismatch

from .floor import Floor, measure
from .memory_limit import memory_limit
from .training import Case, Outcome, train_case

CLOSE = 1e-4  # of a loss: torch sums the gradients of a row in another order


def run(case: Case, apart: bool = True) -> Outcome:
    """Train in a process that is held to the memory of the case; not `apart`, in this one, which has no limit.

    Raises OSError where it ends early or cannot be limited.
    """
    folder = Path(case.folder)
    folder.mkdir(exist_ok=True)
    if not apart:
        return train_case(case)
    _leave_page_cache(folder)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with memory_limit(case.limit) as enter:
        done = subprocess.run(
            [sys.executable, "-m", "disk.training", json.dumps(asdict(case))],
            env=os.environ | {"PYTHONPATH": paths},
            preexec_fn=enter,
            stdout=subprocess.PIPE,
            check=False,
        )
    if done.returncode:
        raise OSError(f"{case.store} with {case.rows} rows a table ended with {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def floor_of(case: Case, seconds: float) -> Floor:
    """Of the files that a store wrote, measured for so long at each depth."""
    return measure([file for file in Path(case.folder).rglob("*.sst") if file.stat().st_size >= 4096], seconds)


def check_same(what: str, one: Outcome, other: Outcome) -> None:
    """Raises Mismatch unless both have the same losses and rows, bit for bit."""
    if one.losses != other.losses:
        raise Mismatch(f"{what}: losses differ")
    if one.sample != other.sample:
        raise Mismatch(f"{what}: rows differ")


def check_close(what: str, one: Outcome, other: Outcome) -> None:
    """Raises Mismatch unless the losses of the steps that both made are close."""
    worst = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=False))
    if worst > CLOSE:
        raise Mismatch(f"{what}: losses differ by up to {worst:.3g}")


def step_of(outcome: Outcome) -> float:
    """The median, in seconds."""
    return median(outcome.seconds)


def slowest_of(outcome: Outcome) -> float:
    """The 99th percentile of the seconds of a step, in medians."""
    return quantiles(outcome.seconds, n=100, method="inclusive")[98] / step_of(outcome)


def _leave_page_cache(folder: Path) -> None:
    """A limit counts the pages that its own process read; those of others would be free."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
