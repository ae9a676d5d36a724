"""The learning rates of past steps, by which rows that catch up apply the steps that they missed.

They are kept as knots, (step, rate) in the order of steps: rates between two knots lie on the line through them, and
earlier steps have the first knot's rate. Steps after the last knot have the present rate, so at a constant rate there
is no knot. Up to `MAX_KNOTS` knots are exact. Beyond, those of the older half go that lie closest to such a line.

The knots follow the limits in the rule's numbers: how many there are, then the step and the rate of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

from .kernel import LIMITS, Kernel

MAX_KNOTS, DROPPED = 240, 24  # knots: that the kernels of a GPU take, and that go at a time
Knot = tuple[float, float]


def knots_of(kernel: Kernel, numbers: Sequence[float]) -> tuple[list[Knot], float]:
    """The knots in the numbers of a rule that catches up, and the present rate."""
    past = numbers[_end(kernel) + 1 :]
    return list(zip(past[::2], past[1::2], strict=True)), numbers[kernel.all_hypers.index("lr")]


def with_past(
    kernel: Kernel, numbers: list[float], before: Sequence[float], step: int, note: Callable[[float], object] = abs
) -> list[float]:
    """The numbers of `step` with the rates of the steps before it.

    before: the numbers of the step before; [] if no step was the rule's by then, and all of them had a rate of 0.
    note: called with the largest change of a past rate, as a share of the largest rate, when knots are dropped.
    """
    knots, rate = knots_of(kernel, before) if before else ([], 0.0)
    while knots and knots[-1][0] >= step:  # of steps that a GPU has undone
        rate = knots.pop()[1]
    first = knots[-1][0] + 1 if knots else 1.0
    if first < step and rate != numbers[kernel.all_hypers.index("lr")]:
        knots += dict.fromkeys([(first, rate), (step - 1.0, rate)])
    if not knots:
        return numbers
    if len(knots) > MAX_KNOTS:
        note(_drop(knots) / (max(rate for _, rate in knots) or 1.0))
    limits = [*numbers, *[0.0] * (_end(kernel) - len(numbers))]
    return [*limits, float(len(knots)), *chain.from_iterable(knots)]


def is_past(past: Sequence[float], step: int) -> bool:
    """Whether numbers that follow the limits in the stored numbers of `step` are what `with_past` makes."""
    steps, rates = past[1::2], past[2::2]
    is_whole = len(steps) == len(rates) == past[0] <= MAX_KNOTS
    return is_whole and all(a < b for a, b in pairwise([0, *steps, step])) and all(map(float.is_integer, steps))


def _end(kernel: Kernel) -> int:
    return len(kernel.all_hypers) + len(LIMITS)


def between(a: Knot, b: Knot, step: float) -> float:
    """The rate of a step on the line through two knots."""
    return a[1] + (b[1] - a[1]) * ((step - a[0]) / (b[0] - a[0]))


def _drop(knots: list[Knot]) -> float:
    """Drop knots of the older half, each time the one whose loss changes the sum of the rates least.

    Returns the largest change of the rate of a knot.
    """

    def change(index: int) -> float:
        a, knot, b = knots[index - 1 : index + 2]
        return abs(knot[1] - between(a, b, knot[0])) * (b[0] - a[0])

    largest = 0.0
    for last in range(MAX_KNOTS // 2, MAX_KNOTS // 2 - DROPPED, -1):
        index = min(range(1, last), key=change)
        largest = max(largest, change(index) / (knots[index + 1][0] - knots[index - 1][0]))
        del knots[index]
    return largest
