"""What a workload is, and how two sides of it are compared before either is timed."""

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
WORKLOADS: dict[str, Workload] = {}  # by "group/name", in the order in which they are measured


class Mismatch(Exception):
    """Two sides computed different values, so there is nothing to time."""


class NotMeasured(Exception):
    """This machine lacks what the workload needs."""


@dataclass(frozen=True)
class Workload:
    """measure(folder, **settings) yields figures. settings: of full size; quick: those that differ in a tiny run.

    passive: whether threads of OpenMP sleep while they wait (OMP_WAIT_POLICY=PASSIVE).
    """

    name: str
    measure: Measure
    settings: Mapping[str, Any]
    quick: Mapping[str, Any]
    passive: bool

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.measure) or "").partition("\n")[0]

    def figures(self, folder: Path, settings: Mapping[str, Any]) -> list[Figure]:
        """Raises Mismatch, NotMeasured, or ModuleNotFoundError if a peer is not installed."""
        return [replace(figure, section=self.name) for figure in self.measure(folder, **settings)]


def workload(
    quick: Mapping[str, Any] | None = None, passive: bool = True, name: str = "", **settings: Any
) -> Callable[[Measure], Measure]:
    """Registers a function under its module's group; the settings are its parameters with defaults, and these."""

    def register(measure: Measure) -> Measure:
        parameters = inspect.signature(measure).parameters.values()
        given = {each.name: each.default for each in parameters if each.default is not each.empty} | settings
        group = measure.__module__.rpartition(".")[2]
        full = f"{group}/{name or measure.__name__}"
        WORKLOADS[full] = Workload(full, measure, given, dict(quick or {}), passive)
        return measure

    return register


def figure(what: str, value: float, unit: str = "", **more: Any) -> Figure:
    """A figure of the workload that yields it."""
    return Figure("", what, value, unit, **more)


def check_same(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Raises Mismatch unless both have the same bits."""
    if not torch.equal(ours, theirs):
        raise Mismatch(f"{what} differ by up to {float((ours - theirs).abs().max()):.3g}")


def check_close(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raises Mismatch unless they are at most `tolerance` of the largest magnitude apart."""
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    if not apart <= tolerance:
        raise Mismatch(f"{what} are {apart:.3g} of the largest magnitude apart")


def check_losses(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Raises Mismatch unless each loss is the other side's, or at most `tolerance` of it apart."""
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not abs(float(one) - float(other)) <= tolerance * abs(float(other)):
            raise Mismatch(f"{what}: loss {float(one)} of step {step}, {float(other)} of the other side")
