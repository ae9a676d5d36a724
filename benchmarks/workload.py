"""Define workloads, and compare the results of their sides.

A workload times two or more sides, tierbed and its peers, on the same task. They must compute the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import Figure
from torch import Tensor

Measure = Callable[..., Iterable[Figure]]
WORKLOADS: dict[str, Workload] = {}  # by "group/name", in the order of measurement


class Mismatch(Exception):
    """Two sides computed different values, so their times cannot be compared."""


class NotMeasured(Exception):
    """The machine lacks something that the workload needs."""


@dataclass(frozen=True)
class Workload:
    """A named benchmark. `measure(folder, **settings)` yields its figures.

    settings: for a full run. quick: settings that differ in a tiny run. passive: run with OMP_WAIT_POLICY=PASSIVE, so
    that waiting OpenMP threads sleep instead of spinning.
    """

    name: str
    measure: Measure
    settings: Mapping[str, Any]
    quick_settings: Mapping[str, Any]
    passive: bool

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.measure) or "").partition("\n")[0]

    def figures(self, folder: Path, settings: Mapping[str, Any]) -> list[Figure]:
        """Measure. Raises Mismatch and NotMeasured. Raises ModuleNotFoundError if a peer is not installed."""
        return [replace(figure, section=self.name) for figure in self.measure(folder, **settings)]


def workload(
    quick: Mapping[str, Any] | None = None, passive: bool = True, name: str = "", **settings: Any
) -> Callable[[Measure], Measure]:
    """Register a function in its module's group. `settings` are added to the defaults of the function's parameters."""

    def register(measure: Measure) -> Measure:
        parameters = inspect.signature(measure).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        group = measure.__module__.rpartition(".")[2]
        full_name = f"{group}/{name or measure.__name__}"
        WORKLOADS[full_name] = Workload(full_name, measure, defaults | settings, dict(quick or {}), passive)
        return measure

    return register


def figure(what: str, value: float, unit: str = "", **more: Any) -> Figure:
    """Make a figure; the workload that yields it fills in the section."""
    return Figure("", what, value, unit, **more)


def check_same(what: str, ours: Tensor, peer: Tensor) -> None:
    """Raise Mismatch unless both are bit-identical."""
    if not torch.equal(ours, peer):
        raise Mismatch(f"{what} differ by up to {float((ours - peer).abs().max()):.3g}")


def check_close(what: str, ours: Tensor, peer: Tensor, tolerance: float) -> None:
    """Raise Mismatch if they differ by more than `tolerance` times the largest magnitude."""
    difference = float((ours - peer).abs().max() / peer.abs().max())
    if not difference <= tolerance:
        raise Mismatch(f"{what} differ by {difference:.3g} of the largest magnitude")


def check_losses(what: str, ours: Sequence[Tensor], peer: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Raise Mismatch if any two losses differ by more than the relative `tolerance`."""
    for step, (one, other) in enumerate(zip(ours, peer, strict=True)):
        if not abs(float(one) - float(other)) <= tolerance * abs(float(other)):
            raise Mismatch(f"{what}: loss of step {step} is {float(one)} and {float(other)}")
