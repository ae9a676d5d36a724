"""The learning rates of past steps, needed by rows that catch up on missed steps.

The rates are stored as knots (step, rate), sorted by step. A rate between two knots is interpolated linearly. Steps
before the first knot have the first knot's rate, and steps after the last knot have the current rate. So a constant
rate needs no knot. At most `MAX_KNOTS` knots are stored. If more would be needed, some knots in the older half are
dropped, first those that affect the interpolated rates least. Until then, the stored rates are exact.

The list from `RowOptimizer.compute_hyperparams` ends with the number of knots, then each knot's step and rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

from .kernel import LIMITS, RuleKernel

MAX_KNOTS = 240  # the largest number that the GPU kernels support
NUM_DROPPED = 24  # number of knots that are dropped at a time
Knot = tuple[float, float]


def read_knots(kernel: RuleKernel, numbers: Sequence[float]) -> tuple[list[Knot], float]:
    """Return the knots and the current rate from `numbers`, a list that `RowOptimizer.compute_hyperparams` returned."""
    past = numbers[len(kernel.all_hyperparams) + len(LIMITS) + 1 :]  # after the number of knots
    return list(zip(past[::2], past[1::2], strict=True)), numbers[kernel.all_hyperparams.index("lr")]


def append_past_rates(
    kernel: RuleKernel, numbers: list[float], previous: Sequence[float], step: int, warn: Callable[[float], Any] = abs
) -> list[float]:
    """Return the `numbers` of a step, followed by the learning rates of earlier steps.

    `previous`: see `RowOptimizer.compute_hyperparams`. When knots are dropped, `warn` gets the largest change of a past
    rate, relative to the largest rate.
    """
    knots, rate = read_knots(kernel, previous) if previous else ([], 0.0)  # before its first step, a rule's rate is 0
    while knots and knots[-1][0] >= step:  # drops knots of steps that were undone because of a GPU's deferred error
        rate = knots.pop()[1]
    first_step = knots[-1][0] + 1 if knots else 1.0
    if first_step < step and rate != numbers[kernel.all_hyperparams.index("lr")]:
        knots += dict.fromkeys([(first_step, rate), (step - 1.0, rate)])
    if not knots:
        return numbers
    if len(knots) > MAX_KNOTS:
        warn(_drop_knots(knots) / (max(rate for _, rate in knots) or 1.0))
    return [*numbers, float(len(knots)), *chain.from_iterable(knots)]


def are_past_rates_valid(past: Sequence[float], step: int) -> bool:
    """True if the knots in `past` are legal for `step`. `past` is the last part of a list from `append_past_rates`."""
    steps, rates = past[1::2], past[2::2]
    is_whole = len(steps) == len(rates) == past[0] <= MAX_KNOTS
    return is_whole and all(a < b for a, b in pairwise([0, *steps, step])) and all(map(float.is_integer, steps))


def interpolate(a: Knot, b: Knot, step: float) -> float:
    """Return the rate of a step, interpolated between two knots."""
    return a[1] + (b[1] - a[1]) * ((step - a[0]) / (b[0] - a[0]))


def _drop_knots(knots: list[Knot]) -> float:
    """Drop `NUM_DROPPED` knots of the older half. Return the largest change of a knot's rate."""

    def find_change(index: int) -> float:  # change of the rates' sum if this knot is dropped
        a, knot, b = knots[index - 1 : index + 2]
        return abs(knot[1] - interpolate(a, b, knot[0])) * (b[0] - a[0])

    largest = 0.0
    for last in range(MAX_KNOTS // 2, MAX_KNOTS // 2 - NUM_DROPPED, -1):
        index = min(range(1, last), key=find_change)
        largest = max(largest, find_change(index) / (knots[index + 1][0] - knots[index - 1][0]))
        del knots[index]
    return largest
